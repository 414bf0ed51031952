"""Warnings about recipes that are right: what is told, at which place, and what must stay quiet."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_texts import GROUPED, HEAD, SMALL, change

from ninfer_convert.recipe.change_log import ChangeLog
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.files import recipes_directory
from ninfer_convert.recipe.globs import covers
from ninfer_convert.recipe.lint import warnings
from ninfer_convert.recipe.loader import read_recipe
from ninfer_convert.recipe.problems import Problems

ONE = HEAD.replace("{base: {}, other: {}}", "{base: {}}")
OBJECTS = "objects: [{name: x, shape: [1], format: BF16, value: v}]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty directory the working directory, so that places begin with bare file names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(name: str) -> list[tuple[Mark, str]]:
    """Returns the warnings about a file or a shipped recipe."""
    changes = ChangeLog()
    return warnings(read_recipe(name, Problems(), changes.note), changes.steps)


def warned(text: str, name: str = "recipe.yaml") -> list[str]:
    """Returns the warnings about a recipe, as line:column: text."""
    Path(name).write_text(text, encoding="utf-8")
    found = told(name)
    assert all(mark.file == name for mark, _ in found)
    return [f"{mark.line}:{mark.column}: {text}" for mark, text in found]


def shipped_texts() -> list[str]:
    directory = recipes_directory()
    return sorted(path.relative_to(directory).with_suffix("").as_posix() for path in directory.rglob("*.yaml"))


@pytest.mark.parametrize("name", shipped_texts())
def test_shipped_recipes_and_examples_have_nothing_to_warn_of(name: str) -> None:
    assert told(name) == []


def test_the_recipe_with_every_construct_has_four_idle_parts(here: Path) -> None:
    assert warned(SMALL) == [
        "20:47: name 'width' is not used",
        "29:3: value 'spare' is not used",
        "46:7: value 'z' is not used",
        "98:99: 'model.layers.2.z' is ignored already in source base, by the entry on line 98",
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("names: {P: a.}\n", ["7:9: name 'P' is not used"]),
        ("names: {P: a., L: <P>b.}\n", ["7:9: name 'P' is not used", "7:16: name 'L' is not used"]),
        ("names: {P: a., L: <P>b.}\nignore: [<L>*]\n", []),
        ("names: {n: 7}\nsets: {s: [<n>]}\nconditions: [{for: {l: s}, conditions: [{same: [a.<l>, b.<l>]}]}]\n", []),
        ("sets: {s: [1], t: {all: s}}\n", ["7:8: set 's' is not used", "7:16: set 't' is not used"]),
        ("sets: {s: [1, 2], t: {all: s, except: [1]}}\nignore: [{for: {l: t}, names: [a.<l>]}]\n", []),
        ("values: {q: a, r: {same: [$q, b]}}\n", ["7:10: value 'q' is not used", "7:16: value 'r' is not used"]),
        ("values: {q: a, r: {same: [$q, b]}}\nconditions: [{same: [$r, c]}]\n", []),
        (
            "values: {q: a}\nconditions: [{for: {l: [0]}, values: {q: b}, conditions: [{same: [$q, c.<l>]}]}]\n",
            ["7:10: value 'q' is not used"],
        ),
        ("inputs: {ranking: {}}\n", ["7:10: input 'ranking' is not used by any object or condition"]),
    ],
)
def test_definitions_that_nothing_uses(more: str, told: list[str], here: Path) -> None:
    assert warned(ONE + OBJECTS + more) == told


def test_sources_that_nothing_reads(here: Path) -> None:
    told = ["5:21: source 'other' is not used by any object or condition"]
    assert warned(HEAD + OBJECTS + "ignore: {other: ['*']}\n") == told
    for reads in ("other:a", "{tensor: {name: b, source: other}}"):
        assert warned(f"{HEAD}{OBJECTS}conditions: [{{same: [a, {reads}]}}]\n") == []
    resource = "objects: [{name: x, shape: [1], format: BF16, value: v}, {resource: r, file: f, source: other}]\n"
    assert warned(HEAD + resource) == []


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("{l: s}", ["7:42: 'when' always holds: every round of the loops around it is in its sets"]),
        ("{l: [0, 1, 2]}", ["7:42: 'when' always holds: every round of the loops around it is in its sets"]),
        ("{l: [0]}", []),
    ],
)
def test_conditions_that_always_hold(condition: str, told: list[str], here: Path) -> None:
    entry = "{name: <l>, shape: [1], format: BF16, value: v.<l>}"
    loop = f"objects: [{{for: {{l: s}}, objects: [{{when: {condition}, objects: [{entry}]}}]}}]\n"
    assert warned(ONE + "sets: {s: [0, 1]}\n" + loop) == told


@pytest.mark.parametrize(
    ("ignore", "told"),
    [
        ("[a.*, a.b]", ["7:15: 'a.b' is ignored already in source base, by 'a.*' on line 7"]),
        ("[a.b, a.*]", ["7:10: 'a.b' is ignored already in source base, by 'a.*' on line 7"]),
        ("[a.b, a.b]", ["7:15: 'a.b' is ignored already in source base, by 'a.b' on line 7"]),
        ("[a.*, a.*, '*']", [
            "7:10: 'a.*' is ignored already in source base, by '*' on line 7",
            "7:15: 'a.*' is ignored already in source base, by 'a.*' on line 7",
        ]),
        ("['a.?x', a.*.b, 'a.[bc].b']", ["7:25: 'a.[bc].b' is ignored already in source base, by 'a.*.b' on line 7"]),
        ("[{for: {l: [1, 2]}, names: [a.<l>.b]}, a.*]", [
            "7:37: 'a.1.b' is ignored already in source base, by 'a.*' on line 7"
        ]),
        ("[{for: {l: [1, 2]}, names: [a.<l>.b]}, a.1*]", []),
        ("[a.*.b, a.b.*, '*.a']", []),
    ],
)  # fmt: skip
def test_globs_that_another_one_covers(ignore: str, told: list[str], here: Path) -> None:
    assert warned(f"{ONE}{OBJECTS}ignore: {ignore}\n") == told


PIECES = ["*", "?", "a", "b", ".", "[ab]", "[!a]", "[a-b]", "[", "]", "!"]
GLOBS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
NAMES = st.lists(st.text("ab.[]!", max_size=6), min_size=1, max_size=40)


@settings(max_examples=600, deadline=None)
@given(GLOBS, GLOBS, NAMES)
def test_a_glob_that_covers_another_matches_all_that_it_matches(wide: str, narrow: str, names: list[str]) -> None:
    if covers(wide, narrow):
        missed = [n for n in names if fnmatch.fnmatchcase(n, narrow) and not fnmatch.fnmatchcase(n, wide)]
        assert missed == []


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("*", "", True), ("*", "a?[b]*", True), ("a*", "a", True), ("a*", "ba", False), ("?", "*", False),
        ("?", "[ab]", True), ("[ab]", "a", True), ("[ab]", "c", False), ("[ab]", "[ab]", True), ("a", "?", False),
        ("*a*", "b*ab", True), ("a*b*c", "a*c", False), ("**", "*", True), ("", "", True), ("a", "", False),
    ],
)  # fmt: skip
def test_what_a_glob_covers(wide: str, narrow: str, expected: bool) -> None:
    assert covers(wide, narrow) is expected


BASE = f"""\
{ONE}objects:
  - {{name: a/x, shape: [4, 64], format: BF16, value: x}}
  - {{name: a/y, shape: [4, 64], format: BF16, value: y}}
  - {{name: q, shape: [4, 64], format: Q4G64_F16S, encoder: {GROUPED}, value: q}}
  - {{resource: r, file: f}}
