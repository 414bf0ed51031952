"""An explained object as text: what it is, the tree of its expression, what it reads and writes, the lines behind it.

Owns columns and wording. Refuses to know anything that is not in the explanation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ninfer_convert.errors import printable
from ninfer_convert.plan.explain import shape_text

Json = Mapping[str, Any]

_LABEL = 11
_TREE = 72
"""Columns that a long step may push shapes to, at most."""


def explanation_text(found: Json) -> str:
    """Returns one explained object as text; names are given whole."""
    pairs = [("object", printable(found["name"])), *(_tensor(found) if found["kind"] == "tensor" else _resource(found))]
    pairs += _several("problem", map(printable, found["problems"]))
    pairs += _several("decided by", _line_texts(found["lines"]))
    return "\n".join(f"{label:<{_LABEL}}{text}".rstrip() for label, text in pairs)


def _several(label: str, texts: Iterator[str] | Sequence[str] | map[str]) -> list[tuple[str, str]]:
    """Returns texts with the label before the first."""
    return [("" if place else label, text) for place, text in enumerate(texts)]


def _tensor(found: Json) -> list[tuple[str, str]]:
    by = f", encoded by {found['encoder']}" if found["encoder"] else ", words copied" if found["words"] else ""
    pairs = [("shape", shape_text(found["shape"])), ("format", f"{found['format']} in {found['layout']}{by}")]
    pairs += _component(found)
    if found["require"]:
        pairs.append(("require", ", ".join(found["require"])))
    pairs += _several("made of", _tree(found["expression"]))
    if found["sources"] is not None:
        pairs += _several("reads", [_source_text(source) for source in found["sources"]])
        pairs.append(("bytes in", f"{found['source_bytes']:,}"))
    planes = ", ".join(f"{plane['name']} {plane['bytes']:,} at {plane['offset']:,}" for plane in found["planes"])
    pairs.append(("bytes out", f"{found['bytes']:,}: {planes}"))
    rounds = [f"{entry['text']} ({entry['file']}:{entry['line']}:{entry['column']})" for entry in found["rounds"]]
    return pairs + _several("rounds", rounds or ["nothing; every value is kept"])


def _resource(found: Json) -> list[tuple[str, str]]:
    pairs = [("resource", f"stored byte for byte as {found['layout']}")]
    pairs += _component(found)
    pairs += _several("from", map(printable, found["places"]))
    pairs.append(("SHA-256", found["sha256"] or "not pinned: any content will do"))
    if found.get("taken_from"):
        pairs.append(("taken from", printable(found["taken_from"])))
    if found["bytes"] is not None:
        pairs.append(("bytes", f"{found['bytes']:,}"))
    return pairs


def _component(found: Json) -> list[tuple[str, str]]:
    if not found["component"]:
        return []
    absent = ", which is optional and absent from the source: left out" if found["left_out"] else ""
    return [("component", printable(found["component"]) + absent)]


def _tree(step: Json) -> list[str]:
    rows = list(_rows(step, ""))
    width = min(_TREE, max(len(text) for text, _, _ in rows))
    shapes = max(len(shape) for _, shape, _ in rows)
    return [f"{text:<{width}}  {shape:<{shapes}}  {dtype}" for text, shape, dtype in rows]


def _rows(step: Json, indent: str) -> Iterator[tuple[str, str, str]]:
    yield f"{indent}{step['step']}", shape_text(step["shape"]), step["dtype"] or "?"
    for operand in step["of"]:
        yield from _rows(operand, indent + "  ")


def _source_text(source: Json) -> str:
    name = printable(f"{source['source']}:{source['tensor']}")
    stored = "" if source["stored_name"] == source["tensor"] else f", stored as {printable(source['stored_name'])}"
    size = f"{source['dtype']} {source['shape']}, {source['bytes']:,} bytes"
    return f"{name}  {size} of {printable(source['file'])}{stored}"


def _line_texts(lines: Sequence[Json]) -> list[str]:
    places = [f"{line['file']}:{line['line']}:{line['column']}" for line in lines]
    width = max(map(len, places))
    return [f"{place:<{width}}  {line['role']} {line['text']}" for place, line in zip(places, lines, strict=True)]
