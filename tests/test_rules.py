"""The value rules: every single-bit flip of a payload is judged as the oracle judges it, wherever runs are cut."""

import random
import re

import numpy as np
import pytest
from artifacts import FORMATS, FP8, NVFP4, payload
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import layouts, values
from oracle.encoders import GROUPED

from ninfer_convert import formats
from ninfer_convert.artifact import rules


def planes_of(name, shape, stored):
    flat = np.frombuffer(bytes(stored), np.uint8)
    return {plane: flat[offset : offset + nbytes] for plane, (offset, nbytes) in layouts.planes(name, shape).items()}


def check(name, shape, stored, run_bytes=2**20):
    """Returns check -> (first position, its detail, count) over all runs of a payload."""
    found = {}
    tensor_rules = rules.rules_of(formats.FORMATS[name], shape)
    planes = planes_of(name, shape, stored)
    for begin, end in rules.runs(tensor_rules, run_bytes):
        part = {plane: planes[plane][slice(*span)] for plane, span in tensor_rules.spans(begin, end).items()}
        for finding in tensor_rules.check(begin, end, part):
            first, count = found.get(finding.check, (finding, 0))
            first = min(first, finding, key=lambda item: item.position)
            found[finding.check] = (first, count + finding.count)
    return {name: (first.position, first.detail, count) for name, (first, count) in found.items()}


def grouped_offences(name, shape, stored):
    """Returns check -> places (row, group), in order, by the oracle's unpacking; one place per offence."""
    found = {}
    grouped, (n, k) = GROUPED[name], shape
    groups = layouts.groups_per_row(name, k)
    whole = layouts.planes(name, shape)
    # unpacking as if K were K_pad gives the padding lanes too
    scales, codes = layouts.unpack_row_split(name, (n, groups * grouped.group), stored)
    assert whole == layouts.planes(name, (n, groups * grouped.group))
    for row in range(n):
        for group in range(groups):
            lanes = codes[row][group * grouped.group : (group + 1) * grouped.group]
            used = max(0, min(grouped.group, k - group * grouped.group))
            scale = scales[row][group]
            place = (row, group)
            if not values.is_grouped_scale(scale):
                found.setdefault("scale-word", []).append(place)
            if used and scale == 0 and any(lanes):
                found.setdefault("zero-scale", []).append(place)
            if any(lanes[used:]) or (not used and scale):
                found.setdefault("padding", []).append(place)
            for code in lanes:
                if not values.is_grouped_code(name, code):
                    found.setdefault("code-word", []).append(place)
    return found


def row_scaled_offences(shape, stored):
    found = {}
    scales, codes = layouts.unpack_row_scale(shape, stored)
    for row, (scale, row_codes) in enumerate(zip(scales, codes, strict=True)):
        if not values.is_fp8_scale(scale):
            found.setdefault("scale-word", []).append((row, None))
        for column, code in enumerate(row_codes):
            if not values.is_fp8_code(code):
                found.setdefault("code-word", []).append((row, column))
            if scale == 0 and code & 0x7F:
                found.setdefault("zero-scale", []).append((row, column))
    return found


def block_scaled_offences(shape, stored):
    found = {}
    _, scales, divisor = layouts.unpack_blockscale(shape, stored)
    places = [
        (row, group)
        for row, row_scales in enumerate(scales)
        for group, scale in enumerate(row_scales)
        if not values.is_nvfp4_scale(scale)
    ]
    if places:
        found["scale-word"] = places
    if not values.is_nvfp4_divisor(divisor):
        found["divisor"] = [(None, None)]
    return found


def offences(name, shape, stored):
    if name in GROUPED:
        return grouped_offences(name, shape, stored)
    return row_scaled_offences(shape, stored) if name == FP8 else block_scaled_offences(shape, stored)


def begins_at(detail, name, place):
    """Tells whether a detail begins with the place, as `row R, group G` or `row R, column C`."""
    row, inner = place
    if row is None:
        return detail.startswith("divisor word ")
    label = "column" if name == FP8 else "group"
    return detail.startswith(f"row {row}" + (f", {label} {inner}" if inner is not None else ":"))


