"""What encoding has cost an object: sums of squares, the largest error, groups.

Owns how the losses of blocks become that of an object. The sums are integers, so the figures depend neither on how
an object is cut into blocks nor on the order in which those are made. Refuses to know how the sums are taken
(`kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_convert.encode import interface

_MEMBERS = ("elements", "noise", "signal", "zero_groups", "clipped_groups", "largest_word", "largest_at")


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of some rows of an object, or of all.

    `noise` is the sum of the squares of the errors, `signal` that of the values, both in units of 2^-400; a group is
    zero if its scale is, and clipped if the clamp of the encoder moved one of its codes; `largest_word` is the
    binary32 word of the largest error, `largest_at` the first element of the object, in C order, that has it.
    """

    elements: int = 0
    noise: int = 0
    signal: int = 0
    zero_groups: int = 0
    clipped_groups: int = 0
    largest_word: int = 0
    largest_at: int = 0

    def __add__(self, other: Loss) -> Loss:
        mine, theirs = (-self.largest_word, self.largest_at), (-other.largest_word, other.largest_at)
        # Rows that were all exact have no largest error, and say element 0.
        word, place = min(mine, theirs) if self.elements and other.elements else mine if self.elements else theirs
        return Loss(
            self.elements + other.elements,
            self.noise + other.noise,
            self.signal + other.signal,
            self.zero_groups + other.zero_groups,
            self.clipped_groups + other.clipped_groups,
            -word,
            place,
        )

    @classmethod
    def of_block(cls, found: npt.NDArray[np.int64], elements: int, first: int) -> Loss:
        """Returns the loss of a block of rows.

        Args:
            found: [interface.LOSS_WORDS], what a kernel has filled.
            elements: of the block.
            first: index of its first element in the object.
        """
        words = found.tolist()
        word = words[interface.LARGEST]
        return cls(
            elements,
            _number(words[interface.NOISE : interface.NOISE + interface.LIMBS]),
            _number(words[interface.SIGNAL : interface.SIGNAL + interface.LIMBS]),
            words[interface.ZERO_GROUPS],
            words[interface.CLIPPED_GROUPS],
            word,
            first + words[interface.LARGEST_AT] if word else 0,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes: the sums are in hexadecimal."""
        found = {name: getattr(self, name) for name in _MEMBERS}
        return found | {"noise": f"{self.noise:x}", "signal": f"{self.signal:x}"}

    @classmethod
    def from_json(cls, found: object) -> Loss | None:
        """Returns a loss that `as_json` gave, or None if it is something else."""
        if not isinstance(found, Mapping) or found.keys() != set(_MEMBERS):
            return None
        try:
            sums = {name: int(found[name], 16) for name in ("noise", "signal")}
        except (TypeError, ValueError):
            return None
        loss = cls(**{**found, **sums})
        numbers = [getattr(loss, name) for name in _MEMBERS]
        if not all(type(number) is int and number >= 0 for number in numbers):
            return None
        # Of larger numbers no figure could be taken.
        is_sound = loss.elements < 1 << 63 and max(loss.noise, loss.signal) < 1 << 32 * interface.LIMBS
        is_somewhere = loss.largest_at < max(1, loss.elements)
        return loss if is_sound and is_somewhere and loss.largest_word < 0x7F800000 else None

    def figures(self, columns: int) -> dict[str, Any]:
        """Returns the `stats` of an object of the report: relative L2 error, SQNR in dB, root mean square of the
        values, largest error with its [row, column], clipped and zero groups; null where a figure is not defined.
        """
        relative = math.sqrt(self.noise / self.signal) if self.signal else None
        row, column = divmod(self.largest_at, columns)
        # Of integers, whose quotient is rounded once, whatever their size.
        mean_square = Fraction(self.signal, max(1, self.elements)) * Fraction(2) ** interface.LIMB_UNIT
        return {
            "relative_l2": relative,
            "sqnr_db": 10 * math.log10(self.signal / self.noise) if self.signal and self.noise else None,
            "rms": math.sqrt(mean_square),
            "max_error": float(np.uint32(self.largest_word).view(np.float32)),
            "max_error_at": [row, column] if self.largest_word else None,
            "clipped_groups": self.clipped_groups,
            "zero_groups": self.zero_groups,
        }


def _number(limbs: list[int]) -> int:
    return sum(limb << (32 * position) for position, limb in enumerate(limbs) if limb)
