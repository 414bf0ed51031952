"""The recipes for Qwen, and what people make of them, over miniature checkpoints: every byte equals the reference.

The twelve miniature layers are 3 of full attention and 9 GDN, of every mix of module kinds.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_directory
from commands import run, source_arguments
from miniatures import RECIPES, Miniatures
from oracle import container
from oracle.encoders import reciprocal
from pipeline import converted, stand_in_places
from reference import Reference, Source, sha256
from rewriting import rewrite

from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.stand_in.checkpoints import StandIn

Q4, Q5, Q6, W8 = "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"
FP8 = "FP8_E4M3FN_ROW_BF16S"

# Six resources, embedding, final norm, head, draft head, its ids; MTP; nine vision objects and two blocks of twelve.
COMMON = 6 + 5 + 12 + 9 + 2 * 12

# recipe: model, objects, tensors of each format
SHIPPED: dict[str, tuple[str, int, dict[str, int]]] = {
    "qwen3.6-27b/groupwise-int": (
        "qwen3.6-27b",
        COMMON + 3 * 9 + 9 * 13,
        {"BF16": 96, "FP32": 18, "I32": 1, Q4: 29, Q5: 40, Q6: 3, W8: 7},
    ),
    # 16 objects a GDN layer and 12 the others, where all parents are NVFP4: one parent of the layer that stands for
    # 4 is not, nor both of the one for 3 nor one of the one for 11, so the scalars after them are missing.
    "qwen3.6-27b/nvfp4": (
        "qwen3.6-27b",
        COMMON + (9 * 16 - 1) + (3 * 12 - 2 - 1),
        {"BF16": 100, "FP32": 18 + 44, "I32": 1, Q4: 5, Q5: 4, Q6: 1, W8: 9, "NVFP4": 44},
    ),
    "qwen3.8-27b/groupwise-int": (
        "qwen3.8-27b",
        COMMON + 3 * 9 + 9 * 13,
        {"BF16": 96, "FP32": 18, "I32": 1, Q4: 29, Q5: 40, Q6: 1, W8: 9},
    ),
    # Eight layers have NVFP4 MLPs, of two parents with a scalar each.
    "qwen3.8-27b/nvfp4": (
        "qwen3.8-27b",
        COMMON + 3 * 8 + 9 * 11 + 8 * 2,
        {"BF16": 87, "FP32": 18 + 16, "I32": 1, Q4: 5, Q5: 4, Q6: 1, W8: 7, "NVFP4": 16, FP8: 34},
    ),
    # Two MLPs in BF16 instead of one Q4 and one Q5 matrix each.
    "examples/fine-tune": (
        "qwen3.6-27b",
        COMMON + 3 * 9 + 9 * 13,
        {"BF16": 96 + 4, "FP32": 18, "I32": 1, Q4: 27, Q5: 38, Q6: 3, W8: 7},
    ),
    # Without MTP, vision and two of the resources.
    "examples/text-only": (
        "qwen3.6-27b",
        COMMON + 3 * 9 + 9 * 13 - 12 - 9 - 2 * 12 - 2,
        {"BF16": 67, "FP32": 18, "I32": 1, Q4: 25, Q5: 36, Q6: 2},
    ),
}


def formats(objects: list[container.Tensor | container.Resource]) -> Counter[str]:
    return Counter(stored.format for stored in objects if isinstance(stored, container.Tensor))


def parsed(path: Path) -> dict[str, container.Tensor | container.Resource]:
    return {stored.name: stored for stored in container.parse(path.read_bytes())[2]}


@pytest.fixture(scope="module")
def shipped(miniatures: Miniatures, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The artifact of every recipe."""
    directory = tmp_path_factory.mktemp("artifacts")
    made = {}
    for name, (model, _, _) in SHIPPED.items():
        made[name] = directory / f"{name.replace('/', '-')}.ninfer"
        converted(miniatures.recipes / f"{name}.yaml", made[name], *stand_in_places(miniatures.models[model]))
    return made


@pytest.mark.parametrize("name", SHIPPED)
def test_every_object_of_the_recipe_equals_the_reference(
    miniatures: Miniatures, shipped: dict[str, Path], name: str
) -> None:
    model, count, by_format = SHIPPED[name]
    recipe = load_recipe(miniatures.recipes / f"{name}.yaml")
    reference = Reference(recipe, *stand_in_places(miniatures.models[model]))
    expected, found = reference.objects(), parsed(shipped[name])
    assert list(found) == [stored.name for stored in expected]
    assert [stored.name for stored in expected if found[stored.name] != stored] == []
    assert shipped[name].read_bytes() == container.build(recipe.model_id, recipe.weights_id, expected)
    assert len(found) == count
    assert formats(expected) == by_format
    assert reference.holds()


def test_the_demo_equals_the_reference_and_holds_all_nine_formats(demo: StandIn, tmp_path: Path) -> None:
    converted(RECIPES / "demo.yaml", tmp_path / "demo.ninfer", *stand_in_places(demo))
    reference = Reference(load_recipe(RECIPES / "demo.yaml"), *stand_in_places(demo))
    assert (tmp_path / "demo.ninfer").read_bytes() == reference.artifact()
    assert len(formats(reference.objects())) == 9
    assert len(reference.specs()) == 56


