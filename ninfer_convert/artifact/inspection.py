"""An artifact in numbers and in words: totals, object table, one object in detail, each as data and as text.

Owns what is worth showing and how it fits 80 columns. Refuses to print, and to judge: `verify` says what is
wrong. The data functions return plain JSON values; the text functions take those and return lines.

Source: cli.md, "JSON"; container.md.
"""

from __future__ import annotations

import fnmatch
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact import decode
from ninfer_convert.artifact.container import VERSION, ObjectRecord, TensorRecord
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.scales import Histogram, scale_histogram
from ninfer_convert.errors import printable
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

WIDTH = 80
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


def summary_text(found: Json) -> str:
    """Returns a summary as text, at most 80 columns wide."""
    totals = found["totals"]
    lines = [
        f"{found['artifact']['model_id']} / {found['artifact']['weights_id']}",
        f"container version {found['container']['version']}, "
        f"directory of {found['container']['directory_bytes']:,} bytes",
        f"{totals['objects']:,} objects: {totals['tensors']:,} tensors, {totals['resources']:,} resources",
        f"{totals['file_bytes']:,} bytes, {totals['payload_bytes']:,} of them payload",
    ]
    if totals["bits_per_weight"] is not None:
        lines.append(f"{totals['elements']:,} elements at {totals['bits_per_weight']:.3f} bits")
    lines += ["", *_share_table("format", found["formats"])] if found["formats"] else []
    lines += ["", *_share_table("component", found["components"])]
    return "\n".join([*(fit(line, WIDTH) for line in lines), *_notes(found["notes"])])


def objects_text(objects: Sequence[Json]) -> str:
    """Returns the object table as text of 80 columns; a name that is too long continues on lines of its own."""
    rows: list[tuple[str, str, str, str]] = [
        (f"{entry['bytes']:,}", _shape_text(entry), str(entry.get("format", entry["kind"])), printable(entry["name"]))
        for entry in objects
    ]
    header = ("bytes", "shape", "format", "object")
    widths = [max(_columns(row[column]) for row in (header, *rows)) for column in range(3)]
    lines: list[str] = []
    for size, shape, format_name, name in (header, *rows):
        line = f"{size:>{widths[0]}} {shape:>{widths[1]}} {format_name:<{widths[2]}}"
        if len(line) + 1 + _columns(name) <= WIDTH:
            lines.append(f"{line} {name}")
        else:
            lines += [line.rstrip(), *(f"  {part}" for part in _wrapped(name, WIDTH - 2))]
    return "\n".join(lines)


def detail_text(found: Json) -> str:
    """Returns one object in detail as text of 80 columns; the name is given whole."""
    pairs: list[tuple[str, str]] = [("object", printable(found["name"])), ("kind", found["kind"])]
    if found["kind"] == "tensor":
        pairs.append(("shape", str(found["shape"])))
        pairs.append(("format", f"{found['format']} in {found['layout']}"))
        pairs.append(("elements", f"{found['elements']:,} at {found['bits_per_weight']:.3f} bits"))
    else:
        pairs.append(("encoding", found["encoding"]))
    pairs.append(("bytes", f"{found['bytes']:,} at byte {found['file_offset']:,} of the file"))
    pairs.append(("SHA-256", found["sha256"]))
    for plane in found.get("planes", ()):
        rows = f", {plane['row_bytes']:,} per row" if plane["row_bytes"] else ""
        pairs.append((f"{plane['name']} plane", f"{plane['bytes']:,} bytes at {plane['offset']:,}{rows}"))
    if "scales" in found:
        pairs.append(("scales", _scales_text(found["scales"])))
    if "divisor" in found:
        pairs.append(("divisor", f"{found['divisor']['value']} ({found['divisor']['word']})"))
    if "first_values" in found:
        pairs.append(("values", " ".join(str(value) for value in found["first_values"])))
    if "first_bytes" in found:
        pairs.append(("bytes", found["first_bytes"]))
    return "\n".join(line for label, text in pairs for line in _labelled(label, text))


def report_text(report: Mapping[str, Any]) -> str:
    """Returns what a conversion report says of its run, recipe and sources, as text of 80 columns.

    Members that are missing or of another type are left out: a report is not trusted.

    Source: container.md, "The conversion report".
    """
    recipe, run, sources = (_mapping(report.get(member)) for member in ("recipe", "run", "sources"))
    lines = [("converted by", run, "converter"), ("converted at", run, "finished"), ("recipe", recipe, "id")]
    pairs = [(label, members[key]) for label, members, key in lines if isinstance(members.get(key), str)]
    for name, source in sources.items():
        members = _mapping(source)
        known = [members[key] for key in ("repo", "revision") if isinstance(members.get(key), str)]
        pairs.append(("source", f"{name}: {' '.join(known) or members.get('location', 'unknown')}"))
    return "\n".join(line for label, text in pairs for line in _labelled(label, printable(text)))


def fit(text: str, width: int) -> str:
    """Returns text made printable and at most width columns wide; what is cut out in the middle shows as `...`."""
    text = printable(text)
    if _columns(text) <= width:
        return text
    tail = _head(text[::-1], (width - 3) // 2)[::-1]
    return _head(text, width - 3 - _columns(tail)) + "..." + tail


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


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _shape_text(entry: Json) -> str:
    return fit("x".join(str(dimension) for dimension in entry["shape"]) or "scalar", 24) if "shape" in entry else "-"


def _scales_text(scales: Json) -> str:
    text = f"{scales['groups']:,}, {scales['zero_groups']:,} zero"
    if scales["invalid_groups"]:
        text += f", {scales['invalid_groups']:,} invalid"
    return text + (f", {scales['least']} to {scales['largest']}" if scales["largest"] is not None else "")


def _share_table(label: str, shares: Sequence[Json]) -> list[str]:
    rows: list[tuple[str, str, str, str]] = [
        (
            fit(share[label], 30),
            f"{share['objects']:,}",
            f"{share['bytes']:,}",
            "-" if share["bits_per_weight"] is None else f"{share['bits_per_weight']:.3f}",
        )
        for share in shares
    ]
    header = (label, "objects", "bytes", "bits/element")
    widths = [max(_columns(row[column]) for row in (header, *rows)) for column in range(4)]
    return [
        name + " " * (widths[0] - _columns(name)) + f"  {count:>{widths[1]}}  {size:>{widths[2]}}  {bits:>{widths[3]}}"
        for name, count, size, bits in (header, *rows)
    ]


def _notes(notes: Iterable[str]) -> list[str]:
    return [line for note in notes for line in ("", *_wrapped(f"note: {note}", WIDTH))]


def _labelled(label: str, text: str) -> list[str]:
    first, *rest = _wrapped(text, WIDTH - 14) or [""]
    return [f"{label:<13} {first}", *(" " * 14 + line for line in rest)]


def _wrapped(text: str, width: int) -> list[str]:
    """Returns text in lines of at most width columns, broken at spaces where there is one."""
    lines: list[str] = []
    while _columns(text) > width:
        line = _head(text, width)
        cut = line.rfind(" ") if " " in line.strip() else len(line)
        lines.append(text[:cut])
        text = text[cut:].lstrip(" ")
    return [*lines, text]


def _head(text: str, width: int) -> str:
    """Returns the longest beginning of text that is at most width columns wide."""
    used = 0
    for index, character in enumerate(text):
        used += _columns(character)
        if used > width:
            return text[:index]
    return text


def _columns(text: str) -> int:
    """Returns the columns that printable text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )
