"""The conversion report and the plan as JSON: what went in, through what, and what came out.

Descriptive only: nothing reads a report to interpret an artifact.

Source: container.md, "The conversion report"; cli.md, "JSON".
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ninfer_convert import __version__
from ninfer_convert.allowance import peak_memory
from ninfer_convert.encode.loss import Loss
from ninfer_convert.errors import printable
from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import RAW_BYTES
from ninfer_convert.plan.planner import HEADERS_ALONE, Plan, PlannedObject, PlannedResource, PlannedTensor
from ninfer_convert.plan.transform import Words
from ninfer_convert.plan.value import constants
from ninfer_convert.recipe.expression import Shortlist
from ninfer_convert.recipe.expression import leaves as expression_leaves
from ninfer_convert.source.acquisition import needed_files
from ninfer_convert.source.checkpoint import Checkpoint
from ninfer_convert.source.remote import RemoteCheckpoint
from ninfer_convert.source.streaming import stream_bytes

REPORT_SCHEMA = 1
REPORTED_PACKAGES = ("numpy", "numba", "ml_dtypes", "safetensors", "huggingface_hub", "click", "pyyaml")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run knows beyond its plan.

    `digests` holds one SHA-256 per object in stored order, `file_sha256` that of the whole file as
    `sha256sum` prints it, `losses` what encoding has cost the objects for which that was measured, by their index.
    """

    digests: tuple[str, ...]
    file_sha256: str
    seconds: float
    losses: Mapping[int, Loss] = field(default_factory=dict)


def plan_json(plan: Plan) -> dict[str, Any]:
    """Returns the document of `plan --json`, without the memory estimate."""
    return {
        "artifact": {"model_id": plan.recipe.model_id, "weights_id": plan.recipe.weights_id},
        "recipe": {"id": plan.recipe.id, "sha256": plan.recipe.sha256},
        "objects": [object_json(item) for item in plan.objects],
        "totals": totals(plan) | remote_totals(plan),
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
        "waived": list(plan.waived),
    }


def totals(plan: Plan) -> dict[str, Any]:
    """Returns the counts and sizes of a plan, in bytes."""
    tensors = [item for item in plan.objects if isinstance(item, PlannedTensor)]
    resources = [item for item in plan.objects if isinstance(item, PlannedResource)]
    return {
        "objects": len(plan.objects),
        "tensors": len(tensors),
        "resources": len(resources),
        "tensor_bytes": sum(item.nbytes for item in tensors),
        "resource_bytes": sum(item.nbytes for item in resources),
        "payload_bytes": plan.payload_bytes,
        "payload_offset": plan.payload_offset,
        "file_bytes": plan.file_bytes,
        "formats": {name: count for name in FORMATS if (count := sum(t.numeric.name == name for t in tensors))},
        "source_bytes": plan.source_bytes,
    }


def remote_totals(plan: Plan) -> dict[str, int]:
    """Returns what a run must download and the disk it takes, in bytes; nothing when every source is here.

    `disk_bytes` counts download and artifact, `stream_disk_bytes` the artifact and the largest shards of `--stream`.
    """
    remote = {name: source for name, source in plan.sources.items() if isinstance(source, RemoteCheckpoint)}
    if not remote:
        return {}
    download = sum(source.pending_bytes(needed_files(plan, name)) for name, source in remote.items())
    held = stream_bytes(plan)
    return {
        "download_bytes": download,
        "disk_bytes": download + plan.file_bytes,
        "stream_disk_bytes": held + plan.file_bytes,
    }


def plan_identity(plan: Plan) -> dict[str, Any]:
    """Returns what must be equal for a half-written artifact to be completed by another run."""
    return {
        "recipe": plan.recipe.sha256,
        "converter": __version__,
        "kernels": kernel_digest(),
        "sources": {name: _used_files(plan, name) for name in plan.sources},
        "prefixes": {name: dict(checkpoint.applied_prefixes) for name, checkpoint in plan.sources.items()},
        "inputs": dict(plan.input_digests),
        "resources": {
            item.name: hashlib.sha256(item.content).hexdigest()
            for item in plan.objects
            if isinstance(item, PlannedResource)
        },
        "shortlists": _shortlists(plan),
        "directory": hashlib.sha256(plan.head).hexdigest(),
    }


def _shortlists(plan: Plan) -> dict[str, str]:
    """Returns the digest of every shortlist: a file that decides it may be no resource and no input."""
    found = {}
    for item in plan.objects:
        if isinstance(item, PlannedTensor):
            value = item.value.codes if isinstance(item.value, Words) else item.value
            for constant in constants(value):
                if constant.dtype == "I32":
                    found[constant.name] = hashlib.sha256(constant.words.tobytes()).hexdigest()
    return found


def _used_files(plan: Plan, name: str) -> list[list[str | int]]:
    """Returns what tells apart the weight files of a source that are used: of the others a hub's cache has none."""
    checkpoint = plan.sources[name]
    used = {checkpoint.tensors[tensor].file for tensor in plan.used[name]}
    # A digest from the hub says more than a time, which is another one wherever the file was fetched to.
    return [
        [file.name, file.size, file.sha256 or file.mtime_ns, file.header_sha256]
        for file in checkpoint.files.values()
        if file.name in used
    ]


