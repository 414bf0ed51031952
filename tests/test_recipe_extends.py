"""Recipes that extend others: what is inherited, overridden, changed and refused.

Source: recipe.md, duty 7.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from recipe_texts import (
    COMMIT,
    DIGEST,
    FP8,
    FP8_ROW,
    GROUPED,
    HEAD,
    OTHER_DIGEST,
    SMALL,
    TUNE,
    change,
    load,
    messages,
    resources,
    tensors,
)

from ninfer_convert.errors import RecipeError
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import Recipe


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty directory the working directory, so that messages begin with bare file names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def base(here: Path) -> Recipe:
    """Writes the small recipe as `base.yaml`."""
    return load(SMALL, "base.yaml")


def test_an_extending_recipe_inherits_everything_it_does_not_say(base: Recipe) -> None:
    tune = load(TUNE, "tune.yaml")
    assert (tune.id, tune.model_id, tune.weights_id) == ("tune", "small", "mixed")
    assert tune.objects == base.objects
    assert (tune.sources, tune.inputs, tune.conditions) == (base.sources, base.inputs, base.conditions)
    assert (tune.evidence, tune.optional_components) == (base.evidence, base.optional_components)


def test_sources_are_overridden_member_by_member(base: Recipe) -> None:
    tune = load(
        TUNE + "sources:\n  base: {repo: me/tune, config: {eps: 1, text_config: {pad: 0}}, prefix: {a: b}}\n"
        f"  quantized: {{revision: {COMMIT}}}\n  third: {{}}\n",
        "tune.yaml",
    )
    assert list(tune.sources) == ["base", "quantized", "third"]
    made = tune.sources["base"]
    assert (made.repo, made.revision, made.dtypes, made.prefixes) == ("me/tune", None, ("BF16", "F32"), {"a": "b"})
    assert made.config == {
        "model_type": "small",
        "eps": 1,
        "text_config": {"vocab": 256, "kinds": ["full", "model.x"], "tied": False, "pad": 0, "bos": "<s>"},
    }
    assert (tune.sources["quantized"].repo, tune.sources["quantized"].revision) == ("org/small-nvfp4", COMMIT)


def test_names_sets_values_and_inputs_are_overridden_for_the_inherited_objects(base: Recipe) -> None:
    tune = load(
        TUNE + "names: {P: 'lm.'}\nsets: {odd: [3], both: odd}\nvalues: {ids: i}\n"
        f"inputs: {{ranking: {{sha256: {OTHER_DIGEST}}}}}\nartifact: {{weights_id: tuned}}\n",
        "tune.yaml",
    )
    made = tensors(tune)
    assert str(made["text/3/qk"].value).startswith("concat(block_rows(base:lm.layers.3.q.weight")
    assert "text/1/qk" not in made
    assert str(made["text/ids"].value) == "base:i"
    assert tune.inputs["ranking"].sha256 == OTHER_DIGEST
    assert (tune.model_id, tune.weights_id) == ("small", "tuned")


def test_an_input_that_is_given_anew_without_a_digest_is_not_pinned(base: Recipe) -> None:
    assert load(TUNE + "inputs: {ranking: {}}\n", "tune.yaml").inputs["ranking"].sha256 is None


def test_ignore_conditions_and_evidence_add_and_objects_come_last(base: Recipe) -> None:
    tune = load(
        TUNE + "ignore: {quantized: [x]}\nconditions: [{same: [c, d]}]\nevidence: [{text: More.}]\n"
        "objects: [{name: extra, shape: [], format: I32, value: $ids}]\n",
        "tune.yaml",
    )
    assert [glob for glob, _mark in tune.sources["quantized"].ignore] == ["*.k_scale", "x"]
    assert [str(condition.value) for condition in tune.conditions][1:] == [
        "same(base:model.layers.2.b, quantized:model.layers.2.b)",
        "same(base:c, base:d)",
    ]
    assert [entry.text for entry in tune.evidence] == ["Measured in a test.", "The rest is like it.", "More."]
    assert [spec.name for spec in tune.objects] == [*(spec.name for spec in base.objects), "extra"]


def test_evidence_none_takes_the_inherited_evidence_back(base: Recipe) -> None:
    assert load(TUNE + "evidence: none\n", "tune.yaml").evidence == ()


def test_a_change_alters_the_tensors_that_match_and_keeps_the_rest(base: Recipe) -> None:
    tune = tensors(load(change("{objects: '*/qk', format: Q6G64_F16S}"), "tune.yaml"))
    before = tensors(base)
    assert {name for name in tune if tune[name] != before[name]} == {"text/1/qk", "text/3/qk"}
    made = tune["text/3/qk"]
    assert (made.format, made.encoder, made.shape, made.value) == (
        "Q6G64_F16S",
        GROUPED,
        (128, 128),
        before["text/3/qk"].value,
    )
    assert made.mark == before["text/3/qk"].mark


@pytest.mark.parametrize(
    ("entry", "name", "expected"),
    [
        ("{objects: 'text/[13]/qk', format: BF16}", "text/3/qk", ("BF16", "contiguous-le-v1", None, False)),
        (
            f"{{objects: text/3/qk, format: {FP8}, encoder: {FP8_ROW}}}",
            "text/3/qk",
            (FP8, "row-scale-v1", FP8_ROW, False),
        ),
        (f"{{objects: mtp/fc, format: {FP8}}}", "mtp/fc", (FP8, "row-scale-v1", FP8_ROW, False)),
        ("{objects: mtp/fc, words: quantized:m}", "mtp/fc", (FP8, "row-scale-v1", None, True)),
        ("{objects: text/3/qkv, format: BF16, value: v}", "text/3/qkv", ("BF16", "contiguous-le-v1", None, False)),
        (f"{{objects: text/3/qkv, format: {FP8}}}", "text/3/qkv", (FP8, "row-scale-v1", None, True)),
        (
            f"{{objects: text/3/norm, format: Q5G64_F16S, encoder: {GROUPED}, shape: [8, 16]}}",
            "text/3/norm",
            ("Q5G64_F16S", "row-split-k128-v1", GROUPED, False),
        ),
    ],
)
def test_a_change_of_format_keeps_the_encoder_only_where_it_fits(
    entry: str, name: str, expected: tuple[object, ...], base: Recipe
) -> None:
    made = tensors(load(change(entry), "tune.yaml"))[name]
    assert (made.format, made.layout, made.encoder, made.words) == expected


def test_a_change_can_give_value_shape_and_rules(base: Recipe) -> None:
    entry = "{objects: text/ids, value: {slice: {of: $ids, span: [0, 64]}}, shape: [64], require: [finite]}"
    made = tensors(load(change(entry), "tune.yaml"))["text/ids"]
    assert (str(made.value), made.shape) == ("slice(shortlist(ranking, 200 candidates, take 128), [0, 64))", (64,))
    assert [rule.rule for rule in made.requirements] == ["finite"]


def test_changes_are_made_in_order(base: Recipe) -> None:
    entries = ("{objects: '*/qk', format: BF16}", "{objects: text/3/qk, format: FP32}", "{drop: text/1/*}")
    made = tensors(load(change(*entries), "tune.yaml"))
    assert made["text/3/qk"].format == "FP32"
    assert not any(name.startswith("text/1/") for name in made)


def test_what_is_dropped_can_be_given_anew_at_the_end(base: Recipe) -> None:
    text = change("{drop: head}") + "objects: [{name: head, shape: [1], format: BF16, value: x}]\n"
    tune = load(text, "tune.yaml")
    assert (tune.objects[-1].name, str(tensors(tune)["head"].value)) == ("head", "base:x")


def test_dropping_a_component_whole_makes_it_no_component(base: Recipe) -> None:
    tune = load(change("{drop: 'mtp/*'}"), "tune.yaml")
    assert tune.optional_components == frozenset()
    assert {spec.component for spec in tune.objects} == {None, "head"}


def test_a_resource_from_another_place_needs_its_digest_anew(base: Recipe) -> None:
    elsewhere = "{resource: frontend/tokenizer.json, file: t.json}"
    pinned = f"{{resource: frontend/ranking, sha256: {DIGEST}}}"
    made = resources(load(change(elsewhere, pinned), "tune.yaml"))
    tokenizer, ranking = made["frontend/tokenizer.json"], made["frontend/ranking"]
    assert ([origin.file for origin in tokenizer.origins], tokenizer.sha256) == (["t.json"], None)
    assert ([origin.input for origin in ranking.origins], ranking.sha256) == (["ranking"], DIGEST)


PINNED = HEAD.replace("{base: {}, other: {}}", "{base: {repo: org/a}, other: {}}") + f"""\
inputs: {{template: {{}}}}
objects:
  - {{resource: own, file: own.json, sha256: {DIGEST}}}
  - {{resource: member, file: own.json, member: text, sha256: {DIGEST}}}
  - {{resource: other, source: other, file: own.json, sha256: {DIGEST}}}
  - {{resource: input, input: template, sha256: {DIGEST}}}
  - {{resource: any, any: [{{source: other, file: x}}, {{file: y}}], sha256: {DIGEST}}}
