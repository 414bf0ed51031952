"""Whether an output that exists is what a plan makes: its report says so, and its bytes are those of the report.

Source: cli.md, `batch`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ninfer_convert.artifact.container import MAX_REPORT_BYTES
from ninfer_convert.errors import printable
from ninfer_convert.plan.planner import Plan
from ninfer_convert.plan.provenance import Outcome, report_json
from ninfer_convert.run.finalize import is_published, published_digests
from ninfer_convert.run.pipeline import Progress

_MEMBERS = ("schema", "artifact", "totals", "objects")


def proven_outcome(
    plan: Plan, output: Path, report: Path, *, threads: int, progress: Progress | None = None
) -> Outcome | None:
    """Returns the digests of an output that is proven to be that of a plan; None if it is not, or is not there.

    Args:
        plan: an accepted plan; headers are enough.
        output: where the artifact would go.
        report: where its report would lie.
        threads: how many hash at a time.
        progress: reports bytes of the file.

    Raises:
        OutputError: the output cannot be read.
    """
    found = _read(report)
    if found is None or not is_published(plan, output) or _is_newer(plan, output):
        return None
    claimed = _claimed(found)
    if claimed is None or not _says(found, plan, claimed):
        return None
    made = published_digests(plan, output, threads=threads, progress=progress)
    return made if (made.digests, made.file_sha256) == (claimed.digests, claimed.file_sha256) else None


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= MAX_REPORT_BYTES:
            found = json.loads(file.read())
            return found if isinstance(found, dict) else None
    return None


def _is_newer(plan: Plan, output: Path) -> bool:
    """Tells whether a weight file has been written since: of its values the report knows nothing."""
    made = output.stat().st_mtime_ns
    return any(
        file.sha256 is None and file.mtime_ns > made
        for name, checkpoint in plan.sources.items()
        for file in checkpoint.files.values()
        if file.name in _used(plan, name)
    )


def _used(plan: Plan, name: str) -> set[str]:
    checkpoint = plan.sources[name]
    return {checkpoint.tensors[tensor].file for tensor in plan.used[name]}


def _claimed(found: Mapping[str, Any]) -> Outcome | None:
    with contextlib.suppress(KeyError, TypeError):
        digests = tuple(str(item["sha256"]) for item in found["objects"])
        return Outcome(digests, str(found["artifact"]["sha256"]), 0.0)
    return None


def _says(found: Mapping[str, Any], plan: Plan, claimed: Outcome) -> bool:
    """Tells whether a report is that of a plan in all that decides the bytes."""
    if len(claimed.digests) != len(plan.objects):
        return False
    wanted = json.loads(json.dumps(report_json(plan, claimed, threads=1, command=())))
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        return (
            all(_holds(found[name], wanted[name]) for name in _MEMBERS)
            and found["recipe"]["sha256"] == wanted["recipe"]["sha256"]
            and _input_digests(found) == _input_digests(wanted)
            and all(_source(found, plan, name) == _source(wanted, plan, name) for name in wanted["sources"])
        )
    return False


def _holds(found: object, wanted: object) -> bool:
    """Tells whether a document has all that another one has; it may have more members."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            name in found and _holds(found[name], value) for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_holds, found, wanted))
    return type(found) is type(wanted) and found == wanted


def _input_digests(document: Mapping[str, Any]) -> dict[str, object]:
    return {name: entry["sha256"] for name, entry in document["inputs"].items()}


def _source(document: Mapping[str, Any], plan: Plan, name: str) -> object:
    """Returns what a report says of a source and its used files, wherever they lie."""
    source, used = document["sources"][name], set(map(printable, _used(plan, name)))
    files = {
        file["name"]: (file["bytes"], file["sha256"], file["header_sha256"])
        for file in source["files"]
        if file["name"] in used
    }
    return source["prefixes"], files
