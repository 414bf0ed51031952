"""Recomputation: every byte that differs from what the source gives is found and placed, whoever made it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_directory
from commands import run, source_arguments
from miniatures import ROOT, Miniatures
from pipeline import converted, planned, stand_in_places

from ninfer_convert.artifact import recheck
from ninfer_convert.artifact.compare import compare_with_source
from ninfer_convert.artifact.container import TensorRecord
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.recheck import Recheck, recheck_artifact
from ninfer_convert.artifact.verify import Problem
from ninfer_convert.encode import block_maker
from ninfer_convert.errors import OutputError
from ninfer_convert.plan import value
from ninfer_convert.plan.planner import PlannedTensor
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.stand_in.checkpoints import StandIn

DEMO = ROOT / "recipes" / "demo.yaml"
ENCODER = {"FP8_E4M3FN_ROW_BF16S": "MAXABS_BF16S_RECIP_E4M3FN_RNE_V1"}
ENCODED = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S", "FP8_E4M3FN_ROW_BF16S")
FLIPS = 200


@pytest.fixture(scope="module")
def demo_artifact(demo: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recheck") / "demo.ninfer"
    converted(DEMO, path, *stand_in_places(demo))
    return path


@pytest.fixture
def copy(demo_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(demo_artifact, tmp_path / "copy.ninfer"))


def checked(path: Path, demo: StandIn, recipe: Path = DEMO, **options: Any) -> Recheck:
    with planned(recipe, *stand_in_places(demo)) as plan, Artifact.open(path) as artifact:
        return recheck_artifact(artifact, plan, **options)


def flip(path: Path, place: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ mask]))


def place_of(path: Path, name: str, plane: str, byte: int = 0) -> int:
    """Returns the file offset of a byte of a plane."""
    with Artifact.open(path) as artifact:
        start = artifact.payload_offset + artifact.record(name).offset
        if not isinstance(artifact.record(name), TensorRecord):
            return start + byte
        return start + next(part.offset for part in artifact.geometry(name).planes if part.name == plane) + byte


def members(path: Path) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    """Returns every kind of plane, (format, plane) -> (object, place in the file, bytes) of each of its planes."""
    kinds: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    with Artifact.open(path) as artifact:
        for name, record in artifact.objects.items():
            start = artifact.payload_offset + record.offset
            if not isinstance(record, TensorRecord):
                kinds.setdefault(("resource", "bytes"), []).append((name, start, record.nbytes))
                continue
            for plane in artifact.geometry(name).planes:
                where = (name, start + plane.offset, plane.nbytes)
                kinds.setdefault((record.format, plane.name), []).append(where)
    return kinds


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_byte_of_a_conversion_is_made_again(demo: StandIn, demo_artifact: Path, threads: int) -> None:
    calls: list[tuple[int, int]] = []
    found = checked(demo_artifact, demo, threads=threads, progress=lambda *call: calls.append(call))
    planes = sum(nbytes for kind in members(demo_artifact).values() for _, _, nbytes in kind)
    assert found == Recheck(56, planes, planes, ())
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (planes, planes)
    assert {total for _, total in calls} == {planes}


def test_a_real_checkpoint_is_made_again(minilm: Path, tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "minilm-l6-v2.yaml"
    converted(recipe, tmp_path / "minilm.ninfer", {"base": minilm})
    with planned(recipe, {"base": minilm}) as plan, Artifact.open(tmp_path / "minilm.ninfer") as artifact:
        found = recheck_artifact(artifact, plan)
    assert (found.objects, found.problems) == (97, ())
    assert found.nbytes == found.total_bytes > 20_000_000


@pytest.mark.parametrize(
    "name", ["qwen3.6-27b/groupwise-int", "qwen3.6-27b/nvfp4", "qwen3.8-27b/nvfp4", "examples/text-only"]
)
def test_every_kind_of_expression_is_made_again(miniatures: Miniatures, tmp_path: Path, name: str) -> None:
    recipe = miniatures.recipes / f"{name}.yaml"
    model = name.partition("/")[0] if name.startswith("qwen") else "qwen3.6-27b"
    places, inputs = stand_in_places(miniatures.models[model])
    sources = load_recipe(recipe).sources
    converted(recipe, tmp_path / "a.ninfer", {key: places[key] for key in sources}, inputs)
    with planned(recipe, {key: places[key] for key in sources}, inputs) as plan:
        with Artifact.open(tmp_path / "a.ninfer") as artifact:
            found = recheck_artifact(artifact, plan)
            assert (found.objects, found.problems) == (len(plan.objects), ())
            assert found.nbytes == found.total_bytes
            losses = compare_with_source(artifact, plan)
    lossy = {item.format for item in losses.objects if item.loss.differing}
    copied = {"NVFP4", "BF16", "FP32", "I32"} | ({"FP8_E4M3FN_ROW_BF16S"} if name == "qwen3.6-27b/nvfp4" else set())
    assert lossy.isdisjoint(copied)
    assert len(losses.objects) == sum(isinstance(item, PlannedTensor) for item in plan.objects)


def test_every_single_byte_flip_in_every_kind_of_plane_is_found(demo: StandIn, copy: Path) -> None:
    """One byte of every kind of plane at a time: each is found, in its own object and plane, and nothing else."""
    kinds, draw = members(copy), random.Random(20261129)
    assert len(kinds) == 19
    original = copy.read_bytes()
    with planned(DEMO, *stand_in_places(demo)) as plan:
        for _ in range(FLIPS):
            damaged, expected = bytearray(original), set()
            for (_, plane), places in kinds.items():
                name, begin, nbytes = draw.choice(places)
                damaged[begin + draw.randrange(nbytes)] ^= draw.randrange(1, 256)
                expected.add((name, plane))
            copy.write_bytes(damaged)
            with Artifact.open(copy) as artifact:
                problems = recheck_artifact(artifact, plan).problems
            assert {(problem.object, plane_named(problem)) for problem in problems} == expected
            assert len(problems) == len(expected)
            assert all("the first of" not in problem.detail for problem in problems)


def plane_named(problem: Problem) -> str:
    assert problem.check == "recomputed"
    words = problem.detail.replace(",", "").split()
    return words[1].removesuffix(":") if words[0] == "plane" else "bytes" if words[0] == "byte" else "words"


@pytest.mark.parametrize(
    ("name", "plane", "byte", "mask", "where"),
    [
        ("text/token_embedding", "base", 3 * 64 + 5, 0x10, "plane base, row 3, column 11"),
        ("text/token_embedding", "base", 3 * 64 + 5, 0x08, "plane base, row 3, column 10"),
        ("text/token_embedding", "high", 2 * 32 + 9, 0x40, "plane high, row 2, column 39"),
        ("text/layers/0/gdn/value_z", "high", 1 * 16 + 15, 0x80, "plane high, row 1, column 127"),
        ("text/output_head", "base", 7 * 128 + 100, 0x01, "plane base, row 7, column 100"),
        ("text/output_head", "scale", (9 * 4 + 3) * 2 + 1, 0x01, "plane scale, row 9, group 3"),
        ("text/layers/0/mlp/gate_up", "code", 130 * 64 + 1, 0x80, "plane code, row 130, column 3"),
        # row 32 of the second block of 128 rows, group 1 of 8
        ("text/layers/0/mlp/gate_up", "scale", 128 * 8 + 5, 0x01, "plane scale, row 160, group 1"),
        ("text/layers/0/mlp/gate_up", "divisor", 3, 0x01, "plane divisor"),
        ("text/layers/3/attention/output", "code", 2 * 128 + 77, 0x04, "plane code, row 2, column 77"),
        ("text/layers/3/attention/output", "scale", 2 * 127, 0x04, "plane scale, row 127"),
        ("text/layers/0/gdn/convolution", "words", (2 * 256 + 17) * 2, 0x04, "row 2, column 17"),
        ("text/final_norm", "words", 255, 0x04, "index 127"),
        ("text/layers/0/mlp/down_projection/input_scale_divisor", "words", 0, 0x04, "the scalar"),
        ("text/draft_head_token_ids", "words", 4 * 5, 0x04, "index 5"),
        ("frontend/tokenizer.json", "bytes", 33, 0x04, "byte 33"),
    ],
)
def test_the_place_is_told_as_people_count(
    demo: StandIn, copy: Path, name: str, plane: str, byte: int, mask: int, where: str
) -> None:
    flip(copy, place_of(copy, name, plane, byte), mask)
    (problem,) = checked(copy, demo).problems
    assert (problem.object, problem.check) == (name, "recomputed")
    place, _, words = problem.detail.partition(": ")
    assert place == where
    found, _, required = words.removesuffix(" required").partition(" found, ")
    word = {"scale": 1 if "mlp" in name else 2, "divisor": 4, "words": 2 if "norm" in name or "conv" in name else 4}
    assert len(found) == len(required) == 2 + 2 * word.get(plane, 1)
    assert bin(int(found, 16) ^ int(required, 16)).count("1") == 1


def test_differences_are_counted_by_plane_and_told_in_the_order_of_the_plan(demo: StandIn, copy: Path) -> None:
    for byte in (9, 200, 8000):
        flip(copy, place_of(copy, "text/output_head", "base", byte), 0xFF)
    flip(copy, place_of(copy, "text/output_head", "scale", 100), 1)
    flip(copy, place_of(copy, "text/final_norm", "words", 2), 1)
    told = [(problem.object, problem.detail.partition(":")[0]) for problem in checked(copy, demo).problems]
    assert told == [
        ("text/final_norm", "index 1"),
        ("text/output_head", "plane base, row 0, column 9"),
        ("text/output_head", "plane scale, row 12, group 2"),
    ]
    assert checked(copy, demo).problems[1].detail.endswith("required (the first of 3)")
    assert checked(copy, demo, threads=5).problems == checked(copy, demo, threads=1).problems


# A converter that is wrong


def off_by_one(plane: str, row: int, byte: int) -> Callable[..., None]:
    """Returns an `encode_rows` whose bytes are right but for one, in the first block with so many rows."""
    right, spent = block_maker.encode_rows, []

    def encode(numeric: Any, dtype: str, words: Any, planes: dict[str, Any], loss: Any) -> None:
        right(numeric, dtype, words, planes, loss)
        if not spent and len(words) > row and plane in planes:
            planes[plane][row, byte] += 1
            spent.append(True)

    return encode


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    """A checkpoint of one matrix in every dtype that encoders take."""
    draw = np.random.default_rng(7)
    wide = (draw.standard_normal((300, 200)) * np.exp2(draw.integers(-6, 6, (300, 1)))).astype(np.float32)
    words = {
        "F32": wide.view("<u4"),
        "BF16": (wide.view("<u4") >> 16).astype("<u2"),
        "F16": wide.astype("<f2").view("<u2"),
        "I64": np.arange(600, dtype="<i8").reshape(3, 200),
    }
    tensors = {dtype.lower(): (dtype, array) for dtype, array in words.items()}
    return write_directory(tmp_path / "matrix", {"model.safetensors": tensors})


def recipe_of(tmp_path: Path, *objects: str, **sections: str) -> Path:
    lines = ["schema: 1", "id: t", "artifact: {model_id: m, weights_id: w}", "evidence: none", "sources: {base: {}}"]
    lines += [f"{name}: {text}" for name, text in sections.items()]
    lines += ["objects:", *(f"  - {{{text}}}" for text in objects)]
    path = tmp_path / "recipe.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def encoded(format_name: str, dtype: str) -> str:
    encoder = ENCODER.get(format_name, "MAXABS_F16_RECIP_RNE_V1")
    return f"name: {format_name}/{dtype}, shape: [300, 200], format: {format_name}, encoder: {encoder}, value: {dtype}"


def ignoring(*dtypes: str) -> str:
    return str([dtype for dtype in ("f32", "bf16", "f16", "i64") if dtype not in dtypes])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_every_encoder_is_made_again_from_every_dtype(tmp_path: Path, matrix: Path, dtype: str) -> None:
    recipe = recipe_of(tmp_path, *(encoded(name, dtype) for name in ENCODED), ignore=ignoring(dtype))
    assert problems_of(tmp_path, recipe, matrix) == ()


def problems_of(tmp_path: Path, recipe: Path, source: Path, **options: Any) -> tuple[Problem, ...]:
    converted(recipe, tmp_path / "a.ninfer", {"base": source}, threads=1, overwrite=True)
    with planned(recipe, {"base": source}) as plan, Artifact.open(tmp_path / "a.ninfer") as artifact:
        return recheck_artifact(artifact, plan, **options).problems


@pytest.mark.parametrize(
    ("plane", "row", "byte", "where"),
    [
        ("base", 17, 33, "plane base, row 17, column 6"),
        ("high", 17, 33, "plane high, row 17, column 13"),
        ("scale", 299, 2, "plane scale, row 299, group 1"),
    ],
)
def test_a_kernel_that_is_off_by_one_in_one_row_is_caught(
    tmp_path: Path, matrix: Path, monkeypatch: pytest.MonkeyPatch, plane: str, row: int, byte: int, where: str
) -> None:
    monkeypatch.setattr(block_maker, "encode_rows", off_by_one(plane, row, byte))
    names = ("Q4G64_F16S", "Q6G64_F16S", "W8G32_F16S")
    recipe = recipe_of(tmp_path, *(encoded(name, "bf16") for name in names), ignore=ignoring("bf16"))
    (problem,) = problems_of(tmp_path, recipe, matrix)
    wrong = "Q6G64_F16S/bf16" if plane == "high" else "Q4G64_F16S/bf16"
    assert (problem.object, problem.check) == (wrong, "recomputed")
    if plane != "scale":
        # a byte plus one changes bits whose lowest is the last: the first lane of the byte
        codes = {"base": 2, "high": 4}[plane]
        where = f"plane {plane}, row {row}, column {byte * codes}"
    assert problem.detail.startswith(where + ": ")


def test_a_cast_that_is_off_by_one_is_caught(
    tmp_path: Path, matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = value.cast_words

    def wrong(words: Any, source: str, target: str) -> Any:
        cast, bad = right(words, source, target)
        cast[203] += 1
        return cast, bad

    recipe = recipe_of(
        tmp_path,
        "name: r, shape: [300, 200], format: BF16, value: {cast: {of: f32, to: BF16, rule: nearest-even}}",
        "name: w, shape: [300, 200], format: FP32, value: {cast: {of: f16, to: FP32, rule: exact}}",
        "name: i, shape: [3, 200], format: I32, value: {cast: {of: i64, to: I32, rule: checked}}",
        ignore=ignoring("f32", "f16", "i64"),
    )
    assert problems_of(tmp_path, recipe, matrix) == ()
    monkeypatch.setattr(value, "cast_words", wrong)
    told = [(problem.object, problem.detail.partition(":")[0]) for problem in problems_of(tmp_path, recipe, matrix)]
    assert told == [("r", "row 1, column 3"), ("w", "row 1, column 3"), ("i", "row 1, column 3")]


@pytest.mark.parametrize(("maker", "expected"), [("pack_nvfp4_rows", "NVFP4"), ("pack_fp8_rows", "FP8")])
def test_a_word_copy_that_misplaces_scales_is_caught(
    demo: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: str, expected: str
) -> None:
    right = getattr(block_maker, maker)

    def wrong(code: Any, scale: Any, planes: dict[str, Any]) -> None:
        right(code, scale, planes)
        planes["scale"][:] = scale if scale.ndim == 2 else np.roll(planes["scale"], 1, axis=0)

    monkeypatch.setattr(block_maker, maker, wrong)
    converted(DEMO, tmp_path / "a.ninfer", *stand_in_places(demo))
    with Artifact.open(tmp_path / "a.ninfer") as artifact:
        copied = {
            name
            for name, record in artifact.objects.items()
            if isinstance(record, TensorRecord) and record.format.startswith(expected)
        }
    problems = checked(tmp_path / "a.ninfer", demo).problems
    assert {problem.object for problem in problems} == copied
    assert all(problem.detail.startswith("plane scale, row ") for problem in problems)


# A sample


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the tasks that workers are given."""
    seen: list[Any] = []
    right = recheck._Worker.compare
    monkeypatch.setattr(recheck._Worker, "compare", lambda self, task: (seen.append(task), right(self, task))[1])
    return seen


