"""The JSON schema of recipes: valid, true of all that is shipped, and never stricter than the loader."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from case_tools import run_cli
from jsonschema import Draft202012Validator
from recipe_texts import COMMIT, DIGEST, GROUPED, HEAD, SMALL, TUNE, change

from ninfer_convert.errors import RecipeError
from ninfer_convert.recipe import blocks, changes, expressions, files, objects, scalars, scope, sections
from ninfer_convert.recipe.files import recipes_directory
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.problems import Problems
from ninfer_convert.recipe.scalars import read_free
from ninfer_convert.recipe.schema import schema
from ninfer_convert.recipe.yaml_nodes import parse_document

SCHEMA = schema()
VALIDATOR = Draft202012Validator(SCHEMA)
README = recipes_directory() / "README.md"
SHIPPED = sorted(recipes_directory().rglob("*.yaml"))
CHANGES = change(
    f"{{objects: text/token_embedding, format: Q5G64_F16S, encoder: {GROUPED}, require: [finite]}}",
    "{objects: text/ids, value: $ids, shape: [128]}",
    "{objects: text/*/qkv, words: quantized:x}",
    "{drop: mtp*}",
    f"{{resource: frontend/tokenizer.json, file: other.json, sha256: {DIGEST}}}",
    "{resource: frontend/ranking, input: ranking}",
    "{resource: frontend/chat_template.jinja, any: [{file: a, source: quantized, member: b}, {input: ranking}]}",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plain(text: str) -> Any:
    """Returns the values of a YAML text as editors see them: scalars by the core schema of YAML 1.2."""
    problems = Problems()
    node = parse_document(text.encode(), "r.yaml", problems)
    value = read_free(node, problems, lambda scalar: scalar.text)
    problems.raise_if_any()
    return value


def is_valid(document: Any) -> bool:
    return bool(VALIDATOR.is_valid(document))


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_command_prints_it_for_editors() -> None:
    ran = run_cli("recipe", "schema")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == SCHEMA


def test_every_reference_leads_somewhere() -> None:
    names = set(re.findall(r'"#/\$defs/([a-z0-9_]+)"', json.dumps(SCHEMA)))
    assert names == set(SCHEMA["$defs"])


def properties(node: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yields every mapping of the schema that has a title, with each of its keys and what is said of it."""
    if isinstance(node, list):
        for item in node:
            yield from properties(item)
    elif isinstance(node, dict):
        if "title" in node:
            yield from ((node, key, said) for key, said in node["properties"].items())
        for item in node.values():
            yield from properties(item)


def test_every_key_is_described_for_completion() -> None:
    found = list(properties(SCHEMA))
    assert len(found) > 100
    for mapping, key, said in found:
        assert re.fullmatch(r"[A-Za-z0-9][^\n]*[.]", said["description"]), (mapping["title"], key)
        assert mapping["additionalProperties"] is False


# -- what is right ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_shipped_is_valid(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [error.message for error in VALIDATOR.iter_errors(plain(text))] == []
    # Other readers of YAML see the same.
    assert is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("text", [SMALL, CHANGES])
def test_every_construct_is_valid(text: str, here: Path) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(plain(text))] == []


def readme_examples() -> list[tuple[str, str]]:
    """Returns the examples in the tables of the language's page, each with the heading of its table."""
    found = []
    heading = ""
    for line in README.read_text(encoding="utf-8").splitlines():
        cells = re.fullmatch(r"\| (.*) \| (.*) \|", line)
        if cells is None:
            continue
        if cells[2] == "example":
            heading = cells[1]
        else:
            found += [(heading, example) for example in re.findall(r"`([^`]+)`", cells[2])]
    return found


