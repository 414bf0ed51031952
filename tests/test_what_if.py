"""`plan --set`: exactly the plan of the changed recipe, and errors that a conversion of it then has."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tools import entry, f32, require_refusal, run_cli
from hypothesis import given
from hypothesis import strategies as st
from miniatures import Miniatures
from pipeline import planned, stand_in_places
from tuning_case import FP8, LAYERS, Q4, Q5, Q6, W8, TuningCase

from ninfer_convert.artifact.decode import decode_rows
from ninfer_convert.cli.what_if import WITHIN
from ninfer_convert.encode.rows import encode_rows
from ninfer_convert.errors import PlanError, UsageError
from ninfer_convert.formats import FORMATS, GroupedFormat, RowScaledFormat
from ninfer_convert.layout import geometry
from ninfer_convert.plan.error_model import TOLERANCE, assumes_normal, expected_error
from ninfer_convert.plan.measured import read_measurements
from ninfer_convert.plan.what_if import file_bytes, parse_setting, stored_objects, total_error, with_settings
from ninfer_convert.recipe.loader import load_recipe

ENCODED = (Q4, Q5, Q6, W8, FP8)
SIZE = (256, 1024)
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> TuningCase:
    return TuningCase(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def report(case: TuningCase) -> dict[str, Any]:
    return case.measured_report()


def plan_json(case: TuningCase, *extra: object) -> dict[str, Any]:
    ran = case.plan("--json", *extra)
    assert ran.code == 0, ran.err
    document: dict[str, Any] = json.loads(ran.out)
    return document


def changed_plan(case: TuningCase, *changes: str) -> dict[str, Any]:
    """Returns the plan of a recipe that extends the case's with these changes."""
    path = case.root / "changed.yaml"
    text = f"schema: 1\nid: changed\nextends: {case.recipe_path.name}\nchange: [{', '.join(changes)}]\n"
    path.write_text(text, encoding="utf-8")
    ran = run_cli("plan", path, "--source", case.sources["base"], "--json")
    assert ran.code == 0, ran.err
    document: dict[str, Any] = json.loads(ran.out)
    return document


# -- the plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ([f"layers/*/down={Q4}"], [f"{{objects: layers/*/down, format: {Q4}}}"]),
        ([f"layers/[0-4]/*={W8}", f"layers/3/up={Q4}"],
         [f"{{objects: 'layers/[0-4]/*', format: {W8}}}", f"{{objects: layers/3/up, format: {Q4}}}"]),
        ([f"layers/3/up={Q4}", f"layers/[0-4]/*={W8}"], [f"{{objects: 'layers/[0-4]/*', format: {W8}}}"]),
        (["head=BF16"], ["{objects: head, format: BF16}"]),
        ([f"plain={Q6}"], [f"{{objects: plain, format: {Q6}, encoder: MAXABS_F16_RECIP_RNE_V1}}"]),
        ([f"head={FP8}"], [f"{{objects: head, format: {FP8}, encoder: MAXABS_BF16S_RECIP_E4M3FN_RNE_V1}}"]),
        ([f"rows={W8}"], [f"{{objects: rows, format: {W8}, encoder: MAXABS_F16_RECIP_RNE_V1}}"]),
        (["copied=NVFP4"], ["{objects: copied, format: NVFP4}"]),
    ],
)
def test_a_setting_plans_what_a_change_at_the_end_plans(
    case: TuningCase, settings: list[str], changes: list[str]
) -> None:
    alone, changed = plan_json(case), changed_plan(case, *changes)
    found = plan_json(case, *(word for text in settings for word in ("--set", text)))
    assert found["objects"] == changed["objects"]
    totals = {**found["totals"], "peak_memory_bytes": 0}
    assert totals == {**changed["totals"], "peak_memory_bytes": 0}
    # The digest is that of the recipe, which is not what was planned: the settings stand beside it.
    assert found["recipe"] == alone["recipe"] | {"set": settings}
    what_if = found["what_if"]
    assert what_if["set"] == [dict(zip(("objects", "format"), text.split("="), strict=True)) for text in settings]
    formats = [[item.get("format") for item in document["objects"]] for document in (alone, found)]
    assert what_if["changed"] == sum(before != after for before, after in zip(*formats, strict=True))
    assert what_if["recipe_file_bytes"] == alone["totals"]["file_bytes"]
    assert what_if["file_bytes"] == changed["totals"]["file_bytes"]
    assert what_if["difference_bytes"] == changed["totals"]["file_bytes"] - alone["totals"]["file_bytes"]
    assert "expected_error" not in what_if


