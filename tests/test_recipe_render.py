"""Recipes written out: the text loads as the same conversion, whatever stands in it, and reads as people write.

Source: recipe.md.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipe_texts import COMMIT, DIGEST, HEAD, SMALL, TUNE, load

from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import LAYOUT_OF_FORMAT
from ninfer_convert.recipe import render
from ninfer_convert.recipe.expression import (
    BlockRows,
    Cast,
    Concat,
    Expression,
    Gather,
    Mark,
    Module,
    Reciprocal,
    Reshape,
    Same,
    Shortlist,
    Slice,
    Tensor,
    Tied,
    Transpose,
)
from ninfer_convert.recipe.loader import load_recipe, shipped_recipes
from ninfer_convert.recipe.model import (
    ConditionSpec,
    Evidence,
    InputSpec,
    ObjectSpec,
    Recipe,
    Requirement,
    ResourceOrigin,
    ResourceSpec,
    SourceSpec,
    TensorSpec,
)
from ninfer_convert.recipe.render import beyond_limits, expanded, recipe_text

AT = Mark("made-up.yaml", 1, 1)
SHIPPED = [*shipped_recipes(), "examples/fine-tune", "examples/text-only"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text_of(recipe: Recipe) -> str:
    return recipe_text(expanded(recipe))


def saying(recipe: Recipe) -> dict[str, object]:
    """Returns what a recipe does: everything but places, path, digest and evidence for what is not there."""
    return {
        "identity": (recipe.id, recipe.model_id, recipe.weights_id),
        "sources": {
            name: dataclasses.replace(source, ignore=tuple((glob, AT) for glob, _ in source.ignore), mark=AT)
            for name, source in recipe.sources.items()
        },
        "order": list(recipe.sources),
        "inputs": recipe.inputs,
        "objects": recipe.objects,
        "conditions": recipe.conditions,
        "optional": recipe.optional_components,
    }


def require_round_trip(recipe: Recipe) -> None:
    text = text_of(recipe)
    again = load(text, "shown.yaml")
    assert saying(again) == saying(recipe)
    assert text_of(again) == text
    assert json.loads(json.dumps(expanded(recipe))) == expanded(recipe)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_written_out_as_what_it_does(name: str, here: Path) -> None:
    recipe = load_recipe(name)
    require_round_trip(recipe)
    text = text_of(recipe)
    assert beyond_limits(expanded(recipe), text) is None
    assert max(map(len, text.splitlines())) <= render.WIDTH
    assert saying(load(json.dumps(expanded(recipe)), "json.yaml")) == saying(recipe)
    for word in ("extends:", "change:", "for:", "when:", "sets:", "values:", "names:", "<"):
        assert word not in text


def test_the_recipe_with_every_construct_is_written_out(here: Path) -> None:
    recipe = load(SMALL)
    require_round_trip(recipe)
    again = load(text_of(recipe))
    assert [[glob for glob, _ in entry.objects] for entry in again.evidence] == [["text/*", "head/[cr]*"], ["*"]]
    assert [entry.text for entry in again.evidence] == ["Measured in a test.", "The rest is like it."]


def test_entries_stand_on_one_line_where_they_fit(here: Path) -> None:
    loops = """\
inputs: {ranking: {}}
names: {P: "model."}
sets: {two: [0, 1]}
objects:
  - for: {l: two}
    objects: [{name: layers/<l>/norm, shape: [14], format: BF16, value: <P>layers.<l>.norm}]
  - component: head
    optional: true
    objects:
      - {name: head, shape: [640, 128], format: Q4G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,
         value: {slice: {of: lm_head.weight, span: [0, 640]}}, require: [finite, {range: [-1, 0.5]}]}
  - {resource: readme, any: [{file: README}, {input: ranking}], sha256: DIGEST}
ignore: {other: ["*.bias"]}
"""
    plain = """\
