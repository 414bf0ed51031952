"""Stand-in checkpoints: what the target pages say about the real ones, at both sizes."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from ninfer_convert.formats import FORMATS
from ninfer_convert.plan.planner import Plan, PlannedTensor, make_plan
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.source.checkpoint import open_checkpoint
from ninfer_convert.stand_in.checkpoints import MODELS, StandIn, miniature_recipe, write_demo_checkpoint, write_stand_in
from ninfer_convert.stand_in.llama import write_llama
from ninfer_convert.stand_in.resources import TOKENS, model_config, ranking, resources
from ninfer_convert.stand_in.weights import (
    DEMO,
    FULL,
    MINIATURE,
    MINIATURE_NUMBERS,
    Weight,
    base_weights,
    line_count,
    quantized_weights,
    seeded_lines,
    seeded_words,
)

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
WORD = {"BF16": "<u2", "U8": "u1", "F8_E4M3": "u1", "F32": "<u4"}
FULL_ATTENTION = range(3, 64, 4)

# Every tensor of the BF16 checkpoint as the target page gives it: name pattern, shape, how many.
BASE_TENSORS = (
    (r"model\.language_model\.embed_tokens\.weight|lm_head\.weight", [248320, 5120], 2),
    (r"model\.language_model\.norm\.weight", [5120], 1),
    (r"L\.(input|post_attention)_layernorm\.weight", [5120], 128),
    (r"L\.mlp\.(gate|up)_proj\.weight", [17408, 5120], 128),
    (r"L\.mlp\.down_proj\.weight", [5120, 17408], 64),
    (r"L\.self_attn\.q_proj\.weight", [12288, 5120], 16),
    (r"L\.self_attn\.[kv]_proj\.weight", [1024, 5120], 32),
    (r"L\.self_attn\.o_proj\.weight", [5120, 6144], 16),
    (r"L\.self_attn\.[qk]_norm\.weight", [256], 32),
    (r"L\.linear_attn\.(A_log|dt_bias)", [48], 96),
    (r"L\.linear_attn\.conv1d\.weight", [10240, 1, 4], 48),
    (r"L\.linear_attn\.in_proj_[ab]\.weight", [48, 5120], 96),
    (r"L\.linear_attn\.in_proj_qkv\.weight", [10240, 5120], 48),
    (r"L\.linear_attn\.in_proj_z\.weight", [6144, 5120], 48),
    (r"L\.linear_attn\.norm\.weight", [128], 48),
    (r"L\.linear_attn\.out_proj\.weight", [5120, 6144], 48),
    (r"mtp\.fc\.weight", [5120, 10240], 1),
    (r"mtp\.(pre_fc_norm_embedding|pre_fc_norm_hidden|norm)\.weight", [5120], 3),
    (r"mtp\.layers\.0\.(input|post_attention)_layernorm\.weight", [5120], 2),
    (r"mtp\.layers\.0\.self_attn\.q_proj\.weight", [12288, 5120], 1),
    (r"mtp\.layers\.0\.self_attn\.[kv]_proj\.weight", [1024, 5120], 2),
    (r"mtp\.layers\.0\.self_attn\.o_proj\.weight", [5120, 6144], 1),
    (r"mtp\.layers\.0\.self_attn\.[qk]_norm\.weight", [256], 2),
    (r"mtp\.layers\.0\.mlp\.(gate|up)_proj\.weight", [17408, 5120], 2),
    (r"mtp\.layers\.0\.mlp\.down_proj\.weight", [5120, 17408], 1),
    (r"model\.visual\.patch_embed\.proj\.weight", [1152, 3, 2, 16, 16], 1),
    (r"model\.visual\.pos_embed\.weight", [2304, 1152], 1),
    (r"model\.visual\.(patch_embed\.proj\.bias|merger\.norm\.(weight|bias))", [1152], 3),
    (r"B\.attn\.qkv\.weight", [3456, 1152], 27),
    (r"B\.attn\.qkv\.bias", [3456], 27),
    (r"B\.attn\.proj\.weight", [1152, 1152], 27),
    (r"B\.mlp\.linear_fc1\.weight", [4304, 1152], 27),
    (r"B\.mlp\.linear_fc1\.bias", [4304], 27),
    (r"B\.mlp\.linear_fc2\.weight", [1152, 4304], 27),
    (r"B\.(attn\.proj|mlp\.linear_fc2)\.bias|B\.norm[12]\.(weight|bias)", [1152], 162),
    (r"model\.visual\.merger\.linear_fc1\.weight", [4608, 4608], 1),
    (r"model\.visual\.merger\.linear_fc1\.bias", [4608], 1),
    (r"model\.visual\.merger\.linear_fc2\.weight", [5120, 4608], 1),
    (r"model\.visual\.merger\.linear_fc2\.bias", [5120], 1),
)


def headers(directory: Path) -> dict[str, tuple[str, list[int], str]]:
    """Dtype, shape and file of every tensor, by the reference reader."""
    found: dict[str, tuple[str, list[int], str]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                view = file.get_slice(name)
                assert name not in found
                found[name] = (view.get_dtype(), view.get_shape(), path.name)
    return found


def words(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The words of every tensor of one file, read by position."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:begin])
    entries.pop("__metadata__")
    spans = {name: slice(*(begin + offset for offset in entry["data_offsets"])) for name, entry in entries.items()}
    return {name: np.frombuffer(data[span], WORD[entries[name]["dtype"]]) for name, span in spans.items()}


def all_words(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {name: found for path in directory.glob("*.safetensors") for name, found in words(path).items()}


def digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module", params=sorted(MODELS))
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, StandIn]:
    return request.param, write_stand_in(request.param, tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module", params=sorted(MODELS))
def miniature(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, StandIn]:
    return request.param, write_stand_in(request.param, tmp_path_factory.mktemp("miniature"), MINIATURE)


def test_full_base_has_exactly_the_tensors_of_the_target_page(full: tuple[str, StandIn]) -> None:
    rest = headers(full[1].base)
    assert len(rest) == 1199
    assert {dtype for dtype, _, _ in rest.values()} == {"BF16"}
    for short, shape, count in BASE_TENSORS:
        pattern = short.replace("L\\.", r"model\.language_model\.layers\.\d+\.")
        pattern = pattern.replace("B\\.", r"model\.visual\.blocks\.\d+\.")
        names = [name for name in rest if re.fullmatch(pattern, name)]
        assert len(names) == count, pattern
        assert {tuple(rest.pop(name)[1]) for name in names} == {tuple(shape)}, pattern
    assert not rest


def test_full_base_is_fifteen_shards_with_a_true_index(full: tuple[str, StandIn]) -> None:
    found = headers(full[1].base)
    index = json.loads((full[1].base / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {name: file for name, (_, _, file) in found.items()}
    assert sorted(set(index["weight_map"].values())) == [f"model-{n:05d}-of-00015.safetensors" for n in range(1, 16)]
    assert index["metadata"]["total_size"] == 55_562_855_904


def test_full_stand_ins_are_sparse(full: tuple[str, StandIn]) -> None:
    for directory, least in ((full[1].base, 55_000_000_000), (full[1].quantized, 20_000_000_000)):
        status = [path.stat() for path in directory.iterdir()]
        assert sum(entry.st_size for entry in status) > least
        assert sum(entry.st_blocks for entry in status) * 512 < 64 << 20


def test_seeded_lines_of_a_sparse_file_are_in_their_place(full: tuple[str, StandIn]) -> None:
    weights = {weight.name: weight for weight in base_weights(FULL, MODELS[full[0]].base_repo)}
    for path in sorted(full[1].base.glob("*.safetensors"))[::7]:
        with open(path, "rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(begin - 8))
            for name in ("lm_head.weight", "model.language_model.layers.0.mlp.down_proj.weight", "mtp.norm.weight"):
                if name not in entries:
                    continue
                offset, end = entries[name]["data_offsets"]
                lines = line_count(weights[name])
                line_bytes = (end - offset) // lines
                for line in (0, lines - 1):
                    file.seek(begin + offset + line * line_bytes)
                    assert file.read(line_bytes) == seeded_words(weights[name], 0, line).tobytes()
                if lines > 1:
                    file.seek(begin + offset + line_bytes)
                    assert not any(file.read(line_bytes))


def test_quantized_36_keeps_117_linears_in_bf16_and_the_others_in_nvfp4() -> None:
    names = {weight.name: weight for weight in quantized_weights("qwen3.6-27b", FULL, "quantized", "base")}
    shared = [name for name, weight in names.items() if weight.origin == "base"]
    assert len(shared) == 117
    layers = r"model\.language_model\.layers\.(\d+)\.(.*)\.weight"
    kept = Counter()
    for name in shared:
        found = re.fullmatch(layers, name)
        assert found
        kept[found[2]] += 1
    assert kept == {
        "linear_attn.in_proj_a": 48,
        "linear_attn.in_proj_b": 48,
        "linear_attn.out_proj": 1,
        "self_attn.q_proj": 6,
        "self_attn.k_proj": 6,
        "self_attn.v_proj": 6,
        "self_attn.o_proj": 2,
    }
    packed = Counter(name.split(".", 4)[4] for name in names if name.endswith("weight_packed"))
    assert packed == {
        "mlp.gate_proj.weight_packed": 64,
        "mlp.up_proj.weight_packed": 64,
        "mlp.down_proj.weight_packed": 64,
        "linear_attn.in_proj_qkv.weight_packed": 48,
        "linear_attn.in_proj_z.weight_packed": 48,
        "linear_attn.out_proj.weight_packed": 47,
        "self_attn.q_proj.weight_packed": 10,
        "self_attn.k_proj.weight_packed": 10,
        "self_attn.v_proj.weight_packed": 10,
        "self_attn.o_proj.weight_packed": 14,
    }


def test_quantized_38_has_the_module_kinds_of_the_target_page() -> None:
    weights = {weight.name: weight for weight in quantized_weights("qwen3.8-27b", FULL, "quantized", "base")}
    assert {weight.origin for weight in weights.values()} == {"quantized"}
    prefix = "model.language_model.layers."
    for layer in range(64):
        for module in ("gate_proj", "up_proj", "down_proj"):
            name = f"{prefix}{layer}.mlp.{module}"
            assert (f"{name}.weight_packed" in weights) == (layer <= 55)
            assert (f"{name}.weight" in weights) == (layer > 55)
        own = ("q_proj", "k_proj", "v_proj", "o_proj") if layer in FULL_ATTENTION else ()
        fp8 = [f"{prefix}{layer}.self_attn.{module}" for module in own] or [
            f"{prefix}{layer}.linear_attn.{module}" for module in ("in_proj_qkv", "in_proj_z", "out_proj")
        ]
        for name in fp8:
            weight, scale = weights[f"{name}.weight"], weights[f"{name}.weight_scale"]
            assert (weight.dtype, scale.dtype, scale.shape) == ("F8_E4M3", "BF16", (weight.shape[0], 1))
        assert (f"{prefix}{layer}.self_attn.k_scale" in weights) == (layer in FULL_ATTENTION)
    assert weights["lm_head.weight"].dtype == "F8_E4M3"
    assert weights["lm_head.weight_scale"].shape == (248320, 1)
    assert weights["model.language_model.embed_tokens.weight"].dtype == "BF16"
    assert weights[f"{prefix}0.linear_attn.in_proj_a.weight"].dtype == "BF16"


def test_nvfp4_fields_have_the_dtypes_and_shapes_of_the_layout_page(miniature: tuple[str, StandIn]) -> None:
    found = headers(miniature[1].quantized)
    modules = [name.removesuffix(".weight_packed") for name in found if name.endswith(".weight_packed")]
    assert modules
    for module in modules:
        dtype, (n, half_k), _ = found[f"{module}.weight_packed"]
        assert dtype == "U8"
        assert found[f"{module}.weight_scale"][:2] == ("F8_E4M3", [n, half_k // 8])
        assert found[f"{module}.weight_global_scale"][:2] == ("F32", [1])
        assert found[f"{module}.input_global_scale"][:2] == ("F32", [1])
        assert f"{module}.weight" not in found


def test_words_are_valid_and_divisors_agree_inside_fused_parents(miniature: tuple[str, StandIn]) -> None:
    found = all_words(miniature[1].quantized)
    dtypes = headers(miniature[1].quantized)
    for name, array in found.items():
        if dtypes[name][0] == "F8_E4M3":
            assert not np.any((array & 0x7F) == 0x7F), name
            assert name.endswith(".weight") or not np.any(array & 0x80), name
        elif dtypes[name][0] == "F32":
            value = float(array.view("<f4")[0])
            assert 0 < value < float("inf"), name
        elif dtypes[name][0] == "BF16":
            assert not np.any((array & 0x7F80) == 0x7F80), name
            assert not name.endswith("scale") or np.all((array > 0) & (array < 0x8000)), name
    for parent in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        for field in ("weight_global_scale", "input_global_scale"):
            for layer in range(12):
                names = [f"model.language_model.layers.{layer}.{module}.{field}" for module in parent]
                if names[0] in found:
                    assert len({found[name].tobytes() for name in names}) == 1


def test_only_the_kept_linears_of_36_equal_the_base(tmp_path: Path) -> None:
    made = write_stand_in("qwen3.6-27b", tmp_path, MINIATURE)
    base, quantized = all_words(made.base), all_words(made.quantized)
    same = {name for name in base.keys() & quantized.keys() if np.array_equal(base[name], quantized[name])}
    expected = {w.name for w in quantized_weights("qwen3.6-27b", MINIATURE, "q", "base") if w.origin == "base"}
    assert same == expected
    # 9 GDN layers with A and B, one of them with its output; query, key and value of layers 3 and 7, output of 3.
    assert len(expected) == 9 * 2 + 1 + 2 * 3 + 1


def test_miniature_is_dense_small_and_sharded(miniature: tuple[str, StandIn]) -> None:
    for directory, files in ((miniature[1].base, 3), (miniature[1].quantized, 1)):
        shards = sorted(directory.glob("*.safetensors"))
        assert len(shards) == files
        assert sum(path.stat().st_size for path in shards) < 8_000_000
        for path in shards:
            assert all(array.any() for array in words(path).values() if array.size > 4)
        assert (directory / "model.safetensors.index.json").exists() == (files > 1)


def test_equal_arguments_give_equal_bytes_and_another_seed_changes_every_tensor(tmp_path: Path) -> None:
    first = write_demo_checkpoint(tmp_path / "a")
    write_demo_checkpoint(tmp_path / "b")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    other = write_stand_in("qwen3.8-27b", tmp_path / "c", DEMO, seed=1)
    for one, two in ((first.base, other.base), (first.quantized, other.quantized)):
        before, after = all_words(one), all_words(two)
        assert before.keys() == after.keys()
        assert not [name for name in before if before[name].size > 1 and np.array_equal(before[name], after[name])]


def test_a_directory_with_a_stand_in_is_refused(tmp_path: Path) -> None:
    write_demo_checkpoint(tmp_path)
    before = digests(tmp_path)
    with pytest.raises(FileExistsError, match="base"):
        write_stand_in("qwen3.6-27b", tmp_path, FULL)
    assert digests(tmp_path) == before


def test_no_two_tensors_of_a_checkpoint_are_equal(miniature: tuple[str, StandIn]) -> None:
    contents = [array.tobytes() for array in all_words(miniature[1].base).values() if array.size > 4]
    assert len(contents) == len(set(contents))


def test_demo_has_modules_of_all_three_kinds(tmp_path: Path) -> None:
    made = write_demo_checkpoint(tmp_path)
    found = headers(made.quantized)
    assert "model.language_model.layers.1.mlp.up_proj.weight_packed" in found
    assert found["model.language_model.layers.2.mlp.up_proj.weight"][0] == "F8_E4M3"
    assert found["model.language_model.layers.3.self_attn.q_proj.weight"][0] == "F8_E4M3"
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 6_000_000


@pytest.mark.parametrize("seed", [0, 7])
def test_resources_of_the_full_base_have_the_published_size(seed: int) -> None:
    files = resources("qwen3.6-27b", FULL, seed, published_size=True)
    assert sum(map(len, files.values())) == 12_833_441
    assert list(files) == [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    ]
    assert all(json.loads(content) for name, content in files.items() if name.endswith(".json"))


def test_special_tokens_lie_below_the_candidates_and_one_beyond() -> None:
    for scale, first, candidates in ((FULL, 248044, 248077), (MINIATURE, 567, 600)):
        files = resources("any", scale, 0, published_size=False)
        added = json.loads(files["tokenizer_config.json"])["added_tokens_decoder"]
        special = [int(token) for token, entry in added.items() if entry["special"]]
        assert {int(token) for token in added} == {*range(first, candidates), candidates + 23}
        assert candidates + 23 in special
        assert len(special) == 22
        assert len(TOKENS) == 33


def test_processor_files_are_shared_by_the_families_and_the_others_are_not() -> None:
    one, other = (resources(family, FULL, 0, published_size=False) for family in ("qwen3.6-27b", "qwen3.8-27b"))
    assert [name for name in one if one[name] == other[name]] == [
        "generation_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    ]


def test_config_meets_every_expectation_of_the_target_page(full: tuple[str, StandIn]) -> None:
    for directory in (full[1].base, full[1].quantized):
        config = json.loads((directory / "config.json").read_bytes())
        text, vision = config["text_config"], config["vision_config"]
        assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
        assert (config["model_type"], config["tie_word_embeddings"]) == ("qwen3_5", False)
        assert config["language_model_only"] is False
        assert [config[f"{token}_token_id"] for token in ("vision_start", "vision_end", "image", "video")] == [
            248053,
            248054,
            248056,
            248057,
        ]
        assert text["rope_parameters"]["rope_theta"] == 10_000_000
        assert text["rope_parameters"]["mrope_section"] == [11, 11, 10]
        kinds = text["layer_types"]
        assert [layer for layer, kind in enumerate(kinds) if kind == "full_attention"] == list(FULL_ATTENTION)
        assert len(kinds) == text["num_hidden_layers"] == 64
        assert text["rms_norm_eps"] == 1e-6
        for member, value in {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "vocab_size": 248320,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "mtp_num_hidden_layers": 1,
            "max_position_embeddings": 262144,
            "full_attention_interval": 4,
            "mamba_ssm_dtype": "float32",
            "mtp_use_dedicated_embeddings": False,
            "tie_word_embeddings": False,
        }.items():
            assert text[member] == value, member
        for member, value in {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 5120,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": 2304,
        }.items():
            assert vision[member] == value, member
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_ranking_rows_add_up_and_have_ties_at_the_cut() -> None:
    for scale, vocabulary, take in ((FULL, 248320, 131072), (MINIATURE, 640, 320)):
        counts = np.frombuffer(ranking(scale, 0), "<i8").reshape(-1, vocabulary)
        assert np.array_equal(counts[0], counts[1:].sum(axis=0))
        assert counts.min() >= 0
        border = np.sort(counts[0])[::-1][take]
        assert np.count_nonzero(counts[0] == border) > 1


def test_code_and_scale_rows_of_a_sparse_module_are_seeded_together() -> None:
    weights = {weight.name: weight for weight in quantized_weights("qwen3.8-27b", FULL, "quantized", "base")}
    for name, weight in weights.items():
        if weight.kind == "fp8-codes":
            scale = weights[f"{name}_scale"]
            lines = line_count(scale)
            # A scale tensor that is one line is seeded whole; else it has a word for each seeded row of codes.
            assert lines == 1 or seeded_lines(lines, False) == seeded_lines(line_count(weight), False)


def test_miniature_numbers_keep_the_products_and_sums_of_the_full_ones() -> None:
    number = MINIATURE.number
    for whole, parts in {
        6144: (24, 256),
        1024: (4, 256),
        512: (2, 256),
        12288: (2, 6144),
        2048: (16, 128),
        4096: (2, 2048),
        96: (2, 48),
        34816: (2, 17408),
        3456: (3, 1152),
        4608: (4, 1152),
    }.items():
        assert whole == parts[0] * parts[1]
        assert number(whole) == number(parts[0]) * number(parts[1]), whole
    for whole, parts in {
        7168: (6144, 1024),
        10240: (4096, 6144),
        14336: (7168, 7168),
        16384: (10240, 6144),
    }.items():
        assert whole == sum(parts)
        assert number(whole) == sum(map(number, parts)), whole
    assert number(48) * number(128) == number(6144)
    assert 2 * number(5120) == number(10240)
    # What NVFP4 can store: N in 128s, K in 64s.
    for n, k in ((14336, 5120), (16384, 5120), (5120, 6144), (34816, 5120), (5120, 17408)):
        assert (number(n) % 128, number(k) % 64) == (0, 0)


def test_miniature_recipe_replaces_sets_layer_types_numbers_and_bases() -> None:
    text = """\