"""
Q5 = f"format: Q5G64_F16S, encoder: {GROUPED}"


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (["{objects: a/*, format: BF16}"], [(5, "nothing")]),
        (["{objects: a/*, shape: [4, 64], value: x}"], []),
        (["{resource: r, file: f}"], [(5, "nothing")]),
        (["{resource: r, file: g}"], []),
        ([f"{{objects: a/x, {Q5}}}", f"{{objects: a/x, {Q5.replace('Q5', 'Q6')}}}"], [(5, "line 6")]),
        # The second takes its encoder from the first.
        ([f"{{objects: a/x, {Q5}}}", "{objects: a/x, format: Q6G64_F16S}"], []),
        ([f"{{objects: a/x, {Q5}}}", "{objects: a/*, format: FP32}"], [(5, "line 6")]),
        ([f"{{objects: a/*, {Q5}}}", "{objects: a/x, format: FP32}"], []),
        ([f"{{objects: a/*, {Q5}}}", "{objects: a/x, format: FP32}", "{drop: a/y}"], [(5, "line 7")]),
        (["{objects: a/x, require: [finite]}", "{objects: a/x, require: [unique]}"], [(5, "line 6")]),
        (["{objects: a/x, require: [finite]}", "{objects: a/x, value: z}"], []),
        (["{objects: a/x, value: z}", "{drop: a/x}"], [(5, "line 6")]),
        (["{resource: r, file: g}", "{resource: r, input: i}"], [(5, "line 6")]),
        (["{resource: r, file: g}", f"{{resource: r, sha256: {'a' * 64}}}"], []),
        (["{drop: a/x}", "{objects: a/*, format: FP32}"], []),
    ],
)
def test_changes_without_effect(entries: list[str], told: list[tuple[int, str]], here: Path) -> None:
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    text = change(*entries) + ("inputs: {i: {}}\n" if "input: i" in entries[-1] else "")
    found = warned(text, "tune.yaml")
    assert [int(warning.partition(":")[0]) for warning in found] == [line for line, _ in told]
    for warning, (_, fragment) in zip(found, told, strict=True):
        whole = {
            "nothing": "this change changes nothing: the objects are like that already",
        }.get(fragment, f"this change has no effect: all of it is changed again further down, last on {fragment}")
        assert re.fullmatch(rf"\d+:5: {whole}", warning)


def test_a_recipe_is_warned_of_its_own_lines_only(here: Path) -> None:
    Path("base.yaml").write_text(BASE + "names: {P: a}\n", encoding="utf-8")
    assert warned("schema: 1\nid: t\nextends: base.yaml\nsets: {s: [1]}\n", "tune.yaml") == ["4:8: set 's' is not used"]


def test_an_override_of_what_the_base_uses_is_used(here: Path) -> None:
    Path("base.yaml").write_text(SMALL, encoding="utf-8")
    text = "schema: 1\nid: t\nextends: base.yaml\nsets: {few: [0, 2]}\nvalues: {ids: other}\ninputs: {ranking: {}}\n"
    assert warned(text.replace("values: {ids: other}\n", ""), "tune.yaml") == []


def test_text_that_looks_like_a_block_defines_nothing(here: Path) -> None:
    config = ONE.replace("{base: {}}", "{base: {config: {values: {q: 1}, names: [x], for: {l: s}}}}")
    assert warned(config + OBJECTS) == []
