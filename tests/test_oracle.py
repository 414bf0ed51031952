"""The oracle itself: golden vectors, groups worked by hand, enumerations, its quick path against its plain one."""

import base64
import json
import math
import struct
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import binary, casts, container, encoders, fast, layouts, shortlist, values
from oracle.binary import OracleError

GOLDEN = Path(__file__).parent / "golden"
ENCODER_CASES = json.loads((GOLDEN / "encoder.json").read_text())
FP8_CASES = json.loads((GOLDEN / "fp8_row_encoder.json").read_text())
LAYOUT_CASES = json.loads((GOLDEN / "layouts.json").read_text())
TINY = (GOLDEN / "tiny.ninfer").read_bytes()

Q4, Q5, Q6, W8 = encoders.GROUPED
NVFP4, FP8 = "NVFP4", "FP8_E4M3FN_ROW_BF16S"
ENCODED = (Q4, Q5, Q6, W8, FP8)


def same_value(mine: Fraction | float, reference: float) -> bool:
    if isinstance(mine, Fraction):
        return math.isfinite(reference) and mine == Fraction(reference)
    return mine == reference or (math.isnan(mine) and math.isnan(reference))


# Binary words


def test_e2m1_has_the_sixteen_values_of_the_page():
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [binary.decode_e2m1(word) for word in range(16)] == positive + [-value for value in positive]


def test_all_e4m3fn_words_decode_as_ml_dtypes_reads_them():
    reference = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert [word for word in range(256) if not same_value(binary.decode_e4m3fn(word), float(reference[word]))] == []


def test_all_binary16_words_decode_as_struct_reads_them():
    words = range(65536)
    reference = struct.unpack("<65536e", struct.pack("<65536H", *words))
    assert [word for word in words if not same_value(binary.decode_f16(word), reference[word])] == []


def test_all_bf16_words_decode_as_the_high_half_of_binary32():
    words = range(65536)
    reference = struct.unpack("<65536f", struct.pack("<65536I", *(word << 16 for word in words)))
    assert [word for word in words if not same_value(binary.decode_bf16(word), reference[word])] == []


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (0x00000001, Fraction(1, 2**149)),  # the least subnormal
        (0x007FFFFF, Fraction(2**23 - 1, 2**149)),  # the largest subnormal
        (0x00800000, Fraction(1, 2**126)),  # the least normal
        (0x3F800000, Fraction(1)),
        (0xC0600000, Fraction(-7, 2)),
        (0x7F7FFFFF, Fraction(2**24 - 1) * 2**104),  # the largest
    ],
)
def test_binary32_words_have_their_textbook_values(word, value):
    assert binary.decode_f32(word) == value
    assert binary.round_f32(value) == word


@pytest.mark.parametrize(
    ("decode", "round_to", "bits"),
    [
        (binary.decode_f16, binary.round_f16, 16),
        (binary.decode_bf16, binary.round_bf16, 16),
        (binary.decode_e4m3fn, binary.round_e4m3fn, 8),
    ],
    ids=["f16", "bf16", "e4m3fn"],
)
def test_rounding_is_to_nearest_even_between_all_neighbours(decode, round_to, bits):
    sign = 1 << (bits - 1)
    wrong = []
    for word in range(sign - 1):
        low, high = decode(word), decode(word + 1)
        if not (binary.is_finite(low) and binary.is_finite(high)):
            continue
        middle = (low + high) / 2
        nudge = (high - low) / 1024
        even = word if word % 2 == 0 else word + 1
        found = [round_to(low), round_to(middle - nudge), round_to(middle), round_to(middle + nudge)]
        mirrored = [round_to(-low, negative_zero=True), round_to(-middle)]
        if found != [word, word, even, word + 1] or mirrored != [sign | word, sign | even]:
            wrong.append(word)
    assert wrong == []


@pytest.mark.parametrize(
    ("round_to", "tie", "words"),
    [
        (binary.round_f32, 2**128 - 2**103, [0x7F7FFFFF, 0x7F800000, 0xFF800000]),
        (binary.round_f16, 65520, [0x7BFF, 0x7C00, 0xFC00]),
        (binary.round_bf16, 2**128 - 2**119, [0x7F7F, 0x7F80, 0xFF80]),
    ],
    ids=["f32", "f16", "bf16"],
)
def test_rounding_past_the_range_gives_infinity_from_the_tie_on(round_to, tie, words):
    assert [round_to(Fraction(value)) for value in (tie - 1, tie, -1000 * tie)] == words