def test_a_plan_without_settings_says_nothing_of_them(case: TuningCase) -> None:
    found = plan_json(case)
    assert "what_if" not in found
    assert set(found["recipe"]) == {"id", "sha256"}


def test_the_summary_tells_both_sizes(case: TuningCase) -> None:
    alone = plan_json(case)["totals"]["file_bytes"]
    more, less = (plan_json(case, "--set", text)["totals"]["file_bytes"] for text in ("head=BF16", f"head={Q4}"))
    for text, line in (
        ("head=BF16", f"{more - alone:,} bytes are added"),
        (f"head={Q4}", f"{alone - less:,} bytes are saved"),
    ):
        ran = case.plan("--set", text, "--objects")
        assert f"what if {text}: 1 object in another format\n  the recipe alone writes {alone:,} bytes" in ran.out
        assert ran.out.rstrip().endswith(line)
    ran = case.plan("--set", f"head={W8}")
    assert "what if head=W8G32_F16S: 0 objects in another format" in ran.out
    assert ran.out.rstrip().endswith("no bytes are added or saved")


def test_a_deep_plan_reads_the_values_as_the_other_format_takes_them(tmp_path: Path) -> None:
    case = TuningCase(tmp_path)
    dtype, words = f32(*[1e30] * 64)
    case.source({"m": (dtype, words.reshape(1, 64))})
    case.recipe(entry("m", [1, 64], "FP32", "m"))
    assert case.plan("--deep").code == 0
    ran = case.plan("--deep", "--set", f"m={Q4}")
    require_refusal(ran, 1)
    assert "is not finite in binary16" in ran.err


def test_sizes_are_those_of_the_planner_for_every_shipped_recipe(miniatures: Miniatures) -> None:
    checked = 0
    for recipe in sorted(miniatures.recipes.rglob("*.yaml")):
        model = "qwen3.8-27b" if "qwen3.8" in str(recipe) else "qwen3.6-27b"
        places, inputs = stand_in_places(miniatures.models[model])
        with planned(recipe, {name: places[name] for name in load_recipe(recipe).sources}, inputs) as plan:
            assert file_bytes(plan.recipe, stored_objects(plan)) == plan.file_bytes
            checked += 1
    assert checked == 6


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "layers"], "--set layers: write GLOB=FORMAT, such as 'text/layers/*/mlp/down=Q6G64_F16S'"),
        (["--set", f"={Q4}"], f"--set ={Q4}: write GLOB=FORMAT"),
        (["--set", "head="], "--set head=: write GLOB=FORMAT"),
        (["--set", "head=Q6G64"], "--set head=Q6G64: no format is named 'Q6G64'; nearest is 'Q6G64_F16S'"),
        (["--set", f"haed={Q4}"], f"--set haed={Q4}: 'haed' matches no tensor of the recipe; nearest is 'head'"),
        (["--set", f"notes={Q4}"], f"--set notes={Q4}: 'notes' matches no tensor of the recipe"),
        (["--report", "r.json"], "--report goes with --set: it lets expect the errors of other formats"),
        (["--set", f"head={Q4}", "-o", "p.json", "--output", "o"],
         "--set is for a look, and -o PLAN.json is for a recipe; write the change into a recipe"),
    ],
)
def test_settings_that_cannot_be_meant_are_usage_errors(case: TuningCase, words: list[str], message: str) -> None:
    ran = case.plan(*words)
    require_refusal(ran, 2)
    assert message in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"norm={Q4}", r"object norm: shape \[128\] has rank 1; Q4G64_F16S stores matrices \[N, K\] of rank 2"),
        (f"copied={Q4}", r"object copied: its NVFP4 words are copied from the source; it cannot be Q4G64_F16S"),
        ("head=NVFP4", r"object head: NVFP4 is copied from a source module and no encoder makes it; it stays W8G32"),
        ("head=FP32", r"object head: base:head is BF16; format FP32 takes F32; name the conversion: cast to FP32"),
    ],
)
def test_a_format_that_an_object_cannot_have_is_told_with_its_name(case: TuningCase, text: str, message: str) -> None:
    ran = case.plan("--set", text)
    require_refusal(ran, 1)
    assert re.search(message, ran.err)
    assert f"error: {case.recipe_path}:" in ran.err


