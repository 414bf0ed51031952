"""What of a conversion report a page shows: what is believed, and in which words.

A report is not trusted: it is used when it fits the artifact, and members that are missing or of another type
are left out. Every text is safe to show and of bounded length.

Source: container.md, "The conversion report".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ninfer_convert.artifact.container import ObjectRecord, TensorRecord
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.errors import printable

MAX_TEXT = 1000
"""Characters that are shown of one text of a conversion report."""
SHOWN_SOURCES = 8
SHOWN_LINES = 200
"""Notes, warnings, waived pins and source files of each kind that are shown."""

STATISTICS = ("relative_l2", "sqnr_db", "max_error")
COUNTS = ("clipped_groups", "zero_groups")

Json = dict[str, Any]


def report_problem(artifact: Artifact, report: Mapping[str, Any]) -> str | None:
    """Tells why a report is not of an artifact; None when it is, as far as its members tell."""
    about = _mapping(report.get("artifact"))
    found = {
        "model_id": artifact.identity.model_id,
        "weights_id": artifact.identity.weights_id,
        "bytes": artifact.file_bytes,
    }
    for member, value in found.items():
        if member in about and about[member] != value:
            return f"its {member} is {shown_text(about[member])}; the artifact's is {shown_text(value)}"
    for item in reported_objects(report):
        record = artifact.objects.get(item["name"])
        if record is None:
            return f"it has object '{shown_text(item['name'])}'; the artifact does not"
        if (problem := _object_problem(record, item)) is not None:
            return f"object '{shown_text(record.name)}': {problem}"
    return None


def _object_problem(record: ObjectRecord, item: Mapping[str, Any]) -> str | None:
    found: Json = {"kind": record.kind, "bytes": record.nbytes}
    if isinstance(record, TensorRecord):
        found |= {"shape": list(record.shape), "format": record.format}
    for member, value in found.items():
        if member in item and item[member] != value:
            return f"its {member} is {shown_text(item[member])}; the artifact's is {shown_text(value)}"
    return None


def reported_objects(report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the named objects of a report."""
    for item in _sequence(report.get("objects")):
        if isinstance(item, Mapping) and isinstance(item.get("name"), str):
            yield item


def reported(item: Mapping[str, Any]) -> Json:
    """Returns what a report tells of one object."""
    found: Json = {
        member: shown_text(item[member])
        for member in ("encoder", "transform", "sha256")
        if isinstance(item.get(member), str)
    }
    if item.get("word_copy") is True:
        found["word_copy"] = True
    sources = [_origin(origin) for origin in _sequence(item.get("sources")) if isinstance(origin, Mapping)]
    if sources:
        found["sources"] = sources[:SHOWN_SOURCES]
        if len(sources) > SHOWN_SOURCES:
            found["more_sources"] = len(sources) - SHOWN_SOURCES
    if stats := _stats(_mapping(item.get("stats"))):
        found["stats"] = stats
    return found


def _origin(origin: Mapping[str, Any]) -> Json:
    texts = {
        member: shown_text(origin[member])
        for member in ("source", "input", "file", "member", "tensor", "dtype")
        if isinstance(origin.get(member), str)
    }
    shape = origin.get("shape")
    return texts | ({"shape": shape} if _is_shape(shape) else {})


def _stats(item: Mapping[str, Any]) -> Json:
    found: Json = {name: float(item[name]) for name in STATISTICS if _is_number(item.get(name))}
    found |= {name: item[name] for name in COUNTS if _is_integer(item.get(name)) and item[name] >= 0}
    at = item.get("max_error_at")
    return found | ({"max_error_at": at} if found and _is_shape(at) else {})


def facts(report: Mapping[str, Any]) -> list[Json]:
    """Returns what a report tells of the whole conversion: titled lists of label and text."""
    about, run = _mapping(report.get("artifact")), _mapping(report.get("run"))
    recipe = _mapping(report.get("recipe"))
    file = {"path": "path", "bytes": "bytes", "sha256": "SHA-256"}
    groups = [
        ("Recipe", [*_pairs(recipe, {"id": "id", "path": "path", "sha256": "SHA-256"})]),
        *((f"Source {shown_text(name)}", _source_facts(_mapping(item))) for name, item in _items(report, "sources")),
        *((f"Input {shown_text(name)}", [*_pairs(_mapping(item), file)]) for name, item in _items(report, "inputs")),
        ("Artifact", [*_pairs(about, {"sha256": "SHA-256"})]),
        ("Run", _run_facts(run)),
        *((title, _lines(report.get(title.lower()))) for title in ("Notes", "Warnings", "Waived")),
    ]
    return [{"title": title, "facts": lines} for title, lines in groups if lines]


def _source_facts(source: Mapping[str, Any]) -> list[list[str]]:
    labels = {"location": "location", "repo": "repository", "revision": "revision"}
    found = [*_pairs(source, labels)]
    if source.get("revision") != source.get("revision_required"):
        found += _pairs(source, {"revision_required": "revision required"})
    found += _pairs(source, {"identified_by": "identified by"})
    dtypes = [f"{shown_text(name)} {count}" for name, count in _items(source, "dtypes") if _is_number(count)]
    found += [["dtypes", ", ".join(dtypes)]] if dtypes else []
    found += _pairs(source, {"tensors_used": "tensors used", "tensors": "tensors"})
    found += [["prefix", f"{shown_text(begin)} \u2192 {shown_text(to)}"] for begin, to in _items(source, "prefixes")]
    files = [_mapping(file) for file in _sequence(source.get("files"))]
    texts = [f"{shown_text(file['name'])}, {_shown(file.get('bytes'))} bytes" for file in files if "name" in file]
    return found + _lines(texts, "file")


def _run_facts(run: Mapping[str, Any]) -> list[list[str]]:
    found = [*_pairs(run, {"finished": "finished", "converter": "converter", "seconds": "seconds"})]
    found += _pairs(run, {"threads": "threads", "peak_memory_bytes": "peak memory, bytes", "host": "host"})
    found += _pairs(run, {"platform": "platform", "python": "Python", "byte_order": "byte order"})
    packages = [f"{shown_text(name)} {shown_text(version)}" for name, version in _items(run, "packages")]
    found += [["packages", ", ".join(packages)]] if packages else []
    command = [word for word in _sequence(run.get("command")) if isinstance(word, str)]
    return found + ([["command", shown_text(" ".join(command))]] if command else [])


def _pairs(members: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[list[str]]:
    for member, label in labels.items():
        value = members.get(member)
        if isinstance(value, str) or _is_number(value):
            yield [label, _shown(value)]


def _lines(values: object, label: str = "") -> list[list[str]]:
    texts = [shown_text(value) for value in _sequence(values) if isinstance(value, str)]
    more = [[label, f"and {len(texts) - SHOWN_LINES} more"]] if len(texts) > SHOWN_LINES else []
    return [[label, text] for text in texts[:SHOWN_LINES]] + more


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and _is_integer(value) else shown_text(value)


def shown_text(value: object) -> str:
    """Returns a text that is safe to show, cut in its middle when it is too long."""
    text = str(value) if not isinstance(value, str) else value
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]} \u2026 {text[-MAX_TEXT // 2 :]}"
    return printable(text)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_integer(value: object) -> bool:
    # binary64 has a place for each of these, and arithmetic with them stays fast
    return type(value) is int and abs(value) < 2**63


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 16 and all(map(_is_integer, value))


def _items(members: Mapping[str, Any], name: str) -> Sequence[tuple[str, Any]]:
    return [*_mapping(members.get(name)).items()]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