def completed(heading: str, example: str) -> str | None:
    """Returns a whole recipe around an example of the page; None for a scrap that is no YAML of its own."""
    example = example.replace("<40 hex digits>", COMMIT).replace("<64 hex digits>", DIGEST)
    example = example.replace("[...]", "[{name: x, shape: [1], format: BF16, value: v}]")
    if example.startswith(("<", "$", ".")) or re.fullmatch("[a-z]+:?", example):
        return None
    if example.startswith("prefix:"):
        example = f"sources: {{base: {{{example}}}}}"
    entry = "{name: x, shape: [], format: FP32, value: v}"
    start = HEAD.replace("evidence: none\n", "")
    if heading == "at the top level":
        if example.startswith("{"):
            return f"{start}objects: [{entry}]\nsets: {{s: {example}}}\n"
        keys = re.findall(r"^(\w+):", example)
        lines = [line for line in f"{start}objects: [{entry}]".splitlines() if line.partition(":")[0] not in keys]
        return "\n".join([*lines, example])
    if heading == "in `objects`":
        example = example.replace("..., ", "name: x, shape: [4, 64], ")
        if re.match(r"require|source|input|file|any", example):
            front = "name: x, shape: [1], format: BF16, value: v" if example.startswith("require") else "resource: r"
            example = f"{{{front}, {'file: f, ' if example.startswith('source') else ''}{example}}}"
        if example.startswith("optional"):
            example = f"{{component: c, {example}, objects: [{entry}]}}"
        return f"{start}objects: [{example}]\n"
    if heading == "a value":
        # Members of a move that stand alone.
        for begins, move in (("axis:", "slice: {span: [0, 1]"), ("to: []", "reshape: {"), ("to: ", "cast: {")):
            if example.startswith(begins):
                example = f"{{{move}{', ' if move[-1] != '{' else ''}of: X, {example}}}}}"
        return f"{start}objects: [{{name: x, shape: [1], format: BF16, value: {example}}}]\n"
    if heading == "in `change`":
        return f"{TUNE}change: [{example}]\n"
    return None


def test_the_examples_of_the_page_are_valid() -> None:
    texts = [completed(heading, example) for heading, example in readme_examples()]
    whole = [re.sub(r"\b([XY])\b", r"\1.weight", text) for text in texts if text is not None]
    assert len(whole) > 45
    for text in whole:
        assert [error.message for error in VALIDATOR.iter_errors(plain(text))] == [], text


# -- what is wrong ------------------------------------------------------------------------------------------------


WRONG = [
    ("schema: 1\n", "schema: 2\n"),
    ("id: small-v1\n", ""),
    ("ignore:\n", "ingore:\n"),
    ("{model_id: small, weights_id: mixed}", "{model_id: small}"),
    ("evidence:\n", "evidence: maybe\nx-evidence:\n"),
    ("revision: 0123456789", "revision: 0123"),
    ("dtype: [BF16, F32]", "dtype: [BF16, FP32]"),
    ("sha256: 5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42}}", "sha256: 5f9e}}"),
    ("{from: 0, through: 3}", "{from: 0, to: 3}"),
    ("{from: 0, through: 3}", "{from: 0}"),
    ("few: [3, 0]", "few: 3"),
    ("P: model.,", "P: [model.],"),
    ("format: W8G32_F16S\n", "format: W8G32\n"),
    ("format: W8G32_F16S\n    encoder: MAXABS_F16_RECIP_RNE_V1\n", "format: W8G32_F16S\n"),
    ("encoder: MAXABS_F16_RECIP_RNE_V1\n    layout", "encoder: MAXABS_BF16S_RECIP_E4M3FN_RNE_V1\n    layout"),
    ("layout: row-split-k128-v1", "layout: row-scale-v1"),
    ("shape: [<vocab>, 128]", "shape: <vocab>"),
    ("shape: [<vocab>, 128]\n", "shape: [1.5]\n"),
    ("    shape: [<vocab>, 128]\n", ""),
    ("    value: <P>embed_tokens.weight\n    require", "    require"),
    ("    value: <P>embed_tokens.weight\n    require", "    value: a\n    words: a\n    require"),
    ("require: [finite,", "require: [finte,"),
    ("{range: [-1e1, .5]}", "{range: [1]}"),
    ("{range: [-1e1, .5]}", "range"),
    ("block: 8, span: [0, 4]}", "block: 8, span: [0]}"),
    ("block: 8, span: [0, 4]}", "span: [0, 4]}"),
    ("format: NVFP4\n            words:", "format: NVFP4\n            value:"),
    ("{reciprocal: quantized:x.<b>}", "{reciprocl: quantized:x.<b>}"),
    ("{reciprocal: quantized:x.<b>}", "{reciprocal: x, reshape: {of: x, to: []}}"),
    ("to: FP32, rule: exact", "to: BF16, rule: exact"),
    ("to: FP32, rule: exact", "to: FP32"),
    ("{same: [a, quantized:a]}", "{same: [a]}"),
    ("{resource: frontend/ranking, input: ranking}", "{resource: frontend/ranking}"),
    ("{resource: frontend/ranking, input: ranking}", "{resource: frontend/ranking, input: ranking, file: x}"),
    ("{resource: frontend/ranking, input: ranking}", "{resource: frontend/ranking, input: ranking, source: base}"),
    ("when: {l: odd}", "if: {l: odd}"),
    ("for: {a: [2], b: {from: 5, through: 6}}", "for: [2]"),
    ("optional: true", "optional: maybe"),
    ("component: mtp\n", "component: [mtp]\n"),
    ("base: [<P>visual.*,", "base: [[<P>visual.*],"),
    ("words: {concat: [$q, {slice: {of: quantized:<L><l>.k, span: [0, 64]}}]}", "words: {reshape: {of: a, to: [1]}}"),
    ("concat: [$q, {slice: {of: quantized:<L><l>.k, span: [0, 64]}}]", "concat: {of: [a, b], axis: 1}"),
]


