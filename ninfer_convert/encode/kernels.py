"""The loops over words that are compiled: group and row encoders, their loss, packing, swizzle, scans.

Owns arithmetic and bit order. Trusts its inputs: `rows` and `words` check shapes, dtypes and contiguity before
they call. Serial and without the interpreter lock; a block of rows is the unit of work, so any thread may run
any block. Only `compiled` imports this module, when a kernel is to be compiled: the entry points allocate nothing
and call nothing outside of themselves, so that their machine code runs without numba.

numba has no half-precision type, hence words in and words out, and a kernel for each source dtype: functions that
are made for a dtype take what widens its words to binary32. Every literal that meets a float is a float32,
because a bare one would widen the expression to float64. Neither fused multiply-add nor reassociation is
allowed (no fastmath): the bytes are the same on every processor.

Source: tensor-formats.md sections 3.3, 3.4, 5 to 7; layouts.md; targets/qwen3.8-27b-nvfp4.md, "Encoder".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from ninfer_convert.encode.interface import (
    CLIPPED_GROUPS,
    LANES,
    LARGEST,
    LARGEST_AT,
    LIMB_UNIT,
    NOISE,
    SEGMENT,
    SIGNAL,
    ZERO_GROUPS,
)

_F16_MAGNITUDE = np.uint16(0x7FFF)
"""Everything but the sign, of a BF16 word too."""
_F32_MAGNITUDE, _F32_INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_F16_MIN_NORMAL, _F16_INFINITY = np.uint32(0x0400), np.uint32(0x7C00)
_F16_STEP, _F16_REBIAS = np.float32(2.0**-24), np.uint32((127 - 15) << 23)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)

_INTEGER_ANCHOR = np.float32(1.5 * 2.0**23)
"""Adding it rounds a small float32 to an integer, ties to even, and leaves that integer in the low bits."""

_F16_ANCHOR, _F16_ANCHOR_WORD = np.float32(0.5), np.uint32(0x3F000000)
"""A float32 whose last place is 2^-24, the binary16 subnormal step: adding it rounds to that step."""

_E4M3_ANCHOR, _E4M3_ANCHOR_WORD = np.float32(2.0**14), np.uint32(0x46800000)
"""A float32 whose last place is 2^-9, the E4M3FN subnormal step."""

_E4M3_MAX, _E4M3_MIN_NORMAL_WORD = np.float32(448), np.uint32(0x3C800000)
_E4M3_STEP, _E4M3_CLIPPED_ABOVE = np.float32(2.0**-9), np.float32(464)
"""From above 464 on, E4M3FN, if it went on, would round to more than its largest value."""

_TINY_WORD = np.uint32((127 - 40) << 23)
"""Squares of values below 2^-40 may be too small for binary32."""

_LARGEST_POWER_WORD = np.uint32(254 << 23)

Array = npt.NDArray[Any]
Widen = Callable[[Any], np.uint32]
"""What makes a binary32 word of a source word."""
Function = TypeVar("Function", bound=Callable[..., Any])


def _inner(function: Function) -> Function:
    """Compiles a function that only other kernels call; it becomes part of their code."""
    return cast(Function, njit(nogil=True, error_model="numpy")(function))


def _kernel(function: Function) -> Function:
    """Marks an entry point, which `compiled` has compiled for one signature and calls through its C interface."""
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Function, njit(nogil=True, error_model="numpy", **options)(function))


# Words to binary32 words


@_inner
def _finite_f16_to_f32(word: np.uint16) -> np.uint32:
    """Exact for every finite binary16 word."""
    magnitude = np.uint32(word & _F16_MAGNITUDE)
    normal = np.uint32((magnitude << np.uint32(13)) + _F16_REBIAS)
    # An integer times a power of two: no subnormal operand, so the processor's flush mode cannot matter.
    subnormal = np.uint32(np.float32(np.float32(np.int32(magnitude)) * _F16_STEP).view(np.uint32))
    wide = normal if magnitude >= _F16_MIN_NORMAL else subnormal
    return np.uint32(wide | (np.uint32(word & np.uint16(0x8000)) << np.uint32(16)))


@_inner
def _f16_to_f32(word: np.uint16) -> np.uint32:
    """Exact for every binary16 word; a NaN keeps its sign, its quiet bit and its payload, moved up."""
    finite = _finite_f16_to_f32(word)
    is_finite = np.uint32(word & _F16_MAGNITUDE) < _F16_INFINITY
    return finite if is_finite else np.uint32(finite + _F16_REBIAS)


@_inner
def _bf16_to_f32(word: np.uint16) -> np.uint32:
    return np.uint32(np.uint32(word) << np.uint32(16))


@_inner
def _f32_to_f32(word: np.uint32) -> np.uint32:
    return word


@_inner
def _as_f32(word: np.uint32) -> np.float32:
    return np.uint32(word).view(np.float32)


# Rounding


@_inner
def _round_to_f16(value: np.float32) -> np.uint32:
    """Nearest, ties to even, of a value >= 0; past the largest finite value the word is >= 0x7C00."""
    word = np.float32(value).view(np.uint32)
    even = np.uint32((word >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(word + np.uint32(0xFFF) + even) - _F16_REBIAS) >> np.uint32(13)
    subnormal = np.uint32(np.float32(value + _F16_ANCHOR).view(np.uint32)) - _F16_ANCHOR_WORD
    return np.uint32(normal) if word >= np.uint32(0x38800000) else np.uint32(subnormal)


@_inner
def _round_to_bf16(word: np.uint32) -> np.uint32:
    """Nearest, ties to even, of a binary32 word that is not a NaN; keeps the sign."""
    even = np.uint32((word >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(word + np.uint32(0x7FFF) + even) >> np.uint32(16))


@_inner
def _round_to_e4m3(value: np.float32) -> np.uint8:
    """Nearest, ties to even, of a value in [-448, 448]; keeps the sign of zero."""
    word = np.float32(value).view(np.uint32)
    magnitude = np.uint32(word & _F32_MAGNITUDE)
    even = np.uint32((magnitude >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32(np.uint32(magnitude + np.uint32(0x7FFFF) + even) >> np.uint32(20)) - np.uint32(120 << 3)
    anchored = np.float32(_as_f32(magnitude) + _E4M3_ANCHOR)
    subnormal = np.uint32(anchored.view(np.uint32)) - _E4M3_ANCHOR_WORD
    code = np.uint32(normal) if magnitude >= _E4M3_MIN_NORMAL_WORD else np.uint32(subnormal)
    return np.uint8(code | np.uint32((word >> np.uint32(24)) & np.uint32(0x80)))


# Largest magnitudes


@_inner
def _largest(words: Array, mask: Any) -> np.uint32:
    """Returns the largest word without its sign. An integer maximum vectorises, a float one does not."""
    largest = np.uint32(0)
    for i in range(words.size):
        largest = max(largest, np.uint32(words[i] & mask))
    return largest


@_inner
def _group_maxima(words: Array, mask: Any, group: int, maxima: Array) -> None:
    whole = words.size // group
    for g in range(whole):
        largest = np.uint32(0)
        begin = np.uint64(g * group)
        # Indexes instead of slices: short groups then cost less. Signed ones could count from the end.
        for i in range(group):
            largest = max(largest, np.uint32(words[begin + np.uint64(i)] & mask))
        maxima[g] = largest
    if whole * group < words.size:
        maxima[whole] = _largest(words[whole * group :], mask)


# Grouped formats


@_inner
def _group_scales(maxima: Array, code_max: np.float32, scales: Array, inverses: Array) -> np.uint32:
    """Fills binary16 scale words and binary32 reciprocals; returns the largest scale word.

    A scale that is not finite, or of a group that is not finite, is a word >= 0x7C00.
    """
    largest = np.uint32(0)
    for g in range(maxima.size):
        scale = _round_to_f16(np.float32(_as_f32(maxima[g]) / code_max))
        if scale == np.uint32(0) and maxima[g] != np.uint32(0):
            scale = np.uint32(1)
        if maxima[g] >= _F32_INFINITY:
            scale = _F16_INFINITY
        largest = max(largest, scale)
        scales[g] = scale
        value = _as_f32(_finite_f16_to_f32(np.uint16(scale)))
        # With an all-zero group a reciprocal of zero makes every code zero.
        inverses[g] = _ZERO if scale == np.uint32(0) else np.float32(_ONE / value)
    return largest


def _coder(to_f32: Widen, has_errors: bool) -> Any:
    """Returns the function that makes the codes of a segment, and their errors or not, for one source dtype."""

    @_inner
    def make(
        words: Array,
        group: int,
        scales: Array,
        inverses: Array,
        code_min: np.float32,
        code_max: np.float32,
        codes: Array,
        errors: Array,
    ) -> None:
        for g in range(inverses.size):
            source = words[g * group : min(words.size, (g + 1) * group)]
            target = codes[g * group : min(words.size, (g + 1) * group)]
            own = errors[g * group : min(words.size, (g + 1) * group)]
            inverse, scale = inverses[g], _as_f32(_finite_f16_to_f32(np.uint16(scales[g])))
            for i in range(source.size):
                value = _as_f32(to_f32(source[i]))
                scaled = np.float32(value * inverse)
                # The bounds are integers, so clamping before the rounding gives what clamping after it gives.
                scaled = scaled if scaled > code_min else code_min
                scaled = scaled if scaled < code_max else code_max
                anchored = np.float32(scaled + _INTEGER_ANCHOR)
                target[i] = np.uint8(anchored.view(np.uint32))
                if has_errors:
                    # The product is exact: code and scale are short.
                    own[i] = np.float32(value - np.float32(np.float32(anchored - _INTEGER_ANCHOR) * scale))

    return make


@_inner
def _pack_nibbles(codes: Array, base: Array) -> None:
    """Codes 2j and 2j+1 become the low and the high nibble of byte j."""
    for j in range(base.size):
        low = np.uint8(codes[2 * j] & np.uint8(15))
        base[j] = np.uint8(low | np.uint8(codes[2 * j + 1] << np.uint8(4)))


@_inner
def _pack_bit_4(codes: Array, high: Array) -> None:
    """Bit 4 of code t becomes bit t % 8 of byte t // 8: eight codes are one little-endian word, and the product
    moves bit 0 of its byte i to bit 56 + i."""
    eights = codes.view(np.uint64)
    for j in range(high.size):
        bits = np.uint64((eights[j] >> np.uint64(4)) & np.uint64(0x0101010101010101))
        high[j] = np.uint8(np.uint64(bits * np.uint64(0x0102040810204080)) >> np.uint64(56))


@_inner
def _pack_bits_4_and_5(codes: Array, high: Array) -> None:
    """Bits 4 and 5 of code t become bits 2 * (t % 4) and 2 * (t % 4) + 1 of byte t // 4."""
    fours = codes.view(np.uint32)
    for j in range(high.size):
        bits = np.uint32(np.uint32(fours[j] >> np.uint32(4)) & np.uint32(0x03030303))
        pairs = np.uint32(bits | (bits >> np.uint32(6)))
        high[j] = np.uint8(pairs | (pairs >> np.uint32(12)))


