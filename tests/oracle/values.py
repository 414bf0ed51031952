"""What stored words mean, as binary32 words, and which stored words are legal.

Source: tensor-formats.md sections 3.1, 3.3, 3.4, 5, 6.1 and 6.2.
"""

from collections.abc import Sequence
from functools import lru_cache

from .binary import (
    BF16_INFINITY,
    E4M3FN_NAN,
    F16_INFINITY,
    F32_INFINITY,
    decode_bf16,
    decode_e2m1,
    decode_e4m3fn,
    decode_f16,
    decode_f32,
    round_f32,
)
from .encoders import GROUPED
from .layouts import unpack_blockscale, unpack_contiguous, unpack_row_scale, unpack_row_split


@lru_cache(maxsize=1 << 18)
def grouped_value(scale: int, code: int) -> int:
    """Returns binary32(s32 * q) of a binary16 scale word and a signed code."""
    return round_f32(decode_f16(scale) * code)


@lru_cache(maxsize=1 << 18)
def nvfp4_value(code: int, scale: int, divisor: int) -> int:
    """Returns decode_e2m1 * decode_e4m3fn / d_w rounded once; the code's sign stays on a zero."""
    exact = decode_e2m1(code) * decode_e4m3fn(scale) / decode_f32(divisor)
    return round_f32(exact, negative_zero=code >= 0x8)


@lru_cache(maxsize=1 << 18)
def fp8_value(scale: int, code: int) -> int:
    """Returns binary32(c32 * s32); the code's sign stays on a zero."""
    return round_f32(decode_e4m3fn(code) * decode_bf16(scale), negative_zero=code >= 0x80)


def i32_value(word: int) -> int:
    """Returns the two's-complement value of an I32 word."""
    return word if word < 2**31 else word - 2**32


def reconstruct(name: str, shape: Sequence[int], payload: bytes) -> list[int]:
    """Returns the represented values of a tensor as binary32 words, in C order; legal words only.

    BF16 and FP32 words are placed bit for bit (NaN payloads too). I32 has no binary32 form here.
    """
    if name == "BF16":
        return [word << 16 for word in unpack_contiguous(name, payload)]
    if name == "FP32":
        return unpack_contiguous(name, payload)
    if name in GROUPED:
        scales, codes = unpack_row_split(name, shape, payload)
        length = GROUPED[name].group
        return [
            grouped_value(row_scales[k // length], code)
            for row_scales, row_codes in zip(scales, codes, strict=True)
            for k, code in enumerate(row_codes)
        ]
    if name == "NVFP4":
        codes, scales, divisor = unpack_blockscale(shape, payload)
        return [
            nvfp4_value(code, row_scales[k // 16], divisor)
            for row_scales, row_codes in zip(scales, codes, strict=True)
            for k, code in enumerate(row_codes)
        ]
    if name == "FP8_E4M3FN_ROW_BF16S":
        row_words, codes = unpack_row_scale(shape, payload)
        return [
            fp8_value(scale, code) for scale, row in zip(row_words, codes, strict=True) for code in row
        ]
    raise KeyError(name)


def is_grouped_scale(word: int) -> bool:
    """Whether a binary16 word may be a group scale: +0, or positive and finite."""
    return 0 <= word < F16_INFINITY


def is_grouped_code(name: str, code: int) -> bool:
    """Whether a signed code lies in the format's interval (W8 has no -128)."""
    return GROUPED[name].qmin <= code <= GROUPED[name].qmax


def is_nvfp4_scale(word: int) -> bool:
    """Whether an E4M3FN word may be an NVFP4 block scale: sign zero and finite."""
    return 0 <= word < E4M3FN_NAN


def is_nvfp4_divisor(word: int) -> bool:
    """Whether a binary32 word may be d_w: finite and strictly positive."""
    return 0 < word < F32_INFINITY


def is_fp8_scale(word: int) -> bool:
    """Whether a BF16 word may be a row scale: sign zero and finite."""
    return 0 <= word < BF16_INFINITY


def is_fp8_code(word: int) -> bool:
    """Whether an E4M3FN word may be a weight code: not NaN."""
    return word & 0x7F != E4M3FN_NAN