@pytest.mark.parametrize(("right", "wrong"), WRONG, ids=[wrong.strip()[:50] for _, wrong in WRONG])
def test_what_the_loader_refuses_of_form_the_schema_rejects(right: str, wrong: str, here: Path) -> None:
    assert SMALL.count(right) == 1
    text = SMALL.replace(right, wrong)
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError):
        load_recipe("recipe.yaml")
    assert not is_valid(plain(text))


@pytest.mark.parametrize(
    "entry",
    [
        "{objects: text/ids}", "{objects: text/ids, name: x}", "{object: text/ids, shape: [1]}", "{drop: [mtp]}",
        "{drop: mtp*, shape: [1]}", "{resource: r}", "{resource: r, member: x}",
        f"{{resource: r, sha256: {DIGEST[1:]}}}",
        "{objects: text/ids, layout: row-scale-v1}", "{objects: text/ids, value: a, words: a}", "{}",
    ],
)  # fmt: skip
def test_changes_of_a_wrong_form_are_rejected(entry: str, here: Path) -> None:
    Path("base.yaml").write_text(SMALL, encoding="utf-8")
    Path("tune.yaml").write_text(change(entry), encoding="utf-8")
    with pytest.raises(RecipeError):
        load_recipe("tune.yaml")
    assert not is_valid(plain(change(entry)))


def test_a_recipe_that_extends_none_is_whole_and_changes_nothing() -> None:
    assert is_valid(plain(TUNE))
    assert not is_valid(plain(TUNE.replace("extends: base.yaml\n", "")))
    assert not is_valid(plain(SMALL + "change: [{drop: mtp*}]\n"))
    assert not is_valid(plain(CHANGES.replace("extends: base.yaml\n", "")))


# -- the same keys as the loader ----------------------------------------------------------------------------------


Asked = tuple[str, frozenset[str], frozenset[str]]
"""What a mapping is called, the keys it needs, those it takes."""


def asked_for(monkeypatch: pytest.MonkeyPatch, load: Callable[[], None]) -> set[Asked]:
    """Returns the mappings that the loader reads."""
    asked = set()
    real = scalars.read_members

    def record(node: Any, what: str, required: Any, optional: Any, problems: Problems) -> Any:
        asked.add((what, frozenset(required), frozenset([*required, *optional])))
        return real(node, what, required, optional, problems)

    for module in (blocks, changes, expressions, files, objects, scope, sections):
        monkeypatch.setattr(module, "read_members", record)
    load()
    return asked


