"""A recipe back to YAML, with `extends`, loops, sets, names, named values and changes worked in.

Owns the way from a `Recipe` to the document that describes the same conversion entry by entry, and that document's
text. Refuses to know where anything was written (`origins`).

Source: recipe.md, "Duties".
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ninfer_convert.recipe.expression import (
    BlockRows,
    Cast,
    Concat,
    Expression,
    Gather,
    Module,
    Reciprocal,
    Reshape,
    Same,
    Shortlist,
    Slice,
    Tensor,
    Tied,
    Transpose,
    operands,
)
from ninfer_convert.recipe.files import SCHEMA
from ninfer_convert.recipe.globs import Globs
from ninfer_convert.recipe.model import (
    ObjectSpec,
    Recipe,
    Requirement,
    ResourceOrigin,
    ResourceSpec,
    SourceSpec,
    TensorSpec,
)
from ninfer_convert.recipe.yaml_nodes import MAX_DEPTH, MAX_FILE_BYTES, MAX_NODES, yaml_reading

DEEPEST = 24
"""Nodes of one expression that are nested in place: YAML may be nested 64 deep, two for each node."""

WIDTH = 120
"""Columns of a line, unless one text alone is longer."""

Json = dict[str, Any]

_PLAIN = re.compile("[A-Za-z0-9_][A-Za-z0-9_./-]*(?::[A-Za-z0-9_][A-Za-z0-9_./-]*)?")
"""Text that needs no quotes anywhere in YAML, unless YAML reads it as something else."""

_SINGLE_SPACES = re.compile(r"[^\s\\]+(?: [^\s\\]+)*")

_PLACEHOLDER = re.compile("<(?=[A-Za-z_][A-Za-z0-9_-]*>)")
_BRACKET = "lt"
"""Stands for a `<` that begins no placeholder but looks like one."""


def expanded(recipe: Recipe) -> Json:
    """Returns the recipe as the plain document that loads as the same conversion, in the order of the language.

    Evidence that speaks of no object that is left, as an inherited one may, is not in it.
    """
    writer = _Writer(next(iter(recipe.sources)))
    objects = [entry for group in _components(recipe) for entry in _entries(group, recipe, writer)]
    conditions = [writer.expression(condition.value) for condition in recipe.conditions]
    document: Json = {"schema": SCHEMA, "id": _text(recipe.id)}
    document["artifact"] = {"model_id": _text(recipe.model_id), "weights_id": _text(recipe.weights_id)}
    if evidence := _evidence(recipe):
        document["evidence"] = evidence
    document["sources"] = {source.name: _source(source) for source in recipe.sources.values()}
    if recipe.inputs:
        document["inputs"] = {
            name: {} if item.sha256 is None else {"sha256": item.sha256} for name, item in recipe.inputs.items()
        }
    if writer.values:
        document["values"] = writer.values
    document["objects"] = objects
    if conditions:
        document["conditions"] = conditions
    ignored = {
        source.name: [_text(glob) for glob, _ in source.ignore] for source in recipe.sources.values() if source.ignore
    }
    if ignored:
        document["ignore"] = ignored
    if f"<{_BRACKET}>" in json.dumps(document, ensure_ascii=False):
        document = {**dict(itertools.islice(document.items(), 3)), "names": {_BRACKET: "<"}, **document}
    return document


def recipe_text(document: Json) -> str:
    """Returns the YAML text of a document, its sections apart, each entry on one line where it fits."""
    lines: list[str] = []
    for key, value in document.items():
        if lines and (isinstance(value, list) or key in ("sources", "values")):
            lines.append("")
        lines += _member(key, value, "")
    return "\n".join(lines) + "\n"


def beyond_limits(document: Json, text: str) -> str | None:
    """Returns why a document is more than one recipe file may hold, which loops need not be; None if it is not."""
    if len(text.encode()) > MAX_FILE_BYTES:
        return f"{len(text.encode()):,} bytes; a recipe file has at most {MAX_FILE_BYTES:,}"
    nodes, depth = _size(document)
    if nodes > MAX_NODES:
        return f"{nodes:,} nodes; a recipe file has at most {MAX_NODES:,}"
    return f"nested {depth} deep; a recipe file is at most {MAX_DEPTH} deep" if depth > MAX_DEPTH else None


def plain_number(value: float) -> int | float:
    """Returns a number as people write it: without a fraction where it has none."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _text(text: str) -> str:
    """Returns text as a recipe must have it where placeholders are filled in, quotes or not."""
    return _PLACEHOLDER.sub(f"<{_BRACKET}>", text)