def test_e4m3fn_rounds_the_tie_464_to_448_and_anything_above_to_nan():
    assert binary.round_e4m3fn(Fraction(464)) == 0x7E
    assert binary.round_e4m3fn(Fraction(464) + Fraction(1, 1000)) == 0x7F
    assert binary.round_e4m3fn(Fraction(-10**9)) == 0xFF


@settings(deadline=None, derandomize=True)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_round_f32_and_f16_agree_with_struct(value):
    negative = math.copysign(1, value) < 0
    for code, round_to in (("f", binary.round_f32), ("e", binary.round_f16)):
        try:
            reference = struct.pack(f"<{code}", value)
        except OverflowError:
            reference = struct.pack(f"<{code}", math.copysign(math.inf, value))
        word = round_to(Fraction(value), negative_zero=negative)
        assert word.to_bytes(len(reference), "little") == reference


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_round_bf16_and_e4m3fn_agree_with_ml_dtypes(word):
    value = binary.decode_f32(word)
    if not binary.is_finite(value):
        return
    source = np.array([word], np.uint32).view(np.float32)
    negative = word >> 31 == 1
    bf16 = int(source.astype(ml_dtypes.bfloat16).view(np.uint16)[0])
    e4m3fn = int(source.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)[0])
    assert binary.round_bf16(value, negative_zero=negative) == bf16
    assert binary.round_e4m3fn(value, negative_zero=negative) == e4m3fn


# Encoders


def words_of(case):
    return [int(word, 16) for word in case["x"]]


@pytest.mark.parametrize("case", ENCODER_CASES, ids=lambda case: f"{case['format'][:2]} {case['name']}")
def test_grouped_encoder_gives_the_golden_vector(case):
    if "error" in case:
        with pytest.raises(OracleError) as caught:
            encoders.encode_group(case["format"], words_of(case))
        assert str(caught.value) == case["error"]
    else:
        expected = (int(case["scale"], 16), case["codes"])
        assert encoders.encode_group(case["format"], words_of(case)) == expected


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case["name"])
def test_fp8_row_encoder_gives_the_golden_vector(case):
    if "error" in case:
        with pytest.raises(OracleError) as caught:
            encoders.encode_fp8_row(words_of(case))
        assert str(caught.value) == case["error"]
    else:
        expected = (int(case["scale"], 16), [int(code, 16) for code in case["codes"]])
        assert encoders.encode_fp8_row(words_of(case)) == expected


def test_golden_files_hold_what_these_tests_count_on():
    assert (len(ENCODER_CASES), len(FP8_CASES), len(LAYOUT_CASES)) == (148, 15, 18)


HAND_GROUPS = [
    # 1/7 = 0.142857..., in binary16 1.0010010010b * 2^-3 = 0x3092; 1 * inv = 6.998 rounds to 7.
    (Q4, [0x3F800000] * 64, 0x3092, [7] * 64),
    # One real value in the tail: 0.5/7 is half of the above, so the exponent field is one less.
    (Q4, [0x3F000000], 0x2C92, [7]),
    # 456704/7 = 65243.43; spacing is 32 there, 2039 * 32 = 65248 = 0x7BF7.
    (Q4, [0x48DF0000, 0], 0x7BF7, [7, 0]),
    # Scale 1.0 = 0x3C00: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2, and the same below zero.
    (Q4, [0x40E00000, 0x3F000000, 0x3FC00000, 0x40200000], 0x3C00, [7, 0, 2, 2]),
    (Q4, [0xC0E00000, 0xBF000000, 0xBFC00000, 0xC0200000], 0x3C00, [-7, 0, -2, -2]),
    # 2^-30 / 7 is below half of 2^-24: rescued to 0x0001, and 2^-30 * 2^24 = 2^-6 rounds to 0.
    (Q4, [0x30800000], 0x0001, [0]),
    # 10 * 2^-24 / 7 = 1.43 * 2^-24 rounds down to 2^-24; +-10 clamp to the ends of each interval.
    (Q4, [0x35200000, 0xB5200000], 0x0001, [7, -8]),
    # 170 * 2^-24 / 127 = 1.34 * 2^-24: the same, but W8 has no -128.
    (W8, [0x372A0000, 0xB72A0000], 0x0001, [127, -127]),
    (Q5, [0x41700000, 0x3F800000, 0xC1000000], 0x3C00, [15, 1, -8]),  # 15, 1, -8 at scale 1
    (Q6, [0x41F80000, 0xC1F80000], 0x3C00, [31, -31]),  # +-31 at scale 1
    (W8, [0x42FE0000, 0x3F800000], 0x3C00, [127, 1]),  # 127, 1 at scale 1
    (W8, [0x80000000, 0x00000000], 0x0000, [0, 0]),
]