"""


@pytest.mark.parametrize(
    ("sources", "unpinned"),
    [
        ("{}", []),
        ("{base: {config: {a: 1}}}", []),
        (f"{{base: {{repo: org/a, revision: {COMMIT}}}}}", []),
        ("{base: {repo: <org>/a}}", []),
        ("{base: {repo: me/a}}", ["own", "member", "any"]),
        (f"{{base: {{repo: me/a, revision: {COMMIT}}}}}", ["own", "member", "any"]),
        ("{other: {repo: me/b}}", ["other", "any"]),
        ("{base: {repo: me/a}, other: {repo: me/b}}", ["own", "member", "other", "any"]),
    ],
)
def test_digests_of_resources_are_not_inherited_by_another_repository(
    sources: str, unpinned: list[str], here: Path
) -> None:
    load(PINNED, "base.yaml")
    made = load(TUNE + f"names: {{org: org}}\nsources: {sources}\n", "tune.yaml")
    assert [name for name, spec in resources(made).items() if spec.sha256 is None] == unpinned
    assert {spec.sha256 for spec in resources(made).values()} <= {DIGEST, None}


def test_a_recipe_for_another_repository_can_pin_and_be_extended_in_its_turn(here: Path) -> None:
    load(PINNED, "base.yaml")
    load(TUNE + f"sources: {{base: {{repo: me/a}}}}\nchange: [{{resource: own, sha256: {OTHER_DIGEST}}}]\n", "mid.yaml")
    top = resources(load(TUNE.replace("base.yaml", "mid.yaml"), "top.yaml"))
    assert (top["own"].sha256, top["member"].sha256) == (OTHER_DIGEST, None)
    # Back home is another repository, too.
    back = load(TUNE.replace("base.yaml", "mid.yaml") + "sources: {base: {repo: org/a}}\n", "back.yaml")
    assert [spec.sha256 for spec in resources(back).values()] == [None, None, DIGEST, DIGEST, None]


def test_a_repository_that_is_said_again_keeps_its_commit(here: Path) -> None:
    load(PINNED.replace("org/a", f"org/a, revision: {COMMIT}"), "base.yaml")
    for repo, revision in (("org/a", COMMIT), ("org/b", None)):
        tune = load(TUNE + f"sources: {{base: {{repo: {repo}}}}}\n", "tune.yaml")
        assert (tune.sources["base"].repo, tune.sources["base"].revision) == (repo, revision)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{objects: text/*/mlp/dwon, format: BF16}", ["5:15: 'text/*/mlp/dwon' matches no inherited tensor"]),
        ("{objects: text/1/qkk, shape: [1]}", ["5:15: 'text/1/qkk' matches no inherited tensor; nearest is 'text/1"]),
        ("{objects: frontend/*, format: BF16}", ["5:15: 'frontend/*' matches no inherited tensor"]),
        ("{drop: visoin/*}", ["5:12: 'visoin/*' matches no inherited object"]),
        ("{drop: '*'}", ["5:3: the changes leave no object"]),
        ("{drop: mtp/*, format: BF16}", ["5:19: unknown key 'format' in a drop; known: drop"]),
        (
            "{resource: frontend/tokenizr.json, file: x}",
            ["5:16: no inherited resource is named 'frontend/tokenizr.json'; nearest is 'frontend/tokenizer.json'"],
        ),
        (
            "{resource: frontend/ranking}",
            ["5:5: a change of a resource changes nothing; it takes file, input, source, member, any, sha256"],
        ),
        ("{resource: frontend/ranking, member: x}", ["5:5: a resource needs exactly one of 'file', 'input' and 'any'"]),
        (
            "{objects: text/ids}",
            ["5:5: a change of tensors changes nothing; it takes format, encoder, value, words, shape, require"],
        ),
        ("{objects: text/ids, fromat: I32}", ["5:5: a change of tensors changes", "5:25: unknown key 'fromat'"]),
        ("{object: text/ids, format: I32}", ["5:6: unknown key 'object' in a change; nearest is 'objects'"]),
        ("{format: I32}", ["5:5: a change needs one of the keys objects, drop, resource"]),
        ("{objects: text/ids, drop: x}", ["5:5: 'objects' and 'drop' cannot stand in one entry"]),
        ("x", ["5:5: expected a change, a mapping, found 'x'"]),
        ("{objects: text/ids, format: q6}", ["5:33: unknown format 'q6'; nearest is 'Q6G64_F16S'"]),
        (
            "{objects: '*/norm', format: Q6G64_F16S}",
            [
                "5:33: 'text/0/norm': format Q6G64_F16S needs its encoder written out; add "
                f"'encoder: {GROUPED}'",
                "5:5: 'text/0/norm': shape [128] has rank 1",
            ],
        ),
        (f"{{objects: text/ids, encoder: {GROUPED}}}", ["5:34: 'text/ids': format I32 has no encoder; remove it"]),
        (f"{{objects: text/3/qk, format: {FP8}}}", [f"5:34: 'text/3/qk': format {FP8} needs its encoder written out"]),
        (f"{{objects: text/3/qk, encoder: {FP8_ROW}}}", [f"5:35: 'text/3/qk': {FP8_ROW} does not make Q4G64_F16S"]),
        ("{objects: text/3/qk, format: NVFP4}", ["5:5: 'text/3/qk': NVFP4 is copied from a source module"]),
        ("{objects: text/3/qkv, format: BF16}", ["5:5: 'text/3/qkv': format BF16 has no words to copy"]),
        ("{objects: text/3/qkv, shape: [100, 64]}", ["5:34: 'text/3/qkv': shape [100, 64]: N = 100 is not a multiple"]),
        ("{objects: text/ids, value: $nope}", ["5:32: no value is named '$nope' here"]),
        ("{objects: text/ids, value: a, words: b}", ["5:42: an object has 'value' or 'words', not both"]),
        ("{objects: text/ids, require: [finit]}", ["5:35: unknown rule 'finit'; nearest is 'finite'"]),
        ("{objects: text/<l>, format: I32}", ["5:15: placeholder <l> is not defined here"]),
    ],
)
def test_a_wrong_change_is_refused_at_its_place(entry: str, told: list[str], base: Recipe) -> None:
    found = messages(change(entry), "tune.yaml")
    assert len(found) == len(told)
    for message in told:
        assert any(line.startswith(f"tune.yaml:{message}") for line in found), found


def test_an_own_evidence_glob_must_match_but_an_inherited_one_need_not(base: Recipe) -> None:
    load(change("{drop: 'text/*'}"), "tune.yaml")
    text = change("{drop: 'text/*'}") + "evidence: [{objects: text/*, text: x}]\n"
    assert messages(text, "tune.yaml") == ["tune.yaml:6:22: 'text/*' matches no object"]


def test_an_object_that_a_change_makes_lossy_needs_evidence(here: Path) -> None:
    load(
        HEAD.replace("evidence: none", "evidence: [{objects: a, text: x}]")
        + f"objects:\n  - {{name: a, shape: [1, 64], format: Q4G64_F16S, encoder: {GROUPED}, value: x}}\n"
        "  - {name: b, shape: [1, 64], format: BF16, value: x}\n",
        "base.yaml",
    )
    entry = f"{{objects: b, format: Q6G64_F16S, encoder: {GROUPED}}}"
    assert messages(change(entry), "tune.yaml") == [
        "base.yaml:8:5: object 'b' loses precision and no evidence covers it"
    ]
    load(change(entry) + "evidence: [{objects: b, text: y}]\n", "tune.yaml")


def test_one_entry_of_evidence_may_cover_several_globs(here: Path) -> None:
    tensor = f"shape: [1, 64], format: Q4G64_F16S, encoder: {GROUPED}, value: x}}"
    objects = "".join(f"  - {{name: {name}, {tensor}\n" for name in ("a", "b/1", "b/2", "c"))
    head = HEAD.replace("evidence: none", "evidence: [{objects: [a, b/*], text: x}]")
    assert messages(f"{head}objects:\n{objects}") == [
        "recipe.yaml:10:5: object 'c' loses precision and no evidence covers it"
    ]
    load(f"{head.replace('b/*]', 'b/*, c]')}objects:\n{objects}")


def test_recipes_may_extend_each_other_in_a_chain(base: Recipe) -> None:
    load(TUNE + "change: [{drop: 'head*'}]\nobjects: [{name: mid, shape: [2], format: BF16, value: x}]\n", "mid.yaml")
    top = load("schema: 1\nid: top\nextends: ./mid.yaml\nchange: [{objects: mid, format: FP32}]\n", "top.yaml")
    assert tensors(top)["mid"].format == "FP32"
    assert "head" not in tensors(top)


def test_extends_is_relative_to_the_extending_file(base: Recipe) -> None:
    Path("sub").mkdir()
    tune = load(TUNE.replace("base.yaml", "../base.yaml"), "sub/tune.yaml")
    assert tune.objects == base.objects
    assert tune.objects[0].mark.file == "base.yaml"


def test_extends_takes_the_name_of_a_shipped_recipe(here: Path) -> None:
    text = "schema: 1\nid: tune\nextends: qwen3.6-27b/groupwise-int\n"
    assert len(load(text).objects) == 1124
    assert messages(text.replace("groupwise", "gropwise")) == [
        "recipe.yaml:3:10: no recipe file and no shipped recipe is named 'qwen3.6-27b/gropwise-int'; "
        "nearest is 'qwen3.6-27b/groupwise-int' (a path ends in .yaml)"
    ]


def test_a_recipe_that_extends_itself_is_refused(here: Path) -> None:
    assert messages(TUNE, "base.yaml") == ["base.yaml:3:10: the recipe extends itself: 'base.yaml' -> 'base.yaml'"]
    Path("b.yaml").write_text(TUNE.replace("base.yaml", "a.yaml"))
    os.symlink("b.yaml", "link.yaml")
    assert messages(TUNE.replace("base.yaml", "link.yaml"), "a.yaml") == [
        "link.yaml:3:10: the recipe extends itself: 'a.yaml' -> 'link.yaml' -> 'a.yaml'"
    ]


def test_a_very_long_chain_is_refused(here: Path) -> None:
    for i in range(20):
        Path(f"r{i}.yaml").write_text(f"schema: 1\nid: x\nextends: r{i + 1}.yaml\n")
    with pytest.raises(RecipeError, match="more than 16 recipes extend each other"):
        load_recipe("r0.yaml")


def test_a_base_that_is_missing_or_wrong_is_told_at_its_place(here: Path) -> None:
    assert messages(TUNE, "tune.yaml") == [
        "tune.yaml:3:10: base.yaml: the recipe cannot be read: No such file or directory"
    ]
    Path("base.yaml").write_text(SMALL.replace("step: 2", "step: 0"))
    assert messages(TUNE + "ingore: [a]\n", "tune.yaml") == [
        "base.yaml:23:36: step is 0; it must be 1 or more",
        "tune.yaml:4:1: unknown key 'ingore' in a recipe; nearest is 'ignore'",
    ]
    Path("base.yaml").write_text("a: b: c")
    assert messages(TUNE, "tune.yaml")[0].startswith("base.yaml:1:5: not valid YAML")
