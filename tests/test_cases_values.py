"""What goes wrong with values and words: zeros, infinities, scales in the wrong shape, divisors, two forms of a module.

Each test is one row of the list of known troubles, told end to end: right bytes, or one clean refusal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tools import (
    FP8,
    NVFP4,
    Q4,
    Q5,
    Q6,
    W8,
    Case,
    changed,
    entry,
    f32,
    filled,
    fp8,
    modelopt,
    nvfp4,
    words_of,
)
from oracle import encoders, layouts
from oracle.binary import decode_e2m1, decode_e4m3fn, decode_f32, round_bf16

ONE, ZERO, MINUS_ZERO, NAN, INFINITE = 0x3F80, 0x0000, 0x8000, 0x7FC0, 0x7F80
GROUPED = (Q4, Q5, Q6, W8)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def natural(case: Case, name: str) -> tuple[list[list[int]], list[list[int]], int]:
    """Returns codes, scales in natural order and the divisor word of a stored NVFP4 object."""
    stored = case.objects()[name]
    return layouts.unpack_blockscale(stored.shape, stored.payload)


def source_rows(tensors: dict[str, Any], module: str) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the codes and the scales of a source module, row by row."""
    packed, scales = tensors[f"{module}.weight_packed"][1], tensors[f"{module}.weight_scale"][1]
    return [layouts.nibbles(row.tobytes()) for row in packed], scales.tolist()


