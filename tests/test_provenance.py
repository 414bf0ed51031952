"""What identifies a conversion, and what the report says went into an object."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoints import bf16, write_directory

from ninfer_convert.errors import OutputError
from ninfer_convert.plan.planner import Plan, make_plan
from ninfer_convert.plan.provenance import object_json, plan_identity
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.run.convert import convert
from ninfer_convert.run.journal import differences
from ninfer_convert.source.checkpoint import open_checkpoint

RECIPE = """\
schema: 1
id: head
artifact: {model_id: m, weights_id: w}
evidence: none
sources: {base: {}}
inputs: {ranking: {}}
values: {ids: {shortlist: {counts: ranking, candidates: 20, take: 5, special: tokenizer_config.json}}}
objects:
  - {name: ids, shape: [5], format: I32, value: $ids}
  - {name: head, shape: [5, 64], format: BF16, value: {gather: {of: e, ids: $ids}}}
  - {name: chosen, shape: [2, 64], format: BF16, value: {gather: {of: e, ids: rows}}}
  - {name: divisor, shape: [], format: FP32, value: {reshape: {to: [], of: {reciprocal: m.input_scale}}}}
"""


def planned(directory: Path, special: int) -> Plan:
    tokens = {"added_tokens_decoder": {str(special): {"content": "<end>", "special": True}}}
    tensors = {
        "e": bf16(np.arange(20 * 64).reshape(20, 64)),
        "rows": ("I64", np.array([3, 1])),
        "m.input_scale": ("F32", np.array([0.1], np.float32)),
    }
    if not directory.exists():
        write_directory(directory, {"model.safetensors": tensors})
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens), encoding="utf-8")
    (directory / "ranking").write_bytes(np.arange(20, dtype="<i8").tobytes())
    (directory / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    with open_checkpoint(directory, name="base") as checkpoint:
        recipe = load_recipe(directory / "recipe.yaml")
        return make_plan(recipe, {"base": checkpoint}, {"ranking": directory / "ranking"})


def test_a_file_that_only_decides_a_shortlist_belongs_to_the_identity(tmp_path: Path) -> None:
    first = plan_identity(planned(tmp_path / "m", 3))
    assert plan_identity(planned(tmp_path / "m", 3)) == first
    changed = differences(first, plan_identity(planned(tmp_path / "m", 4)))
    assert len(changed) == 1
    assert changed[0].startswith("shortlists")


@pytest.mark.parametrize(
    ("name", "origins"),
    [
        ("ids", [("input", "ranking"), ("file", "tokenizer_config.json")]),
        ("head", [("input", "ranking"), ("file", "tokenizer_config.json"), ("tensor", "e")]),
        ("chosen", [("tensor", "e"), ("tensor", "rows")]),
        ("divisor", [("tensor", "m.input_scale")]),
    ],
)
def test_the_report_names_everything_that_went_into_an_object(
    tmp_path: Path, name: str, origins: list[tuple[str, str]]
) -> None:
    plan = planned(tmp_path / "m", 3)
    (entry,) = [object_json(item) for item in plan.objects if item.name == name]
    found = entry["sources"]
    assert len(found) == len(origins)
    for source, (member, text) in zip(found, origins, strict=True):
        assert source[member] == text
        assert "tensor" not in source or {"dtype", "shape", "file", "source"} <= source.keys()


def test_threads_that_cannot_be_started_are_told_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(tmp_path / "m", 3)
    started = threading.Thread.start
    count = iter(range(100))

    def start(self: threading.Thread) -> None:
        if next(count) == 2:
            raise RuntimeError("can't start new thread")
        started(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with open_checkpoint(tmp_path / "m", name="base") as checkpoint:
        recipe = load_recipe(tmp_path / "m" / "recipe.yaml")
        plan = make_plan(recipe, {"base": checkpoint}, {"ranking": tmp_path / "m" / "ranking"})
        with pytest.raises(OutputError, match="threads cannot be started: can't start new thread; use"):
            convert(plan, tmp_path / "out", threads=4)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