def test_a_sample_has_the_first_and_the_last_block_of_every_object(
    demo: StandIn, demo_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recheck, "BLOCK_BYTES", 4096)
    every = counted(monkeypatch)
    whole = checked(demo_artifact, demo, threads=1)
    blocks: dict[str | None, list[Any]] = {}
    for task in every:
        blocks.setdefault(task.name, []).append(task.block)
    assert max(map(len, blocks.values())) > 10
    for sample in (1, 2, 3, 7, 10**6):
        every.clear()
        found = checked(demo_artifact, demo, threads=1, sample=sample)
        chosen: dict[str | None, list[Any]] = {}
        for task in every:
            chosen.setdefault(task.name, []).append(task.block)
        assert list(chosen) == list(blocks)
        for name, all_blocks in blocks.items():
            assert len(chosen[name]) == min(max(2, sample), len(all_blocks))
            assert (chosen[name][0], chosen[name][-1]) == (all_blocks[0], all_blocks[-1])
            assert chosen[name] == [block for block in all_blocks if block in chosen[name]]
        assert (found.objects, found.total_bytes, found.problems) == (whole.objects, whole.total_bytes, ())
        assert found.nbytes == sum(task.nbytes for task in every)
    assert found.nbytes == whole.nbytes


def test_a_sample_can_be_drawn_again_and_otherwise(
    demo: StandIn, demo_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recheck, "BLOCK_BYTES", 4096)
    seen = counted(monkeypatch)
    drawn = []
    for seed in (0, 0, 1):
        checked(demo_artifact, demo, threads=1, sample=4, seed=seed)
        drawn.append([(task.name, task.block) for task in seen])
        seen.clear()
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("byte", [0, 640 * 128 - 1])
def test_a_sample_finds_what_lies_in_the_first_or_last_row(
    demo: StandIn, copy: Path, monkeypatch: pytest.MonkeyPatch, byte: int
) -> None:
    monkeypatch.setattr(recheck, "BLOCK_BYTES", 4096)
    flip(copy, place_of(copy, "text/output_head", "base", byte), 1)
    assert [problem.object for problem in checked(copy, demo, sample=1).problems] == ["text/output_head"]


