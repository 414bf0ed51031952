"""The closed table of numeric formats."""

import dataclasses

import pytest
from oracle import encoders

from ninfer_convert import formats
from ninfer_convert.formats import FORMATS

CANONICAL, FP8_ROW = "MAXABS_F16_RECIP_RNE_V1", "MAXABS_BF16S_RECIP_E4M3FN_RNE_V1"

# Name, kind, encoders, and every number of the row. Source: tensor-formats.md sections 1, 3, 5.
TABLE = [
    ("BF16", "direct", (), {"word_bytes": 2, "source_dtype": "BF16"}),
    ("FP32", "direct", (), {"word_bytes": 4, "source_dtype": "F32"}),
    ("I32", "direct", (), {"word_bytes": 4, "source_dtype": "I32"}),
    ("Q4G64_F16S", "grouped", (CANONICAL,), {"code_bits": 4, "group": 64, "code_min": -8, "code_max": 7}),
    ("Q5G64_F16S", "grouped", (CANONICAL,), {"code_bits": 5, "group": 64, "code_min": -16, "code_max": 15}),
    ("Q6G64_F16S", "grouped", (CANONICAL,), {"code_bits": 6, "group": 64, "code_min": -32, "code_max": 31}),
    ("W8G32_F16S", "grouped", (CANONICAL,), {"code_bits": 8, "group": 32, "code_min": -127, "code_max": 127}),
    ("NVFP4", "block-scaled", (), {"code_bits": 4, "group": 16}),
    ("FP8_E4M3FN_ROW_BF16S", "row-scaled", (FP8_ROW,), {"code_bits": 8}),
]


def test_there_are_exactly_nine_formats_in_this_order():
    assert list(FORMATS) == [name for name, *_ in TABLE]


@pytest.mark.parametrize(("name", "kind", "encoders_", "numbers"), TABLE, ids=[name for name, *_ in TABLE])
def test_format_has_the_numbers_of_the_registry(name, kind, encoders_, numbers):
    row = FORMATS[name]
    assert dataclasses.asdict(row) == {"name": name, "encoders": encoders_, **numbers}
    assert row.kind == kind
    assert getattr(formats, name) is row


@pytest.mark.parametrize(
    "name",
    [
        *("FP16", "FP64", "F32", "I64", "U8", "INT32", "BF16_CTRL", "FP32_CTRL", "I32_CTRL", "FP8_E4M3FN"),
        *("Q4", "Q5", "Q6", "W8", "W8G32", "Q8G32_F16S", "Q2G64_F16S", "Q3G64_F16S", "Q4G32_F16S"),
        *("Q6G128_F16S", "W8G64_F16S", "q4g64_f16s", "Q4_G64_F16S", "nvfp4", "NVFP4 ", "MXFP4", "NF4", ""),
    ],
)
def test_names_outside_the_registry_do_not_exist(name):
    assert name not in FORMATS


def test_the_registry_is_read_only():
    with pytest.raises(TypeError, match="does not support item assignment"):
        FORMATS["FP16"] = formats.BF16
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'group'"):
        formats.Q4G64_F16S.group = 32


def test_encoder_names_are_the_two_of_the_specification():
    assert (formats.CANONICAL_ENCODER, formats.FP8_ROW_ENCODER) == (CANONICAL, FP8_ROW)


@pytest.mark.parametrize("name", encoders.GROUPED)
def test_grouped_rows_agree_with_the_oracle(name):
    row, mine = FORMATS[name], encoders.GROUPED[name]
    assert (row.code_bits, row.group, row.code_min, row.code_max) == (mine.bits, mine.group, mine.qmin, mine.qmax)


@pytest.mark.parametrize(
    ("name", "bits_per_weight"),
    [("Q4G64_F16S", 4.25), ("Q5G64_F16S", 5.25), ("Q6G64_F16S", 6.25), ("W8G32_F16S", 8.5)],
)
def test_full_groups_cost_the_logical_bits_of_the_registry(name, bits_per_weight):
    assert FORMATS[name].code_bits + 16 / FORMATS[name].group == bits_per_weight
