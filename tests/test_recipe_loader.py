"""Recipes from YAML: what every construct means, where recipes are found, what their digest covers.

Source: recipe.md, duties 1 to 6; cli.md, RECIPE.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from recipe_texts import COMMIT, DIGEST, FP8, FP8_ROW, GROUPED, HEAD, SMALL, TUNE, load, resources, tensors

from ninfer_convert.errors import OutputError, RecipeError
from ninfer_convert.recipe import files as recipe_files
from ninfer_convert.recipe.files import recipes_directory
from ninfer_convert.recipe.loader import find_recipe, load_recipe, shipped_recipes
from ninfer_convert.recipe.sections import SAFETENSORS_DTYPES
from ninfer_convert.source.header import DTYPE_BITS


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty directory the working directory, so that messages begin with bare file names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def value_of(expression: str, values: str = "") -> str:
    """Returns what one value expression is read as."""
    text = f"{HEAD}values: {{{values}}}\nobjects: [{{name: x, shape: [1], format: BF16, value: {expression}}}]\n"
    return str(tensors(load(text))["x"].value)


# --- a small recipe, written out ------------------------------------------------------------------------------


def test_a_small_recipe_is_written_out_in_stored_order(here: Path) -> None:
    recipe = load(SMALL)
    assert [
        (spec.name, list(spec.shape), spec.format, spec.layout, spec.encoder, spec.words, str(spec.value))
        for spec in tensors(recipe).values()
    ] == [
        ("text/token_embedding", [256, 128], "W8G32_F16S", "row-split-k128-v1", GROUPED, False,
         "base:model.embed_tokens.weight"),
        ("text/ids", [128], "I32", "contiguous-le-v1", None, False, "shortlist(ranking, 200 candidates, take 128)"),
        ("text/0/norm", [128], "BF16", "contiguous-le-v1", None, False, "base:model.layers.0.norm.weight"),
        ("text/0/qkv", [256, 64], "NVFP4", "blockscale-k16-m128x4-v1", None, True,
         "concat(quantized:model.layers.0.q, slice(quantized:model.layers.0.k, [0, 64)))"),
        ("text/1/norm", [128], "BF16", "contiguous-le-v1", None, False, "base:model.layers.1.norm.weight"),
        ("text/1/qk", [128, 128], "Q4G64_F16S", "row-split-k128-v1", GROUPED, False,
         "concat(block_rows(base:model.layers.1.q.weight, block 8, [0, 4)), base:model.layers.1.k.weight)"),
        ("text/2/norm", [128], "BF16", "contiguous-le-v1", None, False, "base:model.layers.2.norm.weight"),
        ("text/3/norm", [128], "BF16", "contiguous-le-v1", None, False, "base:model.layers.3.norm.weight"),
        ("text/3/qk", [128, 128], "Q4G64_F16S", "row-split-k128-v1", GROUPED, False,
         "concat(block_rows(base:model.layers.3.q.weight, block 8, [0, 4)), base:model.layers.3.k.weight)"),
        ("text/3/qkv", [256, 64], "NVFP4", "blockscale-k16-m128x4-v1", None, True,
         "concat(quantized:model.layers.3.q, slice(quantized:model.layers.3.k, [0, 64)))"),
        ("pair/2/5", [], "FP32", "contiguous-le-v1", None, False, "reciprocal(quantized:x.5)"),
        ("pair/2/6", [], "FP32", "contiguous-le-v1", None, False, "reciprocal(quantized:x.6)"),
        ("mtp/fc", [4, 128], FP8, "row-scale-v1", FP8_ROW, False, "same(base:mtp.fc.weight, quantized:mtp.fc.weight)"),
        ("head", [256, 128], "BF16", "contiguous-le-v1", None, False,
         "tied(base:lm_head.weight, base:model.embed_tokens.weight)"),
        ("head/rows", [128, 128], "BF16", "contiguous-le-v1", None, False,
         "gather(base:lm_head.weight, shortlist(ranking, 200 candidates, take 128))"),
        ("head/conv", [4, 8], "FP32", "contiguous-le-v1", None, False,
         "cast(transpose(reshape(base:conv, [8, 4]), [1, 0]), FP32, exact)"),
        ("head/odd", [2], "BF16", "contiguous-le-v1", None, False, "cast(quantized:$a:b, BF16, nearest-even)"),
    ]  # fmt: skip
    assert [(spec.name, [(o.source, o.file, o.input, o.member) for o in spec.origins], spec.sha256)
            for spec in resources(recipe).values()] == [
        ("frontend/tokenizer.json", [("base", "tokenizer.json", None, None)], DIGEST),
        ("frontend/ranking", [("base", None, "ranking", None)], None),
        ("frontend/chat_template.jinja", [("base", "chat_template.jinja", None, None),
                                          ("quantized", "tokenizer_config.json", None, "chat_template")], None),
        ("mtp/readme", [("quantized", "docs/readme.md", None, None)], None),
    ]  # fmt: skip


def test_the_sections_around_the_objects_are_read(here: Path) -> None:
    recipe = load(SMALL)
    assert (recipe.id, recipe.model_id, recipe.weights_id, recipe.path) == ("small-v1", "small", "mixed", "recipe.yaml")
    assert [([glob for glob, _mark in entry.objects], entry.text) for entry in recipe.evidence] == [
        (["text/*", "head/[cr]*"], "Measured in a test."),
        (["*"], "The rest is like it."),
    ]
    base, quantized = recipe.sources.values()
    assert (base.name, base.repo, base.revision, base.dtypes) == ("base", "org/small", COMMIT, ("BF16", "F32"))
    assert base.config == {
        "model_type": "small",
        "eps": 1e-6,
        "text_config": {"vocab": 256, "kinds": ["full", "model.x"], "tied": False, "pad": None, "bos": "<s>"},
    }
    assert base.prefixes == {"language.": "model.", "": "top."}
    looped = ["model.layers.0.?", "model.layers.2.?", "model.layers.2.z"]
    assert [glob for glob, _mark in base.ignore] == ["model.visual.*", "lm_head.bias", *looped]
    assert (quantized.repo, quantized.revision, quantized.dtypes, quantized.config) == ("org/small-nvfp4", None, (), {})
    assert [(glob, mark.line, mark.column) for glob, mark in quantized.ignore] == [("*.k_scale", 99, 15)]
    assert {name: spec.sha256 for name, spec in recipe.inputs.items()} == {"ranking": DIGEST}
    assert [str(condition.value) for condition in recipe.conditions] == [
        "same(base:a, quantized:a)",
        "same(base:model.layers.2.b, quantized:model.layers.2.b)",
    ]
    assert recipe.optional_components == {"mtp"}
    assert [spec.name for spec in recipe.objects if spec.component == "mtp"] == ["mtp/fc", "mtp/readme"]


def test_requirements_are_read_with_their_bounds(here: Path) -> None:
    made = tensors(load(SMALL))
    both = [made[name].requirements for name in ("text/token_embedding", "text/ids")]
    assert [[(one.rule, one.low, one.high) for one in rules] for rules in both] == [
        [("finite", None, None), ("range", -10.0, 0.5)],
        [("unique", None, None), ("range", 0.0, 256.0)],
    ]


def test_a_tensor_knows_where_it_and_its_leaves_are_written(here: Path) -> None:
    made = tensors(load(SMALL))["text/3/qk"]
    assert (made.mark.file, made.mark.line, made.mark.column) == ("recipe.yaml", 51, 13)
    block_rows, k = made.value.of  # type: ignore[union-attr, misc]
    assert [(node.mark.line, node.mark.column) for node in (block_rows, k)] == [(45, 11), (55, 34)]


def test_a_recipe_can_be_pickled_and_compares_by_meaning(here: Path) -> None:
    recipe = load(SMALL)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert load("# moved down\n" + SMALL).objects == recipe.objects


# --- constructs, one by one -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "members"),
    [
        ("{from: 2, through: 5}", "2345"),
        ("{from: 2, through: 2}", "2"),
        ("{from: 1, through: 8, step: 3}", "147"),
        ("{from: 1, through: <top>}", "1234"),
        ("[7, 3, <top>]", "347"),
        ("low", "012"),
        ("{all: low}", "012"),
        ("{all: low, except: [1]}", "02"),
        ("{all: [low, few]}", "01259"),
        ("{all: [low, {from: 4, through: 5}, [9]], except: [few, [4]]}", "01"),
        ("{all: {from: 0, through: 3}, except: {all: low, except: [0]}}", "03"),
        ("later", "89"),
    ],
)
def test_sets_have_an_algebra_and_loops_run_upward(spelling: str, members: str, here: Path) -> None:
    text = HEAD + "names: {top: 4}\nsets: {low: {from: 0, through: 2}, few: [9, 5, 2], later: tail, tail: [8, 9]}\n"
    text += f"objects: [{{for: {{l: {spelling}}}, objects: [{{name: <l>, shape: [], format: I32, value: x}}]}}]\n"
    assert "".join(spec.name for spec in load(text).objects) == members


def test_several_loop_variables_are_nested_in_order(here: Path) -> None:
    entry = "{name: <a>/<b>, shape: [], format: I32, value: x}"
    text = f"{HEAD}objects: [{{for: {{b: [1, 2], a: [3, 4]}}, objects: [{entry}]}}]"
    assert [spec.name for spec in load(text).objects] == ["3/1", "4/1", "3/2", "4/2"]


def test_when_needs_every_variable_to_be_in_its_set(here: Path) -> None:
    text = f"""{HEAD}objects:
  - for: {{a: [1, 2], b: [1, 2]}}
    objects:
      - when: {{a: [1], b: [2]}}
        objects: [{{name: <a>/<b>, shape: [], format: I32, value: x}}]
