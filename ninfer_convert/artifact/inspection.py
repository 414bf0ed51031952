"""An artifact in numbers: totals, object table, one object in detail, as plain JSON values.

Owns what is worth showing. Refuses to judge, `verify` says what is wrong, and to know how it is printed
(`inspection_text`).

Source: cli.md, "JSON"; container.md.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact import decode
from ninfer_convert.artifact.container import VERSION, ObjectRecord, TensorRecord
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.scales import Histogram, scale_histogram
from ninfer_convert.formats import (
    FORMATS,
    NVFP4,
    BlockScaledFormat,
    DirectFormat,
    GroupedFormat,
    NumericFormat,
)
from ninfer_convert.layout import (
    BASE_GROUP_BYTES,
    DIVISOR_BYTES,
    RAW_BYTES,
    Plane,
    geometry,
    high_group_bytes,
)

FIRST_VALUES = 8
"""Values of the first row, and bytes of a resource, that an object's detail shows."""

Json = dict[str, Any]


def summary(artifact: Artifact) -> Json:
    """Returns identity, totals per format and per top-level component, and the object table.

    Nothing of the payload is read. Bits per weight are stored bits, all planes, padding and scales included,
    per logical element.

    Source: cli.md, "JSON".
    """
    records = list(artifact.objects.values())
    tensors = [record for record in records if isinstance(record, TensorRecord)]
    by_format = {name: [record for record in tensors if record.format == name] for name in FORMATS}
    components: dict[str, list[ObjectRecord]] = {}
    for record in records:
        components.setdefault(component(record.name), []).append(record)
    tensor_bytes = sum(record.nbytes for record in tensors)
    return {
        "artifact": {"model_id": artifact.identity.model_id, "weights_id": artifact.identity.weights_id},
        "container": {"version": VERSION, "directory_bytes": artifact.head.json_bytes},
        "objects": [_entry(record) for record in records],
        "totals": {
            "objects": len(records),
            "tensors": len(tensors),
            "resources": len(records) - len(tensors),
            "tensor_bytes": tensor_bytes,
            "resource_bytes": sum(record.nbytes for record in records) - tensor_bytes,
            "payload_bytes": records[-1].end - records[0].offset,
            "payload_offset": artifact.payload_offset,
            "file_bytes": artifact.file_bytes,
            "formats": {name: len(found) for name, found in by_format.items() if found},
            "elements": sum(math.prod(record.shape) for record in tensors),
            "bits_per_weight": _bits_per_weight(tensors),
        },
        "formats": [{"format": name, **_share(found)} for name, found in by_format.items() if found],
        "components": [{"component": name, **_share(found)} for name, found in components.items()],
        "notes": artifact.head.notes(),
    }


def component(name: str) -> str:
    """Returns the top-level component of an object name: what stands before the first slash."""
    return name.split("/", 1)[0]


def detail(artifact: Artifact, name: str) -> Json:
    """Returns one object in detail: its place, planes, scales, first values and SHA-256. Reads the object once.

    Raises:
        ArtifactError: there is no such object, or the file was cut.
        OutputError: a read fails.

    Source: layouts.md; tensor-formats.md section 6.
    """
    record = artifact.record(name)
    entry = _entry(record)
    entry["file_offset"] = artifact.payload_offset + record.offset
    entry["sha256"] = artifact.digest(name)
    if not isinstance(record, TensorRecord):
        entry["first_bytes"] = artifact.read(name, 0, min(FIRST_VALUES, record.nbytes)).hex(" ")
        return entry
    numeric, where = FORMATS[record.format], geometry(FORMATS[record.format], record.shape)
    entry["rows"], entry["row_quantum"] = where.rows, where.row_quantum
    entry["planes"] = [
        {"name": plane.name, "offset": plane.offset, "bytes": plane.nbytes, "row_bytes": plane.row_bytes}
        for plane in where.planes
    ]
    if (scales := scale_histogram(artifact, record)) is not None:
        entry["scales"] = _scales(numeric, scales)
    if numeric == NVFP4:
        word = artifact.read(name, record.nbytes - DIVISOR_BYTES)
        entry["divisor"] = {"word": f"0x{word[::-1].hex()}", "value": _number(np.frombuffer(word, "<f4")[0])}
    entry["first_values"] = [_number(value) for value in _first_values(artifact, record, numeric)]
    return entry


