"""Rows of source words against golden vectors, groups worked by hand and the exact oracle, byte for byte."""

import base64
import functools
import json
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import casts, fast
from oracle.binary import OracleError

from ninfer_convert.encode import interface
from ninfer_convert.encode.rows import SOURCE_DTYPES, encode_rows
from ninfer_convert.errors import EncodeError
from ninfer_convert.formats import FP8_E4M3FN_ROW_BF16S, NVFP4, Q4G64_F16S, Q5G64_F16S, Q6G64_F16S, W8G32_F16S
from ninfer_convert.layout import geometry
from ninfer_convert.row_error import RowError

GOLDEN = Path(__file__).parent / "golden"
GROUPED = {numeric.name: numeric for numeric in (Q4G64_F16S, Q5G64_F16S, Q6G64_F16S, W8G32_F16S)}
ENCODED = {**GROUPED, FP8_E4M3FN_ROW_BF16S.name: FP8_E4M3FN_ROW_BF16S}
WORD = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}
EVERY_CASE = pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in ENCODED for dtype in SOURCE_DTYPES])


def new_planes(numeric, rows, k):
    """Returns planes full of a byte that no test expects, so that one left unwritten shows."""
    planes = geometry(numeric, (rows, k)).planes
    return {plane.name: np.full((rows, plane.row_bytes), 0xAB, np.uint8) for plane in planes}


def encode(numeric, dtype, words):
    planes = new_planes(numeric, *words.shape)
    encode_rows(numeric, dtype, words, planes)
    return planes


def payload(numeric, shape, planes):
    layout = geometry(numeric, shape)
    result = bytearray(layout.nbytes)
    for plane in layout.planes:
        result[plane.offset : plane.offset + plane.nbytes] = planes[plane.name].tobytes()
    return bytes(result)


def f32_row(*values):
    return np.array([values], "<f4").view("<u4")


def bf16_matrix(rows, k, word=0):
    return np.full((rows, k), word, "<u2")


def scale_words(planes):
    return planes["scale"].view("<u2").tolist()


@functools.cache
def f16_words():
    """Returns the binary16 word of every binary32 word that has one."""
    return {casts.f16_to_f32(word): word for word in range(65536)}


def narrow_words(words, dtype):
    """Returns binary32 words as words of a narrower dtype, or None where one of them is no such word."""
    if dtype == "F32":
        return words
    if dtype == "BF16":
        return (words >> np.uint32(16)).astype("<u2") if not (words & np.uint32(0xFFFF)).any() else None
    found = [f16_words().get(word) for word in words.reshape(-1).tolist()]
    return None if None in found else np.array(found, "<u2").reshape(words.shape)


def golden_codes(case):
    return [int(code, 16) for code in case["codes"]] if isinstance(case["codes"][0], str) else case["codes"]


def golden_cases(file):
    cases = json.loads((GOLDEN / file).read_text())
    return [pytest.param(case, id=f"{case.get('format', 'FP8')}: {case['name']}") for case in cases]


# Golden vectors


@pytest.mark.parametrize("case", golden_cases("encoder.json"))
def test_one_group_has_its_golden_scale_and_codes_from_every_dtype_that_holds_it(case):
    numeric = GROUPED[case["format"]]
    f32_words = np.array([[int(word, 16) for word in case["x"]]], "<u4")
    for dtype in SOURCE_DTYPES:
        words = narrow_words(f32_words, dtype)
        if words is None:
            continue
        if case.get("error"):
            pattern = {"nonfinite": "value is (NaN|[+-]Inf)$", "scale overflow": "not finite in binary16"}
            with pytest.raises(RowError, match=pattern[case["error"]]):
                encode(numeric, dtype, words)
            continue
        planes = encode(numeric, dtype, words)
        assert scale_words(planes)[0][0] == int(case["scale"], 16)
        assert unpack_codes(numeric, planes)[: len(case["codes"])] == case["codes"]