def test_the_keys_of_every_mapping_are_those_of_the_loader(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = SMALL.replace("{concat: [$q, <L><l>.k.weight]}", "{concat: {of: [$q, <L><l>.k.weight], axis: 0}}")
    assert every != SMALL
    Path("base.yaml").write_text(every, encoding="utf-8")
    Path("tune.yaml").write_text(CHANGES.replace("text/*/qkv", "text/0/qkv"), encoding="utf-8")

    def load() -> None:
        load_recipe("base.yaml")
        load_recipe("tune.yaml")

    loader = asked_for(monkeypatch, load)
    mine = {
        (mapping["title"], frozenset(mapping["required"]), frozenset(mapping["properties"]))
        for mapping, _, _ in properties(SCHEMA)
    }
    # What the schema says with `if` and `else`, and what the loader finds out by the one key of an entry.
    whole = frozenset(SCHEMA["properties"])
    assert {keys for what, _, keys in loader if what == "a recipe"} == {whole}
    assert {keys for what, keys, _ in loader if what == "a recipe"} == {
        frozenset(SCHEMA["required"]), frozenset([*SCHEMA["required"], *SCHEMA["else"]["required"]])
    }  # fmt: skip
    ids = frozenset(["model_id", "weights_id"])
    assert {entry for entry in loader if entry[0] == "artifact"} == {("artifact", ids, ids)}
    odd = {"a recipe", "artifact", "a condition"}
    assert {entry for entry in loader if entry[0] not in odd} == {entry for entry in mine if entry[0] not in odd}


def mappings(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from mappings(child)


# Written anew, a quoted text keeps no quotes where it needs none.
REWRITTEN = SMALL.replace('"<s>"', "s").replace('"$a:b"', "a:b")


@pytest.mark.parametrize(("text", "wrong"), [(REWRITTEN, 60), (CHANGES, 8)])
def test_a_key_more_is_refused_by_both_or_by_neither(text: str, wrong: int, here: Path) -> None:
    Path("base.yaml").write_text(SMALL, encoding="utf-8")
    document = plain(text)
    told = 0
    for place in range(sum(1 for _ in mappings(document))):
        changed = copy.deepcopy(document)
        list(mappings(changed))[place]["zzz"] = "a"
        accepted = loads(changed)
        told += not accepted
        if not is_valid(changed):
            assert not accepted
        elif not accepted:
            # A name of the recipe's own, which stands for something that is not there, or is not used as such.
            assert not any("unknown key" in message for message in refused(changed))
    assert told >= wrong


def loads(document: Any) -> bool:
    return not refused(document)


def refused(document: Any) -> list[str]:
    Path("made.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    try:
        load_recipe("made.yaml")
    except RecipeError as error:
        return list(error.messages)
    return []


def test_what_the_loader_takes_is_valid_whatever_was_changed(here: Path) -> None:
    """The schema is never stricter: of many recipes with one thing altered, those that load are valid."""
    document = plain(REWRITTEN)
    assert refused(document) == []
    draw = random.Random(20)
    values = ["x", 3, 0, 1.5, True, None, [], ["x"], [1, 2], {}, {"of": "x"}, "<P>", "<vocab>", "none", "$ids", "odd"]
    taken = 0
    for _ in range(300):
        changed = copy.deepcopy(document)
        spots: list[tuple[Any, Any]] = []
        for mapping in mappings(changed):
            for key, value in mapping.items():
                spots.append((mapping, key))
                spots += [(value, i) for i in range(len(value))] if isinstance(value, list) else []
        container, key = draw.choice(spots)
        how = draw.random()
        if how < 0.4:
            del container[key]
        elif how < 0.7:
            container[key] = draw.choice(values)
        else:
            other, place = draw.choice(spots)
            container[key] = copy.deepcopy(other[place])
        if loads(changed):
            taken += 1
            assert [error.message for error in VALIDATOR.iter_errors(changed)] == []
    assert taken > 50