schema: 1
id: t
artifact: {model_id: m, weights_id: w}
evidence: none

sources:
  base: {}
  other: {}
inputs: {ranking: {}}

objects:
  - {name: layers/0/norm, shape: [14], format: BF16, value: model.layers.0.norm}
  - {name: layers/1/norm, shape: [14], format: BF16, value: model.layers.1.norm}
  - component: head
    optional: true
    objects:
      - name: head
        shape: [640, 128]
        format: Q4G64_F16S
        encoder: MAXABS_F16_RECIP_RNE_V1
        value: {slice: {of: lm_head.weight, span: [0, 640]}}
        require: [finite, {range: [-1, 0.5]}]
  - resource: readme
    any: [{file: README}, {input: ranking}]
    sha256: DIGEST
ignore:
  other: ["*.bias"]
"""
    assert text_of(load(HEAD + loops.replace("DIGEST", DIGEST))) == plain.replace("DIGEST", DIGEST)


def test_what_a_base_cites_for_dropped_objects_is_left_out(here: Path) -> None:
    lossy = "shape: [2, 64], format: Q4G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1, value: v"
    evidence = "[{objects: [a, 'b*'], text: Both.}, {objects: b, text: One.}, {text: All.}]"
    base = HEAD.replace("none", evidence)
    Path("base.yaml").write_text(f"{base}objects: [{{name: a, {lossy}}}, {{name: b, {lossy}}}]\n", encoding="utf-8")
    tune = load(TUNE + "change: [{drop: b}]\n", "tune.yaml")
    again = load(text_of(tune), "shown.yaml")
    assert [([glob for glob, _ in entry.objects], entry.text) for entry in again.evidence] == [
        (["a"], "Both."),
        (["*"], "All."),
    ]


def test_long_prose_is_folded_and_reads_the_same(here: Path) -> None:
    prose = "It says: " + "a measured thing - " * 30 + "and so on."
    recipe = load(f"{HEAD.replace('none', f'[{{text: {json.dumps(prose)}}}]')}"
                  "objects: [{name: x, shape: [1], format: BF16, value: v}]\n")
    text = text_of(recipe)
    assert max(map(len, text.splitlines())) <= render.WIDTH
    assert load(text).evidence[0].text == prose


def test_members_that_are_nested_beyond_the_page_are_written_as_they_are(here: Path) -> None:
    config = "{deep: " * 58 + '{"a b": c, d: "e f"}' + "}" * 58
    recipe = load(
        f"{HEAD.replace('base: {}', f'base: {{config: {config}}}')}"
        "objects: [{name: x, shape: [1], format: BF16, value: v}]\n"
    )
    assert recipe.sources["base"].config
    require_round_trip(recipe)


def test_expressions_that_are_too_deep_for_yaml_are_taken_apart(here: Path) -> None:
    deepest = '{reshape: {of: "deep1", to: [1]}}'
    for _ in range(15):
        deepest = f"{{reshape: {{of: {deepest}, to: [1]}}}}"
    outer = "$half"
    for _ in range(15):
        outer = f"{{transpose: {{of: {outer}, axes: [0]}}}}"
    item = f"{{name: x, shape: [1], format: BF16, value: {outer}}}"
    recipe = load(
        f"{HEAD}values: {{half: {deepest}}}\n"
        f"objects: [{{component: c, objects: [{item}]}}]\nconditions: [{{same: [$half, $half]}}]\n"
    )
    require_round_trip(recipe)
    document = expanded(recipe)
    assert list(document["values"]) == ["deep1"]
    assert beyond_limits(document, text_of(recipe)) is None
    assert '"base:deep1"' in json.dumps(document)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"MAX_NODES": 300}, "nodes; a recipe file has at most 300"),
        ({"MAX_DEPTH": 5}, "nested 12 deep; a recipe file is at most 5 deep"),
        ({"MAX_FILE_BYTES": 2000}, "bytes; a recipe file has at most 2,000"),
    ],
)
def test_a_recipe_that_only_loops_can_say_is_told(
    setting: dict[str, int], told: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = expanded(load(SMALL))
    for name, value in setting.items():
        monkeypatch.setattr(render, name, value)
    found = beyond_limits(document, recipe_text(document))
    assert found is not None
    assert told in found


# -- made-up recipes ------------------------------------------------------------------------------------------

ODD = ("<l>", "<lt>", "<<P>", "a:b", "base:x", "other:", "$q", "1", "1e5", "0x1", "true", "null", "~", "- a", "a: b",
       "#", "a #b", "{}", "[", "*", "&a", "!t", "%", "@", "`", "'", '"', "\\", "\\n", "é", "模", "\U0001f600", "1:30",
       "<", ">", "..", "2020-01-01", "=", "<<", "?", "a?", ",", "| ", "yes")  # fmt: skip
TEXT = st.one_of(
    st.lists(st.sampled_from((*ODD, "model", ".", "/", "layers")), min_size=1, max_size=4).map("".join),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
).filter(str.isprintable)
FILE = TEXT.filter(lambda text: "\\" not in text and not {"", ".", ".."} & set(text.split("/")))
SOURCE = st.sampled_from(("base", "other"))
SIZE = st.integers(1, 2**40)
SHAPE = st.lists(st.integers(1, 9), max_size=4).map(tuple)
SPAN = st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair)))
TENSOR = st.builds(Tensor, SOURCE, TEXT, st.just(AT))
SHORTLIST = st.builds(
    lambda take, more, special, source: Shortlist("counts", take + more, take, special, source, AT),
    SIZE, st.integers(0, 5), FILE, SOURCE,
)  # fmt: skip


def moves(of: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    several = st.lists(of, min_size=2, max_size=3).map(tuple)
    axes = st.integers(1, 4).flatmap(lambda rank: st.permutations(range(rank))).map(tuple)
    casts = st.sampled_from((("FP32", "exact"), ("BF16", "nearest-even"), ("I32", "checked")))
    return st.one_of(
        st.builds(lambda of, axis, span: Slice(of, axis, *span, AT), of, st.integers(0, 3), SPAN),
        st.builds(lambda of, span, more: BlockRows(of, span[1] + more, *span, AT), of, SPAN, st.integers(0, 3)),
        st.builds(Reshape, of, SHAPE, st.just(AT)),
        st.builds(Transpose, of, axes, st.just(AT)),
        st.builds(Concat, several, st.integers(0, 3), st.just(AT)),
        st.builds(lambda of, cast: Cast(of, *cast, AT), of, casts),
        st.builds(Gather, of, of, st.just(AT)),
        st.builds(Same, several, st.just(AT)),
        st.builds(Tied, TENSOR, TENSOR, st.just(AT)),
        st.builds(Reciprocal, of, st.just(AT)),
    )


def word_moves(of: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    several = st.lists(of, min_size=2, max_size=3).map(tuple)
    return st.one_of(
        st.builds(lambda of, span: Slice(of, 0, *span, AT), of, SPAN),
        st.builds(lambda of, span, more: BlockRows(of, span[1] + more, *span, AT), of, SPAN, st.integers(0, 3)),
        st.builds(Concat, several, st.just(0), st.just(AT)),
        st.builds(Gather, of, VALUE, st.just(AT)),
        st.builds(Same, several, st.just(AT)),
    )


VALUE: st.SearchStrategy[Expression] = st.recursive(st.one_of(TENSOR, SHORTLIST), moves, max_leaves=6)
MODULE = st.builds(Module, SOURCE, TEXT, st.sampled_from(("compressed-tensors", "modelopt")), st.just(AT))
WORDS: st.SearchStrategy[Expression] = st.recursive(MODULE, word_moves, max_leaves=6)
BOUND = st.one_of(st.integers(-(2**60), 2**60).map(float), st.floats(allow_nan=False, allow_infinity=False))
RULES = st.lists(
    st.one_of(
        st.sampled_from(("finite", "positive", "non-negative", "unique")).map(lambda r: Requirement(r, None, None, AT)),
        st.tuples(BOUND, BOUND).map(lambda pair: Requirement("range", min(pair), max(pair), AT)),
    ),
    max_size=3,
    unique_by=lambda requirement: requirement.rule,
).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, name: str, component: str | None) -> TensorSpec:
    numeric = draw(st.sampled_from(list(FORMATS)))
    words = numeric == "NVFP4" or (numeric.startswith("FP8") and draw(st.booleans()))
    shape = (256, 64) if FORMATS[numeric].kind != "direct" else draw(SHAPE)
    encoder = None if words or not FORMATS[numeric].encoders else FORMATS[numeric].encoders[0]
    value = draw(WORDS if words else VALUE)
    layout = LAYOUT_OF_FORMAT[numeric]
    return TensorSpec(name, shape, numeric, layout, encoder, value, words, draw(RULES), component, AT)


@st.composite
def resources(draw: st.DrawFn, name: str, component: str | None) -> ResourceSpec:
    member = st.none() | TEXT
    origins = st.one_of(
        st.builds(lambda source, file, member: ResourceOrigin(source, file, None, member, AT), SOURCE, FILE, member),
        st.builds(lambda member: ResourceOrigin("base", None, "counts", member, AT), member),
    )
    found = tuple(draw(st.lists(origins, min_size=1, max_size=2)))
    return ResourceSpec(name, found, draw(st.sampled_from((None, DIGEST))), component, AT)


CONFIG = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(ODD) | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner),
    max_leaves=8,
)  # fmt: skip


@st.composite
def sources(draw: st.DrawFn, name: str) -> SourceSpec:
    repo = draw(st.sampled_from((None, "org/model", "0.5-b")))
    return SourceSpec(
        name=name,
        repo=repo,
        revision=COMMIT if repo and draw(st.booleans()) else None,
        dtypes=tuple(draw(st.lists(st.sampled_from(("BF16", "F32", "I64")), max_size=2, unique=True))),
        config=draw(st.dictionaries(TEXT, CONFIG, max_size=2)),
        prefixes=draw(st.dictionaries(st.just("") | TEXT, st.just("") | TEXT, max_size=2)),
        ignore=tuple((glob, AT) for glob in draw(st.lists(TEXT, max_size=2))),
        mark=AT,
    )


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    names = draw(st.lists(TEXT, min_size=1, max_size=4, unique=True))
    components = (None, *draw(st.lists(TEXT, max_size=2)))
    objects: list[ObjectSpec] = []
    for name in names:
        make = draw(st.sampled_from((tensors, resources)))
        objects.append(draw(make(name, draw(st.sampled_from(components)))))
    present = {spec.component for spec in objects if spec.component is not None}
    return Recipe(
        id=draw(TEXT),
        model_id=draw(TEXT),
        weights_id=draw(TEXT),
        evidence=draw(st.sampled_from(((), (Evidence((("*", AT),), "All of it.", AT),)))),
        sources={name: draw(sources(name)) for name in ("base", "other")},
        inputs={"counts": InputSpec("counts", draw(st.sampled_from((None, DIGEST))), AT)},
        objects=tuple(objects),
        conditions=tuple(
            ConditionSpec(Same((draw(VALUE), draw(VALUE)), AT), AT) for _ in range(draw(st.integers(0, 2)))
        ),
        optional_components=frozenset(draw(st.sets(st.sampled_from(sorted(present))))) if present else frozenset(),
        sha256=DIGEST,
        path="made-up.yaml",
    )


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(recipe=recipes())
def test_any_recipe_is_written_out_as_what_it_does(recipe: Recipe, here: Path) -> None:
    require_round_trip(recipe)
