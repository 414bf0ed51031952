"""What two recipes do differently, and names that are folded: nothing is lost, layers that are alike are one line.

Source: recipe.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipe_texts import DIGEST, HEAD, OTHER_DIGEST, SMALL, TUNE, load

from ninfer_convert.recipe.diff import difference, difference_text
from ninfer_convert.recipe.folding import folded, number_set, pattern, placed
from ninfer_convert.recipe.loader import load_recipe, shipped_recipes
from ninfer_convert.recipe.model import Recipe
from ninfer_convert.recipe.render import expanded, recipe_text

EMPTY = {"identity": {}, "sources": {}, "ignored": {}, "inputs": {}, "conditions": [], "reordered": []}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def unfolded(text: str) -> list[str]:
    """Returns the names that a folded one stands for, as a shell does, by the words of number_set's docstring."""
    head, brace, rest = text.partition("{")
    if not brace:
        return [text]
    inside, _, tail = rest.partition("}")
    numbers: list[int] = []
    kept, _, removed = inside.partition(" except ")
    for sign, part in ((1, kept), (-1, removed)):
        for run in filter(None, part.split(",")):
            bounds, _, step = run.partition(" step ")
            first, _, last = bounds.partition("..")
            for number in range(int(first), int(last or first) + 1, int(step or 1)):
                numbers.append(number) if sign == 1 else numbers.remove(number)
    return [f"{head}{number}{end}" for number in numbers for end in unfolded(tail)]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([3, 4], "{3,4}"),
        ([0, 1, 2], "{0..2}"),
        ([0, 2], "{0,2}"),
        ([3, 7, 11], "{3..11 step 4}"),
        ([0, 1, 2, 4, 5, 6, 8, 9, 10, 12], "{0..12 except 3..11 step 4}"),
        ([0, 1, 5, 9, 10, 11], "{0,1,5,9..11}"),
    ],
)
def test_numbers_are_written_as_people_say_them(numbers: Sequence[int], text: str) -> None:
    assert number_set(numbers) == text
    assert unfolded(text) == list(map(str, numbers))


@given(st.sets(st.integers(0, 40), min_size=1).map(sorted))
def test_number_sets_lose_nothing(numbers: list[int]) -> None:
    assert unfolded(number_set(numbers)) == list(map(str, numbers))


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)), min_size=1))
def test_folded_names_lose_nothing(numbers: set[tuple[int, int, int]]) -> None:
    names = folded("a/{}/b/{}.{}/c", numbers)
    found = [name for text in names for name in unfolded(text)]
    assert sorted(found) == sorted(f"a/{i}/b/{j}.{k}/c" for i, j, k in numbers)
    assert len(found) == len(numbers)


def test_whole_products_are_one_name() -> None:
    numbers = {(layer, expert) for layer in range(64) for expert in range(8)}
    assert folded("layers/{}/experts/{}", numbers) == ["layers/{0..63}/experts/{0..7}"]
    assert folded("layers/{}/experts/{}", numbers - {(5, 7)}) == [
        "layers/{0..4,6..63}/experts/{0..7}",
        "layers/5/experts/{0..6}",
    ]


@pytest.mark.parametrize(
    ("name", "form", "numbers"),
    [
        ("text/layers/12/mlp/down", "text/layers/{}/mlp/down", (12,)),
        ("h.0.attn.c_attn", "h.{}.attn.c_attn", (0,)),
        ("7", "{}", (7,)),
        ("layer12/q4", "layer12/q4", ()),
        ("a/01/b", "a/01/b", ()),
        ("a/1/2/3/4/5", "a/1/2/3/4/5", ()),
        ("a/{}/1", "a/{ }/{}", (1,)),
    ],
)
def test_only_whole_parts_of_a_name_are_layer_numbers(name: str, form: str, numbers: tuple[int, ...]) -> None:
    assert pattern(name) == (form, numbers)


@pytest.mark.parametrize(
    ("text", "numbers", "expected"),
    [
        ("base:model.layers.3.q", (3,), "base:model.layers.<n>.q"),
        ("concat(a.3.x, b.4.x, axis 3)", (3,), "concat(a.<n>.x, b.4.x, axis 3)"),
        ("slice(a.3, [3, 33))", (3,), "slice(a.<n>, [3, 33))"),
        ("l.2.e.5.w", (2, 5), "l.<n1>.e.<n2>.w"),
        ("same(l.2.e.2.w, l.2.e.2.w)", (2, 2), "same(l.<n1>.e.<n2>.w, l.<n1>.e.<n2>.w)"),
    ],
)
def test_numbers_of_a_name_are_found_in_its_expression(text: str, numbers: tuple[int, ...], expected: str) -> None:
    assert placed(text, numbers) == expected


# -- recipes --------------------------------------------------------------------------------------------------


def require_same(a: Recipe, b: Recipe) -> None:
    found = difference(a, b)
    assert found["equal"] is True
    assert {key: found[key] for key in EMPTY} == EMPTY
    assert (found["only_first"], found["only_second"], found["changed"]) == ([], [], [])


