"""Decoding: enumerated words, the oracle's reconstruction bit for bit, moved rows."""

import base64
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from artifacts import DIRECT, FORMATS, FP8, NVFP4, TINY, payload, tensor, write
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import binary, layouts, values
from oracle import container as oracle_container
from oracle.container import Resource
from oracle.encoders import GROUPED

from ninfer_convert import formats
from ninfer_convert.artifact import decode
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.errors import ArtifactError

LAYOUT_CASES = json.loads((Path(__file__).parent / "golden" / "layouts.json").read_text())
TINY_OBJECTS = {stored.name: stored for stored in oracle_container.parse(TINY.read_bytes())[2]}


def words_of(array):
    return np.ascontiguousarray(array, np.float32).view(np.uint32).reshape(-1).tolist()


def planes_of(name, shape, stored, rows):
    """Returns the planes of a whole payload as arrays, cut by the oracle's plane table."""
    return {
        plane: np.frombuffer(stored, np.uint8)[offset : offset + nbytes].reshape(1 if plane == "divisor" else rows, -1)
        for plane, (offset, nbytes) in layouts.planes(name, shape).items()
    }


def decoded(name, shape, stored):
    rows = shape[0] if len(shape) > 1 else 1
    k = int(np.prod(shape)) // rows
    return decode.decode_rows(formats.FORMATS[name], k, planes_of(name, shape, stored, rows))


# Every word


def test_all_16_e2m1_words():
    expected = [binary.round_f32(binary.decode_e2m1(word), negative_zero=word == 8) for word in range(16)]
    assert words_of(decode.E2M1_VALUES) == expected


def test_all_256_e4m3fn_words():
    for word, value in enumerate(decode.E4M3FN_VALUES):
        if word & 0x7F == 0x7F:
            assert np.isnan(value)
        else:
            exact = binary.round_f32(binary.decode_e4m3fn(word), negative_zero=word == 0x80)
            assert words_of(value) == [exact], hex(word)


def test_all_65536_bf16_words():
    words = np.arange(65536, dtype=np.uint16)
    assert words_of(decode.bf16_values(words)) == [word << 16 for word in range(65536)]


def test_all_65536_binary16_words():
    words = np.arange(65536, dtype=np.uint16)
    found = decode.f16_values(words)
    exact = struct.unpack("<65536e", words.tobytes())
    for word in range(65536):
        oracle = binary.decode_f16(word)
        if not binary.is_finite(oracle):
            assert str(found[word]) == str(exact[word]).lower()
        else:
            assert found[word] == float(oracle)
    assert np.signbit(found).tolist() == [word >= 0x8000 for word in range(65536)]


@pytest.mark.parametrize("name", sorted(GROUPED))
def test_every_code_word_of_a_grouped_format(name):
    grouped = GROUPED[name]
    legal = list(range(grouped.qmin, grouped.qmax + 1))
    k = len(legal) + 3
    stored = layouts.pack_row_split(name, [[0x3C00] * -(-k // grouped.group)], [[*legal, 0, 1, -1]])
    planes = planes_of(name, (1, k), stored, 1)
    assert decode.codes(formats.FORMATS[name], k, planes).tolist() == [[*legal, 0, 1, -1]]


# Groups worked by hand


def test_q5_group_of_two_lanes_by_hand():
    planes = {"base": np.zeros((1, 64), np.uint8), "high": np.zeros((1, 16), np.uint8)}
    planes["scale"] = np.array([[0x00, 0x38, 0, 0]], np.uint8)  # 0x3800 is 0.5
    planes["base"][0, 0] = 0xF3
    planes["high"][0, 0] = 0b10
    assert decode.codes(formats.Q5G64_F16S, 2, planes).tolist() == [[3, -1]]
    assert decode.decode_rows(formats.Q5G64_F16S, 2, planes).tolist() == [[1.5, -0.5]]


def test_nvfp4_nibbles_by_hand():
    planes = {"code": np.zeros((128, 32), np.uint8), "scale": np.zeros((128, 4), np.uint8)}
    planes["divisor"] = np.frombuffer(struct.pack("<f", 1.0), np.uint8).reshape(1, 4)
    planes["code"][0, 0] = 0x21
    planes["scale"][0, 0] = 0x38  # 1.0
    found = decode.decode_rows(formats.NVFP4, 64, planes)
    assert found.shape == (128, 64)
    assert found[0, :3].tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(("byte", "row", "group"), [(1, 0, 1), (4, 32, 0), (16, 1, 0), (512, 0, 4), (1024, 128, 0)])
def test_swizzled_bytes_by_hand(byte, row, group):
    stored = np.zeros(256 * 8, np.uint8)
    stored[byte] = 7
    natural = decode.unswizzle_scales(stored.reshape(256, 8))
    assert np.argwhere(natural).tolist() == [[row, group]]
    assert decode.swizzle_scales(natural).reshape(-1).tolist() == stored.tolist()


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 5))
def test_unswizzling_equals_the_formula(blocks, tiles):
    rows, k = 128 * blocks, 64 * tiles
    stored = np.arange(rows * k // 16, dtype=np.uint32).astype(np.uint8).reshape(rows, -1)
    natural = decode.unswizzle_scales(stored)
    flat = stored.reshape(-1)
    for row in range(0, rows, 13):
        for group in range(k // 16):
            assert natural[row, group] == flat[layouts.swizzled_offset(row, group, k)]


# Against the oracle


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: f"{case['format']} {case['shape']}")
def test_golden_payloads_decode_to_the_oracles_values(case):
    stored = base64.b64decode(case["payload"])
    name, shape = case["format"], tuple(case["shape"])
    assert words_of(decoded(name, shape, stored)) == values.reconstruct(name, shape, stored)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"I32"}))