# Loss


@_inner
def _add_exactly(value: np.float64, sums: Array) -> None:
    """Adds a value >= 0 to limbs; those carry nothing over, so that the order of additions does not matter."""
    word = np.float64(value).view(np.uint64)
    position = np.int64(word >> np.uint64(52)) - 1075 - LIMB_UNIT
    if position < 0:
        return
    mantissa = np.uint64((word & np.uint64(0xFFFFFFFFFFFFF)) | np.uint64(1 << 52))
    limb, shift = position // 32, np.uint64(position % 32)
    low = np.uint64(np.uint64(mantissa & np.uint64(0xFFFFFFFF)) << shift)
    high = np.uint64(np.uint64(mantissa >> np.uint64(32)) << shift)
    sums[limb] += np.int64(low & np.uint64(0xFFFFFFFF))
    sums[limb + 1] += np.int64(low >> np.uint64(32)) + np.int64(high & np.uint64(0xFFFFFFFF))
    sums[limb + 2] += np.int64(high >> np.uint64(32))


@_inner
def _folded(lanes: Array) -> Any:
    """Returns the sum of the lanes, always in the same order; leaves them zero."""
    half = LANES // 2
    while half >= 8:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    total: Any = np.float64(0)
    for i in range(8):
        total += np.float64(lanes[i])
    lanes[:] = _ZERO
    return total