# A source that is wrong


def test_another_source_is_told_by_every_object_that_differs(
    demo: StandIn, demo_artifact: Path, tmp_path: Path
) -> None:
    other = StandIn(Path(shutil.copytree(demo.base, tmp_path / "base")), demo.quantized, demo.ranking)
    with planned(DEMO, *stand_in_places(other)) as plan:
        info = plan.sources["base"].tensors["lm_head.weight"]
        path = Path(plan.sources["base"].files[info.file].path)
    flip(path, info.begin + 2 * 128 * 599 + 100, 0x40)
    with planned(DEMO, *stand_in_places(other)) as plan, Artifact.open(demo_artifact) as artifact:
        chosen = {item.name for item in plan.objects if "head" in item.name}
        problems = recheck_artifact(artifact, plan).problems
    assert {problem.object for problem in problems} <= chosen - {"text/draft_head_token_ids"}
    assert problems[0].object == "text/output_head"
    assert "row 599, " in problems[0].detail


def test_a_value_that_cannot_be_encoded_is_a_problem_with_its_place(tmp_path: Path, matrix: Path) -> None:
    names = ("Q4G64_F16S", "FP8_E4M3FN_ROW_BF16S")
    recipe = recipe_of(tmp_path, *(encoded(name, "bf16") for name in names), ignore=ignoring("bf16"))
    assert problems_of(tmp_path, recipe, matrix) == ()
    weights = matrix / "model.safetensors"
    with planned(recipe, {"base": matrix}) as plan:
        begin = plan.sources["base"].tensors["bf16"].begin
    place = begin + (5 * 200 + 77) * 2
    data = bytearray(weights.read_bytes())
    data[place : place + 2] = b"\x80\x7f"
    weights.write_bytes(data)
    with planned(recipe, {"base": matrix}) as plan, Artifact.open(tmp_path / "a.ninfer") as artifact:
        problems = recheck_artifact(artifact, plan).problems
    assert problems == tuple(
        Problem(
            f"{name}/bf16", "source", f"tensor base:bf16, row 5, column 77: value is +Inf; {name} cannot store it"
        )
        for name in names
    )


