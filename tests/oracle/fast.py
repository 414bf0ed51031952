"""The same payloads, quickly: thresholds instead of arithmetic per weight.

For one scale word the code of x is a function of the word of x alone: multiply by inv, round to binary32, round
to a code, clamp. Every step is monotone and treats the signs alike, so the function is known from, for each
code c > 0, the least magnitude word whose code reaches c. With y the least binary32 word that the last rounding
takes to c (found by asking `encoders`), round_f32(x * inv) reaches y exactly when x * inv reaches the midpoint
between y and the word below it, the midpoint itself counting when y is the even word of the two. So the least
word is that midpoint divided by inv, rounded up to a binary32 word. A weight then costs one bisection among
those words. The scale is computed as `encoders` does, on integers in place of `Fraction`s.

`encode_matrix` gives the bytes that `plain_matrix` gives; `plain_matrix` is the reading of the specification.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, lru_cache, partial
from struct import unpack

from .binary import (
    E4M3FN_NAN,
    F16_INFINITY,
    F32_INFINITY,
    OracleError,
    decode_e4m3fn,
    decode_f32,
    f32_ratio,
    least_f32_word,
    nearest_word,
    round_f32,
)
from .casts import f16_to_f32, widen
from .encoders import (
    F32_SIGN,
    GROUPED,
    e4m3fn_code,
    encode_fp8_row,
    encode_group,
    fp8_inverse,
    fp8_scale,
    grouped_inverse,
    integral_code,
)
from .layouts import align_up, groups_per_row, pack_row_scale, pack_row_split, payload_bytes, planes

FP8 = "FP8_E4M3FN_ROW_BF16S"
DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}

Table = tuple[Callable[[int], int], bytes]
"""A function from a binary32 word to the index of its interval, and the code byte of each interval."""


def encode_matrix(name: str, shape: tuple[int, int], dtype: str, data: bytes) -> bytes:
    """Encodes a matrix of little-endian source words (dtype BF16, F16 or F32) in C order to its payload.

    Raises:
        OracleError: the reason, prefixed with `row R: ` or `row R, group G: `.
    """
    if name == FP8:
        return _fp8_matrix(shape, dtype, data)
    n, k = shape
    row_bytes = k * DTYPE_BYTES[dtype]
    parts: dict[str, bytearray] = {"base": bytearray(), "high": bytearray(), "scale": bytearray()}
    for row in range(n):
        unsigned, signed = _words(dtype, data[row * row_bytes : (row + 1) * row_bytes])
        try:
            scales, u = _grouped_row(name, unsigned, signed)
        except OracleError as error:
            raise OracleError(f"row {row}, {error}") from None
        parts["base"] += _base_plane(GROUPED[name].bits, u)
        parts["high"] += _high_plane(GROUPED[name].bits, u)
        parts["scale"] += scales
    payload = bytearray(payload_bytes(name, shape))
    for plane, (offset, nbytes) in planes(name, shape).items():
        payload[offset : offset + nbytes] = parts[plane]
    return bytes(payload)


def plain_matrix(name: str, shape: tuple[int, int], dtype: str, data: bytes) -> bytes:
    """The contract of `encode_matrix`, through the plain encoders and packers alone."""
    n, k = shape
    width = DTYPE_BYTES[dtype]
    words = [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]
    rows = [[widen(dtype, word) for word in words[row * k : (row + 1) * k]] for row in range(n)]
    scales, codes = [], []
    for row in range(n):
        if name == FP8:
            scale, row_codes = _located(f"row {row}", encode_fp8_row, rows[row])
            scales.append(scale)
            codes.append(row_codes)
            continue
        length = GROUPED[name].group
        row_scales: list[int] = []
        row_codes = []
        for begin in range(0, k, length):
            where = f"row {row}, group {begin // length}"
            scale, group_codes = _located(where, partial(encode_group, name), rows[row][begin : begin + length])
            row_scales.append(scale)
            row_codes += group_codes
        scales.append(row_scales)
        codes.append(row_codes)
    return pack_row_scale(scales, codes) if name == FP8 else pack_row_split(name, scales, codes)


def _located(where: str, encoder: Callable, words: Sequence[int]) -> tuple[int, list[int]]:
    try:
        return encoder(words)
    except OracleError as error:
        raise OracleError(f"{where}: {error}") from None


def _words(dtype: str, row: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the binary32 words of a row, read as unsigned and as signed integers."""
    if dtype == "BF16":
        wide = bytearray(2 * len(row))
        wide[2::4], wide[3::4] = row[0::2], row[1::2]
    elif dtype == "F16":
        wide = b"".join(map(_f16_bytes().__getitem__, unpack(f"<{len(row) // 2}H", row)))
    else:
        wide = row
    count = len(wide) // 4
    return unpack(f"<{count}I", wide), unpack(f"<{count}i", wide)


@cache
def _f16_bytes() -> list[bytes]:
    return [f16_to_f32(word).to_bytes(4, "little") for word in range(65536)]


def _amax(unsigned: Sequence[int], signed: Sequence[int]) -> int:
    # Among words with the sign bit the largest magnitude is the largest unsigned word, among words without
    # it the largest signed one; each maximum is harmless where it meets the other kind.
    of_negatives, of_positives = max(unsigned) & ~F32_SIGN, max(signed)
    return max(of_negatives, of_positives)