@pytest.mark.parametrize(("name", "words", "scale", "codes"), HAND_GROUPS)
def test_grouped_encoder_gives_the_group_worked_by_hand(name, words, scale, codes):
    assert encoders.encode_group(name, words) == (scale, codes)


def test_grouped_encoder_fails_at_the_first_bf16_value_whose_scale_is_infinite():
    # 458752 / 7 = 65536 > 65520.
    with pytest.raises(OracleError, match=r"^scale overflow$"):
        encoders.encode_group(Q4, [0x48E00000] + [0] * 63)


HAND_ROWS = [
    # 448/448 = 1.0 = 0x3F80; 448 is 1.75 * 2^8 = 0x7E, 1 is 0x38, 17 lies between 16 (0x58) and 18: even.
    ([0x43E00000, 0x3F800000, 0xC1880000], 0x3F80, [0x7E, 0x38, 0xD8]),
    # 1/448 = 2.232e-3 -> 0x3B12 (2.228e-3): 1 * inv = 448.88 is clamped before the cast; zeros keep their sign.
    ([0x3F800000, 0x80000000, 0x00000000], 0x3B12, [0x7E, 0x80, 0x00]),
    ([0x80000000, 0x80000000], 0x0000, [0x00, 0x00]),
]


@pytest.mark.parametrize(("words", "scale", "codes"), HAND_ROWS)
def test_fp8_row_encoder_gives_the_row_worked_by_hand(words, scale, codes):
    assert encoders.encode_fp8_row(words) == (scale, codes)


def test_fp8_row_encoder_refuses_rows_whose_scale_has_no_finite_reciprocal():
    # 0x03E38000 / 448 = 32.5 * 2^-133, the tie between BF16 words 0x0020 = 2^-128 and 0x0021; 1 / 2^-128 is past
    # binary32. Three words further the quotient still rounds to the tie in binary32, four words further it does not.
    for word in (0x00000001, 0x03E38000, 0x03E38003):
        with pytest.raises(OracleError, match=r"^reciprocal overflow$"):
            encoders.encode_fp8_row([word])
    assert encoders.encode_fp8_row([0x03E38004]) == (0x0021, [0x7E])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x3DCCCCCD, 0x41200000),  # 0.1 -> 10
        (0x3F800000, 0x3F800000),
        (0x7F7FFFFF, 0x00200000),  # the largest -> 2^-128, a subnormal
        (0x00200001, 0x7F7FFFF8),  # a little over 2^-128
    ],
)
def test_reciprocal_is_the_nearest_binary32_word(word, expected):
    assert encoders.reciprocal(word) == expected


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (0x00000000, "not positive and finite"),
        (0x80000000, "not positive and finite"),
        (0xBF800000, "not positive and finite"),
        (0x7F800000, "not positive and finite"),
        (0x7FC00000, "not positive and finite"),
        (0x00200000, "reciprocal overflow"),
    ],
)
def test_reciprocal_refuses_words_without_a_positive_finite_one(word, reason):
    with pytest.raises(OracleError, match=rf"^{reason}$"):
        encoders.reciprocal(word)


# Layouts


