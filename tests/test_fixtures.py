"""Modules written by the compressed-tensors package: their fields, and our decode beside its dequantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ninfer_convert.artifact.decode import decode_rows, read_values, swizzle_scales
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.formats import FP8_E4M3FN_ROW_BF16S, NVFP4
from ninfer_convert.plan.planner import make_plan
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.run.convert import convert
from ninfer_convert.source.checkpoint import open_checkpoint

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "compressed_tensors"
WORD = {"BF16": "<u2", "U8": "u1", "F8_E4M3": "u1", "F32": "<u4"}
NVFP4_MODULES = {"mlp.gate_proj": (64, 64), "mlp.up_proj": (64, 64), "mlp.down_proj": (128, 64)}
FP8_MODULES = {"self_attn.o_proj": (40, 96)}
Array = np.ndarray[Any, Any]


def read(name: str) -> tuple[dict[str, tuple[str, list[int]]], dict[str, Array]]:
    """Dtype and shape, and words, of every tensor of a fixture file."""
    data = (FIXTURES / name).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:begin])
    entries.pop("__metadata__", None)
    types = {key: (entry["dtype"], entry["shape"]) for key, entry in entries.items()}
    spans = {key: slice(*(begin + offset for offset in entry["data_offsets"])) for key, entry in entries.items()}
    words = {key: np.frombuffer(data[span], WORD[types[key][0]]).reshape(types[key][1]) for key, span in spans.items()}
    return types, words


@pytest.fixture(scope="module")
def words() -> dict[str, Array]:
    return read("model.safetensors")[1]


@pytest.fixture(scope="module")
def second_opinion() -> dict[str, dict[str, Array]]:
    return {kind: read(f"dequantized-{kind}.safetensors")[1] for kind in ("fp32", "bf16")}


def nvfp4_values(words: dict[str, Array], modules: tuple[str, ...]) -> Array:
    """Our decode of modules fused in natural form, as the one parent they make."""
    scale = np.concatenate([words[f"{module}.weight_scale"] for module in modules])
    planes = {
        "code": np.concatenate([words[f"{module}.weight_packed"] for module in modules]),
        "scale": swizzle_scales(scale),
        "divisor": words[f"{modules[0]}.weight_global_scale"].view(np.uint8),
    }
    return decode_rows(NVFP4, 64, planes)


def fp8_values(words: dict[str, Array], module: str) -> Array:
    scale = words[f"{module}.weight_scale"]
    planes = {"code": words[f"{module}.weight"], "scale": scale.view(np.uint8).reshape(len(scale), 2)}
    return decode_rows(FP8_E4M3FN_ROW_BF16S, 96, planes)


def test_fields_are_those_of_the_layout_page() -> None:
    types, _ = read("model.safetensors")
    expected = {}
    for module, (n, k) in NVFP4_MODULES.items():
        expected[f"{module}.weight_packed"] = ("U8", [n, k // 2])
        expected[f"{module}.weight_scale"] = ("F8_E4M3", [n, k // 16])
        expected[f"{module}.weight_global_scale"] = ("F32", [1])
        expected[f"{module}.input_global_scale"] = ("F32", [1])
    for module, (n, k) in FP8_MODULES.items():
        expected[f"{module}.weight"] = ("F8_E4M3", [n, k])
        expected[f"{module}.weight_scale"] = ("BF16", [n, 1])
    assert types == expected


def test_fixture_names_its_makers() -> None:
    versions = json.loads((FIXTURES / "versions.json").read_text(encoding="utf-8"))
    assert set(versions) == {"compressed-tensors", "torch"}
    config = json.loads((FIXTURES / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (config["quant_method"], config["version"]) == ("compressed-tensors", versions["compressed-tensors"])


def test_fused_modules_share_their_divisors(words: dict[str, Array]) -> None:
    for field in ("weight_global_scale", "input_global_scale"):
        assert words[f"mlp.gate_proj.{field}"] == words[f"mlp.up_proj.{field}"]


def test_fp8_rows_decode_to_the_values_of_the_package(
    words: dict[str, Array], second_opinion: dict[str, dict[str, Array]]
) -> None:
    values = fp8_values(words, "self_attn.o_proj")
    assert np.array_equal(values.view("<u4"), second_opinion["fp32"]["self_attn.o_proj"])
    # The package multiplies in BF16: one more rounding, of a product that binary32 holds exactly.
    rounded = values.astype(ml_dtypes.bfloat16).view("<u2")
    assert np.array_equal(rounded, second_opinion["bf16"]["self_attn.o_proj"])


@pytest.mark.parametrize("modules", [("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)])
def test_nvfp4_decodes_to_the_values_of_the_package_but_for_its_second_rounding(
    modules: tuple[str, ...], words: dict[str, Array], second_opinion: dict[str, dict[str, Array]]
) -> None:
    values = nvfp4_values(words, modules)
    package = np.concatenate([second_opinion["fp32"][module] for module in modules])
    # The package rounds scale / divisor and then the product; we round the exact quotient once. Signs of zero
    # are the codes' in both, so the words are at most two steps apart.
    steps = np.abs(values.view("<u4").astype(np.int64) - package.astype(np.int64))
    assert steps.max() <= 2
    assert np.count_nonzero(values) > values.size // 2
    bf16 = np.concatenate([second_opinion["bf16"][module] for module in modules])
    rounded = values.astype(ml_dtypes.bfloat16).view("<u2")
    assert np.abs(rounded.astype(np.int64) - bf16.astype(np.int64)).max() <= 1
    assert np.array_equal(package.view("<f4").astype(ml_dtypes.bfloat16).view("<u2"), bf16)


def test_fixture_holds_zero_groups_and_every_code(words: dict[str, Array]) -> None:
    packed = np.concatenate([words[f"{module}.weight_packed"].reshape(-1) for module in NVFP4_MODULES])
    assert set((packed & 15).tolist()) | set((packed >> 4).tolist()) == set(range(16))
    assert not np.any(words["mlp.gate_proj.weight_packed"][2, :8] & 0x77)
    assert not np.any(words["self_attn.o_proj.weight"][5] & 0x7F)


RECIPE = """\
schema: 1
id: fixture
artifact: {model_id: fixture, weights_id: mixed}
evidence: none
sources: {quantized: {config: {quantization_config: {quant_method: compressed-tensors}}}}
objects:
  - {name: gate_up, shape: [128, 64], format: NVFP4, words: {concat: [mlp.gate_proj, mlp.up_proj]}}
  - {name: down, shape: [128, 64], format: NVFP4, words: mlp.down_proj}
  - {name: output, shape: [40, 96], format: FP8_E4M3FN_ROW_BF16S, words: self_attn.o_proj}
  - {name: divisor, shape: [1], format: FP32, value: {same: [mlp.gate_proj.input_global_scale,
     mlp.up_proj.input_global_scale]}}
ignore: [mlp.down_proj.input_global_scale]
"""


def test_fixture_converts_to_an_artifact_that_decodes_the_same(tmp_path: Path, words: dict[str, Array]) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    checkpoint = open_checkpoint(FIXTURES, name="quantized")
    convert(make_plan(recipe, {"quantized": checkpoint}), tmp_path / "out.ninfer", threads=1)
    checkpoint.close()
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        found = {name: read_values(artifact, name, 0, rows) for name, rows in (("gate_up", 128), ("down", 128))}
        assert np.array_equal(found["gate_up"], nvfp4_values(words, ("mlp.gate_proj", "mlp.up_proj")))
        assert np.array_equal(found["down"], nvfp4_values(words, ("mlp.down_proj",)))
        assert np.array_equal(read_values(artifact, "output", 0, 40), fp8_values(words, "self_attn.o_proj"))
        divisor = words["mlp.gate_proj.input_global_scale"].view("<f4")
        assert np.array_equal(read_values(artifact, "divisor", 0, 1).reshape(-1), divisor)