def test_a_cast_that_cannot_be_made_is_a_problem(tmp_path: Path, matrix: Path) -> None:
    recipe = recipe_of(
        tmp_path,
        "name: i, shape: [3, 200], format: I32, value: {cast: {of: i64, to: I32, rule: checked}}",
        ignore=ignoring("i64"),
    )
    assert problems_of(tmp_path, recipe, matrix) == ()
    with planned(recipe, {"base": matrix}) as plan:
        begin = plan.sources["base"].tensors["i64"].begin
    flip(matrix / "model.safetensors", begin + 8 * 7 + 5, 1)
    with planned(recipe, {"base": matrix}) as plan, Artifact.open(tmp_path / "a.ninfer") as artifact:
        (problem,) = recheck_artifact(artifact, plan).problems
    assert (problem.object, problem.check) == ("i", "source")
    assert problem.detail == (
        f"element 7: {7 + 2**40} is no integer from -2147483648 to 2147483647, "
        "counted from tensor base:i64, row 0, column 0"
    )


def test_rules_of_the_recipe_hold_again(tmp_path: Path, matrix: Path) -> None:
    text = "name: i, shape: [3, 200], format: I32, value: {cast: {of: i64, to: I32, rule: checked}}"
    assert problems_of(tmp_path, recipe_of(tmp_path, text, ignore=ignoring("i64")), matrix) == ()
    stricter = recipe_of(tmp_path, text + ", require: [{range: [0, 500]}]", ignore=ignoring("i64"))
    with planned(stricter, {"base": matrix}) as plan, Artifact.open(tmp_path / "a.ninfer") as artifact:
        (problem,) = recheck_artifact(artifact, plan).problems
    assert (problem.object, problem.check) == ("i", "source")
    assert problem.detail.startswith(
        "object i: tensor base:i64, row 2, column 101: value 501 is not in [0, 500], which the recipe requires"
    )