def _adder(to_f32: Widen) -> Any:
    """Returns the function that adds up squares of a segment, for one source dtype."""

    @_inner
    def add(
        words: Array, errors: Array, unit: np.float64, is_tiny: bool, lanes: Array, place: int, loss: Array
    ) -> None:
        """Adds the loss of a segment, whose words and errors are in units of a scale, or of 1."""
        largest = np.uint32(0)
        if is_tiny:
            for i in range(words.size):
                _add_exactly(np.float64(errors[i]) ** 2, loss[NOISE:])
                _add_exactly(np.float64(_as_f32(to_f32(words[i]))) ** 2, loss[SIGNAL:])
        fours = words.size // (4 * LANES) * (4 * LANES)
        for begin in range(0, fours, 4 * LANES):
            own, source = errors[begin : begin + 4 * LANES], words[begin : begin + 4 * LANES]
            for i in range(LANES):
                noise: Any = lanes[i]
                signal: Any = lanes[i + LANES]
                # Four at a time, because every access to a lane waits for the one before.
                for part in range(4):
                    error, value = own[i + part * LANES], _as_f32(to_f32(source[i + part * LANES]))
                    noise += np.float32(error * error)
                    signal += np.float32(value * value)
                    largest = max(largest, np.uint32(np.float32(error).view(np.uint32) & _F32_MAGNITUDE))
                lanes[i], lanes[i + LANES] = noise, signal
        for begin in range(fours, words.size, LANES):
            own = errors[begin : min(words.size, begin + LANES)]
            source = words[begin : min(words.size, begin + LANES)]
            for i in range(source.size):
                error, value = own[i], _as_f32(to_f32(source[i]))
                lanes[i] += np.float32(error * error)
                lanes[i + LANES] += np.float32(value * value)
                largest = max(largest, np.uint32(np.float32(error).view(np.uint32) & _F32_MAGNITUDE))
        noise_sum, signal_sum = _folded(lanes[:LANES]), _folded(lanes[LANES:])
        if not is_tiny:
            _add_exactly(noise_sum * unit * unit, loss[NOISE:])
            _add_exactly(signal_sum * unit * unit, loss[SIGNAL:])
        word = np.int64(np.float32(_as_f32(largest) * np.float32(unit)).view(np.uint32))
        if word > loss[LARGEST]:
            loss[LARGEST] = word
            column = 0
            while np.uint32(np.float32(errors[column]).view(np.uint32) & _F32_MAGNITUDE) != largest:
                column += 1
            loss[LARGEST_AT] = place + column

    return add