def test_every_object_that_cannot_have_the_format_is_told(case: TuningCase) -> None:
    ran = case.plan("--set", f"*={Q4}")
    require_refusal(ran, 1)
    assert [line.partition("object ")[2].partition(":")[0] for line in ran.errors] == ["norm", "copied"]


# -- the model ---------------------------------------------------------------------------------------------


def converted_error(name: str, values: Array) -> float:
    """Returns the relative L2 error of values that the kernels encoded."""
    numeric = FORMATS[name]
    assert isinstance(numeric, (GroupedFormat, RowScaledFormat))
    planes = {
        plane.name: np.empty((values.shape[0], plane.row_bytes), np.uint8)
        for plane in geometry(numeric, values.shape).planes
    }
    encode_rows(numeric, "F32", np.ascontiguousarray(values, "<f4").view("<u4"), planes)
    represented = decode_rows(numeric, values.shape[1], planes).astype(np.float64)
    exact = values.astype(np.float32).astype(np.float64)
    return float(np.linalg.norm(exact - represented) / np.linalg.norm(exact))


def spread(name: str) -> Array:
    draw = np.random.default_rng(11)
    made: dict[str, Callable[[], Array]] = {
        "normal": lambda: draw.standard_normal(SIZE),
        "normal, rows apart": lambda: draw.standard_normal(SIZE) * np.exp(draw.standard_normal((SIZE[0], 1))),
        "narrow": lambda: draw.standard_normal((2048, 32)),
        "uniform": lambda: draw.uniform(-1, 1, SIZE),
        "laplace": lambda: draw.laplace(size=SIZE),
        "t5": lambda: draw.standard_t(5, SIZE),
        "t4": lambda: draw.standard_t(4, SIZE),
        "t3": lambda: draw.standard_t(3, SIZE),
    }
    return made[name]()


@pytest.mark.parametrize("name", ["normal", "normal, rows apart", "narrow", "uniform", "laplace", "t5", "t4"])
def test_the_model_moves_errors_between_formats_as_the_kernels_do(name: str) -> None:
    values = spread(name)
    measured = {name: converted_error(name, values) for name in ENCODED}
    for present in (Q4, Q5, Q6, W8):
        for wanted in ENCODED:
            expected = expected_error(measured[present], FORMATS[present], FORMATS[wanted], values.shape[1])
            assert expected == pytest.approx(measured[wanted], rel=TOLERANCE), (present, wanted)


@pytest.mark.parametrize("name", ["normal", "normal, rows apart", "narrow"])
def test_from_words_that_tell_no_spread_normal_values_are_assumed(name: str) -> None:
    values = spread(name)
    for wanted in (Q4, Q5, Q6, W8):
        for present, measured in ((FP8, 0.02), ("BF16", 0.0)):
            expected = expected_error(measured, FORMATS[present], FORMATS[wanted], values.shape[1])
            assert expected == pytest.approx(converted_error(wanted, values), rel=TOLERANCE)
            assert assumes_normal(FORMATS[present], FORMATS[wanted])
    assert not assumes_normal(FORMATS[Q4], FORMATS[W8])
    assert not assumes_normal(FORMATS["BF16"], FORMATS[FP8])


def test_of_very_heavy_tails_the_model_says_too_much_at_few_bits_and_by_how_much() -> None:
    values = spread("t3")
    measured = {name: converted_error(name, values) for name in ENCODED}
    ratios = {
        (present, wanted): expected_error(measured[present], FORMATS[present], FORMATS[wanted], SIZE[1])
        / measured[wanted]
        for present in (Q4, Q5, Q6, W8)
        for wanted in (Q4, Q5, Q6, W8)
    }
    assert all(0.8 < ratio < 1.2 for ratio in ratios.values())
    assert ratios[W8, Q4] > 1.05