def _evidence(recipe: Recipe) -> list[Json] | str | None:
    if not recipe.evidence:
        return "none"
    names, globs = dict.fromkeys(spec.name for spec in recipe.objects), Globs()
    found: list[Json] = []
    for entry in recipe.evidence:
        texts = [glob for glob, _ in entry.objects if globs.matching(glob, names)]
        if texts == ["*"]:
            found.append({"text": entry.text})
        elif texts:
            found.append({"objects": [_text(glob) for glob in texts], "text": entry.text})
    return found or None


def _source(source: SourceSpec) -> Json:
    found: Json = {}
    if source.repo is not None:
        found["repo"] = _text(source.repo)
    if source.revision is not None:
        found["revision"] = source.revision
    if source.dtypes:
        found["dtype"] = source.dtypes[0] if len(source.dtypes) == 1 else list(source.dtypes)
    if source.config:
        found["config"] = source.config
    if source.prefixes:
        found["prefix"] = {_text(begins): _text(becomes) for begins, becomes in source.prefixes.items()}
    return found


def _components(recipe: Recipe) -> Iterator[list[ObjectSpec]]:
    """Yields runs of objects that belong to one component, or to none."""
    for _, group in itertools.groupby(recipe.objects, key=lambda spec: spec.component):
        yield list(group)


def _entries(group: Sequence[ObjectSpec], recipe: Recipe, writer: _Writer) -> list[Json]:
    entries = [
        _tensor(spec, writer) if isinstance(spec, TensorSpec) else _resource(spec, writer.default) for spec in group
    ]
    component = group[0].component
    if component is None:
        return entries
    block: Json = {"component": _text(component)}
    if component in recipe.optional_components:
        block["optional"] = True
    return [{**block, "objects": entries}]


def _tensor(spec: TensorSpec, writer: _Writer) -> Json:
    entry: Json = {"name": _text(spec.name), "shape": list(spec.shape), "format": spec.format}
    if spec.encoder is not None:
        entry["encoder"] = spec.encoder
    entry["words" if spec.words else "value"] = writer.expression(spec.value)
    if spec.requirements:
        entry["require"] = [_rule(requirement) for requirement in spec.requirements]
    return entry


def _rule(requirement: Requirement) -> str | Json:
    if requirement.low is None or requirement.high is None:
        return requirement.rule
    return {"range": [plain_number(requirement.low), plain_number(requirement.high)]}


def _resource(spec: ResourceSpec, default: str) -> Json:
    places = [_origin(origin, default) for origin in spec.origins]
    entry: Json = {"resource": _text(spec.name), **(places[0] if len(places) == 1 else {"any": places})}
    return entry if spec.sha256 is None else {**entry, "sha256": spec.sha256}


def _origin(origin: ResourceOrigin, default: str) -> Json:
    found: Json = {}
    if origin.input is not None:
        found["input"] = origin.input
    else:
        found["file"] = _text(origin.file or "")
        if origin.source != default:
            found["source"] = origin.source
    return found if origin.member is None else {**found, "member": _text(origin.member)}


