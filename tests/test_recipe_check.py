"""`recipe check` and `recipe list`: what they print, and where.

Source: cli.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from case_tools import run_cli
from recipe_texts import GROUPED, HEAD, SMALL, TUNE

from ninfer_convert.errors import RecipeError
from ninfer_convert.recipe.files import recipes_directory
from ninfer_convert.recipe.loader import load_recipe

OBJECT = "{name: x, shape: [1], format: BF16, value: v}"
LOSSY = f"{{name: x, shape: [1, 64], format: Q4G64_F16S, encoder: {GROUPED}, value: v}}"
ONE = HEAD.replace(", other: {}", "")

RIGHT = SMALL
"""The recipe with every construct, without those parts that are warned of."""
for idle in (", width: <vocab>", "  spare: {modelopt: quantized:nothing}\n", ", {when: {l: [2]}, names: [<L><l>.z]}",
             "      z: {slice: {of: $q, span: [0, 2], axis: 1}}\n"):  # fmt: skip
    assert SMALL.count(idle) == 1
    RIGHT = RIGHT.replace(idle, "")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty directory the working directory, so that messages begin with bare file names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RIGHT, "21 objects, 2 sources"),
        (ONE + f"objects: [{OBJECT}]\n", "1 object, 1 source"),
        (ONE + f"objects: [{LOSSY}]\n", "1 object, 1 source, evidence: none for 1 lossy object"),
    ],
)
def test_a_right_recipe_is_told_in_one_line(text: str, told: str, here: Path) -> None:
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    ran = run_cli("recipe", "check", "recipe.yaml")
    assert (ran.code, ran.out, ran.err) == (0, f"recipe.yaml: {told}: no problems\n", "")


def test_a_right_recipe_as_json(here: Path) -> None:
    Path("recipe.yaml").write_text(RIGHT, encoding="utf-8")
    ran = run_cli("recipe", "check", "--json", "recipe.yaml")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == {"ok": True, "recipe": "recipe.yaml", "objects": 21, "problems": []}


@pytest.mark.parametrize("name", ["demo", "examples/fine-tune", "qwen3.8-27b/nvfp4"])
def test_a_shipped_recipe_is_checked_by_its_name(name: str, here: Path) -> None:
    ran = run_cli("recipe", "check", name)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{recipes_directory() / name}.yaml: {len(load_recipe(name).objects)} objects, ")


def test_every_problem_is_told_at_its_place(here: Path) -> None:
    Path("base.yaml").write_text(SMALL.replace("step: 2", "step: 0"), encoding="utf-8")
    Path("tune.yaml").write_text(TUNE + "ingore: [a]\nnames: {z: [1]}\n", encoding="utf-8")
    told = [
        ("base.yaml", 23, 36, "step is 0; it must be 1 or more"),
        ("tune.yaml", 4, 1, "unknown key 'ingore' in a recipe; nearest is 'ignore'"),
        ("tune.yaml", 5, 12, "expected text or an integer, found a list"),
    ]
    ran = run_cli("recipe", "check", "tune.yaml")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out == """\
base.yaml:23:36: error: step is 0; it must be 1 or more
   23 |   odd: {from: 1, through: 3, step: 0}
      |                                    ^
tune.yaml:4:1: error: unknown key 'ingore' in a recipe; nearest is 'ignore'
    4 | ingore: [a]
      | ^~~~~~
tune.yaml:5:12: error: expected text or an integer, found a list
    5 | names: {z: [1]}
      |            ^
tune.yaml: 3 errors
"""
    ran = run_cli("recipe", "check", "tune.yaml", "--json")
    assert (ran.code, ran.err) == (1, "")
    keys = ("file", "line", "column", "message")
    expected = [{"severity": "error", **dict(zip(keys, problem, strict=True))} for problem in told]
    expected[0] |= {"end_column": 37}
    expected[1] |= {"end_column": 7, "suggestion": "ignore"}
    assert json.loads(ran.out) == {"ok": False, "recipe": "tune.yaml", "objects": None, "problems": expected}


def test_a_check_goes_on_where_an_error_stops(here: Path) -> None:
    entries = "".join(f"  - {{name: x{i}, shape: [0], format: BF16, value: v}}\n" for i in range(250))
    Path("recipe.yaml").write_text(f"{HEAD}objects:\n{entries}", encoding="utf-8")
    expected = [f"recipe.yaml:{7 + i}:" for i in range(250)]
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml")
    assert len(caught.value.messages) == 101
    assert caught.value.messages[-1] == "150 more problems are not shown"
    ran = run_cli("recipe", "check", "recipe.yaml")
    assert ran.code == 1
    *told, last = ran.out.splitlines()[::3]
    assert [line.startswith(at) for line, at in zip(told, expected, strict=True)] == [True] * 250
    assert last == "recipe.yaml: 250 errors"
    assert len(json.loads(run_cli("recipe", "check", "--json", "recipe.yaml").out)["problems"]) == 250


def test_a_file_that_is_no_yaml_is_told_at_its_place(here: Path) -> None:
    Path("recipe.yaml").write_text("a: b: c\n", encoding="utf-8")
    ran = run_cli("recipe", "check", "recipe.yaml")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("recipe.yaml:1:5: error: not valid YAML")


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing.yaml", "error: nothing.yaml: the recipe cannot be read: No such file or directory\n"),
        ("qwen3.6-27b/nvpf4", "error: no recipe file and no shipped recipe is named 'qwen3.6-27b/nvpf4'; nearest is "
         "'qwen3.6-27b/nvfp4'\n"),
    ],
)  # fmt: skip
def test_a_recipe_that_is_not_there_is_an_error_and_no_result(
    name: str, told: str, options: tuple[str, ...], here: Path
) -> None:
    ran = run_cli("recipe", "check", name, *options)
    assert (ran.code, ran.out, ran.err) == (1, "", told)


def test_a_path_that_is_not_utf8_is_shown_escaped(here: Path) -> None:
    name = os.fsdecode(b"\xff\x1b.yaml")
    Path(name).write_text(RIGHT, encoding="utf-8")
    assert run_cli("recipe", "check", name).out == "\\udcff\\x1b.yaml: 21 objects, 2 sources: no problems\n"
    assert json.loads(run_cli("recipe", "check", "--json", name).out)["recipe"] == "\\udcff\\x1b.yaml"
    Path(name).write_text(f"{HEAD}objects: x\n", encoding="utf-8")
    assert run_cli("recipe", "check", name).out.startswith(
        "\\udcff\\x1b.yaml:6:10: error: expected a list of objects, found 'x'\n    6 | objects: x\n      |          ^\n"
    )


def test_the_list_has_the_recipes_that_can_be_converted_as_they_are() -> None:
    names = [
        "demo",
        "minilm-l6-v2",
        "qwen3.6-27b/groupwise-int",
        "qwen3.6-27b/nvfp4",
        "qwen3.8-27b/groupwise-int",
        "qwen3.8-27b/nvfp4",
    ]
    ran = run_cli("recipe", "list")
    assert (ran.code, ran.err) == (0, "")
    assert [line.split()[0] for line in ran.out.splitlines()] == names
    assert [entry["name"] for entry in json.loads(run_cli("recipe", "list", "--json").out)] == names