def unpack_codes(numeric, planes):
    """Returns the signed codes of a matrix of one row; plainly, lane by lane."""
    if numeric.code_bits == 8:
        return planes["base"][0].view(np.int8).tolist()
    lanes = planes["base"].shape[1] * 2
    codes = []
    for lane in range(lanes):
        word = int(planes["base"][0, lane // 2]) >> 4 * (lane % 2) & 15
        for bit in range(numeric.code_bits - 4):
            place = lane * (numeric.code_bits - 4) + bit
            word |= (int(planes["high"][0, place // 8]) >> place % 8 & 1) << (4 + bit)
        codes.append(word - (1 << numeric.code_bits) if word > numeric.code_max else word)
    return codes


@pytest.mark.parametrize("case", golden_cases("fp8_row_encoder.json"))
def test_one_row_has_its_golden_fp8_scale_and_codes_from_every_dtype_that_holds_it(case):
    f32_words = np.array([[int(word, 16) for word in case["x"]]], "<u4")
    for dtype in SOURCE_DTYPES:
        words = narrow_words(f32_words, dtype)
        if words is None:
            continue
        if case.get("error"):
            pattern = {"nonfinite": "value is (NaN|[+-]Inf)$", "reciprocal overflow": "no finite binary32 reciprocal"}
            with pytest.raises(RowError, match=pattern[case["error"]]):
                encode(FP8_E4M3FN_ROW_BF16S, dtype, words)
            continue
        planes = encode(FP8_E4M3FN_ROW_BF16S, dtype, words)
        assert scale_words(planes) == [[int(case["scale"], 16)]]
        assert planes["code"][0].tolist() == golden_codes(case)


@pytest.mark.parametrize(
    "case",
    [case for case in json.loads((GOLDEN / "layouts.json").read_text()) if "bf16" in case],
    ids=lambda case: f"{case['format']} {case['shape']}",
)
def test_matrices_have_their_golden_payload(case):
    numeric, shape = GROUPED[case["format"]], tuple(case["shape"])
    words = np.frombuffer(base64.b64decode(case["bf16"]), "<u2").reshape(shape)
    assert payload(numeric, shape, encode(numeric, "BF16", words)) == base64.b64decode(case["payload"])


# The oracle


def source_rows(dtype):
    """Rows of words over all magnitudes that a scale can hold, whole groups of zeros and of tiny values included."""
    exponents = {"BF16": range(0x8F), "F16": range(0x1F), "F32": range(0x8F)}[dtype]
    shift, bits = {"BF16": (7, 16), "F16": (10, 16), "F32": (23, 32)}[dtype]
    seeds = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(exponents), st.integers(0, 12), st.booleans())

    def make(rows, k, group, drawn):
        result = np.zeros((rows, k), WORD[dtype])
        for index, begin in enumerate(range(0, k, group)):
            seed, top, spread, is_zero = drawn[index % len(drawn)]
            random = np.random.default_rng(seed)
            width = min(group, k - begin)
            exponent = np.maximum(0, top - random.integers(0, spread + 1, (rows, width)))
            fraction = random.integers(0, 1 << shift, (rows, width))
            sign = random.integers(0, 2, (rows, width))
            words = (sign << (bits - 1)) | (exponent << shift) | fraction
            result[:, begin : begin + width] = (sign << (bits - 1)) if is_zero else words
        return result

    return st.builds(
        make,
        rows=st.integers(1, 3),
        k=st.one_of(st.integers(1, 300), st.integers(2555, 2700)),
        group=st.sampled_from([32, 64, 1 << 20]),
        drawn=st.lists(seeds, min_size=1, max_size=9),
    )


@EVERY_CASE
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_matrix_has_the_bytes_of_the_oracle(name, dtype, data):
    words = data.draw(source_rows(dtype))
    try:
        expected = fast.encode_matrix(name, words.shape, dtype, words.tobytes())
    except OracleError as error:
        row = int(re.match(r"row (\d+)", str(error))[1])
        with pytest.raises(RowError) as caught:
            encode(ENCODED[name], dtype, words)
        assert caught.value.row == row
        return
    assert payload(ENCODED[name], words.shape, encode(ENCODED[name], dtype, words)) == expected


@EVERY_CASE
def test_rows_in_chunks_from_threads_give_the_same_bytes(name, dtype):
    numeric, rows, k = ENCODED[name], 43, 2689
    weights = np.random.default_rng(5).standard_normal((rows, k), dtype=np.float32)
    words = {
        "BF16": (weights.view("<u4") >> np.uint32(16)).astype("<u2"),
        "F16": weights.astype("<f2").view("<u2"),
        "F32": weights.view("<u4"),
    }[dtype]
    whole = encode(numeric, dtype, words)
    for chunk, threads in ((1, 7), (3, 2), (7, 3)):
        planes = new_planes(numeric, rows, k)

        def run(begin, chunk=chunk, planes=planes):
            part = {plane: out[begin : begin + chunk] for plane, out in planes.items()}
            encode_rows(numeric, dtype, words[begin : begin + chunk], part)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(0, rows, chunk)))
        for plane, out in planes.items():
            assert np.array_equal(out, whole[plane]), (chunk, plane)


# Cases by hand


@pytest.mark.parametrize("name", GROUPED)
def test_an_all_zero_row_has_scale_zero_and_codes_zero_whatever_the_signs(name):
    words = bf16_matrix(3, 128)
    words[1], words[2] = 0x3F80, 0x8000
    planes = encode(GROUPED[name], "BF16", words)
    for row in (0, 2):
        assert not any(out[row].any() for out in planes.values())
    assert all(scale > 0 for scale in scale_words(planes)[1])


def test_an_all_zero_fp8_row_has_scale_zero_and_codes_zero_whatever_the_signs():
    words = bf16_matrix(3, 128)
    words[1], words[2] = 0x3F80, 0x8000
    planes = encode(FP8_E4M3FN_ROW_BF16S, "BF16", words)
    assert not planes["code"][[0, 2]].any()
    assert not planes["scale"][[0, 2]].any()
    assert (planes["code"][1] == 0x7E).all()


def test_fp8_clamps_to_448_before_it_rounds():
    # 1.0 / 448 rounds down to the multiplier 0x3B12, whose reciprocal takes 1.0 to 448.9.
    planes = encode(FP8_E4M3FN_ROW_BF16S, "F32", f32_row(1.0, -1.0))
    assert scale_words(planes) == [[0x3B12]]
    assert planes["code"].tolist() == [[0x7E, 0xFE]]


def test_the_largest_bf16_value_whose_q4_scale_is_finite_is_stored():
    words = bf16_matrix(1, 64)
    words[0, 0] = 0x48DF
    planes = encode(Q4G64_F16S, "BF16", words)
    assert scale_words(planes) == [[0x7BF7, 0]]
    assert planes["base"][0, 0] == 7
    assert not planes["base"][0, 1:].any()


def test_a_scale_past_binary16_is_refused_with_its_group():
    words = bf16_matrix(3, 320)
    words[1, 200] = words[2, 0] = 0x48E0
    with pytest.raises(RowError) as caught:
        encode(Q4G64_F16S, "BF16", words)
    error = caught.value
    assert (error.row, error.column, error.group) == (1, None, 3)
    assert error.reason == "scale 65536 is not finite in binary16 (largest magnitude 458752)"
    assert str(error) == f"row 1, group 3: {error.reason}"
    assert isinstance(error, EncodeError)


def test_a_tail_group_has_a_scale_of_its_own_and_a_group_beyond_k_has_scale_zero():
    words = bf16_matrix(2, 65, 0x3F80)
    words[:, 64] = 0x3F00
    planes = encode(Q4G64_F16S, "BF16", words)
    assert scale_words(planes) == [[0x3092, 0x2C92]] * 2
    assert planes["base"].tolist() == [[0x77] * 32 + [0x07] + [0] * 31] * 2
    beyond = encode(Q4G64_F16S, "BF16", words[:, :64].copy())
    assert scale_words(beyond) == [[0x3092, 0]] * 2
    assert beyond["base"].tolist() == [[0x77] * 32 + [0] * 32] * 2


def test_an_underflowing_scale_becomes_the_least_binary16_word():
    tiny = np.array([[0x00000001, 0x80000001]], "<u4")
    for numeric in GROUPED.values():
        planes = encode(numeric, "F32", tiny)
        assert scale_words(planes)[0][0] == 0x0001
        assert not planes["base"].any()


def test_codes_are_clamped_where_a_subnormal_scale_is_coarse():
    # 10.4 * 2^-24 / 7 rounds down to 2^-24; then 10.4 and -10.4 steps lie outside [-8, 7].
    planes = encode(Q4G64_F16S, "F32", f32_row(10.4 * 2.0**-24, -10.4 * 2.0**-24))
    assert scale_words(planes)[0][0] == 0x0001
    assert planes["base"][0, 0] == 0x87
    planes = encode(W8G32_F16S, "F32", f32_row(190 * 2.0**-24, -190 * 2.0**-24))
    assert scale_words(planes)[0][0] == 0x0001
    assert planes["base"][0, :2].tolist() == [0x7F, 0x81]


@EVERY_CASE
@pytest.mark.parametrize("kind", ["NaN", "+Inf", "-Inf"])
@pytest.mark.parametrize("column", [0, 31, 2559, 2560, 2688])
def test_the_first_value_that_is_not_finite_is_named(name, dtype, kind, column):
    infinity = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}[dtype]
    sign = {"BF16": 0x8000, "F16": 0x8000, "F32": 0x80000000}[dtype]
    words = np.ones((4, 2689), WORD[dtype])
    words[2, column] = {"NaN": sign | infinity | 1, "+Inf": infinity, "-Inf": sign | infinity}[kind]
    words[2, column + 1 :] = words[3] = infinity
    numeric = ENCODED[name]
    if name == FP8_E4M3FN_ROW_BF16S.name and dtype != "F16":
        words[:2] = 0  # a row as small as one BF16 or F32 step has no FP8 scale
    with pytest.raises(RowError) as caught:
        encode(numeric, dtype, words)
    error = caught.value
    assert (error.row, error.column) == (2, column)
    assert error.group == (column // numeric.group if name in GROUPED else None)
    assert error.reason == f"value is {kind}"


def test_a_row_too_small_for_fp8_is_refused():
    words = bf16_matrix(2, 3)
    words[1, 2] = 0x0001
    with pytest.raises(RowError) as caught:
        encode(FP8_E4M3FN_ROW_BF16S, "BF16", words)
    error = caught.value
    assert (error.row, error.column, error.group) == (1, None, None)
    assert error.reason == "scale 2.0459e-43 has no finite binary32 reciprocal (largest magnitude 9.18355e-41)"


# What a caller may get wrong


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": "F64"}, ValueError, "source dtype F64 has no encoder; required is one of BF16, F16, F32"),
        ({"words": np.zeros((2, 64), "<f4")}, TypeError, "words is <f4; an array of <u2 is required"),
        ({"words": [[0]]}, TypeError, "words is list; an array of <u2 is required"),
        ({"words": np.zeros((2, 64), "<u4")}, TypeError, "words is <u4; an array of <u2 is required"),
        ({"words": np.zeros(64, "<u2")}, ValueError, "words has shape [64]; rank 2 is required"),
        ({"words": np.zeros((64, 2), "<u2").T}, ValueError, "words is not C-contiguous and aligned"),
        (
            {"words": np.zeros(257, np.uint8)[1:].view("<u2").reshape(2, 64)},
            ValueError,
            "words is not C-contiguous and aligned",
        ),
        ({"high": None}, ValueError, "plane high is missing; the layout has it"),
        ({"base": np.zeros((2, 32), np.uint8)}, ValueError, "plane base has shape [2, 32]; shape [2, 64] is required"),
        ({"scale": np.zeros((2, 2), "<u2")}, TypeError, "plane scale is <u2; an array of |u1 is required"),
        ({"base": np.zeros((64, 2), np.uint8).T}, ValueError, "plane base is not C-contiguous"),
    ],
)
def test_arguments_are_checked(change, error, message):
    words = change.get("words", bf16_matrix(2, 64))
    planes = new_planes(Q5G64_F16S, 2, 64)
    planes.update((name, out) for name, out in change.items() if name in ("base", "scale"))
    if "high" in change:
        del planes["high"]
    with pytest.raises(error, match=re.escape(message)):
        encode_rows(Q5G64_F16S, change.get("dtype", "BF16"), words, planes)