def matching(objects: Iterable[Json], patterns: Sequence[str]) -> list[Json]:
    """Returns the entries whose name matches one of the globs (`*` crosses slashes), or all without a glob."""
    return [
        entry
        for entry in objects
        if not patterns or any(fnmatch.fnmatchcase(entry["name"], pattern) for pattern in patterns)
    ]


def _entry(record: ObjectRecord) -> Json:
    if not isinstance(record, TensorRecord):
        return {
            "name": record.name,
            "kind": record.kind,
            "encoding": RAW_BYTES,
            "offset": record.offset,
            "bytes": record.nbytes,
        }
    return {
        "name": record.name,
        "kind": record.kind,
        "shape": list(record.shape),
        "format": record.format,
        "layout": record.layout,
        "offset": record.offset,
        "bytes": record.nbytes,
        "elements": math.prod(record.shape),
        "bits_per_weight": _bits_per_weight([record]),
    }


def _share(records: Sequence[ObjectRecord]) -> Json:
    tensors = [record for record in records if isinstance(record, TensorRecord)]
    return {
        "objects": len(records),
        "bytes": sum(record.nbytes for record in records),
        "elements": sum(math.prod(record.shape) for record in tensors),
        "bits_per_weight": _bits_per_weight(tensors),
    }


def _bits_per_weight(tensors: Sequence[TensorRecord]) -> float | None:
    elements = sum(math.prod(record.shape) for record in tensors)
    return 8 * sum(record.nbytes for record in tensors) / elements if elements else None


def _scales(numeric: NumericFormat, found: Histogram) -> Json:
    """Returns count, range and zeros of the scales of logical groups."""
    return {
        "groups": found.groups,
        "zero_groups": found.zero,
        "invalid_groups": found.invalid,
        "least": None if found.least is None else _scale_value(numeric, found.least),
        "largest": None if found.largest is None else _scale_value(numeric, found.largest),
    }


def _scale_value(numeric: NumericFormat, word: int) -> float | int | str:
    if isinstance(numeric, BlockScaledFormat):
        return _number(decode.E4M3FN_VALUES[word])
    expand = decode.f16_values if isinstance(numeric, GroupedFormat) else decode.bf16_values
    return _number(expand(np.array([word], np.uint16))[0])


def _first_values(artifact: Artifact, record: TensorRecord, numeric: NumericFormat) -> NDArray[Any]:
    """Returns the first values of a tensor from the first bytes of its planes, however long a row is."""
    planes: dict[str, NDArray[np.uint8]] = {}
    for plane in geometry(numeric, record.shape).planes:
        raw = artifact.read(record.name, plane.offset, plane.offset + min(_start_bytes(numeric, plane), plane.nbytes))
        planes[plane.name] = np.frombuffer(raw, np.uint8).reshape(1, -1)
    if isinstance(numeric, BlockScaledFormat):
        codes = decode.codes(numeric, numeric.group, planes)
        values = decode.block_scaled_values(planes["scale"], codes.view(np.uint8), decode.divisor_word(planes))
        first: NDArray[np.float32] = values[0, :FIRST_VALUES]
        return first
    k = min(FIRST_VALUES, math.prod(record.shape) if isinstance(numeric, DirectFormat) else record.shape[1])
    row: NDArray[Any] = decode.decode_rows(numeric, k, planes)[0]
    return row


def _start_bytes(numeric: NumericFormat, plane: Plane) -> int:
    """Returns how many bytes of a plane the first values need: those of the first group."""
    if isinstance(numeric, DirectFormat):
        return FIRST_VALUES * numeric.word_bytes
    if isinstance(numeric, GroupedFormat):
        return {"base": BASE_GROUP_BYTES, "high": high_group_bytes(numeric), "scale": 2}[plane.name]
    if isinstance(numeric, BlockScaledFormat):
        return {"code": numeric.group // 2, "scale": 1, "divisor": DIVISOR_BYTES}[plane.name]
    return {"code": min(FIRST_VALUES, plane.row_bytes), "scale": 2}[plane.name]


def _number(value: Any) -> float | int | str:
    """Returns a JSON number that reads back as the same word of its type; a text where JSON has no number."""
    if isinstance(value, np.integer):
        return int(value)
    return float(str(value)) if math.isfinite(value) else str(value)