def test_a_fine_tune_differs_from_its_base_recipe_in_what_it_says_and_in_nothing_else(
    shipped: dict[str, Path], miniatures: Miniatures
) -> None:
    base, tune = (parsed(shipped[name]) for name in ("qwen3.6-27b/groupwise-int", "examples/fine-tune"))
    assert list(base) == list(tune)
    different = [name for name in base if base[name] != tune[name]]
    assert different == [f"text/layers/{layer}/mlp/{part}" for layer in (10, 11) for part in ("gate_up", "down")]
    source = Source(miniatures.models["qwen3.6-27b"].base)
    down = source.read("model.language_model.layers.11.mlp.down_proj.weight")
    assert tune["text/layers/11/mlp/down"] == container.Tensor(
        "text/layers/11/mlp/down", down.words.shape, "BF16", down.words.tobytes()
    )


def test_a_text_only_artifact_holds_the_text_objects_of_the_whole_one(shipped: dict[str, Path]) -> None:
    whole, text = (parsed(shipped[name]) for name in ("qwen3.6-27b/groupwise-int", "examples/text-only"))
    left_out = ("mtp/", "vision/", "frontend/preprocessor_config.json", "frontend/video_preprocessor_config.json")
    assert text == {name: stored for name, stored in whole.items() if not name.startswith(left_out)}


@pytest.mark.parametrize(
    ("found", "rules"),
    [
        # The vision tensors begin with model. too, and must keep their names.
        ("model.", ["model.=model.language_model.", "model.visual.=model.visual."]),
        ("language_model.model.", ["language_model.model.=model.language_model."]),
        ("_orig_mod.model.language_model.", ["_orig_mod.="]),
    ],
)
def test_another_exporters_prefix_stated_once_gives_the_same_bytes(
    miniatures: Miniatures, shipped: dict[str, Path], tmp_path: Path, found: str, rules: list[str]
) -> None:
    made = miniatures.models["qwen3.6-27b"]

    def rename(name: str) -> str:
        if found.startswith("_orig_mod."):
            return f"_orig_mod.{name}"
        return name.replace("model.language_model.", found, 1)

    text = rewrite(made.base, tmp_path / "base", rename=rename)
    recipe, output = miniatures.recipes / "examples" / "text-only.yaml", tmp_path / "out.ninfer"
    options = [option for rule in rules for option in ("--prefix", rule)]
    places = ["--source", text, "--input", f"ranking={made.ranking}"]
    done = run("run", recipe, *places, *options, "--unpinned", "-o", output)
    assert done.code == 0, done.err
    assert sha256(output) == sha256(shipped["examples/text-only"])
    report = json.loads((tmp_path / "out.ninfer.conversion.json").read_bytes())
    begin, _, to = rules[0].partition("=")
    assert report["sources"]["base"]["prefixes"] == {begin: to}


def test_the_command_line_gives_the_same_bytes_and_records_the_waived_pins(
    miniatures: Miniatures, shipped: dict[str, Path], tmp_path: Path
) -> None:
    name, output = "qwen3.8-27b/nvfp4", tmp_path / "out.ninfer"
    recipe = miniatures.recipes / f"{name}.yaml"
    arguments = [recipe, *source_arguments(miniatures.models["qwen3.8-27b"], "base", "quantized"), "-o", output]
    refused = run("run", *arguments)
    assert (refused.code, refused.out) == (1, "")
    assert len(refused.err.splitlines()) == 7
    assert "input ranking" in refused.err
    assert "resource frontend/video_preprocessor_config.json: SHA-256" in refused.err
    assert list(tmp_path.iterdir()) == []
    done = run("run", *arguments, "--unpinned")
    assert done.code == 0, done.err
    assert done.out == f"{sha256(shipped[name])}  {output}\n"
    report = json.loads((tmp_path / "out.ninfer.conversion.json").read_bytes())
    assert len(report["waived"]) == 7
    assert all("SHA-256" in waived for waived in report["waived"])
    assert sum("could not be checked" in note for note in report["notes"]) == 2


MODELOPT = """\
schema: 1
id: modelopt
artifact: {model_id: m, weights_id: w}
evidence: none
sources: {base: {}}
objects:
  - {name: fused, shape: [256, 128], format: NVFP4, words: {concat: [{modelopt: a}, {modelopt: b}]}}
  - name: divisor
    shape: []
    format: FP32
    value: {reshape: {to: [], of: {reciprocal: {same: [a.input_scale, b.input_scale]}}}}
"""


def test_named_modelopt_conversions_take_exact_reciprocals_and_copy_the_words(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    tensors = {}
    for module in "ab":
        tensors |= {
            f"{module}.weight": ("U8", draw.integers(0, 256, (128, 64)).astype(np.uint8)),
            f"{module}.weight_scale": ("F8_E4M3", draw.integers(0, 0x7F, (128, 8)).astype(np.uint8)),
            f"{module}.weight_scale_2": ("F32", np.array(0x3A83126F, "<u4")),
            f"{module}.input_scale": ("F32", np.array(0x3DCCCCCD, "<u4")),
        }
    source = write_directory(tmp_path / "source", {"model.safetensors": tensors})
    (tmp_path / "recipe.yaml").write_text(MODELOPT, encoding="utf-8")
    converted(tmp_path / "recipe.yaml", tmp_path / "out.ninfer", {"base": source})
    expected = Reference(load_recipe(tmp_path / "recipe.yaml"), {"base": source}).artifact()
    assert (tmp_path / "out.ninfer").read_bytes() == expected
    objects = parsed(tmp_path / "out.ninfer")
    assert objects["divisor"].payload == (0x41200000).to_bytes(4, "little")
    assert objects["fused"].payload[-4:] == reciprocal(0x3A83126F).to_bytes(4, "little")
