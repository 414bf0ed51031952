"""One object of a recipe explained: its expression step by step, what it reads, what it writes, what rounds.

Owns shapes and dtypes of the steps: what the recipe states or implies, or what headers say once there are sources.
Refuses to know where the lines of a recipe are (`recipe.origins`), and tensor data.

Source: recipe.md, duties 3 and 4; cli.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ninfer_convert.errors import ConvertError, printable
from ninfer_convert.formats import FORMATS, DirectFormat, GroupedFormat, NumericFormat
from ninfer_convert.layout import RAW_BYTES, geometry
from ninfer_convert.plan.components import left_out
from ninfer_convert.plan.findings import Findings
from ninfer_convert.plan.implied import Facts, implied, merged_shapes, result
from ninfer_convert.plan.resources import origin_text, read_resource
from ninfer_convert.plan.transform import Binder, Words
from ninfer_convert.plan.value import SourceTensor, Value, source_tensors
from ninfer_convert.recipe.expression import (
    BlockRows,
    Cast,
    Concat,
    Expression,
    Gather,
    Mark,
    Module,
    Reciprocal,
    Reshape,
    Same,
    Shortlist,
    Slice,
    Tensor,
    Tied,
    Transpose,
    leaves,
    operands,
)
from ninfer_convert.recipe.model import Recipe, Requirement, ResourceSpec, TensorSpec
from ninfer_convert.recipe.render import plain_number
from ninfer_convert.source.checkpoint import Checkpoint

Json = dict[str, Any]

_Mode = Literal["value", "words", "header"]
"""How a node is bound; `header` takes what a header says of a tensor, if there is one, and judges nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """One node of an expression: a shape and a dtype (a format, of words), None or with None where unknown."""

    text: str
    mark: Mark
    shape: tuple[int | None, ...] | None
    dtype: str | None
    problem: str | None
    """Why the headers do not fit here."""
    of: tuple[Step, ...]