class _Writer:
    """Spells expressions; one that is nested too deep for YAML is taken apart into named values."""

    def __init__(self, default: str) -> None:
        self.default = default
        """The source of a tensor that is named without one."""
        self.values: Json = {}

    def expression(self, node: Expression, depth: int = 1) -> Any:
        """Returns an expression, which stands `depth` deep in another one, as a recipe has it."""
        if depth > DEEPEST and operands(node):
            name = f"deep{len(self.values) + 1}"
            self.values[name] = self.expression(node)
            return f"${name}"

        def of(operand: Expression) -> Any:
            return self.expression(operand, depth + 1)

        match node:
            case Tensor():
                return self._leaf(node)
            case Module():
                name = self._leaf(node)
                return name if node.dialect == "compressed-tensors" else {node.dialect: name}
            case Slice():
                axis = {"axis": node.axis} if node.axis else {}
                return {"slice": {"of": of(node.of), "span": [node.begin, node.end], **axis}}
            case BlockRows():
                return {"block_rows": {"of": of(node.of), "block": node.block, "span": [node.begin, node.end]}}
            case Reshape():
                return {"reshape": {"of": of(node.of), "to": list(node.to)}}
            case Transpose():
                return {"transpose": {"of": of(node.of), "axes": list(node.axes)}}
            case Concat():
                parts = [of(operand) for operand in node.of]
                return {"concat": {"of": parts, "axis": node.axis} if node.axis else parts}
            case Cast():
                return {"cast": {"of": of(node.of), "to": node.to, "rule": node.rule}}
            case Gather():
                return {"gather": {"of": of(node.of), "ids": of(node.ids)}}
            case Same():
                return {"same": [of(operand) for operand in node.of]}
            case Tied():
                return {"tied": {"head": of(node.head), "embedding": of(node.embedding)}}
            case Reciprocal():
                return {"reciprocal": of(node.of)}
            case Shortlist():
                source = {} if node.source == self.default else {"source": node.source}
                members = {"counts": node.counts, "candidates": node.candidates, "take": node.take}
                return {"shortlist": {**members, "special": _text(node.special), **source}}

    def _leaf(self, leaf: Tensor | Module) -> str:
        """Returns a name as a plain leaf; one that a recipe would take for something else says its source."""
        is_odd = ":" in leaf.name or leaf.name.startswith(("$", "deep"))
        return _text(f"{leaf.source}:{leaf.name}" if is_odd or leaf.source != self.default else leaf.name)


# -- text ---------------------------------------------------------------------------------------------------


def _member(key: str, value: Any, indent: str) -> list[str]:
    """Returns the lines of one member of a mapping: on one line if it fits, else its parts below it."""
    name = _scalar(key)
    line = f"{indent}{name}: {_flow(value)}"
    if isinstance(value, str) and len(line) > WIDTH:
        # YAML reads a line break between quotes as the space that it stands for.
        wrapper = textwrap.TextWrapper(
            WIDTH, subsequent_indent=indent + "  ", break_long_words=False, break_on_hyphens=False
        )
        # A key is never broken, and what is indented beyond the page has no place to break at.
        is_prose = len(indent) + len(name) < WIDTH // 2 and _SINGLE_SPACES.fullmatch(value)
        return wrapper.wrap(line) if is_prose else [line]
    if not isinstance(value, (dict, list)) or not value or (indent and len(line) <= WIDTH):
        return [line]
    if not indent and len(line) <= WIDTH and key not in ("sources", "values", "objects", "conditions", "ignore"):
        return [line]
    return [f"{indent}{name}:", *_below(value, indent + "  ")]


def _below(value: Any, indent: str) -> list[str]:
    if isinstance(value, dict):
        return [line for key, member in value.items() for line in _member(key, member, indent)]
    lines = []
    for item in value:
        line = f"{indent}- {_flow(item)}"
        if len(line) <= WIDTH or not isinstance(item, (dict, list)) or not item:
            lines.append(line)
        else:
            first, *rest = _below(item, indent + "  ")
            lines += [f"{indent}- {first.lstrip(' ')}", *rest]
    return lines


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(member)}" for key, member in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and yaml_reading(value) is None:
        return value
    return '"' + "".join(map(_escaped, value)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _size(value: Any) -> tuple[int, int]:
    """Returns how many nodes a document has, and how deep it is nested."""
    if isinstance(value, dict):
        sizes = [_size(member) for member in value.values()]
        return 1 + len(sizes) + sum(nodes for nodes, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    if isinstance(value, list):
        sizes = [_size(item) for item in value]
        return 1 + sum(nodes for nodes, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    return 1, 0
