"""What a report page shows, as JSON values: an artifact, its conversion report, and a second artifact beside it.

Owns what is worth showing of an artifact. Refuses to know what of a report is believed (`page_report`) and how
it looks (`page`).

Source: cli.md, `report`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer_convert.artifact.container import TensorRecord
from ninfer_convert.artifact.decode import E4M3FN_VALUES, bf16_values, divisor_word, f16_values
from ninfer_convert.artifact.inspection import component, summary
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.scales import Histogram, scale_histogram, scale_plane
from ninfer_convert.errors import ArtifactError, printable
from ninfer_convert.formats import NVFP4
from ninfer_convert.layout import DIVISOR_BYTES
from ninfer_convert.page.report import facts, report_problem, reported, reported_objects, shown_text

PAGE_SCHEMA = 1
OTHER_MEMBERS = ("kind", "shape", "format", "bytes", "bits_per_weight", "sha256", "stats", "scales", "divisor")
"""What is shown of an object of the second artifact."""
Json = dict[str, Any]
Progress = Callable[[int, int], object]
"""Called with the bytes read so far and their total."""

_INTEGER = re.compile(r"(?<![0-9A-Za-z])[0-9]{1,6}(?![0-9A-Za-z])")


@dataclass(frozen=True, slots=True)
class Subject:
    """An artifact with the conversion report beside it, if there is one."""

    artifact: Artifact
    report: Mapping[str, Any] | None = None

    def problem(self) -> str | None:
        """Tells why the report is not of this artifact; None when there is none or it is."""
        return None if self.report is None else report_problem(self.artifact, self.report)

    def believed(self) -> Mapping[str, Any]:
        """Returns the report, empty when there is none or it is not of this artifact."""
        return self.report if self.report is not None and self.problem() is None else {}


def page_data(first: Subject, second: Subject | None = None, progress: Progress | None = None) -> Json:
    """Returns everything that a page shows, as JSON values.

    Of the payload only scale planes and divisors are read, in blocks: memory does not grow with the artifact.

    Args:
        second: an artifact to show beside the first.

    Raises:
        ArtifactError: a file was cut or changed while it was read.
        OutputError: a read fails.

    Source: cli.md, `report`.
    """
    subjects = [first] if second is None else [first, second]
    advance = _advancing(progress, sum(_scale_bytes(subject.artifact) for subject in subjects))
    rows = dict(_entries(first, advance))
    if second is not None:
        for name, other in _entries(second, advance):
            row = rows.setdefault(name, {**_place(name), "name": printable(name)})
            row["other"] = {member: other[member] for member in OTHER_MEMBERS if member in other}
        for row in rows.values():
            row["status"] = _status(row)
    return {
        "schema": PAGE_SCHEMA,
        "artifacts": [_about(subject) for subject in subjects],
        "objects": list(rows.values()),
    }


def layer_and_role(name: str) -> tuple[int | None, str]:
    """Returns the first whole number of an object's path, and the path with a star in its place.

    `text/layers/12/mlp/down` is role `text/layers/*/mlp/down` of layer 12. A name without one is its own role.
    """
    found = _INTEGER.search(name)
    if found is None:
        return None, name
    return int(found[0]), f"{name[: found.start()]}*{name[found.end() :]}"


def _about(subject: Subject) -> Json:
    found, report = summary(subject.artifact), subject.believed()
    return {
        "path": subject.artifact.path,
        "model_id": printable(found["artifact"]["model_id"]),
        "weights_id": printable(found["artifact"]["weights_id"]),
        "totals": found["totals"],
        "notes": [shown_text(note) for note in found["notes"]],
        "has_report": bool(report),
        "report_problem": subject.problem(),
        "facts": facts(report),
    }


def _entries(subject: Subject, advance: Callable[[int], object]) -> Iterator[tuple[str, Json]]:
    artifact = subject.artifact
    items = {item["name"]: item for item in reported_objects(subject.believed())}
    sizes = {entry["name"]: entry for entry in summary(artifact)["objects"]}
    for name, record in artifact.objects.items():
        entry: Json = {**sizes[name], **_place(name), "name": printable(name)}
        if isinstance(record, TensorRecord):
            entry |= _scales(artifact, record, advance)
        yield name, entry | reported(items.get(name, {}))
    if not artifact.is_unchanged():
        raise ArtifactError(f"{artifact.path}: the file was changed while it was read")


def _place(name: str) -> Json:
    layer, role = layer_and_role(name)
    placed: Json = {"component": printable(component(name)), "role": printable(role)}
    return placed if layer is None else placed | {"layer": layer}


def _scales(artifact: Artifact, record: TensorRecord, advance: Callable[[int], object]) -> Json:
    found = scale_histogram(artifact, record, advance)
    if found is None:
        return {}
    shown: Json = {
        "word": found.word,
        "groups": found.groups,
        "zero": found.zero,
        "invalid": found.invalid,
        "shift": found.shift,
        "first": found.first,
        "counts": list(found.counts),
    }
    divisor = 1.0
    entry: Json = {"scales": shown}
    if record.format == NVFP4.name:
        stored = artifact.read(record.name, record.nbytes - DIVISOR_BYTES)
        word = divisor_word({"divisor": np.frombuffer(stored, np.uint8)})
        divisor = float(np.array([word], np.uint32).view(np.float32)[0])
        if math.isfinite(divisor) and divisor > 0:
            entry["divisor"] = divisor
        else:
            divisor = 1.0
    if found.median is not None:
        shown["median"] = _scale_value(found, found.median) / divisor
    return entry


def _scale_value(found: Histogram, word: int) -> float:
    if found.word == "E4M3FN":
        return float(E4M3FN_VALUES[word])
    expand = f16_values if found.word == "F16" else bf16_values
    return float(expand(np.array([word], np.uint16))[0])


def _scale_bytes(artifact: Artifact) -> int:
    records = [record for record in artifact.objects.values() if isinstance(record, TensorRecord)]
    return sum(plane.nbytes for record in records if (plane := scale_plane(record)) is not None)


def _advancing(progress: Progress | None, total: int) -> Callable[[int], object]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return advance


def _status(row: Json) -> str:
    """Tells how an object of the first artifact stands to that of the second."""
    other = row.get("other")
    if other is None:
        return "only in first"
    if "kind" not in row:
        return "only in second"
    for member, status in (("kind", "other kind"), ("shape", "other shape"), ("format", "other format")):
        if row.get(member) != other.get(member):
            return status
    if row["bytes"] != other["bytes"]:
        return "other bytes"
    if "sha256" not in row or "sha256" not in other:
        return "not known"
    return "same bytes" if row["sha256"] == other["sha256"] else "other bytes"
