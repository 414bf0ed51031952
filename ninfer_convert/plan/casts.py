"""Casts of whole runs of words, in plain numpy: exact widening, rounding to BF16, checked integers.

Owns the table of casts that exist and their arithmetic. They happen only where a recipe names one.

Source: tensor-formats.md section 3.1, last paragraphs; recipe.md, duty 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

WORD_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F64": 8}
for _width in (8, 16, 32, 64):
    WORD_BYTES[f"I{_width}"] = WORD_BYTES[f"U{_width}"] = _width // 8
for _name in ("BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"):
    WORD_BYTES[_name] = 1

CASTS: dict[tuple[str, str], str] = {("BF16", "F32"): "exact", ("F16", "F32"): "exact"}
"""Every cast that exists: (from, to) -> the one rule it can be named with."""
CASTS |= {(dtype, "BF16"): "nearest-even" for dtype in ("F32", "F16")}
INTEGER_DTYPES = {f"{sign}{bits}": f"<{sign.lower()}{bits // 8}" for sign in "IU" for bits in (8, 16, 32, 64)}
CASTS |= {(dtype, "I32"): "checked" for dtype in (*INTEGER_DTYPES, "F32", "F16", "BF16", "F64") if dtype != "I32"}


def cast_words(
    words: npt.NDArray[np.uint8], source: str, target: str
) -> tuple[npt.NDArray[Any], tuple[int, str] | None]:
    """Casts raw little-endian words; returns the new words and the first offence (index, reason), if any.

    Exact widening keeps every sign, infinity and NaN payload. Rounding to BF16 is to nearest, ties to even; a
    finite value that would become infinite is an offence, infinities pass and a NaN keeps its sign and top
    payload bits and becomes quiet. The cast to I32 takes only integers in range.

    Source: tensor-formats.md section 3.1, last paragraph of the direct formats.
    """
    if target == "F32":
        return _widen(words, source), None
    if target == "BF16":
        return _round_to_bf16(_widen(words, source) if source == "F16" else words.view("<u4"))
    return _to_int32(words, source)


def _widen(words: npt.NDArray[np.uint8], source: str) -> npt.NDArray[np.uint32]:
    wide = words.view("<u2").astype(np.uint32)
    if source == "BF16":
        return wide << np.uint32(16)
    sign, magnitude = (wide & 0x8000) << np.uint32(16), wide & 0x7FFF
    with np.errstate(invalid="ignore"):
        finite = words.view("<f2").astype(np.float32).view(np.uint32)
    special = sign | np.uint32(0x7F800000) | ((magnitude & 0x3FF) << np.uint32(13))
    return np.where(magnitude >= 0x7C00, special, finite)


def _round_to_bf16(words: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[Any], tuple[int, str] | None]:
    magnitude = words & np.uint32(0x7FFFFFFF)
    rounded = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    top = words >> np.uint32(16)
    is_nan = magnitude > 0x7F800000
    result = np.where(is_nan, top | np.uint32(0x40), rounded).astype("<u2")
    overflow = np.flatnonzero(((result & 0x7FFF) == 0x7F80) & (magnitude < 0x7F800000))
    if len(overflow):
        index = int(overflow[0])
        value = float(words[index : index + 1].view("<f4")[0])
        return result, (index, f"{value!r} rounds to infinity in BF16 (largest finite magnitude 3.3895314e+38)")
    return result, None


def _to_int32(words: npt.NDArray[np.uint8], source: str) -> tuple[npt.NDArray[Any], tuple[int, str] | None]:
    if source in INTEGER_DTYPES:
        numbers: npt.NDArray[Any] = words.view(INTEGER_DTYPES[source])
        bad = np.zeros(len(numbers), bool)
    else:
        if source == "BF16":
            floats: npt.NDArray[Any] = _widen(words, source).view(np.float32)
        else:
            floats = words.view({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[source])
        with np.errstate(invalid="ignore"):
            # In binary32 the largest integer would be compared as 2**31.
            numbers = floats.astype(np.float64)
            bad = ~(np.isfinite(numbers) & (np.trunc(numbers) == numbers))
    with np.errstate(invalid="ignore"):
        outside = (numbers < -(2**31)) | (numbers > 2**31 - 1)
    offences = np.flatnonzero(bad | outside)
    if len(offences):
        index = int(offences[0])
        kind = "is not an integer" if bad[index] else "lies outside [-2147483648, 2147483647]"
        return np.zeros(len(numbers), "<i4"), (index, f"value {numbers[index].item()!r} {kind}, which I32 requires")
    return numbers.astype("<i4"), None