@pytest.mark.parametrize("k", [1, 63, 64, 65, 127, 129])
def test_random_payloads_decode_to_the_oracles_values(name, k):
    shape = (128, 64 * (k % 3 + 1)) if name == NVFP4 else (3, k)
    stored = payload(name, shape, k)
    assert words_of(decoded(name, shape, stored)) == values.reconstruct(name, shape, stored)


def test_golden_artifact_is_decoded():
    with Artifact.open(TINY) as artifact:
        for name, record in artifact.objects.items():
            if record.kind == "resource":
                continue
            found = decode.read_values(artifact, name, 0, artifact.geometry(name).rows)
            stored = TINY_OBJECTS[name]
            if stored.format == "I32":
                assert found.dtype == np.int32
                assert found.tolist() == [[-(2**31), 2**31 - 1], [-1, 0]]
            else:
                assert found.dtype == np.float32
                assert words_of(found) == values.reconstruct(stored.format, stored.shape, stored.payload)


def test_direct_words_keep_every_payload():
    bf16 = payload("BF16", (5, 7))
    planes = planes_of("BF16", (5, 7), bf16, 5)
    words = decode.direct_words(formats.BF16, planes)
    assert (words.dtype, words.shape, words.tobytes()) == (np.uint16, (5, 7), bf16)
    nans = struct.pack("<4I", 0x7F800001, 0xFFC12345, 0x80000000, 0x7F800000)
    found = decoded("FP32", (4,), nans)
    assert found.tobytes() == nans


DIVISORS = [1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x3F800001, 0x3FFFFFFF, 0x40400000, 0x7F7FFFFF]


@pytest.mark.parametrize("divisor", [*DIVISORS, *(random.Random(n).randrange(1, 0x7F800000) for n in range(12))])
def test_nvfp4_quotients_are_rounded_once(divisor):
    scales = np.arange(0x7F, dtype=np.uint8)[:, None]
    words = np.tile(np.arange(16, dtype=np.uint8), (0x7F, 1))
    found = words_of(decode.block_scaled_values(scales, words, divisor))
    assert found == [values.nvfp4_value(code, scale, divisor) for scale in range(0x7F) for code in range(16)]


def test_nvfp4_quotients_reach_subnormals_and_infinity():
    scales = np.array([[1, 0x7E]], np.uint8)
    words = np.full((1, 32), 0xF, np.uint8)
    assert words_of(decode.block_scaled_values(scales, words, 0x7F7FFFFF)[0, ::16]) == [
        values.nvfp4_value(0xF, 1, 0x7F7FFFFF),
        values.nvfp4_value(0xF, 0x7E, 0x7F7FFFFF),
    ]
    assert 0x80000000 < values.nvfp4_value(0xF, 1, 0x7F7FFFFF) < 0x80800000
    assert words_of(decode.block_scaled_values(scales, words, 1)[0, ::16]) == [
        values.nvfp4_value(0xF, 1, 1),
        0xFF800000,
    ]


def test_fp8_products_round_once_for_every_code():
    scales = [0x0001, 0x0080, 0x00FF, 0x3F80, 0x3FFF, 0x7F7F, 0x0040, 0x2345]
    legal = [word for word in range(256) if word & 0x7F != 0x7F]
    stored = layouts.pack_row_scale(scales, [legal] * len(scales))
    found = words_of(decoded(FP8, (len(scales), len(legal)), stored))
    assert found == [values.fp8_value(scale, code) for scale in scales for code in legal]


def test_grouped_products_are_exact_for_every_subnormal_scale():
    scales = [*range(1, 0x400, 7), 0x400, 0x3C01, 0x7BFF]
    codes = [list(range(-32, 32)) for _ in scales]
    stored = layouts.pack_row_split("Q6G64_F16S", [[scale] for scale in scales], codes)
    found = words_of(decoded("Q6G64_F16S", (len(scales), 64), stored))
    assert found == [values.grouped_value(scale, code) for scale in scales for code in range(-32, 32)]