"""
    assert [spec.name for spec in load(text).objects] == ["1/2"]


def test_values_have_the_scope_of_their_block(here: Path) -> None:
    text = f"""{HEAD}values: {{x: outer, y: $x}}
objects:
  - for: {{l: [0, 1]}}
    values: {{x: inner.<l>, z: {{concat: [$x, $y]}}}}
    objects:
      - {{name: a<l>, shape: [], format: I32, value: $z}}
      - when: {{l: [1]}}
        values: {{x: innermost}}
        objects: [{{name: b<l>, shape: [], format: I32, value: {{concat: [$x, $z]}}}}]
  - {{name: c, shape: [], format: I32, value: $x}}
"""
    assert [str(spec.value) for spec in tensors(load(text)).values()] == [
        "concat(base:inner.0, base:outer)",
        "concat(base:inner.1, base:outer)",
        "concat(base:innermost, concat(base:inner.1, base:outer))",
        "base:outer",
    ]


def test_a_named_value_can_be_used_as_tensor_and_as_module(here: Path) -> None:
    text = f"""{HEAD}values: {{q: other:m, head: {{slice: {{of: $q, span: [0, 128]}}}}}}
objects:
  - {{name: a, shape: [128, 64], format: NVFP4, words: $head}}
  - {{name: b, shape: [128, 64], format: BF16, value: $head}}