class Explainer:
    """Explains objects of one recipe, from its text alone or with the headers of its sources."""

    def __init__(
        self, recipe: Recipe, sources: Mapping[str, Checkpoint] | None = None, inputs: Mapping[str, Path] | None = None
    ) -> None:
        self._recipe = recipe
        self._sources = sources
        self._inputs = inputs or {}
        self._binder = None if sources is None else Binder(sources, self._inputs)
        self._left_out = frozenset() if self._binder is None else left_out(recipe, self._binder)

    def resource(self, spec: ResourceSpec) -> Json:
        """Returns what is stored and where it may come from; with sources which place it is taken from.

        It has `problems`, and `left_out` if it belongs to an optional component that the sources lack.
        """
        found: Json = {
            "name": spec.name,
            "kind": "resource",
            "layout": RAW_BYTES,
            "component": spec.component,
            "left_out": spec.component in self._left_out,
            "sha256": spec.sha256,
            "places": [origin_text(origin) for origin in spec.origins],
        }
        if self._sources is None or found["left_out"]:
            return {**found, "bytes": None, "problems": []}
        findings, taken = Findings(unpinned=True), None
        try:
            taken = read_resource(spec, self._sources, self._inputs, findings)
        except ConvertError as error:
            return {**found, "taken_from": None, "bytes": None, "problems": list(error.messages)}
        place = origin_text(taken.origin)
        return {**found, "taken_from": place, "bytes": taken.nbytes, "problems": findings.waived}

    def tensor(self, spec: TensorSpec) -> Json:
        """Returns format, layout, planes, the expression's steps, rounding steps; with sources the tensors read."""
        numeric = FORMATS[spec.format]
        place = geometry(numeric, spec.shape)
        dtype = spec.format if spec.words else numeric.source_dtype if isinstance(numeric, DirectFormat) else None
        step = self._step(spec.value, Facts(spec.shape, dtype), "words" if spec.words else "value")
        found: Json = {
            "name": spec.name,
            "kind": "tensor",
            "shape": list(spec.shape),
            "format": spec.format,
            "layout": spec.layout,
            "encoder": spec.encoder,
            "words": spec.words,
            "component": spec.component,
            "left_out": spec.component in self._left_out,
            "require": [requirement_text(requirement) for requirement in spec.requirements],
            "expression": _step_json(step),
            "rounds": list(_roundings(spec, numeric)),
            "bytes": place.nbytes,
            "planes": [{"name": plane.name, "offset": plane.offset, "bytes": plane.nbytes} for plane in place.planes],
            "problems": list(_problems(step)),
        }
        if self._binder is None:
            return {**found, "sources": None, "source_bytes": None}
        if found["left_out"]:
            return {**found, "sources": [], "source_bytes": 0, "problems": []}
        if not found["problems"]:
            found["problems"] = _stored_problems(spec, step)
        tensors = list(self._tensors(spec))
        return {
            **found,
            "sources": [_tensor_json(tensor) for tensor in tensors],
            "source_bytes": sum(tensor.info.nbytes for tensor in tensors),
        }

    # -- steps ----------------------------------------------------------------------------------------------

    def _step(self, node: Expression, wanted: Facts, mode: _Mode) -> Step:
        """Returns a node with what is known of it."""
        inside = [
            self._step(operand, expected, _mode_of(node, operand, mode))
            for operand, expected in zip(operands(node), implied(node, wanted), strict=True)
        ]
        bound, problem = self._bound(node, inside, mode)
        if bound is None:
            below = result(node, [Facts(step.shape, step.dtype) for step in inside], self._stated)
            bound = Facts(merged_shapes(below.shape, wanted.shape), below.dtype or wanted.dtype)
        return Step(step_text(node), node.mark, bound.shape, bound.dtype, problem, tuple(inside))

    def _stated(self, leaf: Tensor) -> str | None:
        """Returns the dtype of a tensor whose source holds only one, as the recipe says."""
        dtypes = self._recipe.sources[leaf.source].dtypes
        return dtypes[0] if len(dtypes) == 1 else None

    def _bound(self, node: Expression, inside: list[Step], mode: _Mode) -> tuple[Facts | None, str | None]:
        """Returns what the headers say of a node, or why they do not fit; neither if an operand does not."""
        if self._binder is None or self._sources is None or any(True for step in inside for _ in _problems(step)):
            return None, None
        if mode == "header":
            info = self._sources[node.source].tensors.get(node.name) if isinstance(node, Tensor) else None
            return (None, None) if info is None else (Facts(info.shape, info.dtype), None)
        if isinstance(node, Shortlist) and node.counts not in self._inputs:
            return None, f"{node.mark}: input {node.counts} is not given; add --input {node.counts}=PATH"
        try:
            if mode == "words":
                found = self._binder.words(node)
                return Facts(found.shape, found.format), None
            value = self._binder.value(node)
            return Facts(value.shape, value.dtype), None
        except ConvertError as error:
            return None, "; ".join(error.messages)

    def _tensors(self, spec: TensorSpec) -> Iterator[SourceTensor]:
        """Yields the source tensors of an object, each once; of one that does not fit, those that its leaves name."""
        if self._binder is None or self._sources is None:
            return
        try:
            bound: Value | Words = self._binder.words(spec.value) if spec.words else self._binder.value(spec.value)
            found = list(bound.leaves if isinstance(bound, Words) else source_tensors(bound))
        except ConvertError:
            named = [leaf for leaf in leaves(spec.value) if isinstance(leaf, Tensor)]
            held = {leaf: self._sources[leaf.source] for leaf in named}
            found = [
                SourceTensor(leaf.source, held[leaf], held[leaf].tensors[leaf.name])
                for leaf in named
                if leaf.name in held[leaf].tensors
            ]
        yield from {(tensor.source, tensor.info.name): tensor for tensor in found}.values()


def _mode_of(node: Expression, operand: Expression, mode: _Mode) -> _Mode:
    """Returns how an operand is bound: multipliers are no values of their own, and one side of tied may be missing."""
    if mode == "header" or isinstance(node, (Reciprocal, Tied)):
        return "header"
    return "value" if isinstance(node, Gather) and operand is node.ids else mode


