"""What a recipe alone contradicts: each refused by the plan, too, whatever the checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_tools import Case, entry, run_cli, words_of
from recipe_texts import GROUPED, HEAD, TUNE

from ninfer_convert.plan.foresight import contradictions
from ninfer_convert.recipe.files import recipes_directory
from ninfer_convert.recipe.loader import read_recipe
from ninfer_convert.recipe.problems import Problems

DIRECTORY = recipes_directory()
SHIPPED = sorted(path.relative_to(DIRECTORY).with_suffix("").as_posix() for path in DIRECTORY.rglob("*.yaml"))


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.chdir(tmp_path)
    return Case(Path())


def foreseen(name: str = "recipe.yaml") -> list[str]:
    return [f"{mark}: {text}" for mark, text in contradictions(read_recipe(name, Problems()))]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_and_examples_contradict_nothing(name: str) -> None:
    assert foreseen(name) == []


SHORT = "{shortlist: {counts: n, candidates: 9, take: 3, special: s}}"
TO32 = "{reshape: {of: a, to: [4, 8]}}"

WRONG = [
    # bounds and sizes, told at the value
    ([4, 8], "BF16", "{slice: {of: a, span: [0, 3]}}",
     "object x: the value has size 3 along axis 0; its shape is [4, 8]"),
    ([4, 8], "BF16", "{slice: {of: a, span: [0, 7], axis: 1}}",
     "object x: the value has size 7 along axis 1; its shape is [4, 8]"),
    ([4], "BF16", "{slice: {of: a, span: [0, 4], axis: 1}}",
     "object x: the value has size 4 along axis 1; its shape is [4]"),
    ([4, 8], "BF16", "{reshape: {of: a, to: [8, 4]}}",
     "object x: the value has size 8 along axis 0; its shape is [4, 8]"),
    ([32], "BF16", TO32,
     "object x: the value has rank 2; its shape is [32]"),
    ([8, 4], "BF16", "{transpose: {of: {slice: {of: a, span: [0, 5]}}, axes: [1, 0]}}",
     "object x: the value has size 5 along axis 1; its shape is [8, 4]"),
    ([4, 8], "BF16", f"{{transpose: {{of: {TO32}, axes: [0, 2, 1]}}}}",
     "axes [0, 2, 1] are no permutation of those of an operand of rank 2"),
    ([8, 4], "BF16", f"{{slice: {{of: {TO32}, span: [3, 5]}}}}",
     "span [3, 5) lies outside axis 0 of size 4"),
    ([8, 4], "BF16", f"{{slice: {{of: {TO32}, span: [0, 1], axis: 2}}}}",
     "axis 2 does not exist in an operand of rank 2"),
    ([8, 4], "BF16", f"{{reshape: {{of: {TO32}, to: [9, 4]}}}}",
     "the operand has 32 elements; shape [9, 4] holds 36"),
    ([4, 8], "BF16", f"{{block_rows: {{of: {TO32}, block: 3, span: [0, 1]}}}}",
     "4 rows do not divide into blocks of 3 rows"),
    ([3, 8], "BF16", f"{{block_rows: {{of: {TO32}, block: 2, span: [0, 1]}}}}",
     "object x: the value has size 2 along axis 0; its shape is [3, 8]"),
    ([9, 8], "BF16", f"{{concat: [{TO32}, {TO32}]}}",
     "object x: the value has size 8 along axis 0; its shape is [9, 8]"),
    ([8, 9], "BF16", f"{{concat: [{TO32}, a]}}",
     "object x: the value has size 8 along axis 1; its shape is [8, 9]"),
    ([8, 8], "BF16", f"{{concat: [{TO32}, {{reshape: {{of: a, to: [4, 7]}}}}]}}",
     "concat of sizes 8 and 7 along axis 1; they must be equal"),
    ([8, 8], "BF16", f"{{concat: [{TO32}, {{reshape: {{of: a, to: [4]}}}}]}}",
     "concat of ranks 2 and 1; operands must have one rank"),
    ([8, 8], "BF16", f"{{concat: {{of: [{TO32}, a], axis: 2}}}}",
     "axis 2 does not exist in an operand of rank 2"),
    ([4, 8], "BF16", f"{{same: [a, {TO32}, {{slice: {{of: a, span: [0, 5]}}}}]}}",
     "same of sizes 4 and 5 along axis 0; they must be equal"),
    ([4, 8], "BF16", f"{{gather: {{of: a, ids: {SHORT}}}}}",
     "object x: the value has size 3 along axis 0; its shape is [4, 8]"),
    ([4, 8], "BF16", "{gather: {of: a, ids: {reshape: {of: i, to: [2, 2]}}}}",
     "ids have rank 2; required is a vector of I32 or I64"),
    ([2], "I32", SHORT,
     "object x: the value has size 3 along axis 0; its shape is [2]"),
    # dtypes, at the format or the node
    ([4, 8], "FP32", "a",
     "object x: the value is BF16; format FP32 takes F32; name the conversion: cast to FP32, "
     "rule exact"),
    ([4, 8], "I32", "a",
     "object x: the value is BF16; format I32 takes I32; name the conversion: cast to I32, rule "
     "checked"),
    ([4, 8], "BF16", "wide:f",
     "object x: the value is F32; format BF16 takes BF16; name the conversion: cast to "
     "BF16, rule nearest-even"),
    ([4, 8], "BF16", "ints:i",
     "object x: the value is I64; format BF16 takes BF16; no cast leads there"),
    ([4, 64], "Q4G64_F16S", "ints:i",
     "object x: the value is I64; the encoder takes BF16, F16, F32"),
    ([4, 8], "BF16", "{cast: {of: a, to: BF16, rule: nearest-even}}",
     "the value is BF16 already; remove the cast to BF16"),
    ([4, 8], "FP32", "{cast: {of: wide:f, to: FP32, rule: exact}}",
     "the value is F32 already; remove the cast to FP32"),
    ([4, 8], "FP32", "{cast: {of: ints:i, to: FP32, rule: exact}}",
     "there is no cast from I64 to FP32"),
    ([4, 8], "BF16", "{cast: {of: a, to: FP32, rule: exact}}",
     "object x: the value is F32; format BF16 takes BF16; "
     "name the conversion: cast to BF16, rule nearest-even"),
    ([4, 8], "BF16", "{concat: [a, wide:f]}",
     "concat of BF16 and F32; operands must share one dtype"),
    ([4, 8], "BF16", "{same: [a, wide:f]}",
     "same of BF16 and F32; operands must share one dtype"),
    ([], "FP32", "{reciprocal: a}",
     "reciprocal of BF16; required is one F32 scalar"),
    ([4, 8], "BF16", "{gather: {of: a, ids: wide:f}}",
     "ids are F32; required is a vector of I32 or I64"),
    ([4, 8], "FP32", "{tied: {head: a, embedding: b}}",
     "object x: the value is BF16; format FP32 takes F32; name the "
     "conversion: cast to FP32, rule exact"),
]
SOURCES = "{base: {dtype: BF16}, wide: {dtype: F32}, ints: {dtype: I64}}"


@pytest.mark.parametrize(("shape", "numeric", "value", "told"), WRONG)
def test_a_contradiction_is_told_at_its_place_and_refused_by_the_plan(
    shape: list[int], numeric: str, value: str, told: str, case: Case
) -> None:
    case.source({name: words_of("BF16", *range(32), shape=[4, 8]) for name in ("a", "b")})
    case.source({"f": words_of("F32", *range(32), shape=[4, 8])}, "wide")
    case.source({"i": words_of("I64", *range(32), shape=[4, 8])}, "ints")
    case.recipe(entry("x", shape, numeric, value), sources=SOURCES, more="inputs: {n: {}}\n")
    (found,) = foreseen()
    place, message = found[: found.index(": ")], found[found.index(": ") + 2 :]
    assert message == told
    line = case.recipe_path.read_text(encoding="utf-8").splitlines()[7]
    at = int(place.split(":")[2])
    assert place == f"recipe.yaml:8:{at}"
    key = "format" if "takes" in told and message.startswith("object") else None
    if key is not None:
        assert line[at - 1 :].startswith(numeric)
    else:
        assert at > line.index("value: ")
    case.input("n", bytes(9 * 8))
    assert case.plan().code == 1


def test_what_is_not_stated_is_not_guessed(case: Case) -> None:
    rows = ["a", "{slice: {of: a, span: [0, 4]}}", "{concat: [a, b]}", "{block_rows: {of: a, block: 9, span: [0, 1]}}"]
    rows += ["{transpose: {of: a}}", "{same: [a, other:b]}", "{tied: {head: a, embedding: b}}"]
    case.recipe(*(entry(f"x{i}", [4, 8], "FP32", row) for i, row in enumerate(rows)), sources="{base: {}, other: {}}")
    assert foreseen() == []
    # One of several stated dtypes may be the right one.
    cast = entry("x", [4, 8], "FP32", "{cast: {of: a, to: FP32, rule: exact}}")
    case.recipe(cast, sources="{base: {dtype: [F32, F16]}}")
    assert foreseen() == []


def test_copies_of_words_are_matrices(case: Case) -> None:
    case.recipe(entry("x", [128, 64], "NVFP4", "{slice: {of: m, span: [0, 256]}}", words=True))
    assert foreseen() == ["recipe.yaml:7:56: object x: the value has size 256 along axis 0; its shape is [128, 64]"]


def test_one_place_in_a_loop_is_told_once(case: Case) -> None:
    value = "{slice: {of: a<l>, span: [0, 5]}}"
    case.recipe(f"{{for: {{l: [0, 1, 2]}}, objects: [{{name: <l>, shape: [4], format: BF16, value: {value}}}]}}")
    assert foreseen() == ["recipe.yaml:7:83: object 0: the value has size 5 along axis 0; its shape is [4]"]


def test_conditions_are_looked_at_too(case: Case) -> None:
    condition = "{same: [{reshape: {of: a, to: [2]}}, {reshape: {of: a, to: [3]}}]}"
    case.recipe(entry("x", [2], "BF16", "a"), more=f"conditions: [{condition}]\n")
    assert foreseen() == ["recipe.yaml:6:15: same of sizes 2 and 3 along axis 0; they must be equal"]


def test_a_change_is_told_where_it_is_made(case: Case) -> None:
    Path("base.yaml").write_text(
        f"{HEAD.replace('{base: {}, other: {}}', '{base: {dtype: BF16}}')}objects:\n"
        f"  - {entry('x', [4, 64], 'BF16', '{slice: {of: a, span: [0, 4]}}')}\n",
        encoding="utf-8",
    )
    for change, told in (
        ("shape: [5, 64]", "tune.yaml:4:30: object x: the value has size 4 along axis 0; its shape is [5, 64]"),
        ("format: FP32", "tune.yaml:4:31: object x: the value is BF16; format FP32 takes F32; name the conversion: "
         "cast to FP32, rule exact"),
        ("value: {slice: {of: a, span: [0, 5]}}", "tune.yaml:4:31: object x: the value has size 5 along axis 0; its "
         "shape is [4, 64] (base.yaml:7:22)"),
    ):  # fmt: skip
        Path("tune.yaml").write_text(f"{TUNE}change: [{{objects: x, {change}}}]\n", encoding="utf-8")
        assert foreseen("tune.yaml") == [told]
    Path("tune.yaml").write_text(
        f"{TUNE}change: [{{objects: x, format: Q4G64_F16S, encoder: {GROUPED}}}]\n", encoding="utf-8"
    )
    assert foreseen("tune.yaml") == []


def test_a_tensor_is_used_or_ignored(case: Case) -> None:
    case.recipe(
        entry("x", [2], "BF16", "a.b"),
        entry("y", [2], "BF16", "{same: [c, other:d]}"),
        entry("z", [2], "BF16", "{tied: {head: lm_head, embedding: e}}"),
        "{component: mtp, optional: true, objects: [{name: m, shape: [2], format: BF16, value: mtp.x}]}",
        sources="{base: {}, other: {}}",
        more="ignore: {base: [a.*, lm_head, 'mtp.*', d], other: [c, '?']}\n",
    )
    assert foreseen() == [
        "recipe.yaml:6:17: ignore 'a.*' matches a.b, which object x uses",
        "recipe.yaml:6:55: ignore '?' matches d, which object y uses",
    ]


def test_recipe_check_tells_it_and_headers_take_its_place(case: Case) -> None:
    case.source({"a": words_of("BF16", 1, 2)})
    case.recipe(entry("x", [2], "FP32", "a"), sources="{base: {dtype: BF16}}")
    ran = run_cli("recipe", "check", "recipe.yaml")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.splitlines() == [
        "recipe.yaml:7:35: error: object x: the value is BF16; format FP32 takes F32; name the conversion: cast to "
        "FP32, rule exact",
        "    7 |   - {name: x, shape: [2], format: FP32, value: a}",
        "      |                                   ^~~~",
        "recipe.yaml: 1 object, 1 source: 1 error",
    ]
    ran = run_cli("recipe", "check", "recipe.yaml", "--source", "base")
    assert ran.out.startswith("recipe.yaml:7:35: error: object x: base:a is BF16; format FP32 takes F32; ")
    assert ran.out.endswith("recipe.yaml: 1 object, 1 source: 1 error\n")