def test_conditions_between_sources_hold_again(tmp_path: Path) -> None:
    words = np.arange(5000, dtype="<u2").reshape(50, 100)
    tensors = {"a": ("BF16", words), "b": ("BF16", words.copy())}
    source = write_directory(tmp_path / "twins", {"model.safetensors": tensors})
    recipe = recipe_of(
        tmp_path, "name: a, shape: [50, 100], format: BF16, value: a", conditions="[{same: [a, b]}]"
    )
    assert problems_of(tmp_path, recipe, source) == ()
    words[49, 7] += 1
    write_directory(tmp_path / "twins", {"model.safetensors": {"a": tensors["a"], "b": tensors["b"]}})
    with planned(recipe, {"base": source}) as plan, Artifact.open(tmp_path / "a.ninfer") as artifact:
        condition, changed = recheck_artifact(artifact, plan).problems
        sampled = recheck_artifact(artifact, plan, sample=1).problems
    assert (condition.object, condition.check) == (None, "source")
    differs = "tensor base:b, row 49, column 7: word 0x132b differs from 0x132c at tensor base:a, row 49, column 7"
    assert condition.detail.startswith(differs)
    assert changed == Problem("a", "recomputed", "row 49, column 7: 0x132b found, 0x132c required")
    assert sampled == (condition, changed)


