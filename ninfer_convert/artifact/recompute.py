"""A second implementation of the encoders, the word copies and the casts, in plain numpy, for verification.

Owns the same results as `encode`, `pack` and the casts of `transform`, by other means: numpy's and ml_dtypes'
own conversions instead of integer rounding, index arrays instead of loops. Shares no arithmetic with them, so
that a wrong bit in either is seen. Refuses to know where words come from.

Source: tensor-formats.md sections 3.3, 3.4 and 7; layouts.md; targets/qwen3.8-27b-nvfp4.md, "Encoder".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ninfer_convert.errors import EncodeError
from ninfer_convert.formats import GroupedFormat, RowScaledFormat
from ninfer_convert.layout import padded_k
from ninfer_convert.row_error import RowError

Bytes = NDArray[np.uint8]
Words = NDArray[Any]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

FP8_LARGEST = np.float32(448)
LEAST_SCALE = 1
"""The word that a positive scale which rounds to zero is raised to, in binary16 and in BF16."""


def recompute_rows(numeric: GroupedFormat | RowScaledFormat, dtype: str, words: Words) -> dict[str, Bytes]:
    """Returns the planes of a run of encoded rows, plane name -> [rows, row_bytes].

    Grouped formats are encoded by MAXABS_F16_RECIP_RNE_V1, FP8 rows by MAXABS_BF16S_RECIP_E4M3FN_RNE_V1; every
    step rounds to nearest, ties to even, in binary32, and no subnormal is flushed.

    Args:
        dtype: safetensors spelling of the source words: BF16, F16 or F32.
        words: [rows, K], uint16 (BF16, F16) or uint32 (F32).

    Raises:
        RowError: a value is not finite, or a scale or its reciprocal is not; names the first group or row.

    Source: tensor-formats.md section 7; targets/qwen3.8-27b-nvfp4.md, "Encoder".
    """
    values = _floats(dtype, words)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if isinstance(numeric, GroupedFormat):
            return _encode_grouped(numeric, values)
        return _encode_fp8(values)


def copy_nvfp4_rows(code: Bytes, scale: Bytes) -> dict[str, Bytes]:
    """Returns the planes that a word copy of NVFP4 rows must give: codes as they are, scales swizzled.

    Args:
        code: [rows, K / 2], rows a multiple of 128.
        scale: [rows, K / 16], in natural order.

    Source: layouts.md, "blockscale-k16-m128x4-v1".
    """
    rows, groups = scale.shape
    n, g = np.ogrid[:rows, :groups]
    address = ((n // 128) * (groups // 4) + g // 4) * 512 + (n % 128 % 32) * 16 + (n % 128 // 32) * 4 + g % 4
    swizzled = np.empty(scale.size, np.uint8)
    swizzled[address] = scale
    return {"code": code, "scale": swizzled.reshape(rows, groups)}


def copy_fp8_rows(code: Bytes, scale: NDArray[np.uint16]) -> dict[str, Bytes]:
    """Returns the planes that a word copy of FP8 rows must give.

    Args:
        code: [rows, K] E4M3FN words.
        scale: [rows] BF16 words.

    Source: layouts.md, "row-scale-v1".
    """
    return {"code": code, "scale": scale.astype("<u2").reshape(-1, 1).view(np.uint8)}


def recompute_cast(source: str, target: str, words: Words) -> Words:
    """Returns source words under another dtype; the shape is kept.

    BF16 or F16 to F32 is exact and keeps every sign and payload. F32 or F16 to BF16 rounds to nearest, ties to
    even; infinities stay, a NaN keeps its high bits and is made quiet. Anything integral within range to I32.

    Args:
        source: safetensors dtype of the words.
        target: F32, BF16 or I32.
        words: [count]; unsigned words, or numbers of the dtype itself for integers and F64.

    Returns:
        uint32 words for F32, uint16 words for BF16, int32 for I32.

    Raises:
        EncodeError: a finite value overflows BF16, or is no integer in I32's range; names its index.

    Source: tensor-formats.md section 3.1; recipe.md duty 4.
    """
    if target == "I32":
        return _to_i32(source, words)
    wide = _widened(source, words)
    return wide if target == "F32" else _to_bf16(wide)


def _floats(dtype: str, words: Words) -> Floats:
    return _widened(dtype, words).view(np.float32)


def _widened(dtype: str, words: Words) -> NDArray[np.uint32]:
    if dtype == "F32":
        return np.ascontiguousarray(words, np.uint32)
    if dtype == "BF16":
        halves = np.zeros((*words.shape, 2), "<u2")
        halves[..., 1] = words
        return halves.view("<u4")[..., 0].astype(np.uint32, copy=False)
    half = np.ascontiguousarray(words, np.uint16)
    with np.errstate(invalid="ignore"):
        wide = half.view(np.float16).astype(np.float32).view(np.uint32)
    # a conversion may quiet a signaling NaN; the exact one moves its payload up unchanged
    nan = np.isnan(half.view(np.float16))
    wide[nan] = [(int(word) & 0x8000) << 16 | 0x7F800000 | (int(word) & 0x3FF) << 13 for word in half[nan]]
    return wide


def _encode_grouped(grouped: GroupedFormat, values: Floats) -> dict[str, Bytes]:
    rows, k = values.shape
    padded = np.zeros((rows, padded_k(k)), np.float32)
    padded[:, :k] = values
    groups = padded.reshape(rows, -1, grouped.group)
    amax = np.abs(groups).max(axis=2)
    raw = amax / np.float32(grouped.code_max)
    scale = raw.astype(np.float16)
    _require_finite(values, grouped.group, {"scale is not finite in binary16": np.isfinite(scale)})
    words = scale.view(np.uint16)
    is_zero = amax == 0
    words[(words == 0) & ~is_zero] = LEAST_SCALE
    # any finite reciprocal does for a group of zeros, whose codes are zero
    inverse = np.float32(1) / np.where(is_zero, np.float32(1), scale.astype(np.float32))
    groups *= inverse[:, :, None]
    np.rint(groups, out=groups)
    np.clip(groups, grouped.code_min, grouped.code_max, out=groups)
    codes = padded.astype(np.int8).view(np.uint8)
    scale_plane = words.astype("<u2").view(np.uint8)
    if grouped.code_bits == 8:
        return {"base": codes, "scale": scale_plane}
    planes = {"base": (codes[:, 0::2] % 16) + (codes[:, 1::2] % 16) * np.uint8(16), "scale": scale_plane}
    if grouped.code_bits > 4:
        bits = np.empty((*codes.shape, grouped.code_bits - 4), np.uint8)
        # bit by bit: an axis of one or two elements would cost numpy a loop of its own for every code
        for bit in range(grouped.code_bits - 4):
            np.bitwise_and(codes >> (4 + bit), 1, out=bits[:, :, bit])
        planes["high"] = np.packbits(bits.reshape(rows, -1), axis=1, bitorder="little")
    return planes


def _encode_fp8(values: Floats) -> dict[str, Bytes]:
    amax = np.abs(values).max(axis=1)
    scale = (amax / FP8_LARGEST).astype(ml_dtypes.bfloat16)
    words = scale.view(np.uint16)
    is_zero = amax == 0
    words[(words == 0) & ~is_zero] = LEAST_SCALE
    inverse = np.float32(1) / np.where(is_zero, np.float32(1), scale.astype(np.float32))
    _require_finite(
        values,
        None,
        {
            "scale is not finite in BF16": np.isfinite(scale.astype(np.float32))[:, None],
            "scale has no finite binary32 reciprocal": np.isfinite(inverse)[:, None],
        },
    )
    clamped = np.clip(values * inverse[:, None], -FP8_LARGEST, FP8_LARGEST)
    codes = clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes[is_zero] = 0
    return {"code": codes, "scale": words.astype("<u2").reshape(-1, 1).view(np.uint8)}


def _require_finite(values: Floats, group: int | None, finite: Mapping[str, Mask]) -> None:
    """Raises for the first group, row by row, for which one of the conditions does not hold.

    Args:
        group: elements of a group; None where a row is one group and needs no number.
        finite: reason -> [rows, groups], whether the groups are free of it.
    """
    bad = ~np.logical_and.reduce(list(finite.values()))
    if not bad.any():
        return
    row, index = divmod(int(np.argmax(bad)), bad.shape[1])
    number, begin = (None, 0) if group is None else (index, index * group)
    offences = np.flatnonzero(~np.isfinite(values[row, begin : None if group is None else begin + group]))
    if offences.size:
        value = float(values[row, begin + offences[0]])
        found = "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
        raise RowError(row, f"value is {found}", column=begin + int(offences[0]), group=number)
    raise RowError(row, next(reason for reason, holds in finite.items() if not holds[row, index]), group=number)


def _to_bf16(wide: NDArray[np.uint32]) -> NDArray[np.uint16]:
    values = wide.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded: NDArray[np.uint16] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    nan = np.isnan(values)
    rounded[nan] = [int(word) >> 16 | 0x40 for word in wide[nan]]
    overflow = np.flatnonzero(((rounded & 0x7FFF) == 0x7F80) & np.isfinite(values))
    if overflow.size:
        index = int(overflow[0])
        raise EncodeError(f"element {index}: {values.flat[index]} is not finite in BF16")
    return rounded


def _to_i32(source: str, words: Words) -> NDArray[np.int32]:
    numbers = _floats(source, words) if source in ("BF16", "F16", "F32") else words
    # 64-bit integers may round here, but none of them rounds into the range of I32
    wide = numbers.astype(np.float64)
    refused = ~((np.rint(wide) == wide) & (wide >= -(2.0**31)) & (wide < 2.0**31))
    if refused.any():
        index = int(np.argmax(refused))
        raise EncodeError(f"element {index}: {numbers.flat[index]} is no integer from -2147483648 to 2147483647")
    return wide.astype(np.int32)