def test_a_read_only_plane_is_refused_and_read_only_words_are_not():
    words, planes = bf16_matrix(2, 64), new_planes(Q4G64_F16S, 2, 64)
    words.flags.writeable = False
    encode_rows(Q4G64_F16S, "BF16", words, planes)
    planes["base"].flags.writeable = False
    with pytest.raises(ValueError, match="plane base is read-only; it is to be written"):
        encode_rows(Q4G64_F16S, "BF16", words, planes)


def test_a_read_only_loss_is_refused_and_stays_as_it_is():
    loss = np.zeros(interface.LOSS_WORDS, np.int64)
    loss.flags.writeable = False
    with pytest.raises(ValueError, match="loss is read-only; it is to be written"):
        encode_rows(Q4G64_F16S, "BF16", bf16_matrix(2, 64), new_planes(Q4G64_F16S, 2, 64), loss)
    assert not loss.any()


def test_the_scratch_of_a_call_is_small():
    words, planes = bf16_matrix(64, 40000, 0x3F80), new_planes(Q6G64_F16S, 64, 40000)
    encode_rows(Q6G64_F16S, "BF16", words, planes)
    tracemalloc.start()
    encode_rows(Q6G64_F16S, "BF16", words, planes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000


def test_formats_without_an_encoder_are_not_taken():
    with pytest.raises(TypeError, match="NVFP4 has no encoder"):
        encode_rows(NVFP4, "BF16", bf16_matrix(128, 64), new_planes(NVFP4, 128, 64))
