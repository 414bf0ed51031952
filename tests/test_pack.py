"""Copies of already selected words: every word, every rule, and the swizzle against the layout's formula."""

import base64
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_convert.encode.words import pack_fp8_rows, pack_nvfp4_rows
from ninfer_convert.formats import FP8_E4M3FN_ROW_BF16S, NVFP4
from ninfer_convert.layout import LayoutError, geometry
from ninfer_convert.row_error import RowError

GOLDEN = {
    case["format"]: case
    for case in json.loads((Path(__file__).parent / "golden" / "layouts.json").read_text())
    if "bf16" not in case
}


def nvfp4_planes(rows, k):
    return {"code": np.full((rows, k // 2), 0xAB, np.uint8), "scale": np.full((rows, k // 16), 0xAB, np.uint8)}


def fp8_planes(rows, k):
    return {"code": np.full((rows, k), 0xAB, np.uint8), "scale": np.full((rows, 2), 0xAB, np.uint8)}


def golden_bytes(case, key, *shape):
    return np.frombuffer(base64.b64decode(case[key]), np.uint8).reshape(shape)


def payload(numeric, shape, planes):
    layout = geometry(numeric, shape)
    result = bytearray(layout.nbytes)
    for plane in layout.planes[: len(planes)]:
        result[plane.offset : plane.offset + plane.nbytes] = planes[plane.name].tobytes()
    return bytes(result)


# NVFP4


def test_nvfp4_has_its_golden_payload():
    case = GOLDEN["NVFP4"]
    n, k = case["shape"]
    code, scale = golden_bytes(case, "weight_packed", n, k // 2), golden_bytes(case, "weight_scale", n, k // 16)
    planes = nvfp4_planes(n, k)
    pack_nvfp4_rows(code, scale, planes)
    assert payload(NVFP4, (n, k), planes)[:-4] == base64.b64decode(case["payload"])[:-4]


@settings(max_examples=30, deadline=None)
@given(blocks=st.integers(1, 3), quads=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_every_scale_goes_where_the_layout_says(blocks, quads, seed):
    rows, k = 128 * blocks, 64 * quads
    random = np.random.default_rng(seed)
    code = random.integers(0, 256, (rows, k // 2), np.uint8)
    scale = random.integers(0, 0x7F, (rows, k // 16), np.uint8)
    planes = nvfp4_planes(rows, k)
    pack_nvfp4_rows(code, scale, planes)
    n, g = np.indices(scale.shape)
    places = ((n // 128) * (k // 64) + g // 4) * 512 + (n % 128 % 32) * 16 + (n % 128 // 32) * 4 + g % 4
    expected = np.empty(scale.size, np.uint8)
    expected[places] = scale
    assert np.array_equal(planes["scale"].reshape(-1), expected)
    assert np.array_equal(planes["code"], code)


def test_blocks_of_128_rows_from_threads_give_the_same_bytes():
    rows, k = 128 * 6, 128
    random = np.random.default_rng(3)
    code = random.integers(0, 256, (rows, k // 2), np.uint8)
    scale = random.integers(0, 0x7F, (rows, k // 16), np.uint8)
    whole, parts = nvfp4_planes(rows, k), nvfp4_planes(rows, k)
    pack_nvfp4_rows(code, scale, whole)

    def run(begin):
        span = slice(begin, begin + 128)
        pack_nvfp4_rows(code[span], scale[span], {name: out[span] for name, out in parts.items()})

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(0, rows, 128)))
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("word", range(256))
def test_a_scale_word_is_taken_exactly_if_finite_with_sign_zero(word):
    code, scale = np.zeros((256, 32), np.uint8), np.full((256, 4), 0x38, np.uint8)
    row = 3 if word % 2 else 131
    scale[row, 1] = scale[row, 2] = word
    if word <= 0x7E:
        pack_nvfp4_rows(code, scale, nvfp4_planes(256, 64))
        return
    scale[row + 5, 0] = 0xFF
    with pytest.raises(RowError) as caught:
        pack_nvfp4_rows(code, scale, nvfp4_planes(256, 64))
    error = caught.value
    assert (error.row, error.column, error.group) == (row, None, 1)
    found = {
        0x7F: "is NaN; it must be finite",
        0xFF: "is NaN; it must be finite",
        0x80: "is negative zero; its sign must be zero",
    }.get(word, "is negative; its sign must be zero")
    assert error.reason == f"scale word 0x{word:02x} {found}"


# FP8


def test_fp8_has_its_golden_payload():
    case = GOLDEN["FP8_E4M3FN_ROW_BF16S"]
    n, k = case["shape"]
    planes = fp8_planes(n, k)
    scale = np.array([int(word, 16) for word in case["weight_scale"]], "<u2")
    pack_fp8_rows(golden_bytes(case, "weight", n, k), scale, planes)
    assert payload(FP8_E4M3FN_ROW_BF16S, (n, k), planes) == base64.b64decode(case["payload"])


@pytest.mark.parametrize("k", [1, 7, 64, 1000])
def test_fp8_words_are_kept_bit_for_bit(k):
    random = np.random.default_rng(k)
    code = random.integers(0, 256, (5, k), np.uint8)
    code[code & 0x7F == 0x7F] = 0x80
    scale = np.array([0x0001, 0x7F7F, 0x3F80, 0x0000, 0x0080], "<u2")
    code[3] &= 0x80
    planes = fp8_planes(5, k)
    pack_fp8_rows(code, scale, planes)
    assert np.array_equal(planes["code"], code)
    assert np.array_equal(planes["scale"].view("<u2")[:, 0], scale)


@pytest.mark.parametrize("place", [0, 16, 63, 100])
@pytest.mark.parametrize("word", [0x7F, 0xFF])
def test_a_nan_code_is_refused_with_its_column(word, place):
    code, scale = np.full((3, 101), 0x7E, np.uint8), np.full(3, 0x3F80, "<u2")
    code[1, place:] = word
    code[2] = 0x7F
    with pytest.raises(RowError) as caught:
        pack_fp8_rows(code, scale, fp8_planes(3, 101))
    error = caught.value
    assert (error.row, error.column, error.group) == (1, place, None)
    assert error.reason == f"code word 0x{word:02x} is NaN; it must be finite"


def test_every_finite_code_is_taken():
    words = [word for word in range(256) if word & 0x7F != 0x7F]
    planes = fp8_planes(1, len(words))
    pack_fp8_rows(np.array([words], np.uint8), np.array([0x3F80], "<u2"), planes)
    assert planes["code"].tolist() == [words]


def test_all_row_scale_words_are_taken_exactly_if_finite_with_sign_zero():
    code = np.zeros((1, 1), np.uint8)
    refused = []
    for word in range(65536):
        planes = fp8_planes(1, 1)
        try:
            pack_fp8_rows(code, np.array([word], "<u2"), planes)
        except RowError:
            refused.append(word)
        else:
            assert planes["scale"].view("<u2").tolist() == [[word]]
    assert refused == list(range(0x7F80, 65536))


@pytest.mark.parametrize(
    ("word", "found"),
    [
        (0x7F80, "is +Inf; it must be finite"),
        (0x7FC0, "is NaN; it must be finite"),
        (0xFF81, "is NaN; it must be finite"),
        (0x8000, "is negative zero; its sign must be zero"),
        (0xBF80, "is negative; its sign must be zero"),
        (0xFF80, "is -Inf; it must be finite"),
    ],
)
def test_a_row_scale_is_refused_with_its_reason(word, found):
    scale = np.array([0x3F80, 0x3F80, word], "<u2")
    with pytest.raises(RowError) as caught:
        pack_fp8_rows(np.zeros((3, 5), np.uint8), scale, fp8_planes(3, 5))
    error = caught.value
    assert (error.row, error.column, error.group) == (2, None, None)
    assert error.reason == f"row scale word 0x{word:04x} {found}"


def test_a_zero_scale_allows_only_zero_codes():
    code, scale = np.zeros((2, 70), np.uint8), np.zeros(2, "<u2")
    code[:, 1::2] = 0x80
    pack_fp8_rows(code, scale, fp8_planes(2, 70))
    code[1, 66] = 0x81
    with pytest.raises(RowError) as caught:
        pack_fp8_rows(code, scale, fp8_planes(2, 70))
    assert (caught.value.row, caught.value.column) == (1, 66)
    assert caught.value.reason == "code word 0x81 in a row whose scale is zero; it must be 0x00 or 0x80"


# What a caller may get wrong


@pytest.mark.parametrize(
    ("code", "scale", "error", "message"),
    [
        ((128, 36), (128, 4), LayoutError, "K = 72 is not a multiple of 64"),
        ((100, 32), (100, 4), LayoutError, "N = 100 is not a multiple of 128"),
        ((128, 32), (128, 8), ValueError, "scale has shape [128, 8]; shape [128, 4] is required"),
        ((128, 32), (512,), ValueError, "scale has shape [512]; shape [128, 4] is required"),
    ],
)
def test_nvfp4_shapes_are_checked(code, scale, error, message):
    planes = {"code": np.zeros(code, np.uint8), "scale": np.zeros((128, 4), np.uint8)}
    with pytest.raises(error, match=re.escape(message)):
        pack_nvfp4_rows(np.zeros(code, np.uint8), np.zeros(scale, np.uint8), planes)


@pytest.mark.parametrize("missing", ["code", "scale"])
def test_missing_planes_are_named(missing):
    planes = {name: out for name, out in nvfp4_planes(128, 64).items() if name != missing}
    with pytest.raises(ValueError, match=f"plane {missing} is missing; the layout has it"):
        pack_nvfp4_rows(np.zeros((128, 32), np.uint8), np.zeros((128, 4), np.uint8), planes)
    planes = {name: out for name, out in fp8_planes(2, 8).items() if name != missing}
    with pytest.raises(ValueError, match=f"plane {missing} is missing; the layout has it"):
        pack_fp8_rows(np.zeros((2, 8), np.uint8), np.zeros(2, "<u2"), planes)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (np.zeros((2, 1), "<u2"), ValueError, "scale has shape [2, 1]; shape [2] is required"),
        (np.zeros(3, "<u2"), ValueError, "scale has shape [3]; shape [2] is required"),
        (np.zeros(2, np.uint8), TypeError, "scale is |u1; an array of <u2 is required"),
    ],
)
def test_fp8_scales_are_checked(scale, error, message):
    with pytest.raises(error, match=re.escape(message)):
        pack_fp8_rows(np.zeros((2, 8), np.uint8), scale, fp8_planes(2, 8))