"""
    assert [str(spec.value) for spec in tensors(load(text)).values()] == ["slice(other:m, [0, 128))"] * 2


@pytest.mark.parametrize(
    ("expression", "read"),
    [
        ("a.b", "base:a.b"),
        ("other:a", "other:a"),
        ("'a,b'", "base:a,b"),
        ("zz:a", "base:zz:a"),
        ("{tensor: {name: 'other:a'}}", "base:other:a"),
        ("{tensor: {name: $a, source: other}}", "other:$a"),
        ("'a<b'", "base:a<b"),
        ("{slice: {of: a, span: [1, 3]}}", "slice(base:a, [1, 3))"),
        ("{slice: {of: a, span: [1, 3], axis: 2}}", "slice(base:a, [1, 3), axis 2)"),
        ("{block_rows: {of: a, block: 4, span: [2, 4]}}", "block_rows(base:a, block 4, [2, 4))"),
        ("{reshape: {of: a, to: []}}", "reshape(base:a, [])"),
        ("{transpose: {of: a, axes: [2, 0, 1]}}", "transpose(base:a, [2, 0, 1])"),
        ("{transpose: {of: a}}", "transpose(base:a, [1, 0])"),
        ("{concat: [a, b, c]}", "concat(base:a, base:b, base:c)"),
        ("{concat: {of: [a, b], axis: 1}}", "concat(base:a, base:b, axis 1)"),
        ("{cast: {of: a, to: FP32, rule: exact}}", "cast(base:a, FP32, exact)"),
        ("{cast: {of: a, to: BF16, rule: nearest-even}}", "cast(base:a, BF16, nearest-even)"),
        ("{cast: {of: a, to: I32, rule: checked}}", "cast(base:a, I32, checked)"),
        ("{gather: {of: a, ids: b}}", "gather(base:a, base:b)"),
        ("{same: [a, other:a]}", "same(base:a, other:a)"),
        ("{tied: {head: a, embedding: other:b}}", "tied(base:a, other:b)"),
        ("{reciprocal: {reshape: {of: a, to: []}}}", "reciprocal(reshape(base:a, []))"),
    ],
)
def test_expressions_are_spelled_as_a_text_or_a_mapping_with_one_key(expression: str, read: str, here: Path) -> None:
    assert value_of(expression) == read


@pytest.mark.parametrize(
    ("expression", "read"),
    [
        ("m", "base:m"),
        ("{modelopt: other:m}", "modelopt(other:m)"),
        ("{slice: {of: m, span: [0, 8]}}", "slice(base:m, [0, 8))"),
        ("{block_rows: {of: m, block: 4, span: [2, 4]}}", "block_rows(base:m, block 4, [2, 4))"),
        ("{concat: [m, {modelopt: n}]}", "concat(base:m, modelopt(base:n))"),
        ("{gather: {of: m, ids: {transpose: {of: i}}}}", "gather(base:m, transpose(base:i, [1, 0]))"),
        ("{same: [m, other:m]}", "same(base:m, other:m)"),
    ],
)
@pytest.mark.parametrize("numeric", ["NVFP4", FP8])
def test_words_take_moves_of_whole_rows(expression: str, read: str, numeric: str, here: Path) -> None:
    text = f"{HEAD}objects: [{{name: x, shape: [128, 64], format: {numeric}, words: {expression}}}]\n"
    made = tensors(load(text))["x"]
    assert (str(made.value), made.words, made.encoder) == (read, True, None)


def test_a_merge_key_with_an_override_gives_two_objects(here: Path) -> None:
    text = HEAD + "objects:\n  - &a {name: x, shape: [4], format: BF16, value: v}\n  - {<<: *a, name: y, shape: [5]}\n"
    assert [(spec.name, spec.shape) for spec in tensors(load(text)).values()] == [("x", (4,)), ("y", (5,))]


def test_a_recipe_that_loses_nothing_needs_no_evidence(here: Path) -> None:
    text = HEAD.replace("evidence: none\n", "") + "objects: [{name: x, shape: [4], format: BF16, value: v}]"
    assert load(text).evidence == ()


def test_a_single_source_takes_a_plain_list_of_ignored_tensors(here: Path) -> None:
    text = HEAD.replace(", other: {}", "") + "objects: [{resource: x, file: y}]\nignore: [a.*, b]\n"
    assert [glob for glob, _mark in load(text).sources["base"].ignore] == ["a.*", "b"]


IGNORING = HEAD + "names: {P: model.}\nsets: {few: [0, 4], odd: {from: 1, through: 5, step: 2}}\n"


@pytest.mark.parametrize(
    ("entry", "globs"),
    [
        ("{for: {l: few}, names: [<P><l>.w]}", ["model.0.w", "model.4.w"]),
        ("{for: {l: [7]}, names: ['<P><l>.[qk].*', <P><l>.o]}", ["model.7.[qk].*", "model.7.o"]),
        ("{for: {l: few, b: [2, 3]}, names: [<l>.<b>]}", ["0.2", "0.3", "4.2", "4.3"]),
        ("{for: {l: few}, names: [{for: {b: [9]}, names: [<l>.<b>]}, <l>.c]}", ["0.9", "0.c", "4.9", "4.c"]),
        (
            "{for: {l: {all: [few, odd]}}, names: [{when: {l: odd}, names: [<l>.odd]}, <l>.any]}",
            ["0.any", "1.odd", "1.any", "3.odd", "3.any", "4.any", "5.odd", "5.any"],
        ),
    ],
)
def test_ignored_tensors_may_be_listed_by_loops(entry: str, globs: list[str], here: Path) -> None:
    ignore = f"objects: [{{resource: x, file: y}}]\nignore: {{other: [first, {entry}, last]}}\n"
    sources = load(IGNORING + ignore).sources
    assert [glob for glob, _mark in sources["other"].ignore] == ["first", *globs, "last"]
    assert sources["base"].ignore == ()
    plain = IGNORING.replace(", other: {}", "") + ignore.replace("{other: [", "[").replace("last]}", "last]")
    assert [glob for glob, _mark in load(plain).sources["base"].ignore] == ["first", *globs, "last"]


def test_a_glob_of_a_loop_knows_where_it_is_written(here: Path) -> None:
    text = IGNORING + "objects: [{resource: x, file: y}]\nignore:\n  base:\n    - for: {l: few}\n      names: [<l>]\n"
    assert [(glob, str(mark)) for glob, mark in load(text).sources["base"].ignore] == [
        ("0", "recipe.yaml:12:15"),
        ("4", "recipe.yaml:12:15"),
    ]


def test_the_dtypes_of_a_recipe_are_those_of_safetensors() -> None:
    assert set(SAFETENSORS_DTYPES) == set(DTYPE_BITS)


# --- files, names, digests ------------------------------------------------------------------------------------


def test_shipped_recipes_are_found_by_name() -> None:
    names = shipped_recipes()
    assert names == sorted(names)
    assert not any(name.startswith("examples/") for name in names)
    assert {"qwen3.6-27b/groupwise-int", "qwen3.6-27b/nvfp4", "qwen3.8-27b/nvfp4"} <= set(names)
    examples = ["examples/fine-tune", "examples/text-only"]
    for name in [*names, *examples]:
        path = find_recipe(name)
        assert path.is_file()
        assert path.is_relative_to(recipes_directory())


def test_an_installed_package_has_its_recipes_inside(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "recipes").mkdir()
    (here / "recipes" / "beside.yaml").write_text(SMALL)
    monkeypatch.setattr(recipe_files, "__file__", str(here / "ninfer_convert" / "recipe" / "files.py"))
    assert shipped_recipes() == ["beside"]
    inside = here / "ninfer_convert" / "recipes" / "family"
    inside.mkdir(parents=True)
    (inside / "inside.yaml").write_text(SMALL)
    assert shipped_recipes() == ["family/inside"]
    assert load_recipe("family/inside").id == "small-v1"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qwen3.6-27b/groupwise_int", "; nearest is 'qwen3.6-27b/groupwise-int'"),
        ("nvfp4", "; nearest is 'qwen3.6-27b/nvfp4' or 'qwen3.8-27b/nvfp4'"),
        ("../recipes/qwen3.6-27b/nvfp4", "; nearest is 'qwen3.6-27b/nvfp4'"),
        ("fine-tune", "; nearest is 'examples/fine-tune'"),
        (
            "zzzzzzzzzz",
            "; shipped: demo, minilm-l6-v2, qwen3.6-27b/groupwise-int, qwen3.6-27b/nvfp4, qwen3.8-27b/groupwise-int, "
            "qwen3.8-27b/nvfp4",
        ),
    ],
)
def test_an_unknown_name_is_told_the_nearest(name: str, hint: str, here: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert f"no recipe file and no shipped recipe is named '{name}'{hint}" in str(caught.value)


def test_a_directory_in_place_of_a_recipe_is_told_to_be_one(here: Path) -> None:
    Path("gptx").mkdir()
    told = (
        "no shipped recipe is named 'gptx', and here it is a directory; give a recipe file, which `recipe init` drafts "
        "for a checkpoint"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe("gptx")
    assert str(caught.value) == told
    # One that is called like a recipe is in nobody's way.
    Path("demo").mkdir()
    assert load_recipe("demo").id == load_recipe(recipes_directory() / "demo.yaml").id


def test_a_path_wins_over_a_name_and_may_have_any_suffix(here: Path) -> None:
    Path("nvfp4").write_text(SMALL)
    assert load_recipe("nvfp4").id == "small-v1"
    assert load_recipe(Path("nvfp4")).id == "small-v1"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing.yaml", "nothing.yaml: the recipe cannot be read: No such file or directory"),
        (Path("nothing"), "nothing: the recipe cannot be read: No such file or directory"),
        (Path("."), ".: the recipe cannot be read: Is a directory"),
        ("a\nb.yaml", "a\\nb.yaml: the recipe cannot be read: No such file or directory"),
        ("qwen3.6-27b/nvfp4.yaml", "No such file or directory (the shipped recipe is named 'qwen3.6-27b/nvfp4')"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(path: Any, message: str, here: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert message in str(caught.value)


def test_a_recipe_that_the_system_does_not_let_us_read_is_an_input_output_failure(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(OutputError, match=r"^nvfp4\.yaml: the recipe cannot be read: Permission denied$") as caught:
        load_recipe("nvfp4.yaml")
    assert caught.value.exit_code == 74


def test_a_path_that_is_not_utf8_is_shown_escaped(here: Path) -> None:
    name = os.fsdecode(b"\xff.yaml")
    Path(name).write_text("a: [")
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert str(caught.value).startswith("\\udcff.yaml:")


def test_the_digest_of_a_lone_recipe_is_that_of_its_file(here: Path) -> None:
    assert load(SMALL).sha256 == hashlib.sha256(SMALL.encode()).hexdigest()


def test_the_digest_covers_what_is_extended(here: Path) -> None:
    Path("base.yaml").write_text(SMALL)
    digests = [hashlib.sha256(text.encode()).digest() for text in (TUNE, SMALL)]
    assert load(TUNE, "tune.yaml").sha256 == hashlib.sha256(b"".join(digests)).hexdigest()
    Path("base.yaml").write_text(SMALL + "# touched\n")
    assert load(TUNE, "tune.yaml").sha256 != hashlib.sha256(b"".join(digests)).hexdigest()


def test_a_byte_order_mark_is_accepted_and_counts_in_the_digest(here: Path) -> None:
    Path("recipe.yaml").write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    recipe = load_recipe("recipe.yaml")
    assert recipe.objects[0].mark.column == 5
    assert recipe.sha256 == hashlib.sha256(b"\xef\xbb\xbf" + SMALL.encode()).hexdigest()


# --- cost -----------------------------------------------------------------------------------------------------


def test_a_recipe_of_1300_objects_in_loops_loads(here: Path) -> None:
    entries = "".join(
        f"""\
      - {{name: text/<l>/matrix{i}, shape: [14336, 5120], format: Q4G64_F16S, encoder: {GROUPED},
         value: {{concat: [$query, <P><l>.k{i}.weight, {{slice: {{of: <P><l>.v{i}.weight, span: [0, 4096]}}}}]}}}}
"""
        for i in range(20)
    )
    Path("recipe.yaml").write_text(
        f"""{HEAD}names: {{P: model.language_model.layers.}}
objects:
  - for: {{l: {{from: 0, through: 64}}}}
    values: {{query: {{block_rows: {{of: <P><l>.q.weight, block: 512, span: [0, 256]}}}}}}
    objects:
{entries}"""
    )
    assert len(load_recipe("recipe.yaml").objects) == 1300