def _grouped_loss(to_f32: Widen, add: Any) -> Any:
    """Returns the function that adds up the loss of a segment of a grouped format, for one source dtype."""

    @_inner
    def is_clipped(
        words: Array, begin: int, end: int, inverse: np.float32, code_min: np.float32, code_max: np.float32
    ) -> bool:
        for i in range(begin, end):
            anchored = np.float32(np.float32(_as_f32(to_f32(words[i])) * inverse) + _INTEGER_ANCHOR)
            rounded = np.float32(anchored - _INTEGER_ANCHOR)
            if rounded > code_max or rounded < code_min:
                return True
        return False

    @_inner
    def add_segment(
        words: Array,
        group: int,
        maxima: Array,
        scales: Array,
        inverses: Array,
        code_min: np.float32,
        code_max: np.float32,
        errors: Array,
        lanes: Array,
        place: int,
        loss: Array,
    ) -> None:
        zeros, tiny, clipped = np.int64(0), np.uint32(0), np.uint32(0)
        for g in range(inverses.size):
            is_zero = scales[g] == np.uint32(0)
            zeros += np.int64(is_zero)
            tiny |= np.uint32(not is_zero) & np.uint32(maxima[g] < _TINY_WORD)
            # May be: the code of a negative value may be one larger.
            clipped |= np.uint32(np.float32(_as_f32(maxima[g]) * inverses[g]) >= code_max + _HALF)
        loss[ZERO_GROUPS] += zeros
        if clipped:
            for g in range(inverses.size):
                end = min(words.size, (g + 1) * group)
                loss[CLIPPED_GROUPS] += is_clipped(words, g * group, end, inverses[g], code_min, code_max)
        add(words, errors, np.float64(1), tiny != np.uint32(0), lanes, place, loss)

    return add_segment


