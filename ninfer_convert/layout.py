"""The closed table of byte layouts: plane offsets and sizes of one tensor, from integers alone.

Owns where the bytes of a tensor lie. Refuses to know what they mean (`formats`, `decode`) and how they
are made (`encode`, `pack`).

Source: layouts.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ninfer_convert.errors import ConvertError
from ninfer_convert.formats import (
    BlockScaledFormat,
    DirectFormat,
    GroupedFormat,
    NumericFormat,
    RowScaledFormat,
)

CONTIGUOUS = "contiguous-le-v1"
ROW_SPLIT = "row-split-k128-v1"
BLOCKSCALE = "blockscale-k16-m128x4-v1"
ROW_SCALE = "row-scale-v1"
RAW_BYTES = "raw-bytes-v1"
"""The one resource encoding."""

LAYOUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        CONTIGUOUS: ("BF16", "FP32", "I32"),
        ROW_SPLIT: ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"),
        BLOCKSCALE: ("NVFP4",),
        ROW_SCALE: ("FP8_E4M3FN_ROW_BF16S",),
    }
)
"""Each tensor layout with the formats it stores; every format has exactly one layout."""

LAYOUT_OF_FORMAT: Mapping[str, str] = MappingProxyType(
    {name: layout for layout, names in LAYOUTS.items() for name in names}
)

TENSOR_ALIGNMENT = 256
RESOURCE_ALIGNMENT = 1
MAX_RANK = 16
MAX_BYTES = 2**63 - 1
"""No payload of more bytes than a signed 64-bit file offset can name."""

BASE_GROUP_BYTES = 32
"""Base-plane bytes of one group, for every grouped format."""

DIVISOR_BYTES = 4
SWIZZLE_ROWS = 128
"""Rows of one swizzled scale block of the NVFP4 layout."""


class LayoutError(ConvertError):
    """A shape that the format's layout cannot store."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One contiguous part of a payload.

    Rows `[begin, end)` occupy bytes `[begin * row_bytes, end * row_bytes)` of the plane, for `begin` (and
    `end`, unless it is the last row) a multiple of the layout's row quantum. A plane that belongs to the
    whole matrix has `row_bytes` 0.
    """

    name: str
    offset: int
    nbytes: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the bytes of one tensor lie, relative to the tensor's own first byte."""

    layout: str
    rows: int
    row_quantum: int
    """Rows may be produced independently in runs that begin at multiples of this."""
    planes: tuple[Plane, ...]
    nbytes: int


def align_up(value: int, alignment: int) -> int:
    """Returns the smallest multiple of alignment that is not below value."""
    return -(-value // alignment) * alignment


def padded_k(k: int) -> int:
    """Returns K_pad of `row-split-k128-v1`, in elements."""
    return align_up(k, 128)


def high_group_bytes(grouped: GroupedFormat) -> int:
    """Returns the high-plane bytes of one group (0 for Q4 and W8)."""
    return grouped.group * (grouped.code_bits - 4) // 8 if grouped.code_bits < 8 else 0


def geometry(numeric: NumericFormat, shape: tuple[int, ...]) -> Geometry:
    """Returns the planes and the exact encoded size of a tensor.

    Args:
        numeric: a row of `FORMATS`.
        shape: the logical shape, positive integers.

    Raises:
        LayoutError: the layout cannot store this shape; the message names the dimension and the rule.

    Source: layouts.md, every section.
    """
    _require_dimensions(numeric, shape)
    if isinstance(numeric, DirectFormat):
        result = _contiguous(numeric, shape)
    elif isinstance(numeric, GroupedFormat):
        result = _row_split(numeric, *_matrix(numeric, shape))
    elif isinstance(numeric, RowScaledFormat):
        result = _row_scale(*_matrix(numeric, shape))
    else:
        result = _blockscale(numeric, *_matrix(numeric, shape))
    if result.nbytes > MAX_BYTES:
        raise LayoutError(f"shape {list(shape)} needs {result.nbytes} bytes; at most {MAX_BYTES} can be stored")
    return result


def _require_dimensions(numeric: NumericFormat, shape: tuple[int, ...]) -> None:
    if len(shape) > MAX_RANK:
        raise LayoutError(f"shape {list(shape)} has rank {len(shape)}; {numeric.name} stores rank 0 to {MAX_RANK}")
    if any(dimension < 1 for dimension in shape):
        raise LayoutError(f"shape {list(shape)} has a dimension below 1; every dimension must be positive")


def _matrix(numeric: NumericFormat, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise LayoutError(
            f"shape {list(shape)} has rank {len(shape)}; {numeric.name} stores matrices [N, K] of rank 2"
            + (" (reshape [E, N, K] to [E*N, K])" if len(shape) == 3 else "")
        )
    return shape[0], shape[1]


def _contiguous(direct: DirectFormat, shape: tuple[int, ...]) -> Geometry:
    rows = shape[0] if len(shape) > 1 else 1
    nbytes = math.prod(shape) * direct.word_bytes
    return Geometry(CONTIGUOUS, rows, 1, (Plane("words", 0, nbytes, nbytes // rows),), nbytes)


def _row_split(grouped: GroupedFormat, n: int, k: int) -> Geometry:
    groups = padded_k(k) // grouped.group
    base_row, high_row, scale_row = groups * BASE_GROUP_BYTES, groups * high_group_bytes(grouped), groups * 2
    high_offset = align_up(n * base_row, TENSOR_ALIGNMENT)
    scale_offset = high_offset + align_up(n * high_row, TENSOR_ALIGNMENT)
    base = Plane("base", 0, n * base_row, base_row)
    high = Plane("high", high_offset, n * high_row, high_row)
    scale = Plane("scale", scale_offset, n * scale_row, scale_row)
    planes = (base, high, scale) if high_row else (base, scale)
    return Geometry(ROW_SPLIT, n, 1, planes, scale_offset + n * scale_row)


def _blockscale(block_scaled: BlockScaledFormat, n: int, k: int) -> Geometry:
    if n % SWIZZLE_ROWS:
        raise LayoutError(f"shape {[n, k]}: N = {n} is not a multiple of {SWIZZLE_ROWS}, which {BLOCKSCALE} requires")
    if k % 64:
        raise LayoutError(f"shape {[n, k]}: K = {k} is not a multiple of 64, which {BLOCKSCALE} requires")
    code_row, scale_row = k // 2, k // block_scaled.group
    scale_offset = align_up(n * code_row, TENSOR_ALIGNMENT)
    divisor_offset = scale_offset + n * scale_row
    planes = (
        Plane("code", 0, n * code_row, code_row),
        Plane("scale", scale_offset, n * scale_row, scale_row),
        Plane("divisor", divisor_offset, DIVISOR_BYTES, 0),
    )
    return Geometry(BLOCKSCALE, n, SWIZZLE_ROWS, planes, divisor_offset + DIVISOR_BYTES)


def _row_scale(n: int, k: int) -> Geometry:
    scale_offset = align_up(n * k, TENSOR_ALIGNMENT)
    planes = (Plane("code", 0, n * k, k), Plane("scale", scale_offset, 2 * n, 2))
    return Geometry(ROW_SCALE, n, 1, planes, scale_offset + 2 * n)
