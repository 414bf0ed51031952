"""Shapes and dtypes that follow from a recipe alone: from what an object must be down, from what is stated up.

Owns the inference over nodes without headers. A contradiction is not told here; the plan tells it.

Source: recipe.md, duty 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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

Shape = tuple[int | None, ...] | None
"""None where the rank is unknown; a dimension that is unknown is None."""

Stated = Callable[[Tensor], str | None]
"""The dtype of a tensor, where the recipe says it."""


class Facts(NamedTuple):
    """What is known of a value."""

    shape: Shape
    dtype: str | None


UNKNOWN = Facts(None, None)
_DTYPES = {"BF16": "BF16", "FP32": "F32", "I32": "I32"}


def merged_shapes(first: Shape, second: Shape) -> Shape:
    """Returns what two sayings about one shape give together; where they differ the first one holds."""
    if first is None or second is None or len(first) != len(second):
        return second if first is None else first
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))


def implied(node: Expression, wanted: Facts) -> list[Facts]:
    """Returns what a node, if it is to yield what is wanted, demands of each operand."""
    shape, dtype = wanted
    match node:
        case Slice():
            return [Facts(_with_axis(shape, node.axis, None), dtype)]
        case BlockRows():
            rows = shape[0] if shape else None
            per_block = node.end - node.begin
            whole = None if rows is None or rows % per_block else rows // per_block * node.block
            return [Facts(_with_axis(shape, 0, whole), dtype)]
        case Reshape():
            return [Facts(None, dtype)]
        case Transpose():
            if shape is None or len(shape) != len(node.axes):
                return [Facts((None,) * len(node.axes), dtype)]
            turned = [shape[node.axes.index(axis)] for axis in range(len(node.axes))]
            return [Facts(tuple(turned), dtype)]
        case Concat():
            sizes = [_stated_size(operand, node.axis) for operand in node.of]
            return [Facts(_part(node, shape, sizes, i), dtype) for i in range(len(node.of))]
        case Cast():
            return [Facts(shape, None)]
        case Gather():
            return [Facts(_with_axis(shape, 0, None), dtype), Facts(shape[:1] if shape else (None,), None)]
        case _:
            return [wanted] * len(operands(node))


def result(node: Expression, of: Sequence[Facts], stated: Stated) -> Facts:
    """Returns what a node yields, given what is known of its operands."""
    shape, dtype = of[0] if of else UNKNOWN
    match node:
        case Tensor():
            return Facts(None, stated(node))
        case Module():
            return UNKNOWN
        case Shortlist():
            return Facts((node.take,), "I32")
        case Slice():
            return Facts(_with_axis(shape, node.axis, node.end - node.begin), dtype)
        case BlockRows():
            rows = shape[0] if shape else None
            taken = None if rows is None else rows // node.block * (node.end - node.begin)
            return Facts(_with_axis(shape, 0, taken), dtype)
        case Reshape():
            return Facts(node.to, dtype)
        case Transpose():
            if shape is None or len(shape) != len(node.axes):
                return Facts((None,) * len(node.axes), dtype)
            return Facts(tuple(shape[axis] for axis in node.axes), dtype)
        case Concat():
            return Facts(_joined(node.axis, [facts.shape for facts in of]), _first(of))
        case Cast():
            return Facts(shape, _DTYPES[node.to])
        case Gather():
            ids = of[1].shape
            return Facts(_with_axis(shape, 0, ids[0] if ids else None), dtype)
        case Reciprocal():
            return Facts(shape, "F32")
        case Same() | Tied():
            for facts in of:
                shape = merged_shapes(shape, facts.shape)
            return Facts(shape, _first(of))


def _first(of: Sequence[Facts]) -> str | None:
    return next((facts.dtype for facts in of if facts.dtype is not None), None)


def _with_axis(shape: Shape, axis: int, size: int | None) -> Shape:
    if shape is None or axis >= len(shape):
        return None
    return (*shape[:axis], size, *shape[axis + 1 :])


def _part(node: Concat, shape: Shape, sizes: Sequence[int | None], place: int) -> Shape:
    """Returns the shape of one part of a concat; along its axis it is what the others, if they are known, leave."""
    size, whole = sizes[place], _size(shape, node.axis)
    others = [other for i, other in enumerate(sizes) if i != place and other is not None]
    if size is None and whole is not None and len(others) == len(sizes) - 1:
        size = whole - sum(others)
    return _with_axis(shape, node.axis, size)


def _stated_size(node: Expression, axis: int) -> int | None:
    """Returns the size of one axis of a node, where the node or an operand states it."""
    match node:
        case Shortlist():
            return node.take if axis == 0 else None
        case Slice() if node.axis == axis:
            return node.end - node.begin
        case Reshape():
            return _size(node.to, axis)
        case Transpose():
            return _stated_size(node.of, node.axes[axis]) if axis < len(node.axes) else None
        case BlockRows() if axis == 0:
            rows = _stated_size(node.of, 0)
            return None if rows is None else rows // node.block * (node.end - node.begin)
        case Concat() if node.axis == axis:
            sizes = [_stated_size(operand, axis) for operand in node.of]
            present = [size for size in sizes if size is not None]
            return sum(present) if len(present) == len(sizes) else None
        case Gather():
            return _stated_size(node.of if axis else node.ids, axis)
        case _:
            found = (_stated_size(operand, axis) for operand in operands(node))
            return next((size for size in found if size is not None), None)


def _joined(axis: int, shapes: Sequence[Shape]) -> Shape:
    beyond: Shape = None
    for shape in shapes:
        beyond = merged_shapes(beyond, _with_axis(shape, axis, None))
    sizes = [_size(shape, axis) for shape in shapes]
    present = [size for size in sizes if size is not None]
    return _with_axis(beyond, axis, sum(present) if len(present) == len(sizes) else None)


def _size(shape: Shape, axis: int) -> int | None:
    return shape[axis] if shape is not None and axis < len(shape) else None