def _grouped_encoder(mask: Any, to_f32: Widen, any_to_f32: Widen) -> Any:
    """Returns the kernel that encodes rows to a grouped format, for one source dtype.

    Args:
        mask: of everything but the sign of a source word, in its type.
        to_f32: widens a finite word to a binary32 word.
        any_to_f32: widens any word.
    """
    make_codes, make_codes_and_errors = _coder(to_f32, False), _coder(to_f32, True)
    add_loss = _grouped_loss(to_f32, _adder(to_f32))

    def encode(
        words: Array,
        code_bits: int,
        group: int,
        code_min: np.float32,
        code_max: np.float32,
        base: Array,
        high: Array,
        scale: Array,
        scratch: Array,
        maxima: Array,
        scales: Array,
        inverses: Array,
        errors: Array,
        lanes: Array,
        loss: Array,
    ) -> int:
        """Encodes rows of source words [rows, K] into the rows of their planes.

        Returns -1, or row * ceil(K / group) + group of the first group that cannot be encoded. The loss is added to
        `loss` unless that is empty; the arrays between `scale` and that one are `interface.SCRATCH`.
        Source: tensor-formats.md section 7.2; layouts.md, row-split-k128-v1.
        """
        k = words.shape[1]
        k_pad = scale.shape[1] // 2 * group
        lanes[:] = _ZERO
        for row in range(words.shape[0]):
            for begin in range(0, k_pad, SEGMENT):
                end, pad_end = min(begin + SEGMENT, k), min(begin + SEGMENT, k_pad)
                segment = words[row][begin:end]
                groups = (end - begin + group - 1) // group
                _group_maxima(segment, mask, group, maxima)
                for g in range(groups):
                    maxima[g] = any_to_f32(maxima[g])
                if _group_scales(maxima[:groups], code_max, scales, inverses) >= _F16_INFINITY:
                    first = 0
                    while scales[first] < _F16_INFINITY:
                        first += 1
                    bad_group: int = row * ((k + group - 1) // group) + begin // group + first
                    return bad_group
                codes = base[row][begin:pad_end] if code_bits == 8 else scratch[: pad_end - begin]
                own = inverses[:groups]
                if loss.size == 0:
                    make_codes(segment, group, scales, own, code_min, code_max, codes, errors)
                else:
                    make_codes_and_errors(segment, group, scales, own, code_min, code_max, codes, errors)
                    place = row * k + begin
                    add_loss(segment, group, maxima, scales, own, code_min, code_max, errors, lanes, place, loss)
                codes[end - begin :] = 0
                if code_bits < 8:
                    _pack_nibbles(codes, base[row][begin // 2 : pad_end // 2])
                if code_bits == 5:
                    _pack_bit_4(codes, high[row][begin // 8 : pad_end // 8])
                elif code_bits == 6:
                    _pack_bits_4_and_5(codes, high[row][begin // 4 : pad_end // 4])
                scales[groups : (pad_end - begin) // group] = 0
                scale_bytes = scale[row][begin // group * 2 : pad_end // group * 2]
                for g in range(scale_bytes.size // 2):
                    scale_bytes[2 * g] = np.uint8(scales[g])
                    scale_bytes[2 * g + 1] = np.uint8(scales[g] >> np.uint32(8))
        return -1

    return _kernel(encode)


encode_grouped_bf16 = _grouped_encoder(_F16_MAGNITUDE, _bf16_to_f32, _bf16_to_f32)
encode_grouped_f16 = _grouped_encoder(_F16_MAGNITUDE, _finite_f16_to_f32, _f16_to_f32)
encode_grouped_f32 = _grouped_encoder(_F32_MAGNITUDE, _f32_to_f32, _f32_to_f32)


# FP8 with one scale per row


@_inner
def _e4m3_scaled(value: np.float32, inverse: np.float32) -> np.float32:
    scaled = np.float32(value * inverse)
    scaled = scaled if scaled > -_E4M3_MAX else -_E4M3_MAX
    return scaled if scaled < _E4M3_MAX else _E4M3_MAX


@_inner
def _e4m3_to_f32(code: np.uint8) -> np.float32:
    magnitude = np.uint32(code & np.uint8(0x7F))
    normal = _as_f32(np.uint32(magnitude << np.uint32(20)) + np.uint32(120 << 23))
    subnormal = np.float32(np.float32(np.int32(magnitude)) * _E4M3_STEP)
    value = normal if magnitude >= np.uint32(8) else subnormal
    return -value if code & np.uint8(0x80) else value


def _fp8_encoder(mask: Any, to_f32: Widen, any_to_f32: Widen) -> Any:
    """Returns the kernel that encodes rows to E4M3FN, for one source dtype; arguments as of `_grouped_encoder`."""
    add = _adder(_f32_to_f32)

    @_inner
    def add_loss(
        words: Array,
        codes: Array,
        scale: np.float32,
        values: Array,
        errors: Array,
        lanes: Array,
        place: int,
        loss: Array,
    ) -> None:
        """Adds the loss of a row. Values and errors are in units of the power of two in the scale, so that no square
        is too large, and that a value which its code represents exactly has no error.
        """
        exponent = np.uint32(np.float32(scale).view(np.uint32) & _F32_INFINITY)
        to_units = _as_f32(np.uint32(_LARGEST_POWER_WORD - exponent))
        significand = np.float32(scale * to_units)
        for begin in range(0, words.size, SEGMENT):
            source, stored = words[begin : min(words.size, begin + SEGMENT)], codes[begin:]
            for i in range(source.size):
                value = np.float32(_as_f32(to_f32(source[i])) * to_units)
                values[i] = value
                # The product is exact: code and significand are short.
                errors[i] = np.float32(value - np.float32(_e4m3_to_f32(stored[i]) * significand))
            value_words = values[: source.size].view(np.uint32)
            add(value_words, errors, np.float64(1) / np.float64(to_units), False, lanes, place + begin, loss)

    def encode(
        words: Array, code: Array, scale: Array, values: Array, errors: Array, lanes: Array, loss: Array
    ) -> int:
        """Encodes rows of source words [rows, K] to E4M3FN codes and BF16 row multipliers.

        Returns -1, or the first row that cannot be encoded. The loss is added to `loss` unless that is empty, with
        each row as a group; the arrays before that one are of `interface.SCRATCH`.
        Source: targets/qwen3.8-27b-nvfp4.md, "Encoder".
        """
        lanes[:] = _ZERO
        for row in range(words.shape[0]):
            source, target = words[row], code[row]
            maximum = any_to_f32(_largest(source, mask))
            if maximum >= _F32_INFINITY:
                return row
            scale_word = np.uint32(0)
            if maximum == np.uint32(0):
                target[:] = 0
                if loss.size:
                    loss[ZERO_GROUPS] += 1
            else:
                raw = np.float32(_as_f32(maximum) / _E4M3_MAX)
                scale_word = max(np.uint32(1), _round_to_bf16(raw.view(np.uint32)))
                scale_value = _as_f32(scale_word << np.uint32(16))
                inverse = np.float32(_ONE / scale_value)
                if inverse == np.inf:
                    return row
                for i in range(target.size):
                    target[i] = _round_to_e4m3(_e4m3_scaled(_as_f32(to_f32(source[i])), inverse))
                if loss.size:
                    if np.float32(_as_f32(maximum) * inverse) > _E4M3_CLIPPED_ABOVE:
                        loss[CLIPPED_GROUPS] += 1
                    add_loss(source, target, scale_value, values, errors, lanes, row * words.shape[1], loss)
            scale[row, 0] = np.uint8(scale_word)
            scale[row, 1] = np.uint8(scale_word >> np.uint32(8))
        return -1

    return _kernel(encode)


encode_fp8_rows_bf16 = _fp8_encoder(_F16_MAGNITUDE, _bf16_to_f32, _bf16_to_f32)
encode_fp8_rows_f16 = _fp8_encoder(_F16_MAGNITUDE, _finite_f16_to_f32, _f16_to_f32)
encode_fp8_rows_f32 = _fp8_encoder(_F32_MAGNITUDE, _f32_to_f32, _f32_to_f32)


# Copies of already selected words


@_kernel
def copy_fp8_rows(code: Array, scale: Array, code_out: Array, scale_out: Array) -> int:
    """Copies E4M3FN codes [rows, K] and BF16 row multipliers [rows] whose words are all valid.

    Returns -1, or the first row that breaks a rule of tensor-formats.md section 3.4.
    """
    for row in range(code.shape[0]):
        source, target = code[row], code_out[row]
        largest = np.uint8(0)
        for i in range(source.size):
            magnitude = np.uint8(source[i] & np.uint8(0x7F))
            largest = max(largest, magnitude)
            target[i] = source[i]
        word = scale[row]
        if largest == np.uint8(0x7F) or word >= np.uint16(0x7F80):
            return row
        if word == np.uint16(0) and largest != np.uint8(0):
            return row
        scale_out[row, 0] = np.uint8(word)
        scale_out[row, 1] = np.uint8(word >> np.uint16(8))
    return -1


@_kernel
def swizzle_nvfp4_scales(scale: Array, out: Array) -> int:
    """Moves E4M3FN scale words [rows, K / 16], rows a multiple of 128, to their swizzled places in out, flat.

    Returns -1, or row * (K / 16) + group of the first word that is not a finite one with sign zero.
    Source: tensor-formats.md section 3.3; layouts.md, blockscale-k16-m128x4-v1.
    """
    groups = scale.shape[1]
    # Four words of a row stay together; in the order of the target, because scattered writes cost more.
    quads = scale.view(np.uint32)
    swizzled = out.view(np.uint32)
    for block in range(scale.shape[0] // 128):
        largest = np.uint8(0)
        for row in range(block * 128, (block + 1) * 128):
            words = scale[row]
            for i in range(words.size):
                largest = max(largest, words[i])
        if largest >= np.uint8(0x7F):
            first: int = block * 128 * groups
            while scale[first // groups, first % groups] < np.uint8(0x7F):
                first += 1
            return first
        for quad in range(groups // 4):
            target = swizzled[(block * (groups // 4) + quad) * 128 : (block * (groups // 4) + quad + 1) * 128]
            for lane in range(32):
                for part in range(4):
                    target[4 * lane + part] = quads[block * 128 + part * 32 + lane, quad]
    return -1