def golden_payload(case):
    return base64.b64decode(case["payload"])


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: f"{case['format']} {case['shape']}")
def test_layouts_give_the_golden_payload(case):
    name, (n, k) = case["format"], case["shape"]
    if name == NVFP4:
        packed = base64.b64decode(case["weight_packed"])
        scale = base64.b64decode(case["weight_scale"])
        codes = [layouts.nibbles(packed[row * k // 2 : (row + 1) * k // 2]) for row in range(n)]
        scales = [list(scale[row * k // 16 : (row + 1) * k // 16]) for row in range(n)]
        payload = layouts.pack_blockscale(codes, scales, int(case["weight_global_scale"], 16))
    elif name == FP8:
        weight = base64.b64decode(case["weight"])
        scales = [int(word, 16) for word in case["weight_scale"]]
        payload = layouts.pack_row_scale(scales, [weight[row * k : (row + 1) * k] for row in range(n)])
    else:
        payload = fast.plain_matrix(name, (n, k), "BF16", base64.b64decode(case["bf16"]))
        assert fast.encode_matrix(name, (n, k), "BF16", base64.b64decode(case["bf16"])) == payload
    assert payload == golden_payload(case)
    assert len(payload) == layouts.payload_bytes(name, (n, k))


def repack(name, shape, payload):
    if name == NVFP4:
        return layouts.pack_blockscale(*layouts.unpack_blockscale(shape, payload))
    if name == FP8:
        return layouts.pack_row_scale(*layouts.unpack_row_scale(shape, payload))
    if name in layouts.WORD_BYTES:
        return layouts.pack_contiguous(name, layouts.unpack_contiguous(name, payload))
    return layouts.pack_row_split(name, *layouts.unpack_row_split(name, shape, payload))


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: f"{case['format']} {case['shape']}")
def test_unpacking_inverts_packing_and_leaves_zero_padding(case):
    assert repack(case["format"], case["shape"], golden_payload(case)) == golden_payload(case)


def test_base_plane_holds_the_even_lane_in_the_low_nibble():
    # codes 1, -2, 3: nibbles 1, 14, 3 -> bytes 0xE1, 0x03
    payload = layouts.pack_row_split(Q4, [[0x3C00]], [[1, -2, 3]])
    assert payload[:3].hex() == "e10300"
    assert payload[256:].hex() == "003c0000"  # the scale of group 0, then of the group wholly beyond K


def test_high_plane_is_one_bit_stream_per_group():
    # Q5: -1 is 11111b, so bit 4 is set in lanes 0 and 9: stream bits 0 and 9.
    payload = layouts.pack_row_split(Q5, [[0x3C00]], [[-1] + [0] * 8 + [-1]])
    assert payload[256 : 256 + 8].hex() == "0102000000000000"
    # Q6: -32 is 100000b in lane 0 (stream bit 1), 16 is 010000b in lane 1 (stream bit 2).
    payload = layouts.pack_row_split(Q6, [[0x3C00]], [[-32, 16]])
    assert payload[256 : 256 + 16].hex() == "06" + "00" * 15


def test_w8_base_plane_holds_the_code_bytes():
    payload = layouts.pack_row_split(W8, [[0x3C00]], [[1, -1, 127, -127]])
    assert payload[:5].hex() == "01ff7f8100"


@pytest.mark.parametrize(
    ("n", "g", "k", "offset"),
    [
        (0, 0, 64, 0),
        (0, 3, 64, 3),
        (1, 0, 64, 16),
        (31, 0, 64, 496),
        (32, 0, 64, 4),
        (33, 1, 64, 21),
        (127, 3, 64, 511),
        (128, 0, 64, 512),
        (0, 4, 128, 512),
        (128, 0, 128, 1024),
        (255, 7, 128, 2047),
    ],
)
def test_scale_swizzle_has_its_known_offsets(n, g, k, offset):
    assert layouts.swizzled_offset(n, g, k) == offset


def test_scale_swizzle_is_a_permutation():
    assert sorted(layouts.swizzled_offset(n, g, 192) for n in range(256) for g in range(12)) == list(range(3072))


def test_partial_and_absent_groups_are_stored_as_the_page_says():
    # [2, 65]: 64 ones then 0.5; K_pad 128, two groups per row, both with a scale.
    data = b"".join([b"\x80\x3f"] * 64 + [b"\x00\x3f"]) * 2
    payload = fast.encode_matrix(Q4, (2, 65), "BF16", data)
    row = "77" * 32 + "07" + "00" * 31
    assert payload.hex() == row * 2 + "00" * 128 + "9230922c" * 2
    scales, codes = layouts.unpack_row_split(Q4, (2, 65), payload)
    assert (scales, codes) == ([[0x3092, 0x2C92]] * 2, [[7] * 65] * 2)


# Values


@pytest.mark.parametrize(
    ("scale", "code", "word"),
    [
        (0x3C00, -8, 0xC1000000),  # 1 * -8
        (0x0001, 7, 0x34E00000),  # 7 * 2^-24 = 1.75 * 2^-22
        (0x0001, 0, 0x00000000),
        (0x3092, 7, 0x3F7FF000),  # 1170 * 2^-13 * 7 = 8190 / 8192
        (0x7BFF, -127, 0xCAFDE040),  # 65504 * -127 = -8319008, exact
    ],
)
def test_grouped_values_are_scale_times_code(scale, code, word):
    assert values.grouped_value(scale, code) == word


@pytest.mark.parametrize(
    ("code", "scale", "divisor", "word"),
    [
        (0x1, 0x38, 0x3F800000, 0x3F000000),  # 0.5 * 1 / 1
        (0x2, 0x38, 0x3F800000, 0x3F800000),
        (0xF, 0x7E, 0x3F800000, 0xC5280000),  # -6 * 448 = -2688
        (0x8, 0x38, 0x3F800000, 0x80000000),  # negative zero stays one
        (0x9, 0x00, 0x3F800000, 0x80000000),
        (0x2, 0x38, 0x40400000, 0x3EAAAAAB),  # 1/3 rounded once
        (0x1, 0x01, 0x7F000000, 0x00001000),  # 2^-1 * 2^-9 / 2^127 = 2^-137, a subnormal
        (0x7, 0x7E, 0x00000001, 0x7F800000),  # 2688 * 2^149 is past binary32
    ],
)
def test_nvfp4_values_are_rounded_once_with_subnormals(code, scale, divisor, word):
    assert values.nvfp4_value(code, scale, divisor) == word


@pytest.mark.parametrize(
    ("scale", "code", "word"),
    [
        (0x3F80, 0x7E, 0x43E00000),  # 448
        (0x3F80, 0x80, 0x80000000),
        (0x0001, 0x01, 0x00000080),  # 2^-133 * 2^-9 = 2^-142, a subnormal
        (0x0001, 0x81, 0x80000080),
        (0x7F7F, 0xFE, 0xFF800000),  # past binary32
    ],
)
def test_fp8_values_are_code_times_scale(scale, code, word):
    assert values.fp8_value(scale, code) == word


def test_reconstruction_reads_payloads_in_c_order():
    data = struct.pack("<4H", 0x3F80, 0xBF80, 0x4000, 0x0000)  # 1, -1 / 2, 0
    # 1/127 = 0x2008 (1032 * 2^-17), 2/127 one binade higher; 127 * 1032 * 2^-17 = 131064 / 131072.
    payload = fast.encode_matrix(W8, (2, 2), "BF16", data)
    assert values.reconstruct(W8, (2, 2), payload) == [0x3F7FFC00, 0xBF7FFC00, 0x3FFFFC00, 0]
    assert values.reconstruct("BF16", (2, 2), data) == [0x3F800000, 0xBF800000, 0x40000000, 0]
    assert values.reconstruct("FP32", (), b"\x01\x00\x80\x7f") == [0x7F800001]


def test_i32_words_are_twos_complement():
    words = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    assert [values.i32_value(word) for word in words] == [0, 1, 2**31 - 1, -(2**31), -1]


def test_stored_word_rules_accept_exactly_the_legal_words():
    assert [word for word in range(65536) if values.is_grouped_scale(word)] == list(range(0x7C00))
    assert [word for word in range(65536) if values.is_fp8_scale(word)] == list(range(0x7F80))
    assert [word for word in range(256) if values.is_nvfp4_scale(word)] == list(range(0x7F))
    assert [word for word in range(256) if not values.is_fp8_code(word)] == [0x7F, 0xFF]
    assert [code for code in range(-128, 128) if not values.is_grouped_code(W8, code)] == [-128]
    assert [code for code in range(-9, 9) if values.is_grouped_code(Q4, code)] == list(range(-8, 8))
    divisors = [0, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x80000001]
    assert [word for word in divisors if values.is_nvfp4_divisor(word)] == [1, 0x7F7FFFFF]


# Casts


def test_every_bf16_word_survives_widening_and_rounding_unless_a_nan_must_become_quiet():
    changed = [word for word in range(65536) if casts.f32_to_bf16(casts.bf16_to_f32(word)) != word]
    assert changed == [word for word in range(65536) if word & 0x7FC0 == 0x7F80 and word & 0x3F]


def test_every_binary16_word_widens_to_the_same_value():
    wrong = []
    for word in range(65536):
        wide = casts.f16_to_f32(word)
        value, wide_value = binary.decode_f16(word), binary.decode_f32(wide)
        same = value == wide_value if value == value else wide_value != wide_value
        if not same or word >> 15 != wide >> 31:
            wrong.append(word)
    assert wrong == []


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0xBDFCD6E9, 0xBDFD),
        (0x3F808000, 0x3F80),  # tie to even, down
        (0x3F818000, 0x3F82),  # tie to even, up
        (0x00008001, 0x0001),
        (0x80000000, 0x8000),
        (0x80000001, 0x8000),
        (0x7F7F7FFF, 0x7F7F),
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),
    ],
)
def test_cast_to_bf16_is_nearest_even(word, expected):
    assert casts.f32_to_bf16(word) == expected


def test_binary16_casts_to_bf16_nearest_even():
    # 1 + 2^-8 is the tie between 0x3F80 and 0x3F81; 2^-24 is a BF16 normal; infinity stays.
    assert [casts.f16_to_bf16(word) for word in (0x3C04, 0x3C05, 0x0001, 0xFC00)] == [0x3F80, 0x3F81, 0x3380, 0xFF80]


@pytest.mark.parametrize("word", [0x7F7FFFFF, 0xFF7F8000])
def test_cast_to_bf16_refuses_to_make_infinity_of_a_finite_value(word):
    with pytest.raises(OracleError, match=r"^overflow$"):
        casts.f32_to_bf16(word)


def test_checked_cast_keeps_the_whole_range_of_i32():
    kept = [2147483647, -2147483648, 0, -1, 5, Fraction(3), binary.decode_f32(0x80000000)]
    assert [casts.checked_i32(value) for value in kept] == [0x7FFFFFFF, 0x80000000, 0, 0xFFFFFFFF, 5, 3, 0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (4294967301, "out of range"),
        (2**31, "out of range"),
        (-(2**31) - 1, "out of range"),
        (binary.decode_f32(0x40200000), "not an integer"),
        (math.inf, "not an integer"),
        (math.nan, "not an integer"),
    ],
)
def test_checked_cast_refuses_what_i32_cannot_hold(value, reason):
    with pytest.raises(OracleError, match=rf"^{reason}$"):
        casts.checked_i32(value)