def _grouped_row(name: str, unsigned: Sequence[int], signed: Sequence[int]) -> tuple[bytes, bytes]:
    """Returns the stored scale bytes and the two's-complement code words of one row, both padded."""
    length, k = GROUPED[name].group, len(unsigned)
    scales, u = bytearray(), bytearray()
    for begin in range(0, k, length):
        group = unsigned[begin : begin + length]
        try:
            scale = _grouped_scale(name, _amax(group, signed[begin : begin + length]))
        except OracleError as error:
            raise OracleError(f"group {begin // length}: {error}") from None
        scales += scale.to_bytes(2, "little")
        if scale == 0:
            u += bytes(len(group))
        else:
            index, codes = _grouped_table(name, scale)
            u += bytes(map(index, group)).translate(codes)
    stored = groups_per_row(name, k)
    return bytes(scales).ljust(2 * stored, b"\0"), bytes(u).ljust(length * stored, b"\0")


@lru_cache(maxsize=1 << 16)
def _grouped_scale(name: str, amax: int) -> int:
    if amax >= F32_INFINITY:
        raise OracleError("nonfinite")
    numerator, denominator = f32_ratio(amax)
    raw_scale = nearest_word(numerator, denominator * GROUPED[name].qmax, 23, -126)
    scale = nearest_word(*f32_ratio(raw_scale), 10, -14)
    if scale >= F16_INFINITY:
        raise OracleError("scale overflow")
    return max(scale, 1 if amax else 0)


@cache
def _grouped_table(name: str, scale: int) -> Table:
    inverse = grouped_inverse(scale)
    qmin, qmax, bits = GROUPED[name].qmin, GROUPED[name].qmax, GROUPED[name].bits
    words = _least_words(_grouped_midpoints(name), inverse)
    return _table(words[:qmax], words, [*range(qmax + 1), *(-c % (1 << bits) for c in range(-qmin + 1))])


@cache
def _grouped_midpoints(name: str) -> list[tuple[Fraction, bool]]:
    # The negative interval is asked for, since it may be longer by one code.
    return [
        _midpoint(lambda value: -integral_code(name, -value), c, Fraction(c)) for c in range(1, -GROUPED[name].qmin + 1)
    ]


def _midpoint(code: Callable[[Fraction], int], c: int, estimate: Fraction) -> tuple[Fraction, bool]:
    """Returns what a product must reach to become a binary32 value of code c, and whether equality suffices.

    The estimate is a value of code c.
    """
    low, high = 0, round_f32(estimate)
    while high - low > 1:  # code(low) < c <= code(high)
        middle = (low + high) // 2
        low, high = (low, middle) if code(decode_f32(middle)) >= c else (middle, high)
    return (decode_f32(low) + decode_f32(high)) / 2, high % 2 == 0


def _least_words(midpoints: list[tuple[Fraction, bool]], inverse: Fraction) -> list[int]:
    """Returns for each midpoint the least binary32 word x with x * inverse past it, or at it where included."""
    return [
        least_f32_word(
            midpoint.numerator * inverse.denominator, midpoint.denominator * inverse.numerator, inclusive=included
        )
        for midpoint, included in midpoints
    ]


def _table(positive: list[int], negative: list[int], codes: Sequence[int]) -> Table:
    """Joins the thresholds of both signs: as an unsigned integer a negative word lies past every positive one."""
    index = partial(bisect_right, [*positive, F32_SIGN, *(F32_SIGN + word for word in negative)])
    return index, bytes(codes).ljust(256, b"\0")


def _base_plane(bits: int, u: bytes) -> bytes:
    """Returns the base plane of one padded row; as hexadecimal text a byte is written high nibble first."""
    if bits == 8:
        return u
    digits = u.translate(bytes(b"0123456789abcdef"[byte & 15] for byte in range(256)))
    text = bytearray(len(digits))
    text[0::2], text[1::2] = digits[1::2], digits[0::2]
    return bytes.fromhex(text.decode("ascii"))


def _high_plane(bits: int, u: bytes) -> bytes:
    """Returns the high plane of one padded row: a group fills whole bytes, so a row is one bit stream."""
    if bits in (4, 8):
        return b""
    width = bits - 4
    text = bytearray(width * len(u))
    for bit in range(width):
        text[bit::width] = u.translate(bytes(b"01"[byte >> (4 + bit) & 1] for byte in range(256)))
    text.reverse()  # int() reads the most significant digit first, the stream begins with the least
    return int(text.decode("ascii"), 2).to_bytes(len(text) // 8, "little")


def _fp8_matrix(shape: tuple[int, int], dtype: str, data: bytes) -> bytes:
    n, k = shape
    row_bytes = k * DTYPE_BYTES[dtype]
    codes, scales = bytearray(), bytearray()
    for row in range(n):
        unsigned, signed = _words(dtype, data[row * row_bytes : (row + 1) * row_bytes])
        try:
            scale, row_codes = _fp8_row(unsigned, signed)
        except OracleError as error:
            raise OracleError(f"row {row}: {error}") from None
        codes += row_codes
        scales += scale.to_bytes(2, "little")
    return bytes(codes).ljust(align_up(n * k, 256), b"\0") + bytes(scales)


def _fp8_row(unsigned: Sequence[int], signed: Sequence[int]) -> tuple[int, bytes]:
    amax = _amax(unsigned, signed)
    if amax >= F32_INFINITY:
        raise OracleError("nonfinite")
    if amax == 0:
        return 0, bytes(len(unsigned))
    scale = fp8_scale(decode_f32(amax))
    index, codes = _fp8_table(scale)
    return scale, bytes(map(index, unsigned)).translate(codes)


@cache
def _fp8_table(scale: int) -> Table:
    inverse = fp8_inverse(scale)
    words = _least_words(_fp8_midpoints(), inverse)
    return _table(words, words, [*range(E4M3FN_NAN), *range(0x80, 0x80 + E4M3FN_NAN)])


@cache
def _fp8_midpoints() -> list[tuple[Fraction, bool]]:
    return [_midpoint(partial(e4m3fn_code, negative=False), c, decode_e4m3fn(c)) for c in range(1, E4M3FN_NAN)]