class TestZeros:
    """C05."""

    @pytest.mark.parametrize("numeric", GROUPED)
    @pytest.mark.parametrize("zero", [ZERO, MINUS_ZERO])
    def test_a_row_of_zeros_has_zero_scales_and_codes(self, case: Case, numeric: str, zero: int) -> None:
        case.source({"w": words_of("BF16", *[zero] * 128, *[ONE] * 128, shape=[2, 128])})
        case.recipe(entry("w", [2, 128], numeric, "w"))
        case.converted()
        scales, codes = case.grouped("w")
        length = encoders.GROUPED[numeric].group
        scale, row = encoders.encode_group(numeric, [ONE << 16] * length)
        assert scales == [[0] * (128 // length), [scale] * (128 // length)]
        assert codes == [[0] * 128, row * (128 // length)]

    @pytest.mark.parametrize("zero", [ZERO, MINUS_ZERO])
    def test_a_row_of_zeros_in_fp8_is_zero_too(self, case: Case, zero: int) -> None:
        case.source({"w": words_of("BF16", *[zero] * 128, *[ONE] * 128, shape=[2, 128])})
        case.recipe(entry("w", [2, 128], FP8, "w"))
        case.converted()
        scales, codes = layouts.unpack_row_scale([2, 128], case.payload("w"))
        assert (scales[0], codes[0]) == (0, [0] * 128)
        assert (scales[1], codes[1]) == encoders.encode_fp8_row([ONE << 16] * 128)

    def test_no_float_becomes_nvfp4(self, case: Case) -> None:
        case.source({"w": filled("BF16", [128, 64], ONE)})
        case.recipe(entry("w", [128, 64], NVFP4, "w"))
        case.refused("recipe.yaml:7:", "NVFP4 is copied from a source module and no encoder makes it")


def test_the_row_encoder_clamps_before_the_cast(case: Case) -> None:
    """C06: the scale of this row rounds down, its largest value lies beyond 448 steps of it."""
    row = [0x03E8, 0x03E7, 0]
    scale, codes = encoders.encode_fp8_row([word << 16 for word in row])
    assert decode_f32(row[0] << 16) / decode_f32(scale << 16) > 448
    case.source({"w": words_of("BF16", *row, shape=[1, 3])})
    case.recipe(entry("w", [1, 3], FP8, "w"))
    case.converted()
    assert layouts.unpack_row_scale([1, 3], case.payload("w")) == ([scale], [codes])
    assert codes[0] == 0x7E


class TestNvfp4Scales:
    """C06."""

    def recipe(self, case: Case, tensors: dict[str, Any]) -> None:
        case.source(tensors)
        case.recipe(entry("w", [128, 64], NVFP4, "w", words=True), more="ignore: [w.input_global_scale]\n")

    @pytest.mark.parametrize(
        ("word", "found"), [(0x7F, "is NaN"), (0xFF, "is NaN"), (0x80, "is negative zero"), (0x90, "is negative")]
    )
    def test_a_word_that_is_no_scale_is_named_by_row_and_block(self, case: Case, word: int, found: str) -> None:
        self.recipe(case, changed(nvfp4("w"), "w.weight_scale", 3 * 4 + 1, word))
        case.refused_by_values(f"tensor base:w.weight_scale, row 3, block 1: scale word 0x{word:02x} {found}")

    @pytest.mark.parametrize("word", [0x00, 0x01, 0x7E])
    def test_every_other_word_is_copied(self, case: Case, word: int) -> None:
        tensors = changed(nvfp4("w"), "w.weight_scale", 3 * 4 + 1, word)
        self.recipe(case, tensors)
        case.converted()
        codes, scales, divisor = natural(case, "w")
        assert (codes, scales) == source_rows(tensors, "w")
        assert scales[3][1] == word
        assert divisor == int(tensors["w.weight_global_scale"][1][0])

    def test_in_a_fused_parent_the_module_at_fault_is_named_in_its_own_rows(self, case: Case) -> None:
        case.source(changed(nvfp4("a") | nvfp4("b"), "b.weight_scale", 5 * 4 + 2, 0x7F))
        case.recipe(
            entry("w", [256, 64], NVFP4, "{concat: [a, b]}", words=True), more="ignore: ['*.input_global_scale']\n"
        )
        case.refused_by_values("object w: tensor base:b.weight_scale, row 5, block 2")


class TestFp8Rows:
    """C08, and the rules for words of FP8 rows."""

    def write(self, case: Case, scale: tuple[str, Any], rows: int = 4) -> None:
        case.source({"w.weight": filled("F8_E4M3", [rows, 8], 0x38), "w.weight_scale": scale})
        case.recipe(entry("w", [rows, 8], FP8, "w", words=True))

    @pytest.mark.parametrize("shape", [[4], [4, 1]])
    def test_one_multiplier_for_each_row_is_taken(self, case: Case, shape: Sequence[int]) -> None:
        self.write(case, words_of("BF16", 0x3F80, 0x4000, 0x4040, 0x4080, shape=shape))
        case.converted()
        assert case.payload("w") == layouts.pack_row_scale([0x3F80, 0x4000, 0x4040, 0x4080], [[0x38] * 8] * 4)

    @pytest.mark.parametrize("shape", [[], [1], [1, 1], [1, 4], [2], [8], [4, 2], [4, 1, 1]])
    def test_no_factor_is_spread_over_rows(self, case: Case, shape: Sequence[int]) -> None:
        self.write(case, filled("BF16", shape, ONE))
        case.refused(f"tensor w.weight_scale is BF16 {list(shape)}", "BF16 [4] or [4, 1], one multiplier per row")

    def test_a_square_matrix_does_not_make_columns_rows(self, case: Case) -> None:
        self.write(case, filled("BF16", [1, 8], ONE), rows=8)
        case.refused("tensor w.weight_scale is BF16 [1, 8]", "BF16 [8] or [8, 1]")

    @pytest.mark.parametrize("dtype", ["F32", "F16", "F8_E4M3"])
    def test_another_dtype_is_not_converted(self, case: Case, dtype: str) -> None:
        self.write(case, filled(dtype, [4, 1], 0x38))
        case.refused(f"tensor w.weight_scale is {dtype} [4, 1]", "BF16 [4] or [4, 1]")

    def test_multipliers_of_blocks_are_named(self, case: Case) -> None:
        case.source({"w.weight": filled("F8_E4M3", [4, 8], 0x38), "w.weight_scale_inv": f32(1.0)})
        case.recipe(entry("w", [4, 8], FP8, "w", words=True))
        case.refused("tensor w.weight_scale_inv is F32 [1]", "one multiplier per row and none per block")

    @pytest.mark.parametrize(
        ("word", "found"),
        [
            (0x7F81, "is NaN"),
            (0xFFC0, "is NaN"),
            (0x7F80, "is +Inf"),
            (0xFF80, "is -Inf"),
            (0x8000, "is negative zero"),
            (0xBF80, "is negative"),
        ],
    )
    def test_a_word_that_is_no_multiplier_is_named_by_row(self, case: Case, word: int, found: str) -> None:
        self.write(case, words_of("BF16", ONE, ONE, word, ONE, shape=[4, 1]))
        case.refused_by_values(f"tensor base:w.weight_scale, row 2: row scale word 0x{word:04x} {found}")

    @pytest.mark.parametrize("word", [0x7F, 0xFF])
    def test_a_code_that_is_no_number_is_named_by_row_and_column(self, case: Case, word: int) -> None:
        case.source(changed(fp8("w"), "w.weight", 2 * 8 + 5, word))
        case.recipe(entry("w", [4, 8], FP8, "w", words=True))
        case.refused_by_values(f"tensor base:w.weight, row 2, column 5: code word 0x{word:02x} is NaN")

    def test_a_code_under_a_zero_multiplier_must_be_zero(self, case: Case) -> None:
        codes = filled("F8_E4M3", [4, 8], 0, at11=0x38)
        case.source(changed(fp8("w"), "w.weight_scale", 1, 0x0000) | {"w.weight": codes})
        case.recipe(entry("w", [4, 8], FP8, "w", words=True))
        case.refused_by_values("tensor base:w.weight, row 1, column 3: code word 0x38 in a row whose scale is zero")

    def test_both_zeros_are_zero(self, case: Case) -> None:
        codes = filled("F8_E4M3", [1, 8], 0x80, at3=0x00)
        case.source({"w.weight": codes, "w.weight_scale": words_of("BF16", 0)})
        case.recipe(entry("w", [1, 8], FP8, "w", words=True))
        case.converted()
        assert case.payload("w")[:8] == codes[1].tobytes()


class TestTiedHeads:
    """C15."""

    EMBEDDING = words_of("BF16", *range(0x3F80, 0x3F88), shape=[2, 4])
    OTHER = words_of("BF16", *range(0x3F80, 0x3F86), 0x4000, 0x3F87, shape=[2, 4])
    TIED = "{tied: {head: lm_head.weight, embedding: embed.weight}}"

    def write(self, case: Case, config: dict[str, Any], head: Any, value: str = TIED) -> None:
        tensors = {"embed.weight": self.EMBEDDING}
        case.source(tensors if head is None else tensors | {"lm_head.weight": head}, config=config)
        case.recipe(entry("embedding", [2, 4], "BF16", "embed.weight"), entry("head", [2, 4], "BF16", value))

    @pytest.mark.parametrize("value", [TIED, "lm_head.weight"])
    def test_a_missing_head_of_an_untied_model_is_named_with_the_config(self, case: Case, value: str) -> None:
        self.write(case, {"tie_word_embeddings": False}, None, value)
        case.refused("tensor lm_head.weight is not in source base", "config.json says tie_word_embeddings: false")

    @pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
    def test_a_tied_head_is_built_from_the_embedding_and_reported(self, case: Case, config: dict[str, Any]) -> None:
        self.write(case, config, None)
        case.converted()
        assert case.words("head") == case.words("embedding") == list(range(0x3F80, 0x3F88))
        assert case.report()["notes"] == ["lm_head.weight is tied: taken from embed.weight"]
        assert case.report()["objects"][1]["sources"][0]["tensor"] == "embed.weight"

    def test_a_plain_name_is_never_tied_by_inference(self, case: Case) -> None:
        self.write(case, {"text_config": {"tie_word_embeddings": True}}, None, "lm_head.weight")
        case.refused("tensor lm_head.weight is not in", "config.json says text_config.tie_word_embeddings: true")

    def test_a_head_that_is_tied_and_differs_is_named_with_row_and_column(self, case: Case) -> None:
        self.write(case, {"tie_word_embeddings": True}, self.OTHER)
        case.refused(
            "tensor base:lm_head.weight, row 1, column 2: word 0x4000 differs from 0x3f86 at tensor base:embed.weight",
            "config.json says tie_word_embeddings: true, so they must be bit-identical",
        )

    def test_a_tied_head_of_another_shape_is_named_with_the_config(self, case: Case) -> None:
        self.write(case, {"text_config": {"tie_word_embeddings": True}}, filled("BF16", [3, 4], 0x3F80))
        case.refused(
            "base:lm_head.weight is BF16 [3, 4], base:embed.weight is BF16 [2, 4]",
            "config.json says text_config.tie_word_embeddings: true, so they must be bit-identical",
        )

    def test_a_missing_embedding_of_a_tied_head_is_named_with_the_config(self, case: Case) -> None:
        case.source({"a.weight": self.EMBEDDING}, config={"tie_word_embeddings": True})
        case.recipe(entry("a", [2, 4], "BF16", "a.weight"), entry("head", [2, 4], "BF16", self.TIED))
        case.refused("tensor embed.weight is not in source base", "; config.json says tie_word_embeddings: true")

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"tie_word_embeddings": False}, "config.json says tie_word_embeddings: false"),
            ({}, "config.json does not say tie_word_embeddings"),
        ],
    )
    def test_a_missing_head_of_any_name_is_told_with_the_config(
        self, case: Case, config: dict[str, Any], said: str
    ) -> None:
        self.write(case, config, None, "{tied: {head: output.weight, embedding: embed.weight}}")
        (message,) = case.refused("tensor output.weight is not in source base", said)
        assert message.count("config.json") == 1

    @pytest.mark.parametrize("found", ["yes", 1, 0, None, [True], {"value": True}])
    @pytest.mark.parametrize("inside", ["", "text_config"])
    def test_a_tie_that_is_no_boolean_is_refused(self, case: Case, found: object, inside: str) -> None:
        member = {"tie_word_embeddings": found}
        self.write(case, {inside: member} if inside else member, self.EMBEDDING)
        path = f"{inside}.tie_word_embeddings" if inside else "tie_word_embeddings"
        case.refused(f"config.json {path}: {json.dumps(found)} found, true or false required", "state the output head")

    def test_a_tie_that_is_no_boolean_does_not_matter_to_a_stated_head(self, case: Case) -> None:
        self.write(case, {"tie_word_embeddings": "yes"}, self.OTHER, "lm_head.weight")
        case.converted()
        assert case.words("head")[6] == 0x4000

    def test_a_head_that_is_tied_and_equal_is_taken(self, case: Case) -> None:
        self.write(case, {"tie_word_embeddings": True}, self.EMBEDDING)
        case.converted()
        assert case.words("head") == case.words("embedding")

    def test_the_recipe_may_choose_the_head(self, case: Case) -> None:
        config = {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}
        self.write(case, config, self.OTHER, "lm_head.weight")
        case.converted()
        assert case.words("head")[6] == 0x4000

    def test_a_config_that_contradicts_itself_is_named_with_both_values(self, case: Case) -> None:
        self.write(case, {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, self.OTHER)
        case.refused("tie_word_embeddings: false but text_config.tie_word_embeddings: true", "state the output head")


class TestCasts:
    """C16, C21, C33."""

    TO_FP32 = "{cast: {of: a, to: FP32, rule: exact}}"
    TO_BF16 = "{cast: {of: a, to: BF16, rule: nearest-even}}"
    TO_I32 = "{cast: {of: a, to: I32, rule: checked}}"

    @pytest.mark.parametrize(
        ("dtype", "word", "numeric", "value", "stored"),
        [
            ("F32", 0xBDFCD6E9, "FP32", "a", 0xBDFCD6E9),
            ("BF16", 0xBDFD, "FP32", TO_FP32, 0xBDFD0000),
            ("F16", 0x3555, "FP32", TO_FP32, 0x3EAAA000),
            ("F32", 0xBDFCD6E9, "BF16", TO_BF16, 0xBDFD),
            ("BF16", 0xBDFD, "BF16", "a", 0xBDFD),
            ("BF16", 0xFFC1, "BF16", "a", 0xFFC1),
            ("F32", 0x7F800001, "FP32", "a", 0x7F800001),
        ],
    )
    def test_words_are_kept_or_converted_by_a_named_rule(
        self, case: Case, dtype: str, word: int, numeric: str, value: str, stored: int
    ) -> None:
        case.source({"a": filled(dtype, [4], word), "b": f32(1)})
        case.recipe(entry("a", [4], numeric, value), more="ignore: [b]\n")
        case.converted()
        assert case.words("a") == [stored] * 4
        dtypes = case.report()["sources"]["base"]["dtypes"]
        assert dtypes == ({"F32": 2} if dtype == "F32" else {dtype: 1, "F32": 1})

    @pytest.mark.parametrize(
        ("dtype", "numeric", "rule"),
        [
            ("F32", "BF16", "cast to BF16, rule nearest-even"),
            ("F16", "BF16", "cast to BF16, rule nearest-even"),
            ("BF16", "FP32", "cast to FP32, rule exact"),
            ("F16", "FP32", "cast to FP32, rule exact"),
            ("I64", "I32", "cast to I32, rule checked"),
            ("I64", "FP32", "no cast leads there"),
        ],
    )
    def test_nothing_is_converted_unless_the_recipe_names_it(
        self, case: Case, dtype: str, numeric: str, rule: str
    ) -> None:
        case.source({"a": filled(dtype, [4], 1)})
        case.recipe(entry("a", [4], numeric, "a"))
        case.refused(f"object a: base:a is {dtype}; format {numeric} takes", rule)

    def test_a_finite_number_does_not_become_infinite(self, case: Case) -> None:
        case.source({"a": words_of("F32", 0x3F800000, 0x7F7FFFFF)})
        case.recipe(entry("a", [2], "BF16", self.TO_BF16))
        case.refused("tensor base:a, index 1", "rounds to infinity in BF16")

    def test_nor_in_a_tensor_that_is_converted_in_pieces(self, case: Case) -> None:
        case.source({"a": filled("F32", [600, 100], 0x3F800000, at54321=0xFF7FFFFF)})
        case.recipe(entry("a", [600, 100], "BF16", self.TO_BF16))
        case.refused_by_values("object a: tensor base:a, row 543, column 21: -3.4028234663852886e+38 rounds to inf")

    def test_an_id_beyond_32_bits_does_not_wrap(self, case: Case) -> None:
        case.source({"a": words_of("I64", 5, -1, 4294967301)})
        case.recipe(entry("a", [3], "I32", self.TO_I32))
        case.refused("tensor base:a, index 2: value 4294967301 lies outside [-2147483648, 2147483647]")

    def test_the_largest_and_the_smallest_id_are_kept(self, case: Case) -> None:
        case.source({"a": words_of("I64", 2147483647, -2147483648)})
        case.recipe(entry("a", [2], "I32", self.TO_I32))
        case.converted()
        assert case.words("a") == [0x7FFFFFFF, 0x80000000]

    @pytest.mark.parametrize("word", [0x40200000, 0x7FC00000, 0x7F800001, 0x7F800000, 0x4F000000, 0xCF000001])
    def test_a_number_that_is_no_id_is_not_truncated(self, case: Case, word: int) -> None:
        """2.5, two NaNs, infinity, 2**31 and the number below -(2**31)."""
        case.source({"a": words_of("F32", 0xCF000000, word)})
        case.recipe(entry("a", [2], "I32", self.TO_I32))
        case.refused("tensor base:a, index 1: value ", "which I32 requires")


class TestGroups:
    """C21, C49, and values that no format can store."""

    def test_the_largest_scale_is_stored_exactly(self, case: Case) -> None:
        case.source({"w": filled("BF16", [1, 64], 0, at0=0x48DF)})
        case.recipe(entry("w", [1, 64], Q4, "w"))
        case.converted()
        assert case.grouped("w") == ([[0x7BF7]], [[7] + [0] * 63])

    def test_a_scale_that_overflows_is_named_by_row_and_group(self, case: Case) -> None:
        case.source({"w": filled("BF16", [1, 64], 0, at0=0x48E0)})
        case.recipe(entry("w", [1, 64], Q4, "w"))
        case.refused_by_values("tensor base:w, row 0", "group 0", "not finite in binary16", "458752")

    @pytest.mark.parametrize("numeric", [*GROUPED, FP8])
    @pytest.mark.parametrize(("word", "found"), [(NAN, "NaN"), (INFINITE, "+Inf"), (INFINITE | 0x8000, "-Inf")])
    def test_a_value_that_is_no_number_is_named_by_row_and_column(
        self, case: Case, numeric: str, word: int, found: str
    ) -> None:
        case.source({"w": filled("BF16", [3, 130], ONE, **{f"at{2 * 130 + 129}": word})})
        case.recipe(entry("w", [3, 130], numeric, "w"))
        (message,) = case.refused_by_values("object w: tensor base:w, row 2, column 129", f"value is {found}")
        assert numeric in message

    def test_it_is_named_in_the_rows_of_its_source(self, case: Case) -> None:
        case.source({"a": filled("BF16", [4, 64], ONE), "b": filled("BF16", [6, 64], ONE, at195=NAN)})
        case.recipe(entry("w", [6, 64], Q4, "{concat: [a, {slice: {of: b, span: [2, 4]}}]}"))
        case.refused_by_values("object w: tensor base:b, row 3, column 3", "object row 5")

    def test_a_width_beside_the_group_is_padded_inside_the_layout(self, case: Case) -> None:
        row = [ONE] * 64 + [0x3F00]
        case.source({"w": words_of("BF16", *row, *row, shape=[2, 65])})
        case.recipe(entry("w", [2, 65], Q4, "w"))
        case.converted()
        stored = case.objects()["w"]
        assert stored.shape == (2, 65)
        assert case.grouped("w") == ([[0x3092, 0x2C92]] * 2, [[7] * 65] * 2)
        assert layouts.pack_row_split(Q4, *case.grouped("w")) == stored.payload

    @pytest.mark.parametrize(("rows", "columns", "rule"), [(128, 80, "K = 80"), (100, 64, "N = 100")])
    def test_nvfp4_is_not_padded(self, case: Case, rows: int, columns: int, rule: str) -> None:
        case.source(nvfp4("w", rows, columns))
        case.recipe(entry("w", [rows, columns], NVFP4, "w", words=True), more="ignore: [w.input_global_scale]\n")
        case.refused(rule, "not a multiple of")

    def test_a_vector_has_no_groups(self, case: Case) -> None:
        case.source({"w": filled("BF16", [64], ONE)})
        case.recipe(entry("w", [64], Q4, "w"))
        case.refused("shape [64] has rank 1", "rank 2")


class TestNvfp4Modules:
    """C23, C24, and what a fused parent demands."""

    IGNORE = "ignore: ['*.input_global_scale']\n"

    def test_the_low_nibble_is_the_first_element(self, case: Case) -> None:
        tensors = changed(nvfp4("w"), "w.weight_packed", 0, 0x21)
        tensors = changed(tensors, "w.weight_scale", 0, 0x38) | {"w.weight_global_scale": f32(1.0)}
        case.source(tensors)
        case.recipe(entry("w", [128, 64], NVFP4, "w", words=True), more=self.IGNORE)
        case.converted()
        codes, scales, divisor = natural(case, "w")
        values = [decode_e2m1(code) * decode_e4m3fn(scales[0][0]) / decode_f32(divisor) for code in codes[0][:2]]
        assert [round_bf16(value) for value in values] == [0x3F00, 0x3F80]

    @pytest.mark.parametrize(
        ("dtype", "shape"),
        [
            ("U8", [512]),
            ("U8", [128, 4]),
            ("F8_E4M3", [512]),
            ("F8_E4M3", [128, 8]),
            ("F8_E4M3", [128, 2]),
            ("F8_E4M3", [4, 128]),
            ("BF16", [128, 4]),
        ],
    )
    def test_scales_of_another_form_are_not_reinterpreted(self, case: Case, dtype: str, shape: list[int]) -> None:
        case.source(nvfp4("w") | {"w.weight_scale": filled(dtype, shape, 0x38)})
        case.recipe(entry("w", [128, 64], NVFP4, "w", words=True), more=self.IGNORE)
        case.refused(f"tensor w.weight_scale is {dtype} {shape}; required is F8_E4M3 [128, 4]")

    @pytest.mark.parametrize("field", ["weight_packed", "weight_scale", "weight_global_scale"])
    def test_a_missing_field_is_named(self, case: Case, field: str) -> None:
        tensors = nvfp4("w")
        del tensors[f"w.{field}"]
        case.source(tensors)
        case.recipe(entry("w", [128, 64], NVFP4, "w", words=True), more=self.IGNORE)
        case.refused(f"tensor w.{field} is not in source base")

    def test_a_module_that_is_not_there_is_named(self, case: Case) -> None:
        case.source(nvfp4("w"))
        case.recipe(entry("v", [128, 64], NVFP4, "v", words=True), more="ignore: ['*']\n")
        case.refused("v.weight")

    def test_codes_without_scales_are_no_values(self, case: Case) -> None:
        case.source({"w.weight": filled("F8_E4M3", [4, 8], 0x38)})
        case.recipe(entry("w", [4, 8], Q4, "w.weight"))
        case.refused("base:w.weight is F8_E4M3, not a float source", "its scale w.weight_scale is missing")

    @pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "weight_global_scale"])
    def test_codes_with_scales_are_no_values_either(self, case: Case, scale: str) -> None:
        case.source({"w.weight": filled("F8_E4M3", [4, 8], 0x38), f"w.{scale}": f32(1)})
        case.recipe(entry("w", [4, 8], "BF16", "w.weight"), more=f"ignore: [w.{scale}]\n")
        case.refused("tensor w.weight belongs to a quantized module", f"w.{scale}", "its codes are not values")

    def test_integers_are_no_values(self, case: Case) -> None:
        case.source({"w.weight": ("I8", np.ones((4, 8), np.int8))})
        case.recipe(entry("w", [4, 8], Q4, "w.weight"))
        case.refused("base:w.weight is I8, not a float source")

    @pytest.mark.parametrize("words", [True, False])
    def test_a_module_in_two_forms_is_ambiguous(self, case: Case, words: bool) -> None:
        case.source(nvfp4("m") | {"m.weight": filled("BF16", [128, 64], ONE)})
        if words:
            case.recipe(entry("m", [128, 64], NVFP4, "m", words=True), more="ignore: ['*_scale', m.weight]\n")
        else:
            case.recipe(entry("m", [128, 64], Q4, "m.weight"), more="ignore: ['*_scale', m.weight_packed]\n")
        case.refused("m", "weight_packed", "ambiguous")

    def test_a_fused_parent_moves_codes_and_scales_together(self, case: Case) -> None:
        tensors = nvfp4("a", 256, 128, seed=1) | nvfp4("b", 128, 128, seed=2)
        case.source(tensors)
        fused = "{concat: [{block_rows: {of: a, block: 64, span: [16, 48]}}, {slice: {of: b, span: [0, 128]}}]}"
        case.recipe(entry("w", [256, 128], NVFP4, fused, words=True), more=self.IGNORE)
        case.converted()
        rows = [row for row in range(256) if 16 <= row % 64 < 48]
        (a_codes, a_scales), (b_codes, b_scales) = source_rows(tensors, "a"), source_rows(tensors, "b")
        codes, scales, _ = natural(case, "w")
        assert codes == [a_codes[row] for row in rows] + b_codes
        assert scales == [a_scales[row] for row in rows] + b_scales
        assert case.report()["objects"][0]["word_copy"] is True

    def test_divisors_of_a_fused_parent_agree_in_every_bit(self, case: Case) -> None:
        word = int(nvfp4("a")["a.weight_global_scale"][1][0])
        case.source(changed(nvfp4("a") | nvfp4("b"), "b.weight_global_scale", 0, word ^ 1))
        case.recipe(entry("w", [256, 64], NVFP4, "{concat: [a, b]}", words=True), more=self.IGNORE)
        case.refused(
            "weight divisors of one fused parent differ",
            f"base:a has word 0x{word:08x}, base:b has 0x{word ^ 1:08x}",
        )

    def test_formats_are_not_mixed_in_a_fused_parent(self, case: Case) -> None:
        case.source(nvfp4("a") | fp8("b", 128, 64))
        case.recipe(entry("w", [256, 64], NVFP4, "{concat: [a, b]}", words=True), more=self.IGNORE)
        case.refused(f"base:a is {NVFP4}", f"base:b is {FP8}")

    def test_words_of_one_format_are_not_stored_as_another(self, case: Case) -> None:
        case.source(fp8("b", 128, 64))
        case.recipe(entry("w", [128, 64], NVFP4, "b", words=True))
        case.refused(f"base:b holds {FP8} words, not {NVFP4}")

    @pytest.mark.parametrize(
        ("word", "found"),
        [
            (0x00000000, "0.0"),
            (0x80000000, "-0.0"),
            (0x7F800000, "inf"),
            (0xFF800000, "-inf"),
            (0x7FC00000, "nan"),
            (0xBF800000, "-1.0"),
        ],
    )
    @pytest.mark.parametrize("field", ["weight_global_scale", "input_global_scale"])
    def test_a_divisor_is_positive_and_finite(self, case: Case, field: str, word: int, found: str) -> None:
        """C26."""
        case.source(changed(nvfp4("w"), f"w.{field}", 0, word))
        divisor = "{reshape: {of: w.input_global_scale, to: []}}"
        case.recipe(entry("w", [128, 64], NVFP4, "w", words=True), entry("d", [], "FP32", divisor))
        case.refused(f"tensor w.{field} is {found} (word 0x{word:08x})", "must be finite and positive")

    def test_the_divisor_of_the_input_is_stored_as_it_is(self, case: Case) -> None:
        case.source(nvfp4("w"))
        divisor = "{reshape: {of: w.input_global_scale, to: []}}"
        case.recipe(entry("w", [128, 64], NVFP4, "w", words=True), entry("d", [], "FP32", divisor))
        case.converted()
        assert case.words("d") == [int(f32(24.5)[1][0])]

    def test_it_is_missed_only_when_the_recipe_asks_for_it(self, case: Case) -> None:
        tensors = nvfp4("w")
        del tensors["w.input_global_scale"]
        case.source(tensors)
        weight = entry("w", [128, 64], NVFP4, "w", words=True)
        case.recipe(weight, entry("d", [], "FP32", "{reshape: {of: w.input_global_scale, to: []}}"))
        case.refused("tensor w.input_global_scale is not in source base")
        case.recipe(weight)
        case.converted()

    def test_input_divisors_of_a_fused_parent_agree_in_every_bit(self, case: Case) -> None:
        word = int(f32(24.5)[1][0])
        case.source(changed(nvfp4("a") | nvfp4("b"), "b.input_global_scale", 0, word + 1))
        same = "{same: [a.input_global_scale, b.input_global_scale]}"
        case.recipe(
            entry("w", [256, 64], NVFP4, "{concat: [a, b]}", words=True),
            entry("d", [], "FP32", f"{{reshape: {{to: [], of: {same}}}}}"),
        )
        case.refused(
            f"tensor base:b.input_global_scale, index 0: word 0x{word + 1:08x} differs from 0x{word:08x}",
            "a.input_global_scale",
        )


