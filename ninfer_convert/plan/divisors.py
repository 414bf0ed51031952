"""Divisors and multipliers: one positive finite F32 each, read while planning, and the exact reciprocal of one.

Owns what such a scalar must be. Refuses to know which module or object it belongs to.

Source: recipe.md, duty 4; tensor-formats.md section 3.3.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ninfer_convert.errors import PlanError, printable
from ninfer_convert.plan.value import Constant, Identical, Reshaped, SourceTensor, Value, elements, load, source_tensors
from ninfer_convert.recipe.expression import Mark, Reciprocal
from ninfer_convert.source.checkpoint import Checkpoint

PLACEHOLDER = 0x3F800000
"""Stands for every divisor in a plan from headers alone, which is looked at and not carried out."""


def positive_word(value: SourceTensor, mark: Mark) -> int:
    """Returns the binary32 word of a divisor or multiplier, which must be one positive finite F32."""
    label = f"{mark}: tensor {printable(value.info.name)}"
    if value.dtype != "F32" or elements(value.shape) != 1:
        raise PlanError(f"{label} is {value.dtype} {list(value.shape)}; required is F32 [1]")
    if not value.checkpoint.has_values:
        return PLACEHOLDER
    words = load(value)
    number = float(words.view("<f4")[0])
    if not (math.isfinite(number) and number > 0):
        raise PlanError(f"{label} is {number!r} (word 0x{words.view('<u4')[0]:08x}); it must be finite and positive")
    return int(words.view("<u4")[0])


def reciprocal_word(word: int, value: SourceTensor, mark: Mark) -> int:
    """Returns the word of the correctly rounded reciprocal of `word`, which `value` holds."""
    with np.errstate(over="ignore"):
        inverse = np.float32(1) / np.array([word], "<u4").view("<f4")
    if not np.isfinite(inverse[0]):
        raise PlanError(f"{mark}: tensor {printable(value.info.name)} (word 0x{word:08x}) has no finite reciprocal")
    return int(inverse.astype("<f4").view("<u4")[0])


def reciprocal(node: Reciprocal, of: Value) -> Value:
    """Returns the reciprocal of one F32 scalar as a constant of the same shape."""
    if of.dtype != "F32" or elements(of.shape) != 1:
        raise PlanError(f"{node.mark}: reciprocal of {of.dtype} {list(of.shape)}; required is one F32 scalar")
    multiplier = SourceTensor(*_scalar_source(node, of))
    word = reciprocal_word(positive_word(multiplier, node.mark), multiplier, node.mark)
    origins = tuple(source_tensors(of))
    return Constant(str(node), of.shape, "F32", np.array([word], "<u4"), origins)


def _scalar_source(node: Reciprocal, of: Value) -> tuple[str, Checkpoint, Any]:
    while isinstance(of, (Reshaped, Identical)):
        if isinstance(of, Identical):
            if all(leaf.checkpoint.has_values for leaf in source_tensors(of)):
                load(of)
            of = of.parts[0]
        else:
            of = of.of
    if not isinstance(of, SourceTensor):
        raise PlanError(f"{node.mark}: reciprocal takes a scalar tensor of a source")
    return of.source, of.checkpoint, of.info
