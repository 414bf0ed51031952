"""The second implementation of the encoders, held to the golden vectors and to the oracle."""

import base64
import json
import random
from pathlib import Path

import numpy as np
import pytest
from artifacts import FP8
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import binary, casts, fast, layouts
from oracle.binary import OracleError
from oracle.encoders import GROUPED

from ninfer_convert.artifact.recompute import copy_fp8_rows, copy_nvfp4_rows, recompute_cast, recompute_rows
from ninfer_convert.encode.rows import encode_rows
from ninfer_convert.errors import EncodeError
from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import geometry
from ninfer_convert.row_error import RowError

GOLDEN = Path(__file__).parent / "golden"
ENCODER_CASES = json.loads((GOLDEN / "encoder.json").read_text())
FP8_CASES = json.loads((GOLDEN / "fp8_row_encoder.json").read_text())
LAYOUT_CASES = json.loads((GOLDEN / "layouts.json").read_text())
ENCODED = (*GROUPED, FP8)
WORD = {"BF16": np.dtype("<u2"), "F16": np.dtype("<u2"), "F32": np.dtype("<u4")}


def payload_of(name, shape, planes):
    """Returns planes as a payload, placed by the oracle's plane table."""
    stored = bytearray(layouts.payload_bytes(name, shape))
    where = layouts.planes(name, shape)
    assert set(planes) == set(where)
    for plane, (offset, nbytes) in where.items():
        assert planes[plane].shape == (shape[0], nbytes // shape[0])
        stored[offset : offset + nbytes] = planes[plane].tobytes()
    return bytes(stored)


def recomputed(name, dtype, words):
    return payload_of(name, words.shape, recompute_rows(FORMATS[name], dtype, words))


@pytest.mark.parametrize("case", ENCODER_CASES, ids=lambda case: f"{case['format']} {case['name']}")
def test_golden_groups(case):
    words = np.array([[int(word, 16) for word in case["x"]]], np.uint32)
    numeric = FORMATS[case["format"]]
    if "error" in case:
        reason = {"nonfinite": "value is (NaN|[+-]Inf)", "scale overflow": "scale is not finite in binary16"}
        with pytest.raises(RowError, match=reason[case["error"]]):
            recompute_rows(numeric, "F32", words)
        return
    shape = (1, len(case["x"]))
    expected = layouts.pack_row_split(case["format"], [[int(case["scale"], 16)]], [case["codes"]])
    assert payload_of(case["format"], shape, recompute_rows(numeric, "F32", words)) == expected


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case["name"])
def test_golden_fp8_rows(case):
    words = np.array([[int(word, 16) for word in case["x"]]], np.uint32)
    if "error" in case:
        reason = {"nonfinite": "value is (NaN|-Inf)", "reciprocal overflow": "scale has no finite binary32 reciprocal"}
        with pytest.raises(RowError, match=reason[case["error"]]):
            recompute_rows(FORMATS[FP8], "F32", words)
        return
    planes = recompute_rows(FORMATS[FP8], "F32", words)
    assert planes["scale"].tobytes() == int(case["scale"], 16).to_bytes(2, "little")
    assert planes["code"].tobytes().hex() == "".join(case["codes"])


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: f"{case['format']} {case['shape']}")
def test_golden_payloads(case):
    name, shape = case["format"], tuple(case["shape"])
    stored = base64.b64decode(case["payload"])
    if "bf16" in case:
        words = np.frombuffer(base64.b64decode(case["bf16"]), "<u2").reshape(shape)
        assert recomputed(name, "BF16", words) == stored
    elif name == FP8:
        code = np.frombuffer(base64.b64decode(case["weight"]), np.uint8).reshape(shape)
        scale = np.array([int(word, 16) for word in case["weight_scale"]], np.uint16)
        assert payload_of(name, shape, copy_fp8_rows(code, scale)) == stored
    else:
        n, k = shape
        code = np.frombuffer(base64.b64decode(case["weight_packed"]), np.uint8).reshape(n, k // 2)
        scale = np.frombuffer(base64.b64decode(case["weight_scale"]), np.uint8).reshape(n, k // 16)
        planes = copy_nvfp4_rows(code, scale)
        where = layouts.planes(name, shape)
        for plane, (offset, nbytes) in where.items():
            if plane != "divisor":
                assert planes[plane].tobytes() == stored[offset : offset + nbytes]


def draw_words(draw, dtype, count, magnitude):
    """Returns random finite words whose exponents spread below that magnitude's, zeros among them."""
    values = [
        0.0 if draw.random() < 0.1 else draw.uniform(-1, 1) * magnitude * 2.0 ** -draw.randrange(12)
        for _ in range(count)
    ]
    rounded = np.array(values, np.float32)
    if dtype == "F32":
        return rounded.view(np.uint32)
    if dtype == "F16":
        return np.clip(rounded, -60000, 60000).astype(np.float16).view(np.uint16)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(
    name=st.sampled_from(ENCODED),
    dtype=st.sampled_from(["BF16", "F16", "F32"]),
    rows=st.integers(1, 4),
    k=st.sampled_from([1, 31, 32, 33, 64, 65, 100, 128, 129, 200]),
    magnitude=st.sampled_from([1.0, 0.02, 1e-6, 3e4, 1e-30]),
    seed=st.integers(0, 2**32),
)
def test_random_rows_equal_the_oracles(name, dtype, rows, k, magnitude, seed):
    words = draw_words(random.Random(seed), dtype, rows * k, magnitude).reshape(rows, k)
    try:
        expected = fast.encode_matrix(name, (rows, k), dtype, words.astype(WORD[dtype]).tobytes())
    except OracleError as error:
        with pytest.raises(RowError, match=str(error).split(":")[0].split(",")[0]):
            recompute_rows(FORMATS[name], dtype, words)
        return
    assert recomputed(name, dtype, words) == expected


@pytest.mark.parametrize("name", ENCODED)
def test_every_finite_bf16_word_beside_every_magnitude(name):
    words = np.arange(0x7F80, dtype=np.uint16)
    words = np.concatenate([words[: 0x47 << 7], words[: 0x47 << 7] | 0x8000])
    shape = (len(words) // 64, 64)
    matrix = words.reshape(64, -1).T.reshape(shape)
    matrix = matrix if name != FP8 else matrix[:, 32:]
    expected = fast.encode_matrix(name, matrix.shape, "BF16", matrix.astype("<u2").tobytes())
    assert recomputed(name, "BF16", np.ascontiguousarray(matrix)) == expected


@pytest.mark.parametrize(
    ("dtype", "word", "found"),
    [
        ("F32", 0x7FC00000, "NaN"),
        ("F32", 0xFF800000, "-Inf"),
        ("BF16", 0x7F80, "[+]Inf"),
        ("BF16", 0xFF81, "NaN"),
        ("F16", 0x7C00, "[+]Inf"),
        ("F16", 0xFC01, "NaN"),
    ],
)
@pytest.mark.parametrize("name", ENCODED)
def test_value_that_is_not_finite_is_located(name, dtype, word, found):
    words = np.zeros((3, 130), WORD[dtype])
    words[1, 100] = words[2, 0] = word
    with pytest.raises(RowError, match=f"value is {found}") as caught:
        recompute_rows(FORMATS[name], dtype, words)
    group = None if name == FP8 else 100 // GROUPED[name].group
    assert (caught.value.row, caught.value.column, caught.value.group) == (1, 100, group)


@pytest.mark.parametrize("name", sorted(GROUPED))
def test_first_group_whose_scale_overflows_is_located(name):
    words = np.zeros((3, 200), np.uint32)
    words[1, 150] = words[2, 0] = 0x7F7FFFFF
    words[1, 199] = 0x7FC00000
    with pytest.raises(RowError, match=r"row 1, group \d: scale is not finite in binary16") as caught:
        recompute_rows(FORMATS[name], "F32", words)
    assert (caught.value.row, caught.value.column, caught.value.group) == (1, None, 150 // GROUPED[name].group)


def test_first_fp8_row_without_a_reciprocal_is_located():
    words = np.zeros((4, 5), np.uint32)
    words[2, 3] = 1
    words[3, 0] = 0x7FC00000
    with pytest.raises(RowError, match="row 2: scale has no finite binary32 reciprocal"):
        recompute_rows(FORMATS[FP8], "F32", words)


def test_c21_scale_at_the_edge_of_binary16():
    words = np.zeros((1, 64), np.uint16)
    words[0, 0] = 0x48E0
    with pytest.raises(RowError, match="row 0, group 0: scale is not finite in binary16"):
        recompute_rows(FORMATS["Q4G64_F16S"], "BF16", words)
    words[0, 0] = 0x48DF
    planes = recompute_rows(FORMATS["Q4G64_F16S"], "BF16", words)
    assert planes["scale"].view("<u2").tolist() == [[0x7BF7, 0]]
    assert planes["base"][0, 0] == 7


def test_c49_partial_group_has_a_scale_of_its_own():
    words = np.full((2, 65), 0x3F80, np.uint16)
    words[:, 64] = 0x3F00
    planes = recompute_rows(FORMATS["Q4G64_F16S"], "BF16", words)
    assert planes["scale"].view("<u2").tolist() == [[0x3092, 0x2C92]] * 2
    assert planes["base"].tolist() == [[0x77] * 32 + [7] + [0] * 31] * 2


def test_source_words_are_left_alone():
    words = np.full((2, 65), 0x3F800000, np.uint32)
    words.flags.writeable = False
    for name in ENCODED:
        recompute_rows(FORMATS[name], "F32", words)
    assert (words == 0x3F800000).all()


# Casts


def test_every_bf16_and_binary16_word_is_widened_exactly():
    words = np.arange(65536, dtype=np.uint16)
    assert recompute_cast("BF16", "F32", words).tolist() == [casts.bf16_to_f32(word) for word in range(65536)]
    assert recompute_cast("F16", "F32", words).tolist() == [casts.f16_to_f32(word) for word in range(65536)]


def test_every_binary16_word_is_rounded_to_bf16():
    words = np.arange(65536, dtype=np.uint16)
    assert recompute_cast("F16", "BF16", words).tolist() == [casts.f16_to_bf16(word) for word in range(65536)]


def test_binary32_words_around_every_bf16_boundary_are_rounded():
    high = np.arange(0, 65536, 3, dtype=np.uint32) << np.uint32(16)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        words = high | np.uint32(low)
        overflow = (words & 0x7FFFFFFF >= 0x7F7F8000) & (words & 0x7FFFFFFF < 0x7F800000)
        words = words[~overflow]
        assert recompute_cast("F32", "BF16", words).tolist() == [casts.f32_to_bf16(int(word)) for word in words]


def test_overflow_to_bf16_is_located():
    with pytest.raises(OracleError):
        casts.f32_to_bf16(0x7F7FFFFF)
    with pytest.raises(EncodeError, match=r"element 2: 3\.4028\d*e\+38 is not finite in BF16"):
        recompute_cast("F32", "BF16", np.array([0, 0x7F800000, 0x7F7FFFFF], np.uint32))


@pytest.mark.parametrize(
    ("source", "words", "expected"),
    [
        ("I64", np.array([2**31 - 1, -(2**31), 0, -1]), [2**31 - 1, -(2**31), 0, -1]),
        ("U8", np.array([0, 255], np.uint8), [0, 255]),
        ("I16", np.array([-(2**15)], np.int16), [-(2**15)]),
        ("F32", np.array([-5.0, 2.0**24], np.float32).view(np.uint32), [-5, 2**24]),
        ("BF16", np.array([0x4040, 0x8000], np.uint16), [3, 0]),
        ("F64", np.array([2147483647.0, -2147483648.0]), [2**31 - 1, -(2**31)]),
    ],
)
def test_integers_in_range_are_kept(source, words, expected):
    found = recompute_cast(source, "I32", words)
    assert (found.dtype, found.tolist()) == (np.int32, expected)


@pytest.mark.parametrize(
    ("source", "words", "message"),
    [
        ("I64", np.array([5, -1, 4294967301]), "element 2: 4294967301 is no integer from"),
        ("I64", np.array([2**31]), "element 0: 2147483648 is"),
        ("I64", np.array([-(2**63)]), "element 0: -9223372036854775808 is"),
        ("U64", np.array([2**64 - 1], np.uint64), "element 0: 18446744073709551615 is"),
        ("F32", np.array([2.5], np.float32).view(np.uint32), "element 0: 2.5 is no integer"),
        ("F32", np.array([0x7FC00000], np.uint32), "element 0: nan is"),
        ("F32", np.array([0x4F000000], np.uint32), "element 0: 2147483648.0 is"),
        ("F64", np.array([0, -2147483649.0]), "element 1: -2147483649.0 is"),
        ("F16", np.array([0x7C00], np.uint16), "element 0: inf is"),
    ],
)
def test_integers_out_of_range_are_located(source, words, message):
    with pytest.raises(EncodeError, match=message):
        recompute_cast(source, "I32", words)


def test_swizzle_by_hand():
    natural = np.zeros((128, 8), np.uint8)
    natural[33, 5] = 9
    swizzled = copy_nvfp4_rows(np.zeros((128, 64), np.uint8), natural)["scale"].reshape(-1)
    assert np.flatnonzero(swizzled).tolist() == [512 + 1 * 16 + 1 * 4 + 1]
    assert binary.decode_e4m3fn(int(swizzled[533])) == binary.decode_e4m3fn(9)


# Beside the encoder it is to check

SPECIAL = [0, 0x8000, 1, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x48DF, 0x48E0, 0x5F00]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    name=st.sampled_from(ENCODED),
    k=st.sampled_from([1, 33, 64, 100, 130]),
    seed=st.integers(0, 2**32),
    places=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(SPECIAL)), max_size=4),
)
def test_encoder_gives_the_same_planes_and_refuses_the_same_place(name, k, seed, places):
    words = draw_words(random.Random(seed), "BF16", 3 * k, 1.0).astype("<u2")
    for place, word in places:
        words[place % len(words)] = word
    words = words.reshape(3, k)
    assert outcome(recompute_rows, name, words) == outcome(encoded, name, words)


def encoded(numeric, dtype, words):
    planes = {
        plane.name: np.full((3, plane.row_bytes), 0xAA, np.uint8) for plane in geometry(numeric, words.shape).planes
    }
    encode_rows(numeric, dtype, words, planes)
    return planes


def outcome(encoder, name, words):
    """Returns the bytes of every plane, or the place that was refused."""
    try:
        planes = encoder(FORMATS[name], "BF16", words)
    except RowError as error:
        return (error.row, error.column, error.group)
    return {plane: content.tobytes() for plane, content in planes.items()}