# Shortlist


def test_shortlist_puts_forced_ids_after_equal_counts():
    counts = [5, 9, 5, 0, 5, 7, 1, 100]
    # Candidates 0..6; forced 0 and 3; five to take: 1 (9), 5 (7), 2 (5) by count, then 0 (5), 3 (0).
    assert shortlist.shortlist(counts, 7, 5, [0, 3]) == [1, 5, 2, 0, 3]


def test_shortlist_breaks_ties_by_ascending_id():
    assert shortlist.shortlist([3, 3, 3, 3], 4, 2, []) == [0, 1]


@pytest.mark.parametrize(("candidates", "take", "forced"), [(4, 5, []), (4, 1, [0, 1]), (4, 2, [1, 1])])
def test_shortlist_refuses_what_does_not_come_out_exact(candidates, take, forced):
    with pytest.raises(OracleError, match=r"^cannot take$"):
        shortlist.shortlist([1, 2, 3, 4], candidates, take, forced)


def test_forced_ids_are_special_candidates_in_ascending_order():
    special, plain = {"special": True}, {"special": False}
    entries = {"12": special, "7": special, "8": plain, "99": special, "3": {}}
    assert shortlist.forced_ids({"added_tokens_decoder": entries}, 99) == [7, 12]


def test_row_zero_reads_signed_little_endian_counts():
    assert shortlist.row_zero(struct.pack("<4q", 1, -2, 3, 4), 2) == [1, -2]