@pytest.mark.parametrize("name", [*shipped_recipes(), "examples/fine-tune", "examples/text-only"])
def test_a_recipe_does_what_it_does_written_out(name: str) -> None:
    recipe = load_recipe(name)
    require_same(recipe, load(recipe_text(expanded(recipe))))


def test_equal_changes_of_layers_are_one_line_with_their_bytes() -> None:
    Path("tune.yaml").write_text(
        TUNE.replace("base.yaml", "qwen3.6-27b/groupwise-int")
        + "change:\n  - {objects: 'text/layers/*/mlp/down', format: Q6G64_F16S}\n"
        + "  - {objects: 'text/layers/?/mlp/gate_up', format: Q5G64_F16S}\n",
        encoding="utf-8",
    )
    base, tune = load_recipe("qwen3.6-27b/groupwise-int"), load_recipe("tune.yaml")
    found = difference(base, tune)
    # Rows of 272 and 80 groups: 32 bytes of low code bits each, 8 for every further bit, 2 of scale.
    q5, q6 = 272 * (32 + 8 + 2) * 5120, 272 * (32 + 16 + 2) * 5120
    up = [80 * (32 + high + 2) * 34816 * 10 for high in (0, 8)]
    assert [(group["objects"], group["changed"], group["bytes"]) for group in found["changed"]] == [
        (["text/layers/{0..9}/mlp/gate_up"], {"format": ["Q4G64_F16S", "Q5G64_F16S"]}, up),
        (["text/layers/{0..63}/mlp/down"], {"format": ["Q5G64_F16S", "Q6G64_F16S"]}, [64 * q5, 64 * q6]),
    ]
    assert found["changed"][1]["names"] == [f"text/layers/{layer}/mlp/down" for layer in range(64)]
    before, after = found["tensor_bytes"]
    assert after - before == 64 * (q6 - q5) + up[1] - up[0]
    text = difference_text(found)
    line = f"  text/layers/{{0..63}}/mlp/down: Q5G64_F16S -> Q6G64_F16S  (64 objects, {64 * q5:,} -> {64 * q6:,} bytes)"
    assert line in text.splitlines()
    assert text.splitlines()[1:3] == ["identity", "  id: qwen3_6_27b-v2 -> tune"]
    assert text.splitlines()[-1] == f"bytes of tensors: {before:,} -> {after:,} (+5.4%)"


def edits(*pairs: tuple[str, str]) -> tuple[Recipe, Recipe]:
    text = SMALL
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return load(SMALL, "a.yaml"), load(text, "b.yaml")


CONSTRUCTS: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("id: small-v1", "id: other", {"identity": {"id": ["small-v1", "other"]}}, ["  id: small-v1 -> other"]),
    (
        "repo: org/small\n", "repo: org/new\n",
        {"sources": {"base.repo": ["org/small", "org/new"]}}, ["  base.repo: org/small -> org/new"],
    ),
    (
        "eps: 1e-6", "eps: 1e-5",
        {"sources": {"base.config.eps": [1e-06, 1e-05]}}, ["  base.config.eps: 1e-06 -> 1e-05"],
    ),
    (
        "tied: false, pad: null", "tied: 0, bad: null",
        {"sources": {"base.config.text_config.tied": [False, 0], "base.config.text_config.pad": ["null", None],
                     "base.config.text_config.bad": [None, "null"]}},
        ["  base.config.text_config.tied: no -> 0", "  base.config.text_config.pad: null -> none"],
    ),
    (
        "dtype: [BF16, F32]", "dtype: BF16",
        {"sources": {"base.dtype": [["BF16", "F32"], ["BF16"]]}}, ["  base.dtype: [BF16, F32] -> [BF16]"],
    ),
    (
        "{language.: <P>,", "{",
        {"sources": {"base.prefix.language.": ["model.", None]}}, ["  base.prefix.language.: model. -> none"],
    ),
    (
        f"ranking: {{sha256: {DIGEST}}}", f"ranking: {{sha256: {OTHER_DIGEST}}}",
        {"inputs": {"ranking.sha256": [DIGEST, OTHER_DIGEST]}}, [f"  ranking.sha256: {DIGEST} -> {OTHER_DIGEST}"],
    ),
    (
        "when: {l: [2]}, names: [<L><l>.z]", "when: {l: [0]}, names: [<L><l>.z]",
        {"ignored": {"base": [["model.layers.2.z"], ["model.layers.0.z"]]}},
        ["ignored tensors of base", "  - model.layers.2.z", "  + model.layers.0.z"],
    ),
    (
        "{same: [a, quantized:a]}", "{same: [a, quantized:b]}",
        {"conditions": [["same(base:a, quantized:a)"], ["same(base:a, quantized:b)"]]},
        ["conditions", "  - same(base:a, quantized:a)", "  + same(base:a, quantized:b)"],
    ),
    (
        "    optional: true\n", "",
        {"changed": [(["mtp/fc"], {"component": ["mtp, optional", "mtp"]}),
                     (["mtp/readme"], {"component": ["mtp, optional", "mtp"]})]},
        ["  mtp/fc: component mtp, optional -> mtp  (520 bytes)", "  mtp/readme: component mtp, optional -> mtp"],
    ),
    (
        "shape: [4, 128]", "shape: [8, 128]",
        {"changed": [(["mtp/fc"], {"shape": [[4, 128], [8, 128]]})]},
        ["  mtp/fc: shape [4, 128] -> [8, 128]  (520 -> 1,040 bytes)"],
    ),
    (
        "value: <L><l>.norm.weight", "value: <L><l>.ln.weight",
        {"changed": [(["text/{0..3}/norm"],
                      {"value": ["base:model.layers.<n>.norm.weight", "base:model.layers.<n>.ln.weight"]})]},
        ["  text/{0..3}/norm: value base:model.layers.<n>.norm.weight -> base:model.layers.<n>.ln.weight"
         "  (4 objects, 1,024 bytes)"],
    ),
    (
        "{range: [-1e1, .5]}", "positive",
        {"changed": [(["text/token_embedding"],
                      {"require": [["finite", "range [-10.0, 0.5]"], ["finite", "positive"]]})]},
        ["  text/token_embedding: require [finite, range [-10.0, 0.5]] -> [finite, positive]  (34,816 bytes)"],
    ),
    (
        "file: tokenizer.json, sha256", "file: spm.json, sha256",
        {"changed": [(["frontend/tokenizer.json"], {"from": [["base:tokenizer.json"], ["base:spm.json"]]})]},
        ["  frontend/tokenizer.json: from [base:tokenizer.json] -> [base:spm.json]"],
    ),
    (
        "{name: head/rows,", "{name: head/chosen,",
        {"only_first": [(["head/rows"], "BF16", [32768, 0])], "only_second": [(["head/chosen"], "BF16", [0, 32768])]},
        ["objects only in the first", "  head/rows: BF16 [128, 128]  (32,768 bytes)",
         "objects only in the second", "  head/chosen: BF16 [128, 128]  (32,768 bytes)"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "members", "lines"), CONSTRUCTS)
