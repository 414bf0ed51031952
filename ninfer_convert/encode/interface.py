"""What the kernels and their callers agree on: numbers, sizes, signatures.

Owns no arithmetic; apart from `kernels`, so that a caller need not load their compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

WORDS: Mapping[str, str] = MappingProxyType({"BF16": "uint16", "F16": "uint16", "F32": "uint32"})
"""The source dtypes, and the type of their words; the dtypes in small letters end the names of their kernels."""

SEGMENT = 2560
"""Columns handled at a time: codes, maxima and the source words of one segment stay in the first-level cache.
A multiple of 128, so that no group straddles two segments."""

LANES = 128
"""Sums over a segment are taken in so many lanes, each over every so manieth column, so that no order of additions
is left to a processor."""

SCRATCH: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "codes": ("|u1", SEGMENT),
        "maxima": ("<u4", SEGMENT // 32),
        "scales": ("<u4", SEGMENT // 32),
        "inverses": ("<f4", SEGMENT // 32),
        "values": ("<f4", SEGMENT),
        "errors": ("<f4", SEGMENT),
        "lanes": ("<f4", 2 * LANES),
    }
)
"""Arrays that the encoders use for themselves, with their dtype and length. They are apart, because a compiler takes
two parts of one array for dependent on each other, and then vectorises nothing."""

LIMBS = 24
LIMB_UNIT = -400
"""A sum of binary64 numbers without any rounding: so many limbs of 32 bits, each in an int64, least significant
first, in units of 2 to this power. Smaller numbers than 2^53 units are left out."""

NOISE = 0
SIGNAL = LIMBS
ZERO_GROUPS = 2 * LIMBS
CLIPPED_GROUPS = ZERO_GROUPS + 1
LARGEST = ZERO_GROUPS + 2
LARGEST_AT = ZERO_GROUPS + 3
LOSS_WORDS = ZERO_GROUPS + 4
"""The places of an array of losses: limbs of the sums of squares of the errors and of the values; groups whose
scale is zero, and in which the clamp moved a code; the binary32 word of the largest error, and row * K + column of
the first that has it."""

_PLANE = "uint8[:, ::1]"

SIGNATURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        f"encode_grouped_{dtype.lower()}": (
            *(f"{word}[:, ::1]", "int64", "int64", "float32", "float32", _PLANE, _PLANE, _PLANE),
            *("uint8[::1]", "uint32[::1]", "uint32[::1]", "float32[::1]", "float32[::1]", "float32[::1]", "int64[::1]"),
        )
        for dtype, word in WORDS.items()
    }
    | {
        f"encode_fp8_rows_{dtype.lower()}": (
            *(f"{word}[:, ::1]", _PLANE, _PLANE),
            *("float32[::1]", "float32[::1]", "float32[::1]", "int64[::1]"),
        )
        for dtype, word in WORDS.items()
    }
    | {
        "copy_fp8_rows": (_PLANE, "uint16[::1]", _PLANE, _PLANE),
        "swizzle_nvfp4_scales": (_PLANE, "uint8[::1]"),
    }
)
"""The parameters of each kernel, in numba's notation; every one returns an int64."""