def step_text(node: Expression) -> str:
    """Returns a node without its operands, in words."""
    match node:
        case Tensor() | Module():
            return printable(str(node))
        case Slice():
            return f"slice [{node.begin}, {node.end}) of axis {node.axis}"
        case BlockRows():
            return f"rows [{node.begin}, {node.end}) of every {node.block}"
        case Reshape():
            return "reshape"
        case Transpose():
            return f"transpose {list(node.axes)}"
        case Concat():
            return f"concat along axis {node.axis}"
        case Cast():
            return f"cast to {node.to}, {node.rule}"
        case Gather():
            return "gather rows by ids"
        case Same():
            return "same: bit-identical, the first is taken"
        case Tied():
            return "tied: the head, or the embedding, as the config says"
        case Reciprocal():
            return "reciprocal"
        case Shortlist():
            return f"shortlist of input {node.counts}: {node.take} of {node.candidates} candidates"


def requirement_text(requirement: Requirement) -> str:
    """Returns a rule as a recipe names it."""
    if requirement.low is None or requirement.high is None:
        return requirement.rule
    return f"range [{plain_number(requirement.low)}, {plain_number(requirement.high)}]"


def _problems(step: Step) -> Iterator[str]:
    for operand in step.of:
        yield from _problems(operand)
    if step.problem is not None:
        yield step.problem


def _stored_problems(spec: TensorSpec, step: Step) -> list[str]:
    """Returns why what the steps yield is not what the object stores; nothing where it is."""
    numeric = FORMATS[spec.format]
    found: list[str] = []
    if step.shape != spec.shape:
        found.append(f"{spec.mark}: the value has shape {shape_text(step.shape)}, the object {list(spec.shape)}")
    wanted = spec.format if spec.words else numeric.source_dtype if isinstance(numeric, DirectFormat) else step.dtype
    if step.dtype != wanted:
        found.append(f"{spec.mark}: the value is {step.dtype}, format {spec.format} takes {wanted}")
    return found


def shape_text(shape: tuple[int | None, ...] | list[int | None] | None) -> str:
    """Returns a shape, `?` for what is not known."""
    if shape is None:
        return "?"
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _roundings(spec: TensorSpec, numeric: NumericFormat) -> Iterator[Json]:
    """Yields the steps that may change a value, from the leaves up."""
    yield from _expression_roundings(spec.value)
    if spec.encoder is not None:
        if isinstance(numeric, GroupedFormat):
            codes = f"{numeric.code_bits}-bit codes in [{numeric.code_min}, {numeric.code_max}]"
            text = f"{codes}, one binary16 multiplier for every {numeric.group} of a row"
        else:
            text = "E4M3FN codes, one BF16 multiplier for each row"
        yield _rounding(f"{spec.encoder}: {text}", spec.mark)


def _expression_roundings(node: Expression) -> Iterator[Json]:
    for operand in operands(node):
        yield from _expression_roundings(operand)
    if isinstance(node, Cast) and node.rule == "nearest-even":
        yield _rounding(f"cast to {node.to}: to nearest, ties to even", node.mark)
    elif isinstance(node, Reciprocal):
        yield _rounding("reciprocal: 1 / x in binary32, rounded once", node.mark)
    elif isinstance(node, Module) and node.dialect == "modelopt":
        yield _rounding("modelopt: the global scale becomes a divisor, 1 / x in binary32, rounded once", node.mark)


def _rounding(text: str, mark: Mark) -> Json:
    return {"text": text, "file": mark.file, "line": mark.line, "column": mark.column}


def _step_json(step: Step) -> Json:
    return {
        "step": step.text,
        "shape": None if step.shape is None else list(step.shape),
        "dtype": step.dtype,
        "line": step.mark.line,
        "column": step.mark.column,
        "file": step.mark.file,
        "problem": step.problem,
        "of": [_step_json(operand) for operand in step.of],
    }


def _tensor_json(tensor: SourceTensor) -> Json:
    info = tensor.info
    return {
        "source": tensor.source,
        "tensor": info.name,
        "stored_name": info.stored_name,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "file": info.file,
        "bytes": info.nbytes,
    }