def test_everything_a_recipe_says_can_differ(old: str, new: str, members: dict[str, Any], lines: list[str]) -> None:
    a, b = edits((old, new))
    found = difference(a, b)
    assert found["equal"] is False
    for key in ("only_first", "only_second"):
        found[key] = [(group["objects"], group["format"], group["bytes"]) for group in found[key]]
    text = difference_text(difference(a, b)).splitlines()
    found["changed"] = [(group["objects"], group["changed"]) for group in found["changed"]]
    expected = {**EMPTY, "only_first": [], "only_second": [], "changed": [], **members}
    assert {key: found[key] for key in expected} == expected
    assert [line for line in lines if line not in text] == []


def test_a_value_that_becomes_words_is_one_change() -> None:
    value = "format: FP8_E4M3FN_ROW_BF16S, encoder: MAXABS_BF16S_RECIP_E4M3FN_RNE_V1, value: a.weight"
    words = "format: FP8_E4M3FN_ROW_BF16S, words: other:a"
    a, b = (load(f"{HEAD}objects: [{{name: x, shape: [1, 2], {text}}}]\n") for text in (value, words))
    told = "encoder MAXABS_BF16S_RECIP_E4M3FN_RNE_V1 -> none, made of value base:a.weight -> words other:a"
    assert f"  x: {told}  (258 bytes)" in difference_text(difference(a, b)).splitlines()


def test_another_order_is_a_difference() -> None:
    entries = ["{name: x, shape: [1], format: BF16, value: v}", "{name: y, shape: [1], format: BF16, value: w}"]
    a = load(f"{HEAD}objects: [{', '.join(entries)}]\n", "a.yaml")
    b = load(f"{HEAD}objects: [{', '.join(entries[::-1])}]\n", "b.yaml")
    found = difference(a, b)
    assert (found["equal"], found["reordered"]) == (False, ["x", "y"])
    assert "  where the first stores x, the second stores y" in difference_text(found).splitlines()


def test_evidence_and_spelling_are_no_difference() -> None:
    a = load(SMALL, "a.yaml")
    b = load(SMALL.replace("Measured in a test.", "Guessed.").replace("# Every", "# Each"), "b.yaml")
    require_same(a, b)
    nbytes = difference(a, b)["tensor_bytes"]
    assert nbytes[0] == nbytes[1]
    text = f"the recipes do the same: 21 objects, {nbytes[0]:,} bytes of tensors"
    assert difference_text(difference(a, b)) == text


def test_named_objects_are_compared_alone() -> None:
    a, b = edits(("id: small-v1", "id: other"), ("{name: text/ids, shape: [128]", "{name: text/ids, shape: [64]"))
    same = difference(a, b, {"text/0/norm", "head"})
    assert same["equal"] is True
    assert difference_text(same) == "the recipes do the same: 2 objects, 65,792 bytes of tensors"
    found = difference(a, b, {"text/ids"})
    assert [group["changed"] for group in found["changed"]] == [{"shape": [[128], [64]]}]
    assert found["tensor_bytes"] == [512, 256]
    assert "identity" not in found