# Container


def test_tiny_artifact_is_rebuilt_byte_for_byte_from_its_objects():
    assert container.build(*container.parse(TINY)) == TINY


def test_tiny_artifact_holds_all_nine_formats_and_repacks_to_itself():
    tensors = [stored for stored in container.parse(TINY)[2] if isinstance(stored, container.Tensor)]
    assert sorted({tensor.format for tensor in tensors}) == sorted(layouts.LAYOUTS)
    for tensor in tensors:
        assert repack(tensor.format, tensor.shape, tensor.payload) == tensor.payload
        assert len(tensor.payload) == layouts.payload_bytes(tensor.format, tensor.shape)


def test_tiny_artifact_direct_words():
    stored = {item.name: item for item in container.parse(TINY)[2]}
    assert layouts.unpack_contiguous("BF16", stored["d/bf16"].payload) == [0x8000, 0x7F81, 0xFFC1]
    assert layouts.unpack_contiguous("FP32", stored["d/fp32"].payload) == [0x7F800001]
    words = layouts.unpack_contiguous("I32", stored["d/i32"].payload)
    assert [values.i32_value(word) for word in words] == [-(2**31), 2**31 - 1, -1, 0]


def test_artifact_framing_is_these_literal_bytes():
    data = container.build("m", "é", [container.Resource("r", b"abc"), container.Tensor("t", (), "I32", b"\1\0\0\0")])
    text = (
        '{"identity":{"model_id":"m","weights_id":"é"},"objects":['
        '{"name":"r","kind":"resource","encoding":"raw-bytes-v1","offset":0,"bytes":3},'
        '{"name":"t","kind":"tensor","shape":[],"format":"I32","layout":"contiguous-le-v1","offset":256,"bytes":4}]}'
    ).encode()
    assert data[:16] == b"NINFER\x00\x02" + struct.pack("<Q", len(text))
    assert data[16 : 16 + len(text)] == text
    assert data[16 + len(text) : 4096] == bytes(4096 - 16 - len(text))
    assert data[4096:] == b"abc" + bytes(253) + b"\1\0\0\0"