def test_direct_formats_have_neither_codes_nor_scales():
    planes = planes_of("BF16", (2, 2), payload("BF16", (2, 2)), 2)
    with pytest.raises(TypeError, match="BF16 has no codes"):
        decode.codes(formats.BF16, 2, planes)
    with pytest.raises(TypeError, match="BF16 has no scales"):
        decode.scale_words(formats.BF16, 2, planes)


# Rows of a file


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """An artifact of every format, several rows each, and rank 3 for the direct ones."""
    shapes = dict.fromkeys(FORMATS, (7, 130)) | dict.fromkeys(DIRECT, (6, 3, 5)) | {NVFP4: (384, 128)}
    objects = [Resource("r", b"abc"), *(tensor(name, name, shape) for name, shape in shapes.items())]
    objects += [tensor("vector", "BF16", (9,)), tensor("scalar", "FP32", ())]
    with Artifact.open(write(tmp_path_factory.mktemp("mixed") / "mixed.ninfer", objects)) as artifact:
        yield artifact


@pytest.mark.parametrize(
    ("name", "begin", "end"), [("Q4G64_F16S", 2, 5), (NVFP4, 100, 300), ("BF16", 1, 2), (FP8, 3, 3)]
)
def test_values_of_any_rows_are_those_of_the_whole(mixed, name, begin, end):
    whole = decode.read_values(mixed, name, 0, mixed.geometry(name).rows)
    part = decode.read_values(mixed, name, begin, end)
    assert part.shape == (end - begin, whole.shape[1])
    assert part.tobytes() == whole[begin:end].tobytes()


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (0, 385), (300, 200)])
def test_values_of_rows_outside_a_tensor_are_refused(mixed, begin, end):
    with pytest.raises(ArtifactError, match="object 'NVFP4' has rows 0 to 384"):
        decode.read_values(mixed, NVFP4, begin, end)


def select(name, shape, stored, rows):
    """Returns the payload of chosen rows by unpacking and packing with the oracle."""
    if name in DIRECT:
        width = len(stored) // shape[0]
        return b"".join(stored[row * width : (row + 1) * width] for row in rows)
    if name in GROUPED:
        scales, codes = layouts.unpack_row_split(name, shape, stored)
        return layouts.pack_row_split(name, [scales[row] for row in rows], [codes[row] for row in rows])
    if name == FP8:
        scales, codes = layouts.unpack_row_scale(shape, stored)
        return layouts.pack_row_scale([scales[row] for row in rows], [codes[row] for row in rows])
    codes, scales, divisor = layouts.unpack_blockscale(shape, stored)
    return layouts.pack_blockscale([codes[row] for row in rows], [scales[row] for row in rows], divisor)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data(), name=st.sampled_from([name for name in FORMATS if name != NVFP4]))
def test_gathered_rows_are_a_valid_payload_of_those_rows(mixed, data, name):
    shape = mixed.tensor(name).shape
    rows = data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=12))
    assert decode.gather_rows(mixed, name, rows) == select(name, shape, mixed.read(name), rows)


@pytest.mark.parametrize("seed", range(3))
def test_gathered_nvfp4_rows_are_swizzled_anew(mixed, seed):
    rows = random.Random(seed).choices(range(384), k=256)
    found = decode.gather_rows(mixed, NVFP4, np.array(rows))
    assert found == select(NVFP4, (384, 128), mixed.read(NVFP4), rows)


@pytest.mark.parametrize("name", FORMATS)
def test_consecutive_rows_are_a_valid_payload(mixed, name):
    shape = mixed.tensor(name).shape
    begin, end = (130, 258) if name == NVFP4 else (2, 5)
    assert decode.view_rows(mixed, name, begin, end) == select(name, shape, mixed.read(name), range(begin, end))
    assert decode.view_rows(mixed, name, 0, shape[0]) == mixed.read(name)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("Q4G64_F16S", [7], "object 'Q4G64_F16S' has rows 0 to 6; row 7 was asked for"),
        ("Q4G64_F16S", [1, -1], "object 'Q4G64_F16S' has rows 0 to 6; row -1 was asked for"),
        ("Q4G64_F16S", [], r"rows to take are float64 of shape \[0\]; a non-empty list of integers is required"),
        ("Q4G64_F16S", [[1]], r"rows to take are int64 of shape \[1, 1\]; a non-empty list of integers"),
        ("Q4G64_F16S", [1.0], r"rows to take are float64 of shape \[1\]"),
        ("Q4G64_F16S", [True], r"rows to take are bool of shape \[1\]"),
        (NVFP4, range(127), "object 'NVFP4': .*N = 127 is not a multiple of 128"),
        ("vector", [0], r"object 'vector' has shape \[9\]; rows can be taken from rank 2 on"),
        ("scalar", [0], r"object 'scalar' has shape \[\]; rows can be taken from rank 2 on"),
        ("r", [0], "object 'r' is a resource; a tensor is required"),
    ],
)
def test_rows_that_cannot_be_gathered_are_refused(mixed, name, rows, message):
    with pytest.raises(ArtifactError, match=message):
        decode.gather_rows(mixed, name, rows)
