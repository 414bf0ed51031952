"""The recipes for Qwen over checkpoints of full shape: holes with a few rows of words, and every byte known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run, source_arguments
from oracle import container, layouts
from oracle.fast import encode_matrix
from pipeline import stand_in_places
from reference import Reference

from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import ResourceSpec
from ninfer_convert.stand_in.checkpoints import MODELS, StandIn, write_stand_in

GIB = 1 << 30
Q4, Q5, Q6, W8 = GROUPED = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")
FP8 = "FP8_E4M3FN_ROW_BF16S"

# recipe: model, sources, tensors of each format as the target pages give them
RECIPES: dict[str, tuple[str, tuple[str, ...], dict[str, int]]] = {
    "qwen3.6-27b/groupwise-int": (
        "qwen3.6-27b",
        ("base",),
        {"BF16": 582, "FP32": 96, "I32": 1, Q4: 183, Q5: 246, Q6: 3, W8: 7},
    ),
    "qwen3.6-27b/nvfp4": (
        "qwen3.6-27b",
        ("base", "quantized"),
        {"BF16": 591, "FP32": 343, "I32": 1, Q4: 55, Q5: 54, Q6: 1, W8: 9, "NVFP4": 247},
    ),
    "qwen3.8-27b/groupwise-int": (
        "qwen3.8-27b",
        ("base",),
        {"BF16": 582, "FP32": 96, "I32": 1, Q4: 183, Q5: 246, Q6: 1, W8: 9},
    ),
    "qwen3.8-27b/nvfp4": (
        "qwen3.8-27b",
        ("base", "quantized"),
        {"BF16": 534, "FP32": 208, "I32": 1, Q4: 55, Q5: 54, Q6: 1, W8: 7, "NVFP4": 112, FP8: 146},
    ),
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StandIn]:
    directory = tmp_path_factory.mktemp("full")
    return {model: write_stand_in(model, directory / model) for model in MODELS}


@pytest.fixture(scope="module")
def plans(stand_ins: dict[str, StandIn]) -> dict[str, dict[str, Any]]:
    """What `plan --json` says of each recipe."""
    documents = {}
    for name, (model, sources, _) in RECIPES.items():
        done = run("plan", name, *source_arguments(stand_ins[model], *sources), "--unpinned", "--json")
        assert done.code == 0, done.err
        documents[name] = json.loads(done.out)
    return documents


@pytest.mark.parametrize("name", RECIPES)
def test_plan_has_the_objects_and_formats_of_the_target_page(plans: dict[str, dict[str, Any]], name: str) -> None:
    formats = RECIPES[name][2]
    totals = plans[name]["totals"]
    assert totals["formats"] == formats
    assert totals["tensors"] == sum(formats.values()) == (1301 if name == "qwen3.6-27b/nvfp4" else 1118)
    assert (totals["resources"], totals["objects"]) == (6, totals["tensors"] + 6)
    assert totals["resource_bytes"] == 12_833_441
    assert "/".join(plans[name]["artifact"].values()) == name


def test_plan_arrives_at_the_published_figures_exactly(plans: dict[str, dict[str, Any]]) -> None:
    totals = plans["qwen3.6-27b/groupwise-int"]["totals"]
    assert totals["file_bytes"] == 17_495_365_888
    assert totals["tensor_bytes"] == 17_482_342_304
    assert totals["resource_bytes"] == 12_833_441
    assert totals["tensor_bytes"] + totals["resource_bytes"] == 17_495_175_745
    assert totals["payload_bytes"] == 17_495_189_760
    assert totals["payload_bytes"] - totals["tensor_bytes"] - totals["resource_bytes"] == 14_015
    assert totals["source_bytes"] == 55_562_855_904


@pytest.mark.parametrize("name", RECIPES)
def test_plan_sizes_are_those_of_the_oracle_at_the_first_permitted_offsets(
    plans: dict[str, dict[str, Any]], name: str
) -> None:
    cursor = 0
    for entry in plans[name]["objects"]:
        if entry["kind"] == "tensor":
            cursor = layouts.align_up(cursor, 256)
            assert entry["bytes"] == layouts.payload_bytes(entry["format"], entry["shape"]), entry["name"]
            assert entry["layout"] == layouts.LAYOUTS[entry["format"]]
        assert entry["offset"] == cursor, entry["name"]
        cursor += entry["bytes"]
    assert plans[name]["totals"]["payload_bytes"] == cursor


def test_plan_expects_less_than_a_gibibyte_of_memory(plans: dict[str, dict[str, Any]]) -> None:
    assert all(plan["totals"]["peak_memory_bytes"] < GIB for plan in plans.values())


# --- one tensor of the largest shape -------------------------------------------------------------------------------

N, K = 248320, 5120
ROWS = (0, 1, 99_999, 248_319)


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, np.ndarray[Any, Any]]]:
    """A BF16 tensor [248320, 5120] of holes, and the words of its few other rows."""
    path = tmp_path_factory.mktemp("embedding") / "model.safetensors"
    words = (np.random.default_rng(12).standard_normal((len(ROWS), K)) * 0.02).astype(np.float32).view("<u4") >> 16
    header = json.dumps({"w": {"dtype": "BF16", "shape": [N, K], "data_offsets": [0, N * K * 2]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + N * K * 2)
        for row, line in zip(ROWS, words.astype("<u2"), strict=True):
            file.seek(8 + len(header) + row * K * 2)
            file.write(line.tobytes())
    yield path, words.astype("<u2")
    path.unlink()


@pytest.mark.parametrize("format_name", GROUPED)
def test_the_largest_tensor_converts_in_less_than_a_gibibyte(
    embedding: tuple[Path, np.ndarray[Any, Any]], tmp_path: Path, format_name: str
) -> None:
    path, words = embedding
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "out.ninfer"
    recipe.write_text(
        "schema: 1\nid: one\nartifact: {model_id: m, weights_id: w}\nevidence: none\nsources: {base: {}}\n"
        f"objects: [{{name: w, shape: [{N}, {K}], format: {format_name},"
        " encoder: MAXABS_F16_RECIP_RNE_V1, value: w}]\n",
        encoding="utf-8",
    )
    try:
        done = run("run", recipe, "--source", path, "-o", output)
        assert done.code == 0, done.err
        assert done.peak_bytes < GIB
        check_rows(output, format_name, words)
    finally:
        output.unlink(missing_ok=True)


def check_rows(output: Path, format_name: str, words: np.ndarray[Any, Any]) -> None:
    """Compares the seeded rows with the oracle, and their neighbours with zero, in every plane."""
    expected = encode_matrix(format_name, (len(ROWS), K), "BF16", words.tobytes())
    small = layouts.planes(format_name, (len(ROWS), K))
    assert output.stat().st_size == 4096 + layouts.payload_bytes(format_name, (N, K))
    with output.open("rb") as file:
        for plane, (offset, nbytes) in layouts.planes(format_name, (N, K)).items():
            row_bytes = nbytes // N
            for index, row in enumerate(ROWS):
                file.seek(4096 + offset + row * row_bytes)
                begin = small[plane][0] + index * row_bytes
                assert file.read(row_bytes) == expected[begin : begin + row_bytes], (plane, row)
            for row in (2, 99_998, 100_000, 248_318):
                file.seek(4096 + offset + row * row_bytes)
                assert file.read(row_bytes) == bytes(row_bytes), (plane, row)


# --- whole runs at full scale --------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("name", RECIPES)
def test_a_full_scale_run_stays_below_a_gibibyte_and_every_object_equals_the_reference(
    stand_ins: dict[str, StandIn], tmp_path: Path, name: str
) -> None:
    model, sources, _ = RECIPES[name]
    output = tmp_path / "out.ninfer"
    try:
        done = run("run", name, *source_arguments(stand_ins[model], *sources), "--unpinned", "-o", output)
        assert done.code == 0, done.err
        assert done.peak_bytes < GIB
        reference = Reference(load_recipe(name), *stand_in_places(stand_ins[model]))
        report = json.loads((tmp_path / "out.ninfer.conversion.json").read_bytes())
        digest = check_whole(output, reference, report)
        assert done.out == f"{digest}  {output}\n"
        assert report["artifact"]["sha256"] == digest
    finally:
        output.unlink(missing_ok=True)


def check_whole(output: Path, reference: Reference, report: dict[str, Any]) -> str:
    """Compares every byte of an artifact with the reference, object by object; returns the file's digest."""
    whole = hashlib.sha256()
    with output.open("rb") as file:
        head = file.read(16)
        assert head[:8] == container.MAGIC
        directory = json.loads(text := file.read(int.from_bytes(head[8:], "little")))
        padding = file.read(-(16 + len(text)) % 4096)
        whole.update(head + text + padding)
        specs = reference.specs()
        assert [entry["name"] for entry in directory["objects"]] == [spec.name for spec in specs]
        cursor = 0
        for entry, spec, told in zip(directory["objects"], specs, report["objects"], strict=True):
            gap = file.read(entry["offset"] - cursor)
            assert len(gap) < 256
            assert not any(gap)
            found = np.fromfile(file, np.uint8, entry["bytes"])
            assert np.array_equal(found, reference.payload(spec)), spec.name
            if not isinstance(spec, ResourceSpec):
                assert (entry["format"], entry["shape"]) == (spec.format, list(spec.shape)), spec.name
                assert entry["layout"] == layouts.LAYOUTS[spec.format], spec.name
            assert told["sha256"] == hashlib.sha256(found).hexdigest(), spec.name
            whole.update(gap)
            whole.update(found)
            cursor = entry["offset"] + entry["bytes"]
        assert file.read() == b""
    return whole.hexdigest()