extends: qwen3.6-27b/groupwise-int
revision: 5120aa48, 5120
score: 86.48 % at 0.48
layer_types:
  [linear_attention, linear_attention, linear_attention, full_attention,
   linear_attention, linear_attention, linear_attention, full_attention]
sets:
  text: {from: 0, through: 63}
  attention: {from: 3, through: 63, step: 4}
  few: [3, 7]
  late: {from: 56, through: 63}
  # comment
  vision: {from: 0, through: 26}
objects:
  - {name: x, shape: [248320, 5120], value: {span: [0, 4096], block: 512}}
  - for: {l: {from: 4, through: 11}}
ignore:
  - {for: {l: few}, names: ["<P>layers.<l>.self_attn.[qkv]_proj.weight"]}
"""
    text = text.replace(
        "  [linear", "  [" + "linear_attention, linear_attention, linear_attention, full_attention, " * 14 + "linear", 1
    )
    types = ", ".join(["linear_attention, linear_attention, linear_attention, full_attention"] * 3)
    assert miniature_recipe(text) == f"""\
extends: ../qwen3.6-27b/groupwise-int.yaml
revision: 5120aa48, 128
score: 86.48 % at 0.48
layer_types:
  [{types}]
sets:
  text: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
  attention: [3, 7, 11]
  few: [3]
  late: [8, 9, 10, 11]
  # comment
  vision: [0, 1]