class TestModelOpt:
    """Multipliers become divisors where the recipe names it, and nowhere else. C26."""

    DIVISOR = "{reshape: {of: {reciprocal: w.input_scale}, to: []}}"

    @pytest.mark.parametrize(
        "config",
        [
            None,
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}},
            {"text_config": {"quantization_config": {"quant_method": "modelopt_fp4", "quantized_layers": {}}}},
        ],
    )
    def test_the_named_conversion_is_exact_and_recorded(self, case: Case, config: dict[str, Any] | None) -> None:
        tensors = modelopt("w")
        case.source(tensors, config=config)
        case.recipe(
            entry("w", [128, 64], NVFP4, "{modelopt: w}", words=True), entry("d", [], "FP32", self.DIVISOR)
        )
        case.converted()
        codes, scales, divisor = natural(case, "w")
        assert (codes, scales) == source_rows({"w.weight_packed": tensors["w.weight"]} | tensors, "w")
        assert divisor == encoders.reciprocal(0x3A2AAAAB)
        assert case.words("d") == [0x41200000]
        weight, input_divisor = case.report()["objects"]
        assert (weight["word_copy"], weight["transform"]) == (False, "modelopt(base:w)")
        assert [source["tensor"] for source in weight["sources"]] == ["w.weight", "w.weight_scale", "w.weight_scale_2"]
        assert input_divisor["transform"] == "reshape(reciprocal(base:w.input_scale), [])"

    def test_a_plain_copy_is_refused_with_the_reason(self, case: Case) -> None:
        case.source(modelopt("w"))
        case.recipe(entry("w", [128, 64], NVFP4, "w", words=True), entry("d", [], "FP32", self.DIVISOR))
        case.refused(
            "module w is ModelOpt NVFP4: weight_scale_2 and input_scale are multipliers where NInfer stores divisors",
            "a conversion, not a word copy; name it: {modelopt: w}",
        )

    @pytest.mark.parametrize("field", ["input_scale", "weight_scale_2"])
    def test_a_multiplier_is_not_stored_as_it_is(self, case: Case, field: str) -> None:
        case.source(modelopt("w"))
        case.recipe(
            entry("w", [128, 64], NVFP4, "{modelopt: w}", words=True), entry("d", [], "FP32", f"w.{field}"),
            more="" if field == "input_scale" else "ignore: [w.input_scale]\n",
        )
        case.refused(f"tensor w.{field} is a ModelOpt multiplier", "name the conversion: reciprocal")

    @pytest.mark.parametrize(
        ("word", "reason"),
        [
            (0x00000000, "must be finite and positive"),
            (0x7F800000, "must be finite and positive"),
            (0x7FC00000, "must be finite and positive"),
            (0xBF800000, "must be finite and positive"),
            (0x00000001, "has no finite reciprocal"),
        ],
    )
    @pytest.mark.parametrize("field", ["weight_scale_2", "input_scale"])
    def test_a_multiplier_without_a_reciprocal_is_named(
        self, case: Case, field: str, word: int, reason: str
    ) -> None:
        case.source(changed(modelopt("w"), f"w.{field}", 0, word))
        case.recipe(
            entry("w", [128, 64], NVFP4, "{modelopt: w}", words=True), entry("d", [], "FP32", self.DIVISOR)
        )
        case.refused(f"tensor w.{field}", f"0x{word:08x}", reason)

    def test_a_config_of_another_method_contradicts_the_name(self, case: Case) -> None:
        case.source(modelopt("w"), config={"quantization_config": {"quant_method": "compressed-tensors"}})
        case.recipe(entry("w", [128, 64], NVFP4, "{modelopt: w}", words=True), more="ignore: [w.input_scale]\n")
        case.refused("tensor w.weight is taken as modelopt", "quantization_config.quant_method: compressed-tensors")

    def test_the_name_does_not_fit_another_kind_of_module(self, case: Case) -> None:
        case.source(nvfp4("w"))
        case.recipe(entry("w", [128, 64], NVFP4, "{modelopt: w}", words=True), more="ignore: ['*']\n")
        case.refused("w.weight")

    def test_multipliers_of_a_fused_parent_agree(self, case: Case) -> None:
        case.source(changed(modelopt("a") | modelopt("b"), "b.weight_scale_2", 0, 0x3A2AAAAB + 8))
        fused = "{concat: [{modelopt: a}, {modelopt: b}]}"
        case.recipe(entry("w", [256, 64], NVFP4, fused, words=True), more="ignore: ['*.input_scale']\n")
        case.refused("divisors of one fused parent differ", "modelopt(base:a)", "modelopt(base:b)")


