"""What `inspection` has found, in words that fit 80 columns: totals, object table, one object, a conversion report.

Owns widths and line breaks, also those of wide characters. Refuses to read artifacts: every function takes plain
JSON values and returns lines.

Source: cli.md; container.md, "The conversion report".
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ninfer_convert.artifact.inspection import Json
from ninfer_convert.errors import printable

WIDTH = 80


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
