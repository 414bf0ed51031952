"""What no checkpoint can satisfy: contradictions between an object and its value that a recipe alone shows.

Owns bounds, sizes and dtypes as far as they are stated: by moves, by casts, by the `dtype` of a source. What is not
stated is not guessed; the plan compares it with the headers. Refuses to know checkpoints.

Source: recipe.md, duties 2, 4 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ninfer_convert.errors import printable
from ninfer_convert.formats import FORMATS, DirectFormat, NumericFormat
from ninfer_convert.plan.casts import CASTS
from ninfer_convert.plan.planner import FLOAT_DTYPES
from ninfer_convert.recipe.counting import counted
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
    operands,
)
from ninfer_convert.recipe.globs import Globs
from ninfer_convert.recipe.loader import Reading
from ninfer_convert.recipe.model import Recipe, TensorSpec
from ninfer_convert.recipe.problems import PlacedError, quoted
from ninfer_convert.recipe.yaml_nodes import ListNode, MapNode, Node, ScalarNode

Dtypes = frozenset[str] | None
"""The dtypes one of which a value has; None if nothing is stated."""

_CAST_DTYPES: Mapping[str, str] = MappingProxyType({"BF16": "BF16", "FP32": "F32", "I32": "I32"})
"""The safetensors dtype of what a cast makes."""

Told = tuple[Mark, str]


@dataclass(frozen=True, slots=True)
class Known:
    """What is stated of a value: its rank, its sizes by axis, its dtypes."""

    rank: int | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    dtypes: Dtypes = None

    @property
    def elements(self) -> int | None:
        """The number of elements, where every size is known."""
        return math.prod(self.sizes.values()) if self.rank == len(self.sizes) else None


def contradictions(reading: Reading) -> list[Told]:
    """Returns what is wrong whatever the checkpoint holds, one problem a place, in the order of the places."""
    recipe = reading.recipe
    problems: dict[Mark, str] = {}
    foreseer = _Foreseer(recipe, entries(reading))
    for spec in recipe.objects:
        if isinstance(spec, TensorSpec):
            for mark, text in foreseer.object_problems(spec):
                problems.setdefault(mark, text)
    for condition in recipe.conditions:
        for mark, text in foreseer.value_problems(condition.value):
            problems.setdefault(mark, text)
    for mark, text in _used_and_ignored(recipe):
        problems.setdefault(mark, text)
    return sorted(problems.items())


def entries(reading: Reading) -> dict[Mark, MapNode]:
    """Returns the entries of objects and of changes, and the blocks around them, by their places."""
    sections = [document.sections.get(name) for document in reading.chain for name in ("objects", "change")]
    return {mark: node for section in sections for mark, node in _entries(section)}


def _entries(node: Node | None) -> Iterator[tuple[Mark, MapNode]]:
    if isinstance(node, ListNode):
        for item in node.items:
            yield from _entries(item)
    elif isinstance(node, MapNode):
        yield node.mark, node
        yield from _entries(node.members.get("objects"))


class _Foreseer:
    """Infers what is known of the values of one recipe."""

    def __init__(self, recipe: Recipe, entries: Mapping[Mark, MapNode]) -> None:
        self._entries = entries
        self._stated = {name: frozenset(source.dtypes) or None for name, source in recipe.sources.items()}

    def object_problems(self, spec: TensorSpec) -> Iterator[Told]:
        """Yields what is wrong with one object."""
        try:
            known = self._known(spec.value)
        except PlacedError as error:
            yield error.mark, error.text
            return
        label = f"object {printable(spec.name)}"
        if known.rank is not None and known.rank != len(spec.shape):
            yield self._misfit(spec, f"{label}: the value has rank {known.rank}")
            return
        for axis, size in sorted(known.sizes.items()):
            if axis >= len(spec.shape) or spec.shape[axis] != size:
                yield self._misfit(spec, f"{label}: the value has size {size} along axis {axis}")
                break
        if not spec.words and known.dtypes is not None and (reason := _dtype_reason(spec.format, known.dtypes)):
            yield self._place(spec, "format"), f"{label}: {reason}"

    def value_problems(self, value: Expression) -> Iterator[Told]:
        """Yields what is wrong with a value as such."""
        try:
            self._known(value)
        except PlacedError as error:
            yield error.mark, error.text

    def _misfit(self, spec: TensorSpec, found: str) -> Told:
        """Returns what is told of a value that does not fit its shape: at the value, unless the shape is younger."""
        place, shape = spec.value.mark, self._place(spec, "shape")
        written = self._member(spec, "words" if spec.words else "value")
        if shape.file != spec.mark.file:
            place = shape
        elif isinstance(written, ScalarNode):
            # A named value is right where it is defined, and does not fit here.
            place = written.mark
        there = f" (line {shape.line})" if shape.line != place.line else ""
        if shape.file != place.file:
            there = f" ({shape})"
        return place, f"{found}; its shape is {list(spec.shape)}{there}"

    def _member(self, spec: TensorSpec, key: str) -> Node | None:
        """Returns the member of an object as it was written last."""
        for mark in (*reversed(spec.changes), spec.mark):
            entry = self._entries.get(mark)
            if entry is not None and key in entry.members:
                return entry.members[key]
        return None

    def _place(self, spec: TensorSpec, key: str) -> Mark:
        """Returns where the member of an object was written last."""
        member = self._member(spec, key)
        return spec.mark if member is None else member.mark

    def _known(self, node: Expression) -> Known:
        """Returns what is stated of a value.

        Raises:
            PlacedError: a node contradicts its operands.
        """
        of = [self._known(operand) for operand in operands(node)]
        match node:
            case Tensor():
                return Known(dtypes=self._stated[node.source])
            case Module():
                return Known(rank=2)
            case Shortlist():
                return Known(1, {0: node.take}, frozenset({"I32"}))
            case Slice():
                return _sliced(node, of[0])
            case BlockRows():
                return _block_rows(node, of[0])
            case Reshape():
                return _reshaped(node, of[0])
            case Transpose():
                return _transposed(node, of[0])
            case Concat():
                return _joined(node, of)
            case Cast():
                return _cast(node, of[0])
            case Gather():
                return _gathered(node, *of)
            case Same():
                return _agreed(node.mark, "same", of)
            case Tied():
                return Known(dtypes=_either(of))
            case Reciprocal():
                if of[0].dtypes is not None and "F32" not in of[0].dtypes:
                    raise PlacedError(node.mark, f"reciprocal of {_listed(of[0].dtypes)}; required is one F32 scalar")
                return Known(of[0].rank, of[0].sizes, frozenset({"F32"}))


def _sliced(node: Slice, of: Known) -> Known:
    _require_axis(node.mark, node.axis, of)
    size = of.sizes.get(node.axis)
    if size is not None and node.end > size:
        span = f"span [{node.begin}, {node.end})"
        raise PlacedError(node.mark, f"{span} lies outside axis {node.axis} of size {size}")
    return Known(of.rank, {**of.sizes, node.axis: node.end - node.begin}, of.dtypes)


def _block_rows(node: BlockRows, of: Known) -> Known:
    _require_axis(node.mark, 0, of)
    sizes = dict(of.sizes)
    rows = sizes.pop(0, None)
    if rows is not None:
        if rows % node.block:
            raise PlacedError(node.mark, f"{rows} rows do not divide into blocks of {node.block} rows")
        sizes[0] = rows // node.block * (node.end - node.begin)
    return Known(of.rank, sizes, of.dtypes)


def _reshaped(node: Reshape, of: Known) -> Known:
    found, wanted = of.elements, math.prod(node.to)
    if found is not None and found != wanted:
        text = f"the operand has {counted(found, 'element')}; shape {list(node.to)} holds {wanted}"
        raise PlacedError(node.mark, text)
    return Known(len(node.to), dict(enumerate(node.to)), of.dtypes)


def _transposed(node: Transpose, of: Known) -> Known:
    rank = len(node.axes)
    if of.rank not in (None, rank) or any(axis >= rank for axis in of.sizes):
        found = max(of.rank or 0, *(axis + 1 for axis in of.sizes), 0)
        text = f"axes {list(node.axes)} are no permutation of those of an operand of rank {found}"
        raise PlacedError(node.mark, text)
    return Known(rank, {i: of.sizes[axis] for i, axis in enumerate(node.axes) if axis in of.sizes}, of.dtypes)


def _joined(node: Concat, of: Sequence[Known]) -> Known:
    for part in of:
        _require_axis(node.mark, node.axis, part)
    beyond = [Known(part.rank, {a: n for a, n in part.sizes.items() if a != node.axis}, part.dtypes) for part in of]
    agreed = _agreed(node.mark, "concat", beyond)
    along = [part.sizes.get(node.axis) for part in of]
    sizes = dict(agreed.sizes)
    if None not in along:
        sizes[node.axis] = sum(size for size in along if size is not None)
    return Known(agreed.rank, sizes, agreed.dtypes)


def _cast(node: Cast, of: Known) -> Known:
    target = _CAST_DTYPES[node.to]
    if of.dtypes is not None and not any(CASTS.get((dtype, target)) == node.rule for dtype in of.dtypes):
        if of.dtypes == {target}:
            raise PlacedError(node.mark, f"the value is {target} already; remove the cast to {node.to}")
        legal = sorted({CASTS[dtype, target] for dtype in of.dtypes if (dtype, target) in CASTS})
        found = f"cast from {_listed(of.dtypes)} to {node.to}"
        if not legal:
            raise PlacedError(node.mark, f"there is no {found}")
        raise PlacedError(node.mark, f"a {found} is {' or '.join(legal)}, the recipe names it {node.rule}")
    return Known(of.rank, of.sizes, frozenset({target}))


def _gathered(node: Gather, of: Known, ids: Known) -> Known:
    _require_axis(node.mark, 0, of)
    if ids.rank not in (None, 1) or (ids.dtypes is not None and not ids.dtypes & {"I32", "I64"}):
        found = f"ids have rank {ids.rank}" if ids.rank not in (None, 1) else f"ids are {_listed(ids.dtypes or ())}"
        raise PlacedError(node.mark, f"{found}; required is a vector of I32 or I64")
    sizes = {axis: size for axis, size in of.sizes.items() if axis}
    return Known(of.rank, sizes | ({0: ids.sizes[0]} if 0 in ids.sizes else {}), of.dtypes)


def _require_axis(mark: Mark, axis: int, of: Known) -> None:
    if of.rank is not None and axis >= of.rank:
        raise PlacedError(mark, f"axis {axis} does not exist in an operand of rank {of.rank}")


def _agreed(mark: Mark, what: str, of: Sequence[Known]) -> Known:
    """Returns what is known of values that must be alike."""
    agreed = of[0]
    for part in of[1:]:
        if None not in (agreed.rank, part.rank) and agreed.rank != part.rank:
            raise PlacedError(mark, f"{what} of ranks {agreed.rank} and {part.rank}; operands must have one rank")
        for axis in sorted(agreed.sizes.keys() & part.sizes):
            if agreed.sizes[axis] != part.sizes[axis]:
                sizes = f"{agreed.sizes[axis]} and {part.sizes[axis]}"
                raise PlacedError(mark, f"{what} of sizes {sizes} along axis {axis}; they must be equal")
        dtypes = agreed.dtypes if part.dtypes is None else part.dtypes
        if agreed.dtypes is not None and part.dtypes is not None:
            dtypes = agreed.dtypes & part.dtypes
            if not dtypes:
                both = f"{_listed(agreed.dtypes)} and {_listed(part.dtypes)}"
                raise PlacedError(mark, f"{what} of {both}; operands must share one dtype")
        agreed = Known(part.rank if agreed.rank is None else agreed.rank, {**part.sizes, **agreed.sizes}, dtypes)
    return agreed


def _either(of: Sequence[Known]) -> Dtypes:
    found: frozenset[str] = frozenset()
    for part in of:
        if part.dtypes is None:
            return None
        found |= part.dtypes
    return found


def _dtype_reason(format_name: str, dtypes: frozenset[str]) -> str | None:
    """Returns why a format cannot take a value of one of the dtypes; None if it can."""
    numeric: NumericFormat = FORMATS[format_name]
    if not isinstance(numeric, DirectFormat):
        if dtypes.intersection(FLOAT_DTYPES):
            return None
        return f"the value is {_listed(dtypes)}; the encoder takes {', '.join(FLOAT_DTYPES)}"
    if numeric.source_dtype in dtypes:
        return None
    rules = [CASTS[dtype, numeric.source_dtype] for dtype in sorted(dtypes) if (dtype, numeric.source_dtype) in CASTS]
    advice = f"name the conversion: cast to {format_name}, rule {rules[0]}" if rules else "no cast leads there"
    return f"the value is {_listed(dtypes)}; format {format_name} takes {numeric.source_dtype}; {advice}"


def _listed(dtypes: Sequence[str] | frozenset[str] | tuple[()]) -> str:
    return " or ".join(sorted(dtypes))


def _used_and_ignored(recipe: Recipe) -> Iterator[Told]:
    """Yields the globs of `ignore` that match a tensor which an object that cannot be absent reads."""
    used: dict[str, dict[str, str]] = {name: {} for name in recipe.sources}
    for spec in recipe.objects:
        if isinstance(spec, TensorSpec) and spec.component not in recipe.optional_components:
            for tensor in _certain_tensors(spec.value):
                used[tensor.source].setdefault(tensor.name, spec.name)
    globs = Globs()
    for name, source in recipe.sources.items():
        for glob, mark in source.ignore:
            matches = globs.matching(glob, used[name])
            if matches is None:
                return
            if matches:
                reader = f"object {printable(used[name][matches[0]])}"
                yield mark, f"ignore {quoted(glob)} matches {printable(matches[0])}, which {reader} uses"


def _certain_tensors(value: Expression) -> Iterator[Tensor]:
    """Yields the tensors that are read in any case; which of a tied head are is for the config to say."""
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, Tied):
        for operand in operands(value):
            yield from _certain_tensors(operand)