def test_the_model_holds_for_trained_weights(minilm: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(minilm / "model.safetensors")
    matrices = [
        values
        for name, values in tensors.items()
        if values.ndim == 2 and ("encoder.layer.0" in name or "encoder.layer.5" in name or "position_emb" in name)
    ]
    assert len(matrices) == 13
    for values in matrices:
        measured = {name: converted_error(name, values) for name in ENCODED}
        for present in (Q4, Q5, Q6, W8):
            for wanted in ENCODED:
                expected = expected_error(measured[present], FORMATS[present], FORMATS[wanted], values.shape[1])
                assert expected == pytest.approx(measured[wanted], rel=TOLERANCE)


GROUPED_FORMATS = st.sampled_from((Q4, Q5, Q6, W8))


@given(GROUPED_FORMATS, GROUPED_FORMATS, st.floats(1e-4, 0.3), st.integers(1, 5000))
def test_there_and_back_is_where_it_began(present: str, wanted: str, measured: float, k: int) -> None:
    there = expected_error(measured, FORMATS[present], FORMATS[wanted], k)
    assert expected_error(there, FORMATS[wanted], FORMATS[present], k) == pytest.approx(measured, rel=1e-9)


@given(st.floats(1e-4, 0.3), st.integers(64, 5000))
def test_of_one_group_length_the_error_goes_as_the_step(measured: float, k: int) -> None:
    levels = {Q4: 7, Q5: 15, Q6: 31}
    for present, q in levels.items():
        for wanted, other in levels.items():
            expected = expected_error(measured, FORMATS[present], FORMATS[wanted], k)
            assert expected == pytest.approx(measured * q / other, rel=1e-12)
        assert expected_error(measured, FORMATS[present], FORMATS["BF16"], k) == 0
        assert expected_error(measured, FORMATS[present], FORMATS[present], k) == measured


# -- expected errors ---------------------------------------------------------------------------------------


def relative_together(case: TuningCase, errors: dict[str, float]) -> float:
    squares = {name: float(np.sum(case.values[name].astype(np.float64) ** 2)) for name in errors}
    return math.sqrt(sum(error**2 * squares[name] for name, error in errors.items()) / sum(squares.values()))


def test_expected_errors_come_from_the_report_and_true_conversions_agree(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    case = TuningCase(tmp_path)
    settings = [f"layers/*/down={Q4}", f"head={Q6}", "layers/2/up=BF16", f"rows={W8}"]
    words = [word for text in settings for word in ("--set", text)]
    found = plan_json(case, *words, "--report", case.save(report))["what_if"]["expected_error"]
    stats = {item["name"]: item["stats"] for item in report["objects"] if "stats" in item}
    names = [name for role in ("down",) for name in (f"layers/{layer}/{role}" for layer in range(LAYERS))]
    assert {item["name"] for item in found["objects"]} == {*names, "head", "layers/2/up", "rows"}
    by_name = {item["name"]: item for item in found["objects"]}
    assert {name: item["before"] for name, item in by_name.items()} == {
        name: stats[name]["relative_l2"] for name in by_name
    }
    for name in names:
        assert by_name[name]["after"] == pytest.approx(stats[name]["relative_l2"] * 31 / 7)
    assert by_name["layers/2/up"] == {
        "name": "layers/2/up", "format_before": Q5, "format_after": "BF16",
        "before": stats["layers/2/up"]["relative_l2"], "after": 0.0, "assumes_normal_values": False,
    }
    assert [name for name, item in by_name.items() if item["assumes_normal_values"]] == ["rows"]
    # Now it is done.
    case.write(down=Q4, more="")
    text = case.recipe_path.read_text().replace(f"format: {W8}", f"format: {Q6}", 1)
    text = text.replace(f"format: {FP8}, encoder: MAXABS_BF16S_RECIP_E4M3FN_RNE_V1",
                        f"format: {W8}, encoder: MAXABS_F16_RECIP_RNE_V1")
    case.recipe_path.write_text(text)
    case.converted()
    for name in by_name.keys() - {"layers/2/up"}:
        assert by_name[name]["after"] == pytest.approx(case.stats(name)["relative_l2"], rel=TOLERANCE), name
    # The totals are those of the values themselves.
    assert (found["weight"], found["unmeasured"]) == ("squared norm", [])
    for key, members in (("changed", set(by_name)), ("measured", set(stats))):
        before = relative_together(case, {name: stats[name]["relative_l2"] for name in members})
        after = relative_together(
            case, {name: by_name[name]["after"] if name in by_name else stats[name]["relative_l2"] for name in members}
        )
        assert found[key]["objects"] == len(members)
        assert found[key]["before"] == pytest.approx(before)
        assert found[key]["after"] == pytest.approx(after)


def test_the_summary_says_that_it_is_an_estimate(case: TuningCase, report: dict[str, Any]) -> None:
    path = case.save(report)
    stats = {item["name"]: item["stats"] for item in report["objects"] if "stats" in item}
    ran = case.plan("--set", f"layers/1/down={Q4}", "--set", f"rows={Q4}", "--set", f"plain={W8}", "--report", path)
    assert ran.code == 0, ran.err
    down, rows = (stats[name]["relative_l2"] for name in ("layers/1/down", "rows"))
    lines = ran.out.splitlines()
    assert f"{TOLERANCE:.0%}" in WITHIN
    begin = lines.index(f"expected relative L2 error from {path}; an estimate, {WITHIN}")
    assert lines[begin + 1] == f"  Q6G64_F16S {down:.5f} -> Q4G64_F16S {down * 31 / 7:.5f}  layers/1/down"
    assert lines[begin + 2].startswith(f"  {FP8} {rows:.5f} -> Q4G64_F16S 0.107")
    assert lines[begin + 2].endswith("  rows, if its values are normal")
    assert lines[begin + 3].endswith("  together, 2 objects changed, by squared norm")
    assert lines[begin + 4].endswith(f"  together, {len(stats)} objects measured, by squared norm")
    assert lines[begin + 5] == "  not in the report: 1 object, plain first"


def test_without_rms_objects_weigh_by_their_elements(case: TuningCase, report: dict[str, Any]) -> None:
    old = copy.deepcopy(report)
    for item in old["objects"]:
        item.get("stats", {}).pop("rms", None)
    found = plan_json(case, "--set", f"*/0/*={W8}", "--report", case.save(old))["what_if"]["expected_error"]
    assert found["weight"] == "elements"
    stats = {item["name"]: item["stats"]["relative_l2"] for item in old["objects"] if "stats" in item}
    up, down = stats["layers/0/up"], stats["layers/0/down"]
    expected = math.sqrt((up**2 * 96 * 128 + down**2 * 64 * 320) / (96 * 128 + 64 * 320))
    assert found["changed"]["before"] == pytest.approx(expected)


def test_totals_of_nothing_are_zero() -> None:
    assert total_error([]) == 0
    assert total_error([(0.5, 0.0)]) == 0
    assert total_error([(0.3, 1.0), (0.4, 1.0)]) == pytest.approx(math.sqrt(0.125))


# -- reports -----------------------------------------------------------------------------------------------


def edited(report: dict[str, Any], name: str, **members: Any) -> dict[str, Any]:
    """Returns the report with members of one object replaced."""
    other = copy.deepcopy(report)
    (item,) = [item for item in other["objects"] if item["name"] == name]
    item.update(members)
    return other


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"stats": {"relative_l2": "a", "rms": 1}}, "object head: `relative_l2` is a; required: a number that is not"),
        ({"stats": {"relative_l2": -1, "rms": 1}}, "object head: `relative_l2` is -1; required: a number"),
        ({"stats": {"relative_l2": 0.1, "rms": True}}, "object head: `rms` is True; required: a number"),
        ({"stats": {"relative_l2": 0.1, "rms": 1e300}}, "object head: `rms` is 1e+300; required: a number"),
        ({"stats": {"relative_l2": 0.1, "rms": 1}, "shape": None}, "object head has `stats` and no `shape`"),
        ({"stats": {"relative_l2": 0.1, "rms": 1}, "format": "Q3"}, "object head has `stats` and no known `format`"),
        ({"stats": {"relative_l2": 0.1, "rms": 1}, "format": []}, "object head has `stats` and no known `format`"),
    ],
)
def test_statistics_that_are_none_are_refused(
    case: TuningCase, report: dict[str, Any], members: dict[str, Any], message: str
) -> None:
    ran = case.plan("--set", f"head={Q4}", "--report", case.save(edited(report, "head", **members)))
    require_refusal(ran, 1)
    assert message in ran.err


