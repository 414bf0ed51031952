"""Plane bytes to words and codes to represented values, and encoded rows to new payloads; plain numpy.

Owns what stored bytes mean. Refuses to know files (`reader`) and whether the words are legal (`rules`):
illegal words decode to whatever the arithmetic gives.

A run of rows travels as `planes`: plane name -> [rows, row_bytes] uint8, as `Artifact.read_rows` returns it.
`k` is the number of elements of one row: the last dimension of a matrix, or the elements behind the first
axis of a direct tensor.

Source: tensor-formats.md sections 3, 5 and 6; layouts.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.errors import ArtifactError, printable
from ninfer_convert.formats import (
    FORMATS,
    BlockScaledFormat,
    DirectFormat,
    GroupedFormat,
    NumericFormat,
    RowScaledFormat,
)
from ninfer_convert.layout import SWIZZLE_ROWS, LayoutError, Plane, align_up, geometry

Bytes = NDArray[np.uint8]
Planes = Mapping[str, Bytes]
Values = NDArray[np.float32] | NDArray[np.int32]


def _e2m1_values() -> NDArray[np.float32]:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return np.array(positive + [-value for value in positive], np.float32)


def _e4m3fn_values() -> NDArray[np.float32]:
    positive = [math.ldexp(fraction, -9) for fraction in range(8)]
    positive += [
        math.ldexp(8 + fraction, exponent - 10) for exponent in range(1, 16) for fraction in range(8)
    ]
    positive[-1] = math.nan
    return np.array(positive + [-value for value in positive], np.float32)


E2M1_VALUES = _e2m1_values()
"""Value of every E2M1 word: s ee m, 0x1 is 0.5, 0x7 is 6.0, 0x8 is -0.0. Source: section 3.3."""

E4M3FN_VALUES = _e4m3fn_values()
"""Value of every E4M3FN word: s eeee mmm, 0x01 is 2^-9, 0x38 is 1.0, 0x7e is 448, 0x7f NaN. Source: section 3.3."""


def bf16_values(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Returns the exact binary32 expansion of BF16 words, NaN payloads included. Source: section 3.1."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_values(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Returns the exact binary32 expansion of binary16 words, subnormals kept. Source: section 6.1."""
    return words.view(np.float16).astype(np.float32)