BROKEN = [
    (b"NINFER\0\2", b"NINFER\0\1", "magic"),
    (b'"w/1"', b'"w/0"', "names"),
    (b'"offset":768,', b'"offset":760,', "alignment of w/1"),
    (b'"offset":768,', b'"offset":256,', "extent of w/1"),
    (b'"offset":8960,', b'"offset":9472,', "extent of d/i32"),
    (b'"layout":"row-scale-v1"', b'"layout":"row-scale-v2"', "layout of w/5"),
    (b'"bytes":262', b'"bytes":261', "layout of w/5"),
    (b'"kind":"resource"', b'"kind":"resourcE"', "kind of frontend/tokenizer.json"),
    (b'"identity":', b'"Identity":', "members"),
    (b'"shape":[3,37]', b'"Shape":[3,37]', "members of w/5"),
]


@pytest.mark.parametrize(("old", "new", "reason"), BROKEN, ids=[reason for _, _, reason in BROKEN])
def test_parse_refuses_a_broken_artifact(old, new, reason):
    with pytest.raises(OracleError, match=rf"^{reason}$"):
        container.parse(TINY.replace(old, new, 1))


def test_parse_refuses_a_directory_longer_than_the_file():
    with pytest.raises(OracleError, match=r"^json_bytes$"):
        container.parse(TINY[:8] + struct.pack("<Q", len(TINY)) + TINY[16:])


# The quick path


def outcome(encode, *arguments):
    try:
        return encode(*arguments)
    except OracleError as error:
        return str(error)


NEAR_ONE = st.integers(0x3D00, 0x4100)
ANY_FINITE_BF16 = st.integers(0, 0x7F7F)
WORDS = {
    "BF16": st.one_of(NEAR_ONE, ANY_FINITE_BF16, st.integers(0, 0x7FFF)).flatmap(
        lambda word: st.sampled_from([word, word | 0x8000])
    ),
    "F16": st.one_of(st.integers(0x2C00, 0x4400), st.integers(0, 0x7BFF), st.integers(0, 0xFFFF)),
    "F32": st.one_of(
        st.integers(0x3D000000, 0x41000000), st.integers(0xBD000000, 0xC1000000), st.integers(0, 2**32 - 1)
    ),
}


@st.composite
def matrices(draw):
    dtype = draw(st.sampled_from(["BF16", "F16", "F32"]))
    n, k = draw(st.integers(1, 3)), draw(st.integers(1, 140))
    base = draw(st.lists(WORDS[dtype], min_size=1, max_size=12))
    order = draw(st.integers(1, 1000))
    words = [base[i * order % len(base)] for i in range(n * k)]
    width = "<H" if dtype != "F32" else "<I"
    return (n, k), dtype, b"".join(struct.pack(width, word) for word in words)


@pytest.mark.parametrize("name", ENCODED)
@settings(deadline=None, derandomize=True)
@given(matrix=matrices())
def test_quick_payload_equals_plain_payload_or_fails_alike(name, matrix):
    assert outcome(fast.encode_matrix, name, *matrix) == outcome(fast.plain_matrix, name, *matrix)