def kernel_digest() -> str:
    """Returns the SHA-256 of the kernels' source: code that may make other bytes has another one."""
    return hashlib.sha256((Path(__file__).parent.parent / "encode" / "kernels.py").read_bytes()).hexdigest()


def object_json(item: PlannedObject) -> dict[str, Any]:
    """Returns one object as `plan --json` and the report show it."""
    if isinstance(item, PlannedResource):
        origin = {"source": item.origin.source, "file": item.origin.file, "member": item.origin.member}
        if item.origin.input is not None:
            origin = {"input": item.origin.input, "member": item.origin.member}
        return {
            "name": item.name,
            "kind": "resource",
            "encoding": RAW_BYTES,
            "offset": item.offset,
            "bytes": item.nbytes,
            "sources": [origin],
        }
    return {
        "name": item.name,
        "kind": "tensor",
        "shape": list(item.shape),
        "format": item.numeric.name,
        "layout": item.geometry.layout,
        "encoder": item.encoder,
        "word_copy": isinstance(item.value, Words) and item.value.is_copy,
        "offset": item.offset,
        "bytes": item.nbytes,
        "transform": str(item.spec.value),
        "sources": _tensor_sources(item),
    }


def _tensor_sources(item: PlannedTensor) -> list[dict[str, Any]]:
    leaves = {(leaf.source, leaf.info.name): leaf for leaf in item.leaves()}
    shortlists = dict.fromkeys(leaf for leaf in expression_leaves(item.spec.value) if isinstance(leaf, Shortlist))
    files: list[dict[str, Any]] = []
    for leaf in shortlists:
        files += [{"input": leaf.counts}, {"source": leaf.source, "file": leaf.special}]
    return files + [
        {
            "source": leaf.source,
            "file": printable(leaf.info.file),
            "tensor": leaf.info.name,
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
        }
        for leaf in leaves.values()
    ]


def report_json(plan: Plan, outcome: Outcome, *, threads: int, command: Sequence[str]) -> dict[str, Any]:
    """Returns the conversion report: everything that varies between equal runs is under `run`."""
    objects = [
        object_json(item) | {"sha256": digest} for item, digest in zip(plan.objects, outcome.digests, strict=True)
    ]
    for index, loss in outcome.losses.items():
        objects[index]["stats"] = loss.figures(objects[index]["shape"][-1])
    return {
        "schema": REPORT_SCHEMA,
        "artifact": {
            "model_id": plan.recipe.model_id,
            "weights_id": plan.recipe.weights_id,
            "bytes": plan.file_bytes,
            "sha256": outcome.file_sha256,
        },
        "recipe": {"id": plan.recipe.id, "sha256": plan.recipe.sha256, "path": printable(plan.recipe.path)},
        "sources": {name: _source_json(plan, name) for name in plan.sources},
        "inputs": {
            name: {
                "path": printable(str(plan.inputs[name])),
                "bytes": _file_bytes(plan.inputs[name]),
                "sha256": digest,
            }
            for name, digest in plan.input_digests.items()
        },
        "totals": totals(plan),
        "objects": objects,
        # The process that planned may have read no values; those that encoded have.
        "notes": [note for note in plan.notes if not note.endswith(HEADERS_ALONE)],
        "warnings": list(plan.warnings),
        "waived": list(plan.waived),
        "run": {
            "converter": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in REPORTED_PACKAGES},
            "host": platform.node(),
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(outcome.seconds, 3),
            "threads": threads,
            "peak_memory_bytes": peak_memory(),
            "byte_order": sys.byteorder,
            "command": list(map(printable, command)),
        },
    }


def _version(package: str) -> str | None:
    """Returns a package's version, or None where its metadata cannot be read, as in a trimmed image."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _file_bytes(path: Path) -> int | None:
    """Returns the size of an input as it is now; what was read of it was read before the first byte was written."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _source_json(plan: Plan, name: str) -> dict[str, Any]:
    spec, checkpoint = plan.recipe.sources[name], plan.sources[name]
    used = {leaf.info.name: leaf.info for leaf in plan.leaves() if leaf.source == name}
    dtypes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + 1
    return {
        "location": printable(checkpoint.location),
        "repo": checkpoint.repo or spec.repo,
        "revision": checkpoint.revision,
        "revision_required": spec.revision,
        "revision_requested": checkpoint.origin.requested if checkpoint.origin else None,
        "identified_by": _identified_by(checkpoint),
        "prefixes": dict(checkpoint.applied_prefixes),
        "dtypes": dtypes,
        "tensors": len(checkpoint.tensors),
        "tensors_used": len(used),
        "files": [
            {
                "name": printable(file.name),
                "bytes": file.size,
                "sha256": file.sha256,
                "verified": file.name in checkpoint.verified,
                "header_sha256": file.header_sha256,
            }
            for file in checkpoint.files.values()
        ],
    }


def _identified_by(checkpoint: Checkpoint) -> str:
    if checkpoint.origin:
        return checkpoint.origin.identified_by
    return "hub cache" if checkpoint.revision else "file sizes and header digests"