class TestIdentical:
    """Tensors that must be bit-identical across two checkpoints."""

    def write(self, case: Case, other: tuple[str, Any], rows: int = 40) -> None:
        case.source({"w": filled("BF16", [rows, 50], ONE)})
        case.source({"w": other}, "quantized")
        case.recipe(
            entry("w", [rows, 50], "BF16", "w"),
            sources="{base: {}, quantized: {}}",
            more="conditions: [{same: [w, quantized:w]}]\n",
        )

    def test_the_first_row_and_column_that_differ_are_named(self, case: Case) -> None:
        self.write(case, filled("BF16", [40, 50], ONE, at1523=0x3F81, at1990=0x3F81))
        case.refused_by_values(
            "tensor quantized:w, row 30, column 23: word 0x3f81 differs from 0x3f80 at tensor base:w, row 30, column 23"
        )

    def test_small_tensors_are_compared_while_planning(self, case: Case) -> None:
        self.write(case, filled("BF16", [2, 50], ONE, at77=0x3F81), rows=2)
        case.refused("tensor quantized:w, row 1, column 27: word 0x3f81 differs")

    def test_zeros_of_two_signs_differ(self, case: Case) -> None:
        case.source({"w": filled("BF16", [4], ZERO)})
        case.recipe(entry("w", [4], "BF16", "{same: [w, v]}"))
        case.source({"w": filled("BF16", [4], ZERO), "v": filled("BF16", [4], ZERO, at2=MINUS_ZERO)})
        case.refused("tensor base:v, index 2: word 0x8000 differs from 0x0000")

    def test_equal_tensors_convert(self, case: Case) -> None:
        self.write(case, filled("BF16", [40, 50], ONE))
        case.converted()

    @pytest.mark.parametrize(("dtype", "shape"), [("F16", [40, 50]), ("BF16", [50, 40]), ("BF16", [41, 50])])
    def test_another_dtype_or_shape_is_named_before_any_value(self, case: Case, dtype: str, shape: list[int]) -> None:
        self.write(case, filled(dtype, shape, ONE))
        case.refused(f"quantized:w is {dtype} {shape}", "base:w is BF16 [40, 50]", "bit-identical")