@pytest.mark.parametrize("name", ENCODED)
def test_quick_payload_equals_plain_payload_on_gaussian_rows(name):
    rng = np.random.default_rng(20260101)
    rows = (rng.standard_normal((4, 300)) * rng.uniform(0.001, 3, (4, 1))).astype(np.float32)
    for dtype, kind in (("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)):
        data = rows.astype(kind).tobytes()
        assert fast.encode_matrix(name, (4, 300), dtype, data) == fast.plain_matrix(name, (4, 300), dtype, data)


@pytest.mark.parametrize("case", ENCODER_CASES, ids=lambda case: f"{case['format'][:2]} {case['name']}")
def test_quick_path_gives_the_golden_vector(case):
    data = b"".join(struct.pack("<I", word) for word in words_of(case))
    shape = (1, len(case["x"]))
    if "error" in case:
        with pytest.raises(OracleError, match=rf"^row 0, group 0: {case['error']}$"):
            fast.encode_matrix(case["format"], shape, "F32", data)
    else:
        payload = fast.encode_matrix(case["format"], shape, "F32", data)
        scales, codes = layouts.unpack_row_split(case["format"], shape, payload)
        assert (scales, codes) == ([[int(case["scale"], 16)]], [case["codes"]])


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case["name"])
def test_quick_path_gives_the_golden_fp8_vector(case):
    data = b"".join(struct.pack("<I", word) for word in words_of(case))
    shape = (1, len(case["x"]))
    if "error" in case:
        with pytest.raises(OracleError, match=rf"^row 0: {case['error']}$"):
            fast.encode_matrix(FP8, shape, "F32", data)
    else:
        scales, codes = layouts.unpack_row_scale(shape, fast.encode_matrix(FP8, shape, "F32", data))
        assert (scales, codes) == ([int(case["scale"], 16)], [[int(code, 16) for code in case["codes"]]])


@pytest.mark.parametrize("name", encoders.GROUPED)
def test_quick_scale_equals_the_plain_one_around_every_kind_of_boundary(name):
    words = {0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF}
    for scale in (*range(1, 40), *range(0x3F0, 0x410), *range(0x410, 0x7C00, 501), *range(0x7BF8, 0x7C00)):
        # Where the quotient passes the midpoint below this scale word, and the one above it.
        step = binary.decode_f16(1 if scale < 0x400 else scale & 0x7C00) / (1 if scale < 0x400 else 1024)
        for midpoint in (binary.decode_f16(scale) - step / 2, binary.decode_f16(scale) + step / 2):
            near = binary.round_f32(midpoint * encoders.GROUPED[name].qmax)
            words |= set(range(near - 3, near + 4))
    for word in words:
        plain = outcome(encoders.grouped_scale, name, binary.decode_f32(word))
        assert outcome(fast._grouped_scale, name, word) == plain, hex(word)


def threshold_words(table):
    """The finite words at and beside every threshold."""
    index, _ = table
    near = {word + step for word in index.args[0] for step in (-1, 0, 1)}
    return sorted(word for word in near if word & 0x7FFFFFFF < 0x7F800000)


SCALE_WORDS = [0x0001, 0x0002, 0x0003, 0x03FF, 0x0400, 0x0401, 0x3C00, 0x7BFF, *range(0x0155, 0x7C00, 2999)]


@pytest.mark.parametrize("name", encoders.GROUPED)
def test_grouped_thresholds_lie_exactly_where_the_plain_code_changes(name):
    bits = encoders.GROUPED[name].bits
    for scale in SCALE_WORDS:
        index, codes = table = fast._grouped_table(name, scale)
        inverse = encoders.grouped_inverse(scale)
        for word in threshold_words(table):
            plain = encoders.grouped_code(name, binary.decode_f32(word), inverse) % (1 << bits)
            assert codes[index(word)] == plain, (hex(scale), hex(word))


def test_fp8_thresholds_lie_exactly_where_the_plain_code_changes():
    for scale in [0x0021, 0x0040, 0x007F, 0x0080, 0x0081, 0x3B12, 0x3F80, 0x7B00, *range(0x00D5, 0x7B12, 4999)]:
        index, codes = table = fast._fp8_table(scale)
        inverse = encoders.fp8_inverse(scale)
        for word in threshold_words(table):
            plain = encoders.fp8_code(binary.decode_f32(word), inverse, negative=word >> 31 == 1)
            assert codes[index(word)] == plain, (hex(scale), hex(word))
