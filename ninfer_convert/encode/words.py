"""Rows of already selected words to rows of plane bytes: copied bit for bit, every word checked, scales swizzled.

Owns the checks in front of the copying kernels and the wording of what a row is refused for. Refuses to know
where words come from and to mend any.

Source: tensor-formats.md sections 3.3 and 3.4; layouts.md, blockscale-k16-m128x4-v1 and row-scale-v1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ninfer_convert.encode.compiled import KERNELS
from ninfer_convert.encode.rows import Array, Plane, require_array, require_plane
from ninfer_convert.formats import FP8_E4M3FN_ROW_BF16S, NVFP4
from ninfer_convert.layout import geometry
from ninfer_convert.row_error import RowError

_BYTE = np.dtype(np.uint8)


def pack_nvfp4_rows(code: Array, scale: Array, planes: Mapping[str, Plane]) -> None:
    """Copies E2M1 codes and swizzles E4M3FN scales of a block of rows that begins at a multiple of 128.

    Args:
        code: uint8 [rows, K / 2], two codes a byte, the smaller k in the low nibble; rows a multiple of 128.
        scale: uint8 [rows, K / 16], in natural order.
        planes: `code` and `scale`, uint8 of the same shapes. After an error their contents are undefined.

    Raises:
        RowError: the first scale word that is not finite or whose sign is not zero.
        LayoutError, TypeError, ValueError: an array is not as described.

    Source: tensor-formats.md section 3.3; layouts.md, blockscale-k16-m128x4-v1.
    """
    require_array("code", code, _BYTE, 2)
    rows, code_bytes = code.shape
    groups = 2 * code_bytes // NVFP4.group
    geometry(NVFP4, (rows, 2 * code_bytes))
    require_array("scale", scale, _BYTE, 2, (rows, groups))
    require_plane(planes, "code", (rows, code_bytes))
    require_plane(planes, "scale", (rows, groups))
    bad_scale = KERNELS["swizzle_nvfp4_scales"](scale, planes["scale"].reshape(-1))
    if bad_scale >= 0:
        row, group = divmod(bad_scale, groups)
        raise RowError(row, f"scale {_e4m3_offence(int(scale[row, group]))}", group=group)
    np.copyto(planes["code"], code)


def pack_fp8_rows(code: Array, scale: Array, planes: Mapping[str, Plane]) -> None:
    """Copies E4M3FN codes and BF16 row multipliers of a block of rows.

    Args:
        code: uint8 [rows, K].
        scale: '<u2' [rows].
        planes: `code` uint8 [rows, K] and `scale` uint8 [rows, 2]. After an error their contents are undefined.

    Raises:
        RowError: the first row with a scale that is not finite or whose sign is not zero, with a code that is
            a NaN, or with a zero scale and a code that is not zero.
        LayoutError, TypeError, ValueError: an array is not as described.

    Source: tensor-formats.md section 3.4; layouts.md, row-scale-v1.
    """
    require_array("code", code, _BYTE, 2)
    rows, k = code.shape
    geometry(FP8_E4M3FN_ROW_BF16S, (rows, k))
    require_array("scale", scale, np.dtype("<u2"), 1, (rows,))
    require_plane(planes, "code", (rows, k))
    require_plane(planes, "scale", (rows, 2))
    row = KERNELS["copy_fp8_rows"](code, scale, planes["code"], planes["scale"])
    if row >= 0:
        raise _fp8_offence(row, code[row], int(scale[row]))


def _e4m3_offence(word: int) -> str:
    if word & 0x7F == 0x7F:
        return f"word 0x{word:02x} is NaN; it must be finite"
    return f"word 0x{word:02x} is negative{' zero' if word == 0x80 else ''}; its sign must be zero"


def _fp8_offence(row: int, codes: Array, scale: int) -> RowError:
    if scale & 0x7FFF >= 0x7F80:
        kind = {0x7F80: "+Inf", 0xFF80: "-Inf"}.get(scale, "NaN")
        return RowError(row, f"row scale word 0x{scale:04x} is {kind}; it must be finite")
    if scale >= 0x8000:
        kind = "negative zero" if scale == 0x8000 else "negative"
        return RowError(row, f"row scale word 0x{scale:04x} is {kind}; its sign must be zero")
    magnitudes = codes & 0x7F
    column = int(np.argmax(magnitudes == 0x7F))
    if magnitudes[column] == 0x7F:
        return RowError(row, f"code word 0x{int(codes[column]):02x} is NaN; it must be finite", column=column)
    column = int(np.argmax(magnitudes != 0))
    reason = f"code word 0x{int(codes[column]):02x} in a row whose scale is zero; it must be 0x00 or 0x80"
    return RowError(row, reason, column=column)
