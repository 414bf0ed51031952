"""The closed table of the nine persistent numeric formats and of the encoder profiles.

Owns what a format is: code width, group length, legal codes, scale word. Refuses to know bytes (`layout`),
arithmetic (`kernels`, `decode`) and where a format is used (recipes).

Source: tensor-formats.md sections 1, 3, 5 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

CANONICAL_ENCODER = "MAXABS_F16_RECIP_RNE_V1"
"""The encoder of the four grouped formats. Source: tensor-formats.md section 7."""

FP8_ROW_ENCODER = "MAXABS_BF16S_RECIP_E4M3FN_RNE_V1"
"""The row encoder of FP8_E4M3FN_ROW_BF16S. Source: targets/qwen3.8-27b-nvfp4.md, "Encoder"."""


@dataclass(frozen=True, slots=True)
class DirectFormat:
    """One word per element, kept bit for bit. Source: section 3.1."""

    name: str
    word_bytes: int
    source_dtype: str
    """The safetensors dtype whose words are this format's words."""
    kind = "direct"
    encoders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """Signed codes with one binary16 multiplier per group along the last axis. Source: sections 3.2, 5, 6."""

    name: str
    code_bits: int
    group: int
    code_min: int
    code_max: int
    kind = "grouped"
    encoders: tuple[str, ...] = (CANONICAL_ENCODER,)


@dataclass(frozen=True, slots=True)
class BlockScaledFormat:
    """E2M1 codes, one E4M3FN scale per group, one FP32 divisor per matrix. Source: section 3.3."""

    name: str
    code_bits: int
    group: int
    kind = "block-scaled"
    encoders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowScaledFormat:
    """E4M3FN codes, one BF16 multiplier per row. Source: section 3.4."""

    name: str
    code_bits: int
    kind = "row-scaled"
    encoders: tuple[str, ...] = (FP8_ROW_ENCODER,)


NumericFormat = DirectFormat | GroupedFormat | BlockScaledFormat | RowScaledFormat

BF16 = DirectFormat("BF16", 2, "BF16")
FP32 = DirectFormat("FP32", 4, "F32")
I32 = DirectFormat("I32", 4, "I32")
Q4G64_F16S = GroupedFormat("Q4G64_F16S", 4, 64, -8, 7)
Q5G64_F16S = GroupedFormat("Q5G64_F16S", 5, 64, -16, 15)
Q6G64_F16S = GroupedFormat("Q6G64_F16S", 6, 64, -32, 31)
W8G32_F16S = GroupedFormat("W8G32_F16S", 8, 32, -127, 127)
NVFP4 = BlockScaledFormat("NVFP4", 4, 16)
FP8_E4M3FN_ROW_BF16S = RowScaledFormat("FP8_E4M3FN_ROW_BF16S", 8)

FORMATS: Mapping[str, NumericFormat] = MappingProxyType(
    {
        row.name: row
        for row in (
            BF16,
            FP32,
            I32,
            Q4G64_F16S,
            Q5G64_F16S,
            Q6G64_F16S,
            W8G32_F16S,
            NVFP4,
            FP8_E4M3FN_ROW_BF16S,
        )
    }
)
"""Every format by its canonical name; a name that is not a key here does not exist."""