# What cannot be compared


def test_an_object_of_another_shape_or_name_is_left_out(demo: StandIn, demo_artifact: Path, tmp_path: Path) -> None:
    text = DEMO.read_text(encoding="utf-8").replace("name: text/final_norm", "name: text/last_norm")
    text = text.replace("{resource: frontend/chat_template.jinja, file: chat", "{resource: frontend/x, file: chat")
    renamed = tmp_path / "renamed.yaml"
    renamed.write_text(text, encoding="utf-8")
    found = checked(demo_artifact, demo, renamed)
    assert (found.objects, found.problems) == (54, ())


def test_an_artifact_that_is_cut_meanwhile_is_a_problem(demo: StandIn, copy: Path) -> None:
    with planned(DEMO, *stand_in_places(demo)) as plan, Artifact.open(copy) as artifact:
        os.truncate(copy, copy.stat().st_size - 1)
        problem = recheck_artifact(artifact, plan, threads=1).problems[0]
    assert (problem.object, problem.check) == (None, "changed")
    assert "the file was cut while it was read" in problem.detail


def test_an_artifact_that_changes_meanwhile_is_a_problem(demo: StandIn, copy: Path) -> None:
    with planned(DEMO, *stand_in_places(demo)) as plan, Artifact.open(copy) as artifact:
        os.utime(copy, ns=(0, 0))
        problems = recheck_artifact(artifact, plan).problems
    assert problems == (Problem(None, "changed", f"{copy}: the file was changed while it was read"),)