objects:
  - {{name: x, shape: [640, 128], value: {{span: [0, 128], block: 32}}}}
  - for: {{l: [4, 5, 6, 7]}}
ignore:
  - {{for: {{l: few}}, names: ["<P>layers.<l>.self_attn.[qkv]_proj.weight"]}}
"""


@pytest.mark.parametrize("name", sorted(str(path.relative_to(RECIPES)) for path in RECIPES.glob("qwen*/*.yaml")))
def test_no_full_size_number_is_left_in_a_miniature_recipe(name: str) -> None:
    text = miniature_recipe((RECIPES / name).read_text(encoding="utf-8"))
    # These are values of the miniature too, or stand in names and digests.
    ambiguous = set(MINIATURE_NUMBERS.values()) | {24, 27, 48, 96}
    for number in MINIATURE_NUMBERS.keys() - ambiguous:
        assert not re.search(rf"[\[ ]{number}[\],}}\n]", text), number


def test_miniature_config_agrees_with_the_miniature_recipe_numbers() -> None:
    config = model_config(MINIATURE)
    assert config["text_config"]["hidden_size"] == 128
    assert config["text_config"]["num_hidden_layers"] == 12
    assert config["text_config"]["layer_types"].count("full_attention") == 3
    assert config["vision_config"]["depth"] == 2
    assert config["image_token_id"] == 579
    assert config["language_model_only"] is False


def test_script_writes_both_sizes_and_the_recipes_of_the_small_one(tmp_path: Path) -> None:
    script = RECIPES.parent / "scripts" / "make_checkpoint.py"
    for arguments in ([tmp_path / "full"], [tmp_path / "small", "--miniature", "--seed", "3"]):
        done = subprocess.run(
            [sys.executable, script, "qwen3.8-27b", *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [str(arguments[0] / name) for name in ("base", "quantized", "ranking.i64")]
    assert not (tmp_path / "full" / "recipes").exists()
    made = {path.name: path for path in (tmp_path / "small" / "recipes" / "qwen3.8-27b").iterdir()}
    assert set(made) == {path.name for path in (RECIPES / "qwen3.8-27b").iterdir()}
    again = subprocess.run(
        [sys.executable, script, "qwen3.8-27b", tmp_path / "full"], capture_output=True, text=True, check=False
    )
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith("error: ")
    assert "Traceback" not in again.stderr


LLAMA_TENSORS = (
    (r"model\.embed_tokens\.weight|lm_head\.weight", [1024, 256], 2),
    (r"model\.norm\.weight", [256], 1),
    (r"L\.(input|post_attention)_layernorm\.weight", [256], 8),
    (r"L\.self_attn\.[qo]_proj\.weight", [256, 256], 8),
    (r"L\.self_attn\.[kv]_proj\.weight", [128, 256], 8),
    (r"L\.mlp\.(gate|up)_proj\.weight", [704, 256], 8),
    (r"L\.mlp\.down_proj\.weight", [256, 704], 4),
)


def test_the_llama_has_the_tensors_of_its_family_in_two_shards(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    found = headers(tmp_path / "llama")
    for pattern, shape, count in LLAMA_TENSORS:
        names = [name for name in found if re.fullmatch(pattern.replace("L", r"model\.layers\.[0-3]"), name)]
        assert [found[name][:2] for name in names] == [("BF16", shape)] * count, pattern
    assert sum(count for *_, count in LLAMA_TENSORS) == len(found)
    index = json.loads((tmp_path / "llama" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {name: place for name, (_, _, place) in found.items()}
    assert len(set(index["weight_map"].values())) == 2
    config = json.loads((tmp_path / "llama" / "config.json").read_bytes())
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 256, 4)


def test_equal_seeds_give_equal_llamas(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_llama(tmp_path / name, seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    before, after = all_words(tmp_path / "a"), all_words(tmp_path / "c")
    assert not [name for name in before if np.array_equal(before[name], after[name])]
    with pytest.raises(FileExistsError, match="a"):
        write_llama(tmp_path / "a")


def test_bell_words_are_sums_of_bytes_rounded_to_nearest_even() -> None:
    weight = Weight("w", (64, 64), "bell", "here", "w")
    found = seeded_words(weight, 0, 0)
    bits = hashlib.shake_128(b"0 here w 0").digest(64 * 64 * 8)
    for place in range(0, 64 * 64, 37):
        exact = Fraction(2 * sum(bits[8 * place : 8 * place + 8]) - 8 * 255, 2**15)
        word = int(found[place])
        near = {other: abs(_bf16(other) - exact) for other in (word - 1, word, word + 1) if 0 <= other < 2**16}
        assert near[word] == min(near.values())
        assert word % 2 == 0 or list(near.values()).count(near[word]) == 1
    values = (found.astype("<u4") << 16).view("<f4")
    assert abs(float(values.mean())) < 0.001
    assert 0.0120 < float(values.std()) < 0.0136
    assert float(np.abs(values).max()) <= 1020 / 2**14


def _bf16(word: int) -> Fraction:
    return Fraction(float(np.array(word << 16, "<u4").view("<f4")))


def test_script_writes_the_llama_and_has_it_in_one_size(tmp_path: Path) -> None:
    words = [sys.executable, RECIPES.parent / "scripts" / "make_checkpoint.py", "llama", tmp_path / "llama"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path / 'llama'}\n"
    write_llama(tmp_path / "again")
    assert digests(tmp_path / "llama") == digests(tmp_path / "again")
    wrong = subprocess.run([*words, "--miniature"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "llama has one size; leave --miniature out" in wrong.stderr


def planned(recipe_path: Path, made: StandIn, unpinned: bool) -> Plan:
    recipe = load_recipe(recipe_path)
    places = {"base": made.base, "quantized": made.quantized}
    sources = {name: open_checkpoint(places[name], name=name) for name in recipe.sources}
    try:
        return make_plan(recipe, sources, {"ranking": made.ranking}, unpinned=unpinned)
    finally:
        for source in sources.values():
            source.close()


@pytest.mark.parametrize("weights", ["groupwise-int", "nvfp4"])
def test_miniature_recipes_plan_over_the_miniature(
    miniature: tuple[str, StandIn], weights: str, tmp_path: Path
) -> None:
    for shipped in RECIPES.glob("qwen*/*.yaml"):
        path = tmp_path / shipped.relative_to(RECIPES)
        path.parent.mkdir(exist_ok=True)
        path.write_text(miniature_recipe(shipped.read_text(encoding="utf-8")), encoding="utf-8")
    plan = planned(tmp_path / miniature[0] / f"{weights}.yaml", miniature[1], unpinned=True)
    assert {item.name.split("/")[0] for item in plan.objects} == {"frontend", "text", "mtp", "vision"}


def test_published_totals_over_the_full_shape(tmp_path: Path) -> None:
    made = write_stand_in("qwen3.6-27b", tmp_path)
    plan = planned(RECIPES / "qwen3.6-27b" / "groupwise-int.yaml", made, unpinned=True)
    assert (plan.file_bytes, plan.payload_bytes) == (17_495_365_888, 17_495_189_760)


def test_demo_recipe_needs_no_waiver_and_uses_all_nine_formats(tmp_path: Path) -> None:
    plan = planned(RECIPES / "demo.yaml", write_demo_checkpoint(tmp_path), unpinned=False)
    assert {item.numeric.name for item in plan.objects if isinstance(item, PlannedTensor)} == set(FORMATS)