def assert_agrees(name, shape, stored, run_bytes=2**20):
    expected = offences(name, shape, bytes(stored))
    found = check(name, shape, stored, run_bytes)
    assert set(found) == set(expected)
    for rule, places in expected.items():
        _, detail, count = found[rule]
        assert count == len(places), (rule, detail)
        assert begins_at(detail, name, places[0]), (rule, detail, places[0])


SHAPES = [("Q4G64_F16S", (2, 65)), ("Q5G64_F16S", (2, 131)), ("Q6G64_F16S", (3, 70)), ("W8G32_F16S", (2, 33))]
SHAPES += [("Q5G64_F16S", (1, 128)), (FP8, (5, 9)), (FP8, (3, 1)), (NVFP4, (128, 64))]
LARGER = [("Q6G64_F16S", (9, 257)), ("W8G32_F16S", (7, 90)), (NVFP4, (256, 128)), (FP8, (3, 300))]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_every_single_bit_flip_is_judged_as_the_oracle_judges_it(name, shape):
    stored = bytearray(payload(name, shape, zero_groups=0.4))
    assert check(name, shape, stored) == {}
    places = range(len(stored))
    if name == NVFP4:
        places = [*range(0, 4096, 97), *range(4096, len(stored), 3), *range(len(stored) - 4, len(stored))]
    for byte in places:
        for bit in range(8):
            stored[byte] ^= 1 << bit
            assert_agrees(name, shape, stored)
            stored[byte] ^= 1 << bit


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    case=st.sampled_from(SHAPES + LARGER),
    seed=st.integers(0, 2**32),
    run_bytes=st.integers(1, 5000),
)
def test_many_flips_are_counted_and_the_first_is_named_however_runs_are_cut(case, seed, run_bytes):
    name, shape = case
    draw = random.Random(seed)
    stored = bytearray(payload(name, shape, seed % 5, zero_groups=0.3))
    for _ in range(draw.randrange(12)):
        stored[draw.randrange(len(stored))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
    assert_agrees(name, shape, stored, run_bytes)


@settings(derandomize=True, deadline=None)
@given(
    name=st.sampled_from(FORMATS), n=st.integers(1, 5), k=st.integers(1, 400), run_bytes=st.integers(1, 3000)
)
def test_runs_cover_every_plane_once_and_stay_small(name, n, k, run_bytes):
    shape = (128 * n, 64 * (k % 4 + 1)) if name == NVFP4 else (n, k)
    tensor_rules = rules.rules_of(formats.FORMATS[name], shape)
    covered = {plane: [] for plane in layouts.planes(name, shape)}
    for begin, end in rules.runs(tensor_rules, run_bytes):
        spans = tensor_rules.spans(begin, end)
        assert sum(high - low for low, high in spans.values()) <= max(run_bytes, 64) + 8
        for plane, span in spans.items():
            covered[plane].append(span)
    for plane, (_, nbytes) in layouts.planes(name, shape).items():
        cursor = 0
        for low, high in covered[plane]:
            # the scale of an FP8 row longer than a run is read with each of its runs
            assert low == cursor or (name == FP8 and plane == "scale" and low == cursor - 2)
            cursor = high
        assert cursor == nbytes


@pytest.mark.parametrize(
    ("name", "shape", "edit", "rule", "detail"),
    [
        (
            "Q4G64_F16S",
            (2, 128),
            {"scale": {7: 0x80}},
            "scale-word",
            "row 1, group 1: scale word 0x80..; a finite, non-negative binary16 word is required",
        ),
        (
            "Q6G64_F16S",
            (2, 128),
            {"scale": {2: 0, 3: 0}, "high": {31: 1}},
            "zero-scale",
            "row 0, group 1: the scale is zero and a code is not; zero codes are required",
        ),
        (
            "W8G32_F16S",
            (2, 128),
            {"base": {128 + 70: 0x80}},
            "code-word",
            "row 1, group 2, column 70: code -128; -127 to 127 is required",
        ),
        (
            "Q5G64_F16S",
            (1, 66),
            {"high": {8: 0b100}},
            "padding",
            "row 0, group 1: a lane at column 66 or beyond holds a code; code 0 is required",
        ),
        (
            "Q5G64_F16S",
            (1, 64),
            {"scale": {2: 1}},
            "padding",
            "row 0, group 1: a group wholly beyond column 64 is not zero; zero codes and scale 0x0000 are required",
        ),
        (
            NVFP4,
            (128, 64),
            {"scale": {16 * 3 + 4 * 2 + 1: 0x7F}},
            "scale-word",
            "row 67, group 1: scale word 0x7f; a finite, non-negative E4M3FN word is required",
        ),
        (
            NVFP4,
            (128, 64),
            {"divisor": {0: 0, 1: 0, 2: 0, 3: 0}},
            "divisor",
            "divisor word 0x00000000; a finite, positive binary32 word is required",
        ),
        (
            FP8,
            (3, 10),
            {"code": {25: 0xFF}},
            "code-word",
            r"row 2, column 5: code word 0xff \(NaN\); a finite one is required",
        ),
        (
            FP8,
            (3, 10),
            {"scale": {2: 0, 3: 0}, "code": {13: 0x81}},
            "zero-scale",
            "row 1, column .: code word 0x.. under a zero scale; 0x00 or 0x80 is required",
        ),
        (
            FP8,
            (3, 10),
            {"scale": {4: 0x80, 5: 0x7F}},
            "scale-word",
            "row 2: scale word 0x7f80; a finite, non-negative BF16 word is required",
        ),
    ],
)
def test_details_name_place_finding_and_rule(name, shape, edit, rule, detail):
    stored = bytearray(payload(name, shape, zero_groups=0))
    for plane, edits in edit.items():
        for place, byte in edits.items():
            stored[layouts.planes(name, shape)[plane][0] + place] = byte
    found = check(name, shape, stored)
    assert rule in found
    assert re.fullmatch(detail, found[rule][1]), found[rule][1]


@pytest.mark.parametrize("word", [0x7BFF, 0x7C00, 0x7C01, 0x8000, 0x8001, 0xFFFF])
def test_binary16_scales_end_at_the_largest_finite_word(word):
    stored = bytearray(payload("Q4G64_F16S", (1, 128), zero_groups=0))
    stored[-2:] = word.to_bytes(2, "little")
    assert ("scale-word" in check("Q4G64_F16S", (1, 128), stored)) == (not values.is_grouped_scale(word))


def test_scale_of_a_row_that_takes_several_runs_is_counted_once():
    stored = bytearray(payload(FP8, (3, 300), zero_groups=0))
    stored[layouts.planes(FP8, (3, 300))["scale"][0] + 3] = 0xFF
    _, detail, count = check(FP8, (3, 300), stored, run_bytes=50)["scale-word"]
    assert detail.startswith("row 1: scale word 0xff")
    assert count == 1


@pytest.mark.parametrize("name", ["BF16", "FP32", "I32"])
def test_every_direct_word_is_legal(name):
    assert check(name, (4, 4), b"\xff" * 16 * layouts.WORD_BYTES[name]) == {}


def test_w8_alone_has_an_illegal_code():
    for name in GROUPED:
        stored = bytearray(payload(name, (1, 128), zero_groups=0))
        stored[0] = 0x80
        assert ("code-word" in check(name, (1, 128), stored)) == (name == "W8G32_F16S")


def test_nvfp4_codes_under_a_zero_scale_are_legal():
    codes = [[random.Random(row).randrange(16) for _ in range(64)] for row in range(128)]
    stored = layouts.pack_blockscale(codes, [[0] * 4 for _ in range(128)], 0x3F800000)
    assert check(NVFP4, (128, 64), stored) == {}
