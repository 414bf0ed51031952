"""`recipe show` on the command line: recipes written out, objects explained with and without sources, differences.

Source: cli.md; recipe.md, duties 3, 4 and 7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
import strategies
from case_tools import Case, Ran, changed, entry, f32, filled, modelopt, nvfp4, require_refusal, run_cli
from commands import source_arguments
from hypothesis import HealthCheck, given, settings
from miniatures import Miniatures
from recipe_texts import DIGEST, HEAD, SMALL, TUNE

from ninfer_convert.recipe import render
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.render import expanded, recipe_text
from ninfer_convert.stand_in.checkpoints import StandIn

BASE = """\
schema: 1
id: base
artifact: {model_id: m, weights_id: w}
evidence: [{objects: l/*, text: "Measured, once."}, {objects: "*", text: "Guessed."}]
sources: {base: {repo: org/base, dtype: BF16}, quantized: {}}
names: {P: "model.", L: "<P>layers."}
sets: {all: {from: 0, through: 5}, odd: [1, 3, 5], even: {all: all, except: odd}}
values: {top: <P>top.weight}
objects:
  - {resource: tokenizer.json, file: tokenizer.json, sha256: DIGEST}
  - component: body
    values: {q: <L>0.q.weight}
    objects:
      - for: {l: all}
        values: {r: {slice: {of: $q, span: [0, 2]}}}
        objects:
          - when: {l: even}
            objects:
              - {name: l/<l>/a, shape: [4, 64], format: Q4G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1,
                 value: {concat: [$r, $top]}}
          - {name: l/<l>/b, shape: [2, 64], format: BF16, value: <L><l>.b.weight}
""".replace("DIGEST", DIGEST)
TUNED = """\
schema: 1
id: tune
extends: base.yaml
sources: {base: {repo: me/tune}}
names: {X: "extra."}
change:
  - {objects: "l/[24]/a", format: Q5G64_F16S}
  - {objects: l/4/*, format: BF16, value: <X>b, shape: [2]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    Path("tune.yaml").write_text(TUNED, encoding="utf-8")
    Path("small.yaml").write_text(SMALL, encoding="utf-8")
    return tmp_path


def show(*arguments: object, code: int = 0) -> str:
    ran = run_cli("recipe", "show", *arguments)
    assert (ran.code, ran.err) == (code, "")
    return ran.out


def objects(*arguments: object, code: int = 0) -> dict[str, dict[str, Any]]:
    return {made["name"]: made for made in json.loads(show(*arguments, "--json", code=code))["objects"]}


# -- written out ----------------------------------------------------------------------------------------------


def test_a_recipe_is_written_out_as_text_and_as_json(here: Path) -> None:
    recipe = load_recipe("small.yaml")
    assert show("small.yaml") == recipe_text(expanded(recipe))
    assert json.loads(show("small.yaml", "--json")) == expanded(recipe)
    Path("shown.yaml").write_text(show("tune.yaml"), encoding="utf-8")
    assert load_recipe("shown.yaml").objects == load_recipe("tune.yaml").objects
    assert show("shown.yaml") == show("tune.yaml")


def test_what_only_loops_can_say_is_noted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MAX_NODES", 300)
    ran = run_cli("recipe", "show", "small.yaml")
    assert ran.code == 0
    assert ran.out == recipe_text(expanded(load_recipe("small.yaml")))
    told = r"note: written out, the recipe cannot be loaded again: \d+ nodes; a recipe file has at most 300\n"
    assert re.fullmatch(told, ran.err)


# -- lines ----------------------------------------------------------------------------------------------------


def lines_of(made: dict[str, Any]) -> list[str]:
    return [f"{line['file']}:{line['line']}:{line['column']} {line['role']} {line['text']}" for line in made["lines"]]


Q4 = "{name: l/<l>/a, shape: [4, 64], format: Q4G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1, value: {con..."
INSIDE = [
    "base.yaml:11:5 component body",
    "base.yaml:14:9 for {l: all}, l = 2",
    "base.yaml:17:13 when {l: even}",
    f"base.yaml:19:17 declared {Q4}",
]
SETS = [
    "base.yaml:7:13 set all: {from: 0, through: 5}",
    "base.yaml:7:58 set even: {all: all, except: odd}",
    "base.yaml:7:41 set odd: [1, 3, 5]",
]
VALUES = [
    "base.yaml:15:21 value $r: {slice: {of: $q, span: [0, 2]}}",
    "base.yaml:12:17 value $q: <L>0.q.weight",
    "base.yaml:6:25 name <L>: <P>layers.",
    "base.yaml:6:12 name <P>: model.",
    "base.yaml:8:15 value $top: <P>top.weight",
]
EVIDENCE = ["base.yaml:4:12 evidence Measured, once.", "base.yaml:4:53 evidence Guessed."]


def test_every_line_that_decided_an_object_is_told(here: Path) -> None:
    found = objects("tune.yaml", "--object", "l/[24]/*", "--object", "l/1/b", "--object", "tokenizer.json")
    extends = ["tune.yaml:3:10 extends base.yaml"]
    first = "tune.yaml:7:5 changed {objects: l/[24]/a, format: Q5G64_F16S}"
    assert lines_of(found["l/2/a"]) == [*INSIDE, first, *SETS, *VALUES, *EVIDENCE, *extends]
    # Another value takes the named ones of the former with it, and what is no longer lossy needs no evidence.
    assert lines_of(found["l/4/a"]) == [
        *(line.replace("l = 2", "l = 4") for line in INSIDE),
        first,
        "tune.yaml:8:5 changed {objects: l/4/*, format: BF16, value: <X>b, shape: [2]}",
        *SETS,
        "tune.yaml:5:12 name <X>: extra.",
        *extends,
    ]
    assert lines_of(found["l/1/b"]) == [
        INSIDE[0],
        "base.yaml:14:9 for {l: all}, l = 1",
        "base.yaml:21:13 declared {name: l/<l>/b, shape: [2, 64], format: BF16, value: <L><l>.b.weight}",
        SETS[0],
        *VALUES[2:4],
        *extends,
    ]
    assert lines_of(found["tokenizer.json"]) == [
        f"base.yaml:10:5 declared {{resource: tokenizer.json, file: tokenizer.json, sha256: {DIGEST[:40]}...",
        "tune.yaml:4:17 moved another repository: the SHA-256 of its files no longer holds",
        *extends,
    ]
    assert lines_of(objects("base.yaml", "--object", "l/2/a")["l/2/a"]) == [*INSIDE, *SETS, *VALUES, *EVIDENCE]


def test_entries_behind_aliases_are_told_with_the_blocks_that_are_around_them(here: Path) -> None:
    Path("alias.yaml").write_text(
        f"{HEAD}values: {{v: outer}}\nobjects:\n"
        "  - for: {a: [1]}\n    values: {v: a.<a>}\n"
        "    objects: [&one {when: {a: [1]}, objects: [{name: x/<a>/y, shape: [1], format: BF16, value: $v}]}]\n"
        "  - for: {a: [2]}\n"
        "    objects: [{when: {a: [2]}, objects: [{name: x/<a>/y, shape: [1], format: BF16, value: $v}]}]\n",
        encoding="utf-8",
    )
    found = objects("alias.yaml", "--object", "x/*")
    assert [line for line in lines_of(found["x/1/y"]) if " value " in line] == ["alias.yaml:9:17 value $v: a.<a>"]
    assert [line for line in lines_of(found["x/2/y"]) if " value " in line] == ["alias.yaml:6:13 value $v: outer"]


def test_every_object_of_the_shipped_recipes_has_its_lines() -> None:
    for name in ("qwen3.6-27b/nvfp4", "examples/fine-tune", "demo"):
        recipe = load_recipe(name)
        found = objects(name, "--object", "*")
        assert list(found) == [spec.name for spec in recipe.objects]
        for spec in recipe.objects:
            declared = [line for line in lines_of(found[spec.name]) if " declared " in line]
            assert [line.split(" ")[0] for line in declared] == [str(spec.mark)]


# -- steps ----------------------------------------------------------------------------------------------------


def test_an_object_is_explained_from_the_recipe_alone(here: Path) -> None:
    assert show("base.yaml", "--object", "l/0/a").splitlines()[:9] == [
        "object     l/0/a",
        "shape      [4, 64]",
        "format     Q4G64_F16S in row-split-k128-v1, encoded by MAXABS_F16_RECIP_RNE_V1",
        "component  body",
        "made of    concat along axis 0               [4, 64]  BF16",
        "             slice [0, 2) of axis 0          [2, 64]  BF16",
        "               base:model.layers.0.q.weight  [?, 64]  BF16",
        "             base:model.top.weight           [2, 64]  BF16",
        "bytes out  272: base 256 at 0, scale 16 at 256",
    ]


STEPS = [
    ("[3, 4]", "BF16", "v", "base:v [3, 4] BF16"),
    ("[4, 3]", "BF16", "{transpose: {of: v}}", "transpose [1, 0] [4, 3] BF16; base:v [3, 4] BF16"),
    ("[2, 3]", "BF16", "{reshape: {of: v, to: [2, 3]}}", "reshape [2, 3] BF16; base:v ? BF16"),
    (
        "[6, 8]", "BF16", "{block_rows: {of: v, block: 5, span: [1, 3]}}",
        "rows [1, 3) of every 5 [6, 8] BF16; base:v [15, 8] BF16",
    ),
    (
        "[5, 8]", "BF16", "{concat: [{reshape: {of: v, to: [2, 8]}}, w]}",
        "concat along axis 0 [5, 8] BF16; reshape [2, 8] BF16; base:v ? BF16; base:w [3, 8] BF16",
    ),
    (
        "[5, 8]", "BF16", "{concat: {of: [v, w], axis: 1}}",
        "concat along axis 1 [5, 8] BF16; base:v [5, ?] BF16; base:w [5, ?] BF16",
    ),
    ("[2]", "FP32", "{cast: {of: v, to: FP32, rule: exact}}", "cast to FP32, exact [2] F32; base:v [2] ?"),
    (
        "[2, 8]", "BF16", "{gather: {of: v, ids: i}}",
        "gather rows by ids [2, 8] BF16; base:v [?, 8] BF16; base:i [2] ?",
    ),
    (
        "[2]", "FP32", "{same: [v, other:v]}",
        "same: bit-identical, the first is taken [2] F32; base:v [2] F32; other:v [2] F32",
    ),
    (
        "[7, 2]", "BF16", "{slice: {of: {tied: {head: v, embedding: w}}, span: [3, 5], axis: 1}}",
        "slice [3, 5) of axis 1 [7, 2] BF16; tied: the head, or the embedding, as the config says [7, ?] BF16; "
        "base:v [7, ?] BF16; base:w [7, ?] BF16",
    ),
    ("[]", "FP32", "{reciprocal: v}", "reciprocal [] F32; base:v [] F32"),
    (
        "[3]", "I32", "{shortlist: {counts: c, candidates: 9, take: 3, special: t.json}}",
        "shortlist of input c: 3 of 9 candidates [3] I32",
    ),
]  # fmt: skip


def steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield step
    for operand in step["of"]:
        yield from steps(operand)


def step_line(step: dict[str, Any]) -> str:
    shape = "?" if step["shape"] is None else str(["?" if size is None else size for size in step["shape"]])
    return f"{step['step']} {shape} {step['dtype'] or '?'}".replace("'?'", "?")


@pytest.mark.parametrize(("shape", "numeric", "value", "expected"), STEPS)
def test_shapes_follow_from_what_is_stated(shape: str, numeric: str, value: str, expected: str, here: Path) -> None:
    text = f"{HEAD}inputs: {{c: {{}}}}\nobjects: [{{name: x, shape: {shape}, format: {numeric}, value: {value}}}]\n"
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    made = objects("recipe.yaml", "--object", "x")["x"]
    assert "; ".join(map(step_line, steps(made["expression"]))) == expected
    assert (made["sources"], made["source_bytes"], made["problems"]) == (None, None, [])


def agree(implied: list[int | None] | None, found: list[int]) -> bool:
    return implied is None or (
        len(implied) == len(found) and all(a in (None, b) for a, b in zip(implied, found, strict=True))
    )


def require_agreement(recipe: object, where: list[str], minimum: int, code: int = 0) -> None:
    """Requires that the headers confirm what the recipe implied, and that the plan has the same bytes and sources."""
    alone, bound = objects(recipe, "--object", "*"), objects(recipe, "--object", "*", *where, code=code)
    plan = json.loads(run_cli("plan", recipe, *where, "--unpinned", "--json").out)
    assert list(alone) == list(bound) == [item["name"] for item in plan["objects"]]
    known = 0
    for item in plan["objects"]:
        first, second = alone[item["name"]], bound[item["name"]]
        assert second["bytes"] == item["bytes"]
        if item["kind"] == "resource":
            continue
        assert first["bytes"] == item["bytes"]
        pairs = list(zip(steps(first["expression"]), steps(second["expression"]), strict=True))
        for a, b in pairs:
            assert a["step"] == b["step"]
            assert agree(a["shape"], b["shape"]), (item["name"], a, b)
            assert a["dtype"] in (None, b["dtype"])
            known += a["shape"] is not None
        assert second["problems"] == []
        read = [(source["source"], source["tensor"]) for source in second["sources"]]
        assert set(read) == {(source["source"], source["tensor"]) for source in item["sources"] if "tensor" in source}
        assert len(set(read)) == len(read)
    assert known > minimum


def test_headers_confirm_what_the_demonstration_implies(demo: StandIn) -> None:
    require_agreement("demo", source_arguments(demo, "base", "quantized"), 90)


@pytest.mark.parametrize("name", ["groupwise-int", "nvfp4"])
def test_headers_confirm_what_the_recipes_imply(name: str, miniatures: Miniatures) -> None:
    # The files of a stand-in cannot match the digests of the recipe, which is told of them and of nothing else.
    names = ("base",) if name == "groupwise-int" else ("base", "quantized")
    where = source_arguments(miniatures.models["qwen3.6-27b"], *names)
    require_agreement(miniatures.recipes / "qwen3.6-27b" / f"{name}.yaml", where, 200, code=1)


# -- with sources ---------------------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.chdir(tmp_path)
    made = Case(Path())
    made.recipe_path = Path("recipe.yaml")
    return made


def explain(case: Case, *names: str, code: int = 0, json_too: bool = False) -> str:
    arguments = case.arguments("show", *(word for name in names for word in ("--object", name)))[1:]
    ran: Ran = run_cli("recipe", "show", *arguments)
    assert (ran.code, ran.err) == (code, "")
    return ran.out


def test_an_object_is_explained_with_its_sources(case: Case) -> None:
    case.source(
        {
            "one.safetensors": {"a.weight": filled("F32", [6, 64], 0x3F800000)},
            "two.safetensors": {"m.b.weight": filled("F32", [2, 64], 0x3F800000)},
        }
    )
    joined = "{concat: [{slice: {of: a.weight, span: [0, 2]}}, n.b.weight]}"
    case.recipe(
        "{name: x, shape: [4, 64], format: BF16, require: [finite, {range: [-2147483647, .5]}],\n"
        f"     value: {{cast: {{of: {joined}, to: BF16, rule: nearest-even}}}}}}",
        sources="{base: {prefix: {m.: n.}}}",
    )
    told = explain(case, "x").partition("decided by")[0]
    assert told == """\
object     x
shape      [4, 64]
format     BF16 in contiguous-le-v1
require    finite, range [-2147483647, 0.5]
made of    cast to BF16, nearest-even  [4, 64]  BF16
             concat along axis 0       [4, 64]  F32
               slice [0, 2) of axis 0  [2, 64]  F32
                 base:a.weight         [6, 64]  F32
               base:n.b.weight         [2, 64]  F32
reads      base:a.weight  F32 [6, 64], 1,536 bytes of one.safetensors
           base:n.b.weight  F32 [2, 64], 512 bytes of two.safetensors, stored as m.b.weight
bytes in   2,048
bytes out  512: words 512 at 0
rounds     cast to BF16: to nearest, ties to even (recipe.yaml:8:14)
"""


CHECKED: list[tuple[dict[str, Any], str, list[str]]] = [
    (
        {"a.weight": filled("BF16", [2, 4], 0)},
        entry("x", [2, 4], "BF16", "{concat: [a.weigth]}").replace("[a.weigth]", "[a.weigth, a.weight]"),
        ["8:61: tensor a.weigth is not in source base (base); nearest: a.weight"],
    ),
    (
        {"a.weight": filled("BF16", [2, 4], 0)},
        entry("x", [2, 4], "BF16", "{slice: {of: a.weight, span: [0, 3]}}"),
        ["8:52: span [0, 3) lies outside axis 0 of size 2"],
    ),
    (
        {"a.weight": filled("BF16", [2, 4], 0)},
        entry("x", [4, 2], "BF16", "a.weight"),
        ["8:5: the value has shape [2, 4], the object [4, 2]"],
    ),
    (
        {"a.weight": filled("F16", [2, 4], 0)},
        entry("x", [2, 4], "BF16", "a.weight"),
        ["8:5: the value is F16, format BF16 takes BF16"],
    ),
    (
        {"a.weight": filled("BF16", [2, 4], 0), "b.weight": filled("F16", [2, 4], 0)},
        entry("x", [4, 4], "BF16", "{concat: [a.weight, b.weight]}"),
        ["8:52: concat of BF16 and F16; operands must share one dtype"],
    ),
    (
        modelopt("m"),
        entry("x", [128, 64], "NVFP4", "m", words=True),
        ["8:55: module m is ModelOpt NVFP4: weight_scale_2 and input_scale are multipliers where NInfer "
         "stores divisors. That is a conversion, not a word copy; name it: {modelopt: m}"],
    ),
    (
        {"a.weight": filled("BF16", [4], 0)},
        entry("x", [2], "I32", "{shortlist: {counts: c, candidates: 3, take: 2, special: t.json}}"),
        ["8:48: input c is not given; add --input c=PATH"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "item", "problems"), CHECKED)
def test_what_the_headers_contradict_is_told_where_it_breaks(
    tensors: dict[str, Any], item: str, problems: list[str], case: Case
) -> None:
    case.source(tensors)
    case.recipe(item, more="inputs: {c: {}}\n")
    text = explain(case, "x", code=1)
    told = [line.removeprefix("problem    ") for line in text.splitlines() if line.startswith("problem")]
    assert told == [f"recipe.yaml:{problem}" for problem in problems]


def test_a_multiplier_below_a_reciprocal_is_no_problem(case: Case) -> None:
    case.source(modelopt("m"))
    case.recipe(
        entry("x", [], "FP32", "{reciprocal: {reshape: {of: m.input_scale, to: []}}}"),
        entry("y", [128, 64], "NVFP4", "{modelopt: m}", words=True),
    )
    first, second = explain(case, "x", "y").split("\n\n")
    assert first.splitlines()[3:7] == [
        "made of    reciprocal              []  F32",
        "             reshape               []  F32",
        "               base:m.input_scale  []  F32",
        "reads      base:m.input_scale  F32 [], 4 bytes of model.safetensors",
    ]
    assert "rounds     reciprocal: 1 / x in binary32, rounded once (recipe.yaml:7:" in first
    assert second.splitlines()[3] == "made of    modelopt(base:m)  [128, 64]  NVFP4"
    assert "rounds     modelopt: the global scale becomes a divisor, 1 / x in binary32, rounded once" in second
    reads = [line[11:].split("  ")[0] for line in second.splitlines()[4:7]]
    assert reads == ["base:m.weight", "base:m.weight_scale", "base:m.weight_scale_2"]


def test_a_tied_head_may_be_missing(case: Case) -> None:
    case.source({"e.weight": filled("BF16", [4, 8], 0)}, config={"tie_word_embeddings": True})
    case.recipe(entry("x", [4, 8], "BF16", "{tied: {head: h.weight, embedding: e.weight}}"))
    assert explain(case, "x").splitlines()[3:7] == [
        "made of    tied: the head, or the embedding, as the config says  [4, 8]  BF16",
        "             base:h.weight                                       [4, 8]  BF16",
        "             base:e.weight                                       [4, 8]  BF16",
        "reads      base:e.weight  BF16 [4, 8], 64 bytes of model.safetensors",
    ]


def test_words_are_explained_module_by_module(case: Case) -> None:
    case.source({**nvfp4("a"), **nvfp4("b")})
    case.recipe(entry("x", [256, 64], "NVFP4", "{concat: [a, b]}", words=True))
    lines = explain(case, "x").splitlines()
    assert lines[2:6] == [
        "format     NVFP4 in blockscale-k16-m128x4-v1, words copied",
        "made of    concat along axis 0  [256, 64]  NVFP4",
        "             base:a             [128, 64]  NVFP4",
        "             base:b             [128, 64]  NVFP4",
    ]
    assert lines[12:15] == [
        f"bytes in   {2 * (128 * 32 + 128 * 4 + 4):,}",
        "bytes out  9,220: code 8,192 at 0, scale 1,024 at 8,192, divisor 4 at 9,216",
        "rounds     nothing; every value is kept",
    ]
    case.source(changed({**nvfp4("a"), **nvfp4("b")}, "b.weight_global_scale", 0, 0x44C00001))
    assert "problem    recipe.yaml:7:" in explain(case, "x", code=1)
    assert "weight divisors of one fused parent differ: base:a has word 0x44c00000, base:b has 0x44c00001" in (
        explain(case, "x", code=1)
    )


def test_a_resource_is_explained_with_the_place_it_is_taken_from(case: Case) -> None:
    case.source({"a": f32(1.0)}, files={"t.json": b'{"chat": "hello"}'})
    resource = "{resource: r, any: [{file: r.txt}, {file: t.json, member: chat}]"
    case.recipe(resource + "}", entry("x", [1], "FP32", "a"))
    assert explain(case, "r") == """\
object     r
resource   stored byte for byte as raw-bytes-v1
from       base:r.txt
           base:t.json, member chat
SHA-256    not pinned: any content will do
taken from base:t.json, member chat
bytes      5
decided by recipe.yaml:7:5  declared {resource: r, any: [{file: r.txt}, {file: t.json, member: chat}]}
"""
    case.recipe(f"{resource}, sha256: {DIGEST}}}", entry("x", [1], "FP32", "a"))
    text = explain(case, "r", code=1)
    found = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert f"SHA-256    {DIGEST}\n" in text
    problem = f"SHA-256 {found} found in base:t.json, member chat, {DIGEST} required"
    assert f"problem    recipe.yaml:7:5: resource r: {problem}\n" in text
    case.recipe("{resource: r, file: r.txt}", entry("x", [1], "FP32", "a"))
    assert "problem    recipe.yaml:7:5: resource r was not found; looked at: base:r.txt" in explain(case, "r", code=1)


def test_an_optional_component_that_is_absent_whole_is_left_out(case: Case) -> None:
    case.source({"a": f32(1.0)})
    inside = f"{{resource: r, file: r.txt}}, {entry('y', [1], 'FP32', 'b')}"
    case.recipe(entry("x", [1], "FP32", "a"), f"{{component: c, optional: true, objects: [{inside}]}}")
    text = explain(case, "*")
    assert text.count("component  c, which is optional and absent from the source: left out\n") == 2
    assert "problem" not in text
    assert "reads      base:a" in text
    case.source({"a": f32(1.0), "b": f32(1.0)})
    assert "problem    recipe.yaml:8:" in explain(case, "r", code=1)
    assert "left out" not in explain(case, "y")


def test_strange_recipes_are_shown_or_refused(tmp_path: Path) -> None:
    hostile.prepare(tmp_path)
    where = ("--source", tmp_path / "fitting", "--input", f"counts={tmp_path / 'counts'}")

    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(strategies.recipes())
    def shown(data: bytes) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(data)
        for options in ((), ("--object", "*"), ("--object", "*", *where), ("--diff", "demo")):
            ran = run_cli("recipe", "show", path, *options)
            assert ran.code in (0, 1, 2)
            assert "internal:" not in ran.err
            assert (ran.out + ran.err).replace("\n", "").isprintable()

    shown()


# -- differences ----------------------------------------------------------------------------------------------


def test_the_help_and_the_heading_go_from_the_old_recipe_to_the_new_one(here: Path) -> None:
    page = " ".join(run_cli("recipe", "show", "--help").out.split())
    assert "ninfer-convert recipe show qwen3.6-27b/groupwise-int --diff my-tune.yaml" in page
    assert "Show what changes from RECIPE to recipe OTHER." in page
    assert show("base.yaml", "--diff", "tune.yaml", code=1).startswith("base.yaml -> tune.yaml\n")


def test_differences_are_printed_and_told_by_the_exit_code(here: Path) -> None:
    text = show("base.yaml", "--diff", "tune.yaml", code=1)
    assert text == f"""\
base.yaml -> tune.yaml
identity
  id: base -> tune
sources
  base.repo: org/base -> me/tune
objects that differ
  tokenizer.json: sha256 {DIGEST} -> none
  l/2/a: Q4G64_F16S -> Q5G64_F16S  (272 -> 528 bytes)
  l/4/a:  (272 -> 4 bytes)
    shape [4, 64] -> [2]
    Q4G64_F16S -> BF16
    value concat(slice(base:model.layers.0.q.weight, [0, 2)), base:model.top.weight) -> base:extra.b
  l/4/b: shape [2, 64] -> [2], value base:model.layers.4.b.weight -> base:extra.b  (256 -> 4 bytes)
bytes of tensors: 2,352 -> 2,088 (-11.2%)
"""
    assert json.loads(show("base.yaml", "--diff", "tune.yaml", "--json", code=1))["equal"] is False
    assert show("base.yaml", "--diff", "base.yaml") == "the recipes do the same: 10 objects, 2,352 bytes of tensors\n"
    assert json.loads(show("tune.yaml", "--diff", "tune.yaml", "--json"))["equal"] is True
    only = show("base.yaml", "--diff", "tune.yaml", "--object", "l/2/*", code=1)
    assert only.splitlines()[1:3] == ["objects that differ", "  l/2/a: Q4G64_F16S -> Q5G64_F16S  (272 -> 528 bytes)"]
    show("base.yaml", "--diff", "tune.yaml", "--object", "l/[01]/*")


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (
            ("base.yaml", "--object", "l/3/a"), 1,
            "no object of recipe base is named 'l/3/a'; nearest: l/4/a, l/3/b, l/2/a",
        ),
        (("base.yaml", "--object", "zzz*"), 1, "no object of recipe base is named 'zzz*'"),
        (
            ("base.yaml", "--diff", "small.yaml", "--object", "head/row"), 1,
            "no object of recipe base or small-v1 is named 'head/row'; nearest: head/rows, head/odd, head",
        ),
        (("base.yaml", "--source", "x"), 2, "--source goes with --object, which explains what is read; without it"),
        (("base.yaml", "--diff", "tune.yaml", "--object", "l/1/b", "--source", "x"), 2, "--source goes with --object"),
        (("base.yaml", "--object", "l/1/b", "--input", "a=b"), 2, "--input needs --source"),
        (("base.yaml", "--object", "l/1/b", "--prefix", "a=b"), 2, "--prefix needs --source"),
        (("base.yaml", "--object", "l/1/b", "--source", "base=."), 2, "a source is not given; add --source quantized="),
        (("nothing.yaml",), 1, "nothing.yaml: the recipe cannot be read: No such file or directory"),
        (("base.yaml", "--diff", "nothing.yaml"), 1, "nothing.yaml: the recipe cannot be read"),
        (("broken.yaml",), 1, "broken.yaml:1:1: a recipe needs"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused(arguments: tuple[str, ...], code: int, told: str, here: Path) -> None:
    Path("broken.yaml").write_text("schema: 1\n", encoding="utf-8")
    ran = run_cli("recipe", "show", *arguments)
    require_refusal(ran, code)
    assert told in ran.errors[0]


def test_a_name_with_brackets_is_a_name(here: Path) -> None:
    item = "{name: 'x[0]', shape: [1], format: BF16, value: v}"
    Path("odd.yaml").write_text(f"{HEAD}objects: [{item}]\n", encoding="utf-8")
    assert list(objects("odd.yaml", "--object", "x[0]")) == ["x[0]"]


def test_inherited_recipes_are_shown_by_their_names(here: Path) -> None:
    text = TUNE.replace("base.yaml", "demo") + "change: [{drop: text/final_norm}]\n"
    Path("my.yaml").write_text(text, encoding="utf-8")
    told = "objects only in the first\n  text/final_norm: BF16 [128]  (256 bytes)\n"
    assert told in show("demo", "--diff", "my.yaml", code=1)
