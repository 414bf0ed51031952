"""What each move and cast of the recipe language demands of its operands, and the value it yields.

Every function takes a node and its bound operands and raises `PlanError`, beginning with the node's place in the
recipe, where shapes, dtypes or bounds do not fit. Only the ids of a gather are read.

Source: recipe.md, duty 4.
"""

from __future__ import annotations

import numpy as np

from ninfer_convert.errors import PlanError, printable
from ninfer_convert.plan.arrangement import Gathered, Joined, Sliced, Transposed
from ninfer_convert.plan.casts import CASTS, WORD_BYTES
from ninfer_convert.plan.value import Converted, Identical, Reshaped, Value, elements, load
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.expression import BlockRows, Cast, Concat, Gather, Reshape, Same, Slice, Transpose

MAX_IDS_BYTES = 64 << 20
"""Ids of a gather are read while planning; a longer vector is refused."""


def sliced(node: Slice, of: Value) -> Value:
    """Returns coordinates of one axis."""
    if not 0 <= node.axis < len(of.shape):
        raise PlanError(f"{node.mark}: axis {node.axis} does not exist in shape {list(of.shape)}")
    size = of.shape[node.axis]
    if not 0 <= node.begin < node.end <= size:
        raise PlanError(f"{node.mark}: span [{node.begin}, {node.end}) lies outside axis {node.axis} of size {size}")
    shape = (*of.shape[: node.axis], node.end - node.begin, *of.shape[node.axis + 1 :])
    inner = elements(of.shape[node.axis + 1 :])
    return Sliced(of, shape, node.begin * inner, (node.end - node.begin) * inner, size * inner)


def block_rows(node: BlockRows, of: Value) -> Value:
    """Returns rows of every block of rows."""
    if not of.shape or of.shape[0] % node.block:
        raise PlanError(f"{node.mark}: shape {list(of.shape)} does not divide into blocks of {node.block} rows")
    if not 0 <= node.begin < node.end <= node.block:
        raise PlanError(f"{node.mark}: span [{node.begin}, {node.end}) lies outside a block of {node.block} rows")
    rows = of.shape[0] // node.block * (node.end - node.begin)
    inner = elements(of.shape[1:])
    width = (node.end - node.begin) * inner
    return Sliced(of, (rows, *of.shape[1:]), node.begin * inner, width, node.block * inner)


def reshaped(node: Reshape, of: Value) -> Value:
    """Returns the same elements in another shape."""
    if elements(node.to) != elements(of.shape):
        raise PlanError(
            f"{node.mark}: {list(of.shape)} has {counted(elements(of.shape), 'element')}; shape {list(node.to)} holds "
            f"{elements(node.to)}"
        )
    return Reshaped(of, node.to)


def transposed(node: Transpose, of: Value) -> Value:
    """Returns the value with its axes permuted."""
    if not node.axes or sorted(node.axes) != list(range(len(of.shape))):
        raise PlanError(f"{node.mark}: axes {list(node.axes)} are no permutation of those of shape {list(of.shape)}")
    return Transposed(of, node.axes, tuple(of.shape[axis] for axis in node.axes))


def joined(node: Concat, parts: list[Value]) -> Value:
    """Returns the parts joined along one axis."""
    first, axis = parts[0], node.axis
    for part in parts:
        if part.dtype != first.dtype:
            raise PlanError(f"{node.mark}: concat of {first.dtype} and {part.dtype}; operands must share one dtype")
        if not 0 <= axis < len(part.shape):
            raise PlanError(f"{node.mark}: axis {axis} does not exist in shape {list(part.shape)}")
        if (len(part.shape), part.shape[:axis], part.shape[axis + 1 :]) != (
            len(first.shape),
            first.shape[:axis],
            first.shape[axis + 1 :],
        ):
            raise PlanError(
                f"{node.mark}: shapes {list(first.shape)} and {list(part.shape)} differ beyond axis {axis}"
            )
    shape = (*first.shape[:axis], sum(part.shape[axis] for part in parts), *first.shape[axis + 1 :])
    return Joined(tuple(parts), shape, elements(first.shape[:axis]))


def cast(node: Cast, of: Value) -> Value:
    """Returns the value in another dtype."""
    target = {"BF16": "BF16", "FP32": "F32", "I32": "I32"}[node.to]
    if of.dtype == target:
        raise PlanError(f"{node.mark}: the value is {of.dtype} already; remove the cast to {node.to}")
    rule = CASTS.get((of.dtype, target))
    if rule is None:
        raise PlanError(f"{node.mark}: there is no cast from {of.dtype} to {node.to}")
    if node.rule != rule:
        raise PlanError(f"{node.mark}: a cast from {of.dtype} to {node.to} is {rule}, the recipe names it {node.rule}")
    return Converted(of, target, rule)


def gathered(node: Gather, of: Value, ids: Value) -> Value:
    """Returns rows chosen by a vector of integers, which is read here."""
    if not of.shape:
        raise PlanError(f"{node.mark}: a scalar has no rows to gather")
    if ids.dtype not in ("I32", "I64") or len(ids.shape) != 1:
        raise PlanError(f"{node.mark}: ids are {ids.dtype} {list(ids.shape)}; required is a vector of I32 or I64")
    if elements(ids.shape) * WORD_BYTES[ids.dtype] > MAX_IDS_BYTES:
        raise PlanError(f"{node.mark}: {ids.shape[0]} ids are more than a gather takes ({MAX_IDS_BYTES} bytes)")
    numbers = load(ids).view("<i4" if ids.dtype == "I32" else "<i8").astype(np.int64)
    outside = np.flatnonzero((numbers < 0) | (numbers >= of.shape[0]))
    if len(outside):
        raise PlanError(
            f"{node.mark}: id {numbers[outside[0]]} at index {outside[0]} is out of range; "
            f"{printable(str(node.of))} has {counted(of.shape[0], 'row')}"
        )
    return Gathered(of, numbers, (len(numbers), *of.shape[1:]), ids)


def identical(
    node: Same, parts: list[Value], demand: str = "the recipe requires them to be bit-identical"
) -> Value:
    """Returns the first of parts that must be bit-identical; reading compares them. `demand` ends the messages."""
    first = parts[0]
    for operand, part in zip(node.of, parts, strict=True):
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise PlanError(
                f"{node.mark}: {printable(str(operand))} is {part.dtype} {list(part.shape)}, "
                f"{printable(str(node.of[0]))} is {first.dtype} {list(first.shape)}; {demand}"
            )
    return Identical(tuple(parts), demand)