def test_a_report_without_statistics_is_refused(case: TuningCase, report: dict[str, Any]) -> None:
    bare = copy.deepcopy(report)
    for item in bare["objects"]:
        item.pop("stats", None)
    path = case.save(bare)
    ran = case.plan("--set", f"head={Q4}", "--report", path)
    require_refusal(ran, 1)
    assert f"report {path} has no `stats` of any object" in ran.err


@pytest.mark.parametrize("members", [{"shape": [160, 64]}, {"transform": "base:other"}, {"stats": None}])
def test_what_was_measured_of_another_object_is_not_believed(
    case: TuningCase, report: dict[str, Any], members: dict[str, Any]
) -> None:
    path = case.save(edited(report, "head", **members))
    found = plan_json(case, "--set", f"head={Q4}", "--set", f"rows={Q4}", "--report", path)["what_if"]
    assert found["expected_error"]["unmeasured"] == ["head"]
    assert [item["name"] for item in found["expected_error"]["objects"]] == ["rows"]


@pytest.mark.parametrize("name", [[], {}, None, 7])
def test_files_without_names_tell_nothing(case: TuningCase, report: dict[str, Any], name: object) -> None:
    other = copy.deepcopy(report)
    other["sources"]["base"]["files"].append({"name": name, "bytes": 1})
    found = plan_json(case, "--set", f"head={Q4}", "--report", case.save(other))["what_if"]
    assert [item["name"] for item in found["expected_error"]["objects"]] == ["head"]