def test_a_source_that_changes_meanwhile_is_a_problem(tmp_path: Path, matrix: Path) -> None:
    recipe = recipe_of(tmp_path, encoded("Q4G64_F16S", "bf16"), ignore=ignoring("bf16"))
    assert problems_of(tmp_path, recipe, matrix) == ()
    with planned(recipe, {"base": matrix}) as plan, Artifact.open(tmp_path / "a.ninfer") as artifact:
        os.utime(matrix / "model.safetensors", ns=(0, 0))
        problems = recheck_artifact(artifact, plan).problems
    assert {problem.check for problem in problems} == {"source"}
    assert any("model.safetensors" in problem.detail for problem in problems)


def test_a_read_that_fails_is_an_input_output_failure(
    demo: StandIn, demo_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, preadv = place_of(demo_artifact, "text/output_head", "base"), os.preadv

    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == place:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    with planned(DEMO, *stand_in_places(demo)) as plan, Artifact.open(demo_artifact) as artifact:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(OutputError, match="reading object 'text/output_head' at byte .*: Input/output error"):
            recheck_artifact(artifact, plan)


def test_progress_may_stop_it(demo: StandIn, demo_artifact: Path) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked(demo_artifact, demo, progress=stop)


def test_memory_is_bounded_by_blocks(tmp_path: Path) -> None:
    path = tmp_path / "large" / "model.safetensors"
    path.parent.mkdir()
    shape, nbytes = [8192, 4096], 8192 * 4096 * 2
    header = json.dumps({"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + nbytes)
    names = ("Q6G64_F16S", "W8G32_F16S")
    recipe = recipe_of(tmp_path, *(encoded(name, "w").replace("[300, 200]", str(shape)) for name in names))
    converted(recipe, tmp_path / "a.ninfer", {"base": path.parent})
    with planned(recipe, {"base": path.parent}) as plan, Artifact.open(tmp_path / "a.ninfer") as artifact:
        tracemalloc.start()
        try:
            problems = recheck_artifact(artifact, plan, threads=2).problems
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert problems == ()
    assert peak < nbytes


# The command


@pytest.fixture
def verified(demo: StandIn) -> Callable[..., Any]:
    sources = source_arguments(demo, "base", "quantized")
    return lambda path, *more: run("verify", path, "--recipe", DEMO, *sources, *more)


def test_the_command_says_what_held(demo_artifact: Path, verified: Callable[..., Any]) -> None:
    report = demo_artifact.with_name("demo.ninfer.conversion.json")
    report.write_text(json.dumps(report_of(demo_artifact)), encoding="utf-8")
    done = verified(demo_artifact, "--report", report)
    total = sum(nbytes for kind in members(demo_artifact).values() for _, _, nbytes in kind)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{demo_artifact} is valid: 56 objects, ")
    assert done.out.splitlines()[1:] == [
        "its directory is that of recipe demo",
        f"recomputed from the source: 56 objects, {total:,} bytes equal",
        f"sizes and digests are those of {report}",
    ]


def report_of(path: Path) -> dict[str, Any]:
    with Artifact.open(path) as artifact:
        objects = [
            {"name": name, "bytes": record.nbytes, "sha256": artifact.digest(name)}
            for name, record in artifact.objects.items()
        ]
    data = path.read_bytes()
    whole = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return {"artifact": whole, "objects": objects}


def test_the_command_names_what_did_not_hold(copy: Path, verified: Callable[..., Any]) -> None:
    report = copy.with_name("report.json")
    report.write_text(json.dumps(report_of(copy)), encoding="utf-8")
    flip(copy, place_of(copy, "text/draft_head", "base", 70), 0x0F)
    done = verified(copy, "--report", report)
    assert done.code == 1
    well_formed, *others = done.out.splitlines()
    assert well_formed.startswith(f"{copy} is well formed: 56 objects, ")
    assert others == ["its directory is that of recipe demo"]
    recomputed, whole, digest = done.err.splitlines()
    assert recomputed.startswith("error: text/draft_head: recomputed: plane base, row 1, column 12: 0x")
    assert whole.startswith("error: digest: SHA-256 is ")
    assert digest.startswith("error: text/draft_head: digest: SHA-256 is ")
    document = json.loads(verified(copy, "--report", report, "--json").out)
    assert document["ok"] is False
    assert [problem["object"] for problem in document["problems"]] == ["text/draft_head", None, "text/draft_head"]
    assert document["recomputed"]["bytes"] == document["recomputed"]["total_bytes"]


def test_a_sample_says_how_much_it_saw(demo_artifact: Path, verified: Callable[..., Any]) -> None:
    done = verified(demo_artifact, "--sample", "1")
    total = sum(nbytes for kind in members(demo_artifact).values() for _, _, nbytes in kind)
    # every object of the demo is one block
    assert f"recomputed from the source: 56 objects, {total:,} bytes equal" in done.out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "x"], "--source needs --recipe: a recipe says what the source became"),
        (["--sample", "3"], "--sample needs --recipe and --source"),
        (["--recipe", "demo", "--sample", "3"], "--sample needs --recipe and --source"),
        (["--recipe", "demo", "--input", "ranking=x"], "--input needs --recipe and --source"),
        (["--recipe", "demo", "--prefix", "a=b"], "--prefix needs --recipe and --source"),
        (["--unpinned"], "--unpinned says how to read the sources of --recipe, which is not given"),
        (["--recipe", "demo", "--source", "base=x"], "a source is not given; add --source quantized=WHERE"),
    ],
)
def test_options_that_need_others_are_refused(demo_artifact: Path, arguments: list[str], message: str) -> None:
    done = run("verify", demo_artifact, *arguments)
    assert (done.code, done.out, done.err) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize("sample", ["0", "-1", "x"])
def test_a_sample_is_a_positive_number(demo_artifact: Path, sample: str) -> None:
    assert run("verify", demo_artifact, "--sample", sample).code == 2


def test_a_broken_structure_is_told_alone(copy: Path, verified: Callable[..., Any]) -> None:
    os.truncate(copy, 5000)
    done = verified(copy)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: structure: {copy}: directory length is ")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, 1, "no such file or directory"),
        ("{", 1, "not JSON: "),
        ("[]", 1, "required: a JSON object"),
    ],
)
def test_a_report_that_cannot_be_read_is_told_before_anything_is_read(
    demo_artifact: Path, tmp_path: Path, content: str | None, code: int, message: str
) -> None:
    report = tmp_path / "report.json"
    if content is not None:
        report.write_text(content, encoding="utf-8")
    done = run("verify", demo_artifact, "--report", report)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(f"error: {report}")
    assert message in done.err