class TestRequirements:
    """Value rules of a recipe."""

    def test_a_small_object_is_checked_while_planning(self, case: Case) -> None:
        case.source({"a": f32(0.5, -1.0)})
        case.recipe(entry("a", [2], "FP32", "a", more=", require: [finite, non-negative]"))
        case.refused("object a: tensor base:a, index 1: value -1.0 is not non-negative", "recipe.yaml:7:")

    def test_a_large_one_in_the_pass_that_reads_it(self, case: Case) -> None:
        case.source({"a": filled("BF16", [100, 10], ONE, at777=0x4140)})
        case.recipe(entry("a", [100, 10], "BF16", "a", more=", require: [{range: [0, 5]}]"))
        case.refused_by_values("tensor base:a, row 77, column 7: value 12.0 is not in [0, 5]")

    def test_ids_that_must_be_distinct_are_compared_across_blocks(self, case: Case) -> None:
        ids = np.arange(700_000, dtype="<i4")
        ids[650_000] = 3
        case.source({"ids": ("I32", ids)})
        case.recipe(entry("ids", [700_000], "I32", "ids", more=", require: [unique]"))
        case.refused_by_values("tensor base:ids, index 650000: value 3 is not unique")


def test_of_several_wrong_values_one_is_named_and_nothing_remains(case: Case) -> None:
    """C27 (c): a failure in the last tensor, after others are complete."""
    good = {f"w{i}": filled("BF16", [64, 64], ONE) for i in range(8)}
    case.source(good | {"bad": filled("BF16", [64, 64], ONE, at4095=NAN)})
    case.recipe(*(entry(name, [64, 64], Q4, name) for name in [*good, "bad"]))
    case.refused_by_values("object bad: tensor base:bad, row 63, column 63", extra=["--threads", "2"])