def test_nothing_is_lost_of_values_that_are_all_zero(report: dict[str, Any]) -> None:
    zero = edited(report, "head", stats={"relative_l2": None, "rms": 0.0})
    assert read_measurements(zero, "r").tensors["head"].relative_error == 0
    unknown = edited(report, "head", stats={"relative_l2": None, "rms": 1.0})
    assert "head" not in read_measurements(unknown, "r").tensors


@pytest.mark.parametrize(
    ("member", "value"), [("bytes", 17), ("sha256", "0" * 64), ("header_sha256", "0" * 64)]
)
def test_a_report_of_another_checkpoint_is_refused(
    case: TuningCase, report: dict[str, Any], member: str, value: object
) -> None:
    other = copy.deepcopy(report)
    file = other["sources"]["base"]["files"][0]
    known = file[member]
    file[member] = value
    path = case.save(other)
    ran = case.plan("--set", f"head={Q4}", "--report", path)
    if known is None:
        # Nobody hashed a plain directory: nothing speaks against the report.
        assert ran.code == 0
        return
    require_refusal(ran, 1)
    message = f"report {path} is of another checkpoint: source base: model.safetensors: its {member} is {value}; "
    assert message in ran.err


def test_the_functions_raise_what_the_command_prints(case: TuningCase) -> None:
    recipe = load_recipe(case.recipe_path)
    with pytest.raises(UsageError, match="write GLOB=FORMAT"):
        parse_setting("head")
    with pytest.raises(UsageError, match="'nothing' matches no tensor"):
        with_settings(recipe, [parse_setting(f"nothing={Q4}")])
    with pytest.raises(PlanError, match="object norm: shape"):
        with_settings(recipe, [parse_setting(f"norm={Q4}")])
    # An equals sign belongs to the glob if it is not the last.
    assert dataclasses.astuple(parse_setting(f"a=b={Q4}")) == ("a=b", Q4)