def direct_words(direct: DirectFormat, planes: Planes) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Returns the words of a direct tensor, [rows, k]; uint16 for BF16, uint32 for FP32 and I32."""
    stored = planes["words"]
    return stored.view("<u2") if direct.word_bytes == 2 else stored.view("<u4")


def grouped_codes(grouped: GroupedFormat, planes: Planes) -> NDArray[np.int8]:
    """Returns every signed code, padding lanes included, [rows, K_pad].

    Base byte j holds lane 2j in its low and lane 2j+1 in its high nibble. The high plane is a bit stream, lane
    by lane, bit 4 first: with Q6, the stream's bits 0 and 1 are bits 4 and 5 of lane 0. One Q5 group whose
    lanes 0 and 1 are 3 and -1 (00011 and 11111) begins with base byte 0xf3 and high byte 0b10.

    Source: layouts.md, "row-split-k128-v1"; tensor-formats.md section 5.
    """
    base = planes["base"]
    if grouped.code_bits == 8:
        return base.view(np.int8)
    words = np.empty((len(base), base.shape[1] * 2), np.uint8)
    np.bitwise_and(base, 15, out=words[:, 0::2])
    np.right_shift(base, 4, out=words[:, 1::2])
    bits = grouped.code_bits - 4
    if bits:
        stream = np.unpackbits(planes["high"], axis=1, bitorder="little").reshape(len(base), -1, bits)
        for bit in range(bits):
            words |= stream[:, :, bit] << (4 + bit)
    sign = 1 << (grouped.code_bits - 1)
    return (words ^ sign).view(np.int8) - np.int8(sign)


def codes(numeric: NumericFormat, k: int, planes: Planes) -> NDArray[np.int8] | Bytes:
    """Returns one code per element, [rows, k].

    Signed int8 codes for the grouped formats; E2M1 words 0 to 15 (NVFP4) or E4M3FN words (FP8 rows) as uint8.

    Raises:
        TypeError: a direct format has words, not codes.

    Source: layouts.md.
    """
    if isinstance(numeric, GroupedFormat):
        return grouped_codes(numeric, planes)[:, :k]
    if isinstance(numeric, BlockScaledFormat):
        packed = planes["code"]
        words = np.empty((len(packed), k), np.uint8)
        np.bitwise_and(packed, 15, out=words[:, 0::2])
        np.right_shift(packed, 4, out=words[:, 1::2])
        return words
    if isinstance(numeric, RowScaledFormat):
        return planes["code"]
    raise TypeError(f"{numeric.name} has no codes")


def scale_words(numeric: NumericFormat, k: int, planes: Planes) -> NDArray[np.uint16] | Bytes:
    """Returns the scale words of the logical groups, [rows, groups]; groups wholly beyond K are left out.

    binary16 words for the grouped formats, E4M3FN words in natural order for NVFP4, one BF16 word per row for
    FP8 rows.

    Raises:
        TypeError: a direct format has no scales.

    Source: layouts.md.
    """
    if isinstance(numeric, GroupedFormat):
        words: NDArray[np.uint16] = planes["scale"].view("<u2")
        return words[:, : -(-k // numeric.group)]
    if isinstance(numeric, BlockScaledFormat):
        return unswizzle_scales(planes["scale"])
    if isinstance(numeric, RowScaledFormat):
        return planes["scale"].view("<u2")
    raise TypeError(f"{numeric.name} has no scales")


def divisor_word(planes: Planes) -> int:
    """Returns the binary32 word d_w of an NVFP4 matrix."""
    return int(planes["divisor"].reshape(-1).view("<u4")[0])


def decode_rows(numeric: NumericFormat, k: int, planes: Planes) -> Values:
    """Returns the represented values of a run of rows, [rows, k].

    binary32 for every format but I32, whose values are int32. A direct FP32 or BF16 word is expanded bit for
    bit. A quantized value is the reference's reconstruction, rounded to nearest even once, subnormals and the
    sign of zero kept.

    Source: tensor-formats.md sections 3.1, 3.3, 3.4 and 6.2.
    """
    if isinstance(numeric, DirectFormat):
        words = direct_words(numeric, planes)
        if numeric.name == "BF16":
            return bf16_values(words.astype(np.uint16, copy=False))
        return words.view("<i4" if numeric.name == "I32" else "<f4").copy()
    scales, stored = scale_words(numeric, k, planes), codes(numeric, k, planes)
    if isinstance(numeric, BlockScaledFormat):
        return block_scaled_values(scales.astype(np.uint8, copy=False), stored.view(np.uint8), divisor_word(planes))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        multipliers = scales.astype(np.uint16, copy=False)
        if isinstance(numeric, RowScaledFormat):
            return E4M3FN_VALUES[stored.view(np.uint8)] * bf16_values(multipliers)
        wide = np.repeat(f16_values(multipliers), numeric.group, axis=1)[:, :k]
        return wide * stored.astype(np.float32)


def read_values(artifact: Artifact, name: str, begin: int, end: int) -> Values:
    """Returns the represented values of rows `[begin, end)` of a tensor, [rows, k].

    Any rows may be asked for, also inside an NVFP4 tensor's blocks of 128 rows.

    Raises:
        ArtifactError: no such tensor, or rows outside it.
        OutputError: a read fails.

    Source: tensor-formats.md sections 3 and 6.
    """
    artifact.require_rows(name, begin, end)
    record, stored = artifact.tensor(name), artifact.geometry(name)
    outer_begin = begin - begin % stored.row_quantum
    outer_end = min(align_up(end, stored.row_quantum), stored.rows)
    planes = artifact.read_rows(name, outer_begin, outer_end)
    values = decode_rows(FORMATS[record.format], math.prod(record.shape) // stored.rows, planes)
    return values[begin - outer_begin : end - outer_begin]


def block_scaled_values(scales: Bytes, words: Bytes, divisor: int) -> NDArray[np.float32]:
    """Returns code x scale / d_w, each rounded once to binary32, [rows, K].

    Args:
        scales: [rows, groups] E4M3FN words in natural order.
        words: [rows, 16 * groups] E2M1 words.
        divisor: the binary32 word d_w.

    Source: tensor-formats.md section 3.3.
    """
    # A matrix has one divisor, so every value is one of 256 x 16 quotients. Code x scale has at most 6
    # significant bits and is exact in binary32, which leaves the division as the only rounding.
    with np.errstate(all="ignore"):
        divisors: NDArray[np.float32] = np.array([divisor], np.uint32).view(np.float32)
        table: NDArray[np.float32] = np.divide(E4M3FN_VALUES[:, None] * E2M1_VALUES, divisors)
    index = np.repeat(scales.astype(np.uint16) << np.uint16(4), 16, axis=1)
    index |= words
    return table.reshape(-1)[index]


def unswizzle_scales(stored: Bytes) -> Bytes:
    """Returns natural scale words, [rows, groups], of whole swizzled blocks of 128 rows.

    Row n, group g of a block of 128 rows lies at byte `(g // 4) * 512 + n % 32 * 16 + n // 32 * 4 + g % 4`:
    row 0 group 1 is byte 1, row 32 group 0 is byte 4, row 1 group 0 is byte 16, row 0 group 4 is byte 512.

    Source: layouts.md, "blockscale-k16-m128x4-v1".
    """
    rows, groups = stored.shape
    blocks = stored.reshape(rows // SWIZZLE_ROWS, groups // 4, 32, 4, 4)
    return blocks.transpose(0, 3, 2, 1, 4).reshape(rows, groups)


def swizzle_scales(natural: Bytes) -> Bytes:
    """Returns the stored form of natural scale words; the inverse of `unswizzle_scales`."""
    rows, groups = natural.shape
    blocks = natural.reshape(rows // SWIZZLE_ROWS, 4, 32, groups // 4, 4)
    return blocks.transpose(0, 3, 2, 1, 4).reshape(rows, groups)


def view_rows(artifact: Artifact, name: str, begin: int, end: int) -> bytes:
    """Returns rows `[begin, end)` of a tensor as a valid payload of the same format and layout.

    Codes, scales and words are moved, never touched. The result's shape is [end - begin, ...].

    Raises:
        ArtifactError: as `gather_rows`.
        OutputError: a read fails.

    Source: layouts.md, "A run of rows".
    """
    return gather_rows(artifact, name, range(begin, end))


def gather_rows(artifact: Artifact, name: str, rows: Sequence[int] | ArrayLike) -> bytes:
    """Returns chosen rows of a tensor, in the order given, as a valid payload of the same format and layout.

    Codes, scales and words are moved, never touched. A row may be given twice. The result's shape is
    [len(rows), ...]; for NVFP4 the number of rows must be a multiple of 128.

    Raises:
        ArtifactError: no such tensor, rank below 2, no row, a row outside the tensor, or a number of rows that
            the layout cannot store.
        OutputError: a read fails.

    Source: layouts.md, "A run of rows".
    """
    record, source = artifact.tensor(name), artifact.geometry(name)
    where = f"{artifact.path}: object '{printable(name)}'"
    if len(record.shape) < 2:
        raise ArtifactError(f"{where} has shape {list(record.shape)}; rows can be taken from rank 2 on")
    chosen = np.asarray(rows)
    if chosen.ndim != 1 or not chosen.size or not np.issubdtype(chosen.dtype, np.integer):
        found = f"{chosen.dtype} of shape {list(chosen.shape)}"
        raise ArtifactError(f"{where}: the rows to take are {found}; a non-empty list of integers is required")
    outside = chosen[(chosen < 0) | (chosen >= source.rows)]
    if outside.size:
        raise ArtifactError(f"{where} has rows 0 to {source.rows - 1}; row {int(outside[0])} was asked for")
    chosen = chosen.astype(np.int64)
    try:
        target = geometry(FORMATS[record.format], (len(chosen), *record.shape[1:]))
    except LayoutError as error:
        raise ArtifactError(f"{where}: {error}") from error
    what = f"object '{printable(name)}'"
    payload = np.zeros(target.nbytes, np.uint8)
    for plane, placed in zip(source.planes, target.planes, strict=True):
        out = payload[placed.offset : placed.offset + placed.nbytes]
        begin = artifact.payload_offset + record.offset + plane.offset
        if not plane.row_bytes:
            artifact.read_into(begin, out, what)
        elif source.row_quantum > 1 and plane.name == "scale":
            out[:] = swizzle_scales(_gather_swizzled(artifact, begin, plane, chosen, what)).reshape(-1)
        else:
            _gather_plain(artifact, begin, plane, chosen, out, what)
    return payload.tobytes()


def _gather_plain(
    artifact: Artifact, begin: int, plane: Plane, rows: NDArray[np.int64], out: Bytes, what: str
) -> None:
    edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    for low, high in itertools.pairwise(edges):
        target = out[low * plane.row_bytes : high * plane.row_bytes]
        artifact.read_into(begin + int(rows[low]) * plane.row_bytes, target, what)


def _gather_swizzled(
    artifact: Artifact, begin: int, plane: Plane, rows: NDArray[np.int64], what: str
) -> Bytes:
    natural = np.empty((len(rows), plane.row_bytes), np.uint8)
    block = np.empty((SWIZZLE_ROWS, plane.row_bytes), np.uint8)
    order = np.argsort(rows, kind="stable")
    blocks = rows[order] // SWIZZLE_ROWS
    edges = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(rows)]
    for low, high in itertools.pairwise(edges):
        first = int(blocks[low]) * SWIZZLE_ROWS
        artifact.read_into(begin + first * plane.row_bytes, block.reshape(-1), what)
        members = order[low:high]
        natural[members] = unswizzle_scales(block)[rows[members] - first]
    return natural
