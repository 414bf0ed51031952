"""Value rules that a recipe puts on the words of a direct object: finite, positive, unique, in a range.

Source: recipe.md, duty 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_convert.errors import EncodeError
from ninfer_convert.recipe.model import Requirement

_DTYPES = {"FP32": "<f4", "I32": "<i4"}


def require(
    requirements: Sequence[Requirement],
    format_name: str,
    words: npt.NDArray[np.uint8],
    place: Callable[[int], str],
) -> None:
    """Checks little-endian words of one direct format against every rule.

    Args:
        requirements: the rules of the object.
        format_name: `BF16`, `FP32` or `I32`.
        words: the bytes of the words; `unique` looks only at these, so they must be the whole object then.
        place: returns the words that name element i in a message.

    Raises:
        EncodeError: names the first offending element, its value and the rule.
    """
    if not requirements:
        return
    numbers = _numbers(format_name, words)
    for requirement in requirements:
        offences = np.flatnonzero(_offends(requirement, numbers))
        if len(offences):
            index = int(offences[0])
            rule = requirement.rule
            if rule == "range":
                rule = f"in [{requirement.low:g}, {requirement.high:g}]"
            raise EncodeError(
                f"{place(index)}: value {numbers[index].item()!r} is not {rule}, which the recipe requires "
                f"({requirement.mark})"
            )


def _numbers(format_name: str, words: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    if format_name == "BF16":
        return (words.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view(_DTYPES[format_name])


def _offends(requirement: Requirement, numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    match requirement.rule:
        case "finite":
            finite: npt.NDArray[np.bool_] = np.isfinite(numbers)
            return ~finite
        case "positive":
            return ~(numbers > 0)
        case "non-negative":
            return ~(numbers >= 0)
        case "range":
            return ~((numbers >= requirement.low) & (numbers <= requirement.high))
        case _:
            first = np.zeros(len(numbers), bool)
            first[np.unique(numbers, return_index=True)[1]] = True
            return ~first
