"""One is told as one, wherever a count is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from case_tools import Case, entry, filled, run_cli

from ninfer_convert.recipe.counting import counted, plural


@pytest.mark.parametrize(("number", "told"), [(0, "0 tensors"), (1, "1 tensor"), (2, "2 tensors"), (11, "11 tensors")])
def test_one_is_one_and_everything_else_is_many(number: int, told: str) -> None:
    assert counted(number, "tensor") == told
    assert f"{number} {plural(number, 'tensor')}" == told


def test_commands_count_one_object_of_one_source_as_one(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.source({"a": filled("BF16", [64, 64], 0x3F80)})
    case.recipe(entry("a", [64, 64], "Q4G64_F16S", "a"))
    source = ["--source", case.sources["base"]]
    ran = [
        run_cli("recipe", "init", case.sources["base"], "-o", tmp_path / "draft.yaml"),
        run_cli("recipe", "check", case.recipe_path),
        run_cli("recipe", "show", case.recipe_path, "--diff", case.recipe_path),
        case.plan("--set", "a=Q5G64_F16S"),
        case.run(),
        run_cli("verify", case.output, "--recipe", case.recipe_path, *source),
    ]
    text = "\n".join(one.out + one.err for one in ran)
    assert [one.code for one in ran] == [0] * len(ran)
    assert text.count("1 object") >= len(ran)
    assert re.findall(r"(?<![\d.,])1 (?!byte)[a-z]+s\b", text) == []


def test_the_draft_says_whether_it_stands_alone(tmp_path: Path) -> None:
    case = Case(tmp_path)
    place = case.source({"a": filled("BF16", [64, 64], 0x3F80)})
    ran = run_cli("recipe", "init", place, "-o", tmp_path / "draft.yaml")
    assert ran.out == f"wrote {tmp_path / 'draft.yaml'}: 1 object; stands alone\n"
