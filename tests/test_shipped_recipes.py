"""The shipped recipes against an inventory written down here from the target pages.

Source: targets/qwen3.6-27b.md, targets/qwen3.8-27b-nvfp4.md, container.md "Identities in use".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import TENSOR_ALIGNMENT, align_up, geometry
from ninfer_convert.recipe.expression import Expression, Module, Same, Tensor, leaves, operands
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import Recipe, ResourceSpec, TensorSpec

RECIPES = Path(__file__).parents[1] / "recipes"
NAMES = (
    "qwen3.6-27b/groupwise-int",
    "qwen3.6-27b/nvfp4",
    "qwen3.8-27b/groupwise-int",
    "qwen3.8-27b/nvfp4",
)
GROUPED = "MAXABS_F16_RECIP_RNE_V1"
FP8_ROW = "MAXABS_BF16S_RECIP_E4M3FN_RNE_V1"
P = "model.language_model."
ATTENTION = range(3, 64, 4)
BF16_INPUT = (3, 7, 11, 15, 19, 23)
BF16_OUTPUT = (3, 7)


@cache
def shipped(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml")


# --- the inventory: (name, shape, format, encoder, value as expression.py writes it) ---------------------------


@dataclass(frozen=True)
class Row:
    name: str
    shape: tuple[int, ...]
    format: str
    encoder: str | None
    value: str
    words: bool = False


def bf16(name: str, shape: tuple[int, ...], value: str) -> Row:
    return Row(name, shape, "BF16", None, value)


def grouped(name: str, shape: tuple[int, ...], bits: str, value: str) -> Row:
    numeric = {"Q4": "Q4G64_F16S", "Q5": "Q5G64_F16S", "Q6": "Q6G64_F16S", "W8": "W8G32_F16S"}[bits]
    return Row(name, shape, numeric, GROUPED, value)


def nvfp4(name: str, shape: tuple[int, ...], value: str) -> Row:
    return Row(name, shape, "NVFP4", None, value, words=True)


def fp8(name: str, shape: tuple[int, ...], value: str) -> Row:
    return Row(name, shape, "FP8_E4M3FN_ROW_BF16S", None, value, words=True)


def concat(*parts: str) -> str:
    return f"concat({', '.join(parts)})"


def same(name: str) -> str:
    return f"same(base:{name}, quantized:{name})"


def query(q: str) -> str:
    return f"block_rows({q}, block 512, [0, 256))"


def gate(q: str) -> str:
    return f"block_rows({q}, block 512, [256, 512))"


def divisor(name: str, *modules: str) -> Row:
    words = [f"quantized:{module}.input_global_scale" for module in modules]
    value = words[0] if len(words) == 1 else f"same({', '.join(words)})"
    return Row(f"{name}/input_scale_divisor", (), "FP32", None, f"reshape({value}, [])")


def gdn_controls(at: str, a: str) -> Iterator[Row]:
    yield Row(f"{at}a_log", (48,), "FP32", None, f"cast({a}A_log, FP32, exact)")
    yield Row(f"{at}dt_bias", (48,), "FP32", None, f"cast({a}dt_bias, FP32, exact)")
    yield bf16(f"{at}convolution", (4, 10240), f"transpose(reshape({a}conv1d.weight, [10240, 4]), [1, 0])")


def groupwise_layer(layer: int) -> Iterator[Row]:
    at, source = f"text/layers/{layer}/", f"base:{P}layers.{layer}."
    yield bf16(f"{at}input_norm", (5120,), f"{source}input_layernorm.weight")
    if layer in ATTENTION:
        a = f"{source}self_attn."
        q, k, v = (f"{a}{letter}_proj.weight" for letter in "qkv")
        yield grouped(f"{at}attention/query_key", (7168, 5120), "Q4", concat(query(q), k))
        yield grouped(f"{at}attention/gate_value", (7168, 5120), "Q5", concat(gate(q), v))
        yield bf16(f"{at}attention/query_norm", (256,), f"{a}q_norm.weight")
        yield bf16(f"{at}attention/key_norm", (256,), f"{a}k_norm.weight")
        yield grouped(f"{at}attention/output", (5120, 6144), "Q5", f"{a}o_proj.weight")
    else:
        a = f"{source}linear_attn."
        qkv = f"{a}in_proj_qkv.weight"
        yield from gdn_controls(f"{at}gdn/", a)
        yield bf16(f"{at}gdn/a_projection", (48, 5120), f"{a}in_proj_a.weight")
        yield bf16(f"{at}gdn/b_projection", (48, 5120), f"{a}in_proj_b.weight")
        yield grouped(f"{at}gdn/query_key", (4096, 5120), "Q4", f"slice({qkv}, [0, 4096))")
        value_z = concat(f"slice({qkv}, [4096, 10240))", f"{a}in_proj_z.weight")
        yield grouped(f"{at}gdn/value_z", (12288, 5120), "Q5", value_z)
        yield bf16(f"{at}gdn/norm", (128,), f"{a}norm.weight")
        yield grouped(f"{at}gdn/output", (5120, 6144), "Q5", f"{a}out_proj.weight")
    yield bf16(f"{at}post_attention_norm", (5120,), f"{source}post_attention_layernorm.weight")
    gate_up = concat(f"{source}mlp.gate_proj.weight", f"{source}mlp.up_proj.weight")
    yield grouped(f"{at}mlp/gate_up", (34816, 5120), "Q4", gate_up)
    yield grouped(f"{at}mlp/down", (5120, 17408), "Q5", f"{source}mlp.down_proj.weight")


def word_mlp(at: str, module: str) -> Iterator[Row]:
    parts = (f"{module}mlp.gate_proj", f"{module}mlp.up_proj")
    yield nvfp4(f"{at}mlp/gate_up", (34816, 5120), concat(*(f"quantized:{part}" for part in parts)))
    yield divisor(f"{at}mlp/gate_up_projection", *parts)
    yield nvfp4(f"{at}mlp/down", (5120, 17408), f"quantized:{module}mlp.down_proj")
    yield divisor(f"{at}mlp/down_projection", f"{module}mlp.down_proj")


def nvfp4_layer(layer: int) -> Iterator[Row]:
    at, name = f"text/layers/{layer}/", f"{P}layers.{layer}."
    yield bf16(f"{at}input_norm", (5120,), f"base:{name}input_layernorm.weight")
    yield from nvfp4_attention(layer, at, name) if layer in ATTENTION else nvfp4_gdn(layer, at, name)
    yield bf16(f"{at}post_attention_norm", (5120,), f"base:{name}post_attention_layernorm.weight")
    yield from word_mlp(at, name)


def nvfp4_attention(layer: int, at: str, name: str) -> Iterator[Row]:
    a = f"{name}self_attn."
    parent = f"{at}attention/query_key_gate_value"
    if layer in BF16_INPUT:
        q, k, v = (same(f"{a}{letter}_proj.weight") for letter in "qkv")
        yield bf16(parent, (14336, 5120), concat(query(q), k, gate(q), v))
    else:
        q, k, v = (f"quantized:{a}{letter}_proj" for letter in "qkv")
        yield nvfp4(parent, (14336, 5120), concat(query(q), k, gate(q), v))
        yield divisor(f"{at}attention/input_projection", f"{a}q_proj", f"{a}k_proj", f"{a}v_proj")
    yield bf16(f"{at}attention/query_norm", (256,), f"base:{a}q_norm.weight")
    yield bf16(f"{at}attention/key_norm", (256,), f"base:{a}k_norm.weight")
    if layer in BF16_OUTPUT:
        yield bf16(f"{at}attention/output", (5120, 6144), same(f"{a}o_proj.weight"))
    else:
        yield nvfp4(f"{at}attention/output", (5120, 6144), f"quantized:{a}o_proj")
        yield divisor(f"{at}attention/output_projection", f"{a}o_proj")


def nvfp4_gdn(layer: int, at: str, name: str) -> Iterator[Row]:
    a = f"{name}linear_attn."
    yield from gdn_controls(f"{at}gdn/", f"base:{a}")
    yield bf16(f"{at}gdn/a_projection", (48, 5120), same(f"{a}in_proj_a.weight"))
    yield bf16(f"{at}gdn/b_projection", (48, 5120), same(f"{a}in_proj_b.weight"))
    parts = (f"{a}in_proj_qkv", f"{a}in_proj_z")
    yield nvfp4(f"{at}gdn/query_key_value_z", (16384, 5120), concat(*(f"quantized:{part}" for part in parts)))
    yield divisor(f"{at}gdn/input_projection", *parts)
    yield bf16(f"{at}gdn/norm", (128,), f"base:{a}norm.weight")
    if layer == 4:
        yield bf16(f"{at}gdn/output", (5120, 6144), same(f"{a}out_proj.weight"))
    else:
        yield nvfp4(f"{at}gdn/output", (5120, 6144), f"quantized:{a}out_proj")
        yield divisor(f"{at}gdn/output_projection", f"{a}out_proj")


def mixed_layer(layer: int) -> Iterator[Row]:
    """A layer of qwen3.8-27b nvfp4: FP8 rows, with NVFP4 MLPs up to layer 55."""
    at, name = f"text/layers/{layer}/", f"{P}layers.{layer}."
    source = f"quantized:{name}"
    yield bf16(f"{at}input_norm", (5120,), f"{source}input_layernorm.weight")
    if layer in ATTENTION:
        a = f"{source}self_attn."
        q, k, v = (f"{a}{letter}_proj" for letter in "qkv")
        parent = concat(query(q), k, gate(q), v)
        yield fp8(f"{at}attention/query_key_gate_value", (14336, 5120), parent)
        yield bf16(f"{at}attention/query_norm", (256,), f"{a}q_norm.weight")
        yield bf16(f"{at}attention/key_norm", (256,), f"{a}k_norm.weight")
        yield fp8(f"{at}attention/output", (5120, 6144), f"{a}o_proj")
    else:
        a = f"{source}linear_attn."
        yield from gdn_controls(f"{at}gdn/", a)
        a_b = concat(f"{a}in_proj_a.weight", f"{a}in_proj_b.weight")
        yield bf16(f"{at}gdn/a_b_projection", (96, 5120), a_b)
        yield fp8(f"{at}gdn/query_key_value_z", (16384, 5120), concat(f"{a}in_proj_qkv", f"{a}in_proj_z"))
        yield bf16(f"{at}gdn/norm", (128,), f"{a}norm.weight")
        yield fp8(f"{at}gdn/output", (5120, 6144), f"{a}out_proj")
    yield bf16(f"{at}post_attention_norm", (5120,), f"{source}post_attention_layernorm.weight")
    if layer <= 55:
        yield from word_mlp(at, name)
    else:
        yield fp8(f"{at}mlp/gate_up", (34816, 5120), concat(f"{source}mlp.gate_proj", f"{source}mlp.up_proj"))
        yield fp8(f"{at}mlp/down", (5120, 17408), f"{source}mlp.down_proj")


def draft_head() -> Iterator[Row]:
    ids = "shortlist(ranking, 248077 candidates, take 131072)"
    yield grouped("text/draft_head", (131072, 5120), "Q4", f"gather(base:lm_head.weight, {ids})")
    yield Row("text/draft_head_token_ids", (131072,), "I32", None, ids)


def mtp() -> Iterator[Row]:
    m = "base:mtp.layers.0."
    q, k, v = (f"{m}self_attn.{letter}_proj.weight" for letter in "qkv")
    fused = "mtp/layer/attention/query_key_gate_value"
    yield grouped("mtp/input_projection", (5120, 10240), "W8", "base:mtp.fc.weight")
    yield bf16("mtp/embedding_norm", (5120,), "base:mtp.pre_fc_norm_embedding.weight")
    yield bf16("mtp/hidden_norm", (5120,), "base:mtp.pre_fc_norm_hidden.weight")
    yield bf16("mtp/layer/input_norm", (5120,), f"{m}input_layernorm.weight")
    yield grouped(fused, (14336, 5120), "W8", concat(query(q), k, gate(q), v))
    yield bf16("mtp/layer/attention/query_norm", (256,), f"{m}self_attn.q_norm.weight")
    yield bf16("mtp/layer/attention/key_norm", (256,), f"{m}self_attn.k_norm.weight")
    yield grouped("mtp/layer/attention/output", (5120, 6144), "W8", f"{m}self_attn.o_proj.weight")
    yield bf16("mtp/layer/post_attention_norm", (5120,), f"{m}post_attention_layernorm.weight")
    gate_up = concat(f"{m}mlp.gate_proj.weight", f"{m}mlp.up_proj.weight")
    yield grouped("mtp/layer/mlp/gate_up", (34816, 5120), "W8", gate_up)
    yield grouped("mtp/layer/mlp/down", (5120, 17408), "W8", f"{m}mlp.down_proj.weight")
    yield bf16("mtp/final_norm", (5120,), "base:mtp.norm.weight")


def vision() -> Iterator[Row]:
    v = "base:model.visual."
    patches = f"reshape({v}patch_embed.proj.weight, [1152, 1536])"
    yield grouped("vision/patch_embedding", (1152, 1536), "Q6", patches)
    yield bf16("vision/patch_embedding_bias", (1152,), f"{v}patch_embed.proj.bias")
    yield bf16("vision/position_embedding", (2304, 1152), f"{v}pos_embed.weight")
    for block in range(27):
        at, b = f"vision/layers/{block}/", f"{v}blocks.{block}."
        yield grouped(f"{at}attention/qkv", (3456, 1152), "Q4", f"{b}attn.qkv.weight")
        yield bf16(f"{at}attention/qkv_bias", (3456,), f"{b}attn.qkv.bias")
        yield grouped(f"{at}attention/output", (1152, 1152), "Q5", f"{b}attn.proj.weight")
        yield bf16(f"{at}attention/output_bias", (1152,), f"{b}attn.proj.bias")
        yield grouped(f"{at}mlp/fc1", (4304, 1152), "Q4", f"{b}mlp.linear_fc1.weight")
        yield bf16(f"{at}mlp/fc1_bias", (4304,), f"{b}mlp.linear_fc1.bias")
        yield grouped(f"{at}mlp/fc2", (1152, 4304), "Q5", f"{b}mlp.linear_fc2.weight")
        yield bf16(f"{at}mlp/fc2_bias", (1152,), f"{b}mlp.linear_fc2.bias")
        for norm in ("norm1", "norm2"):
            yield bf16(f"{at}{norm}/weight", (1152,), f"{b}{norm}.weight")
            yield bf16(f"{at}{norm}/bias", (1152,), f"{b}{norm}.bias")
    m = f"{v}merger."
    yield grouped("vision/merger/fc1", (4608, 4608), "W8", f"{m}linear_fc1.weight")
    yield bf16("vision/merger/fc1_bias", (4608,), f"{m}linear_fc1.bias")
    yield grouped("vision/merger/fc2", (5120, 4608), "W8", f"{m}linear_fc2.weight")
    yield bf16("vision/merger/fc2_bias", (5120,), f"{m}linear_fc2.bias")
    yield bf16("vision/merger/norm/weight", (1152,), f"{m}norm.weight")
    yield bf16("vision/merger/norm/bias", (1152,), f"{m}norm.bias")


def inventory(name: str) -> list[Row]:
    shape = (248320, 5120)
    embedding, head = ("text/token_embedding", f"base:{P}embed_tokens.weight"), ("text/output_head", "lm_head")
    if name == "qwen3.8-27b/nvfp4":
        first = Row(embedding[0], shape, "FP8_E4M3FN_ROW_BF16S", FP8_ROW, embedding[1])
        norm, last = f"quantized:{P}norm.weight", fp8(head[0], shape, "quantized:lm_head")
        layer = mixed_layer
    else:
        bits = "Q6" if name == "qwen3.6-27b/groupwise-int" else "W8"
        first = grouped(embedding[0], shape, bits, embedding[1])
        norm, last = f"base:{P}norm.weight", grouped(head[0], shape, bits, "base:lm_head.weight")
        layer = nvfp4_layer if name == "qwen3.6-27b/nvfp4" else groupwise_layer
    rows = [first]
    for index in range(64):
        rows += layer(index)
    return [*rows, bf16("text/final_norm", (5120,), norm), last, *draft_head(), *mtp(), *vision()]


def tensors(recipe: Recipe) -> list[TensorSpec]:
    return [spec for spec in recipe.objects if isinstance(spec, TensorSpec)]


def resources(recipe: Recipe) -> list[ResourceSpec]:
    return [spec for spec in recipe.objects if isinstance(spec, ResourceSpec)]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_made_as_the_target_page_says_and_in_its_order(name: str) -> None:
    found = [
        Row(spec.name, spec.shape, spec.format, spec.encoder, str(spec.value), spec.words)
        for spec in tensors(shipped(name))
    ]
    expected = inventory(name)
    assert [row.name for row in found] == [row.name for row in expected]
    assert [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]] == []


COUNTS = {
    "qwen3.6-27b/groupwise-int": {"BF16": 582, "FP32": 96, "I32": 1, "Q4": 183, "Q5": 246, "Q6": 3, "W8": 7},
    "qwen3.6-27b/nvfp4": {
        "BF16": 591, "FP32": 343, "I32": 1, "Q4": 55, "Q5": 54, "Q6": 1, "W8": 9, "NVFP4": 247,
    },
    # As qwen3.6-27b/groupwise-int, with embedding and output head moved from Q6 to W8.
    "qwen3.8-27b/groupwise-int": {"BF16": 582, "FP32": 96, "I32": 1, "Q4": 183, "Q5": 246, "Q6": 1, "W8": 9},
    "qwen3.8-27b/nvfp4": {
        "BF16": 534, "FP32": 208, "I32": 1, "Q4": 55, "Q5": 54, "Q6": 1, "W8": 7, "NVFP4": 112, "FP8": 146,
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_formats_are_used_as_often_as_the_page_counts(name: str) -> None:
    short = {
        "Q4G64_F16S": "Q4", "Q5G64_F16S": "Q5", "Q6G64_F16S": "Q6", "W8G32_F16S": "W8",
        "FP8_E4M3FN_ROW_BF16S": "FP8",
    }
    counts = Counter(short.get(spec.format, spec.format) for spec in tensors(shipped(name)))
    assert dict(counts) == COUNTS[name]
    assert counts.total() == {"qwen3.6-27b/nvfp4": 1301}.get(name, 1118)
    assert len(resources(shipped(name))) == 6


def test_groupwise_layouts_and_bytes_are_the_published_ones() -> None:
    specs = tensors(shipped("qwen3.6-27b/groupwise-int"))
    layouts = Counter(spec.layout for spec in specs)
    assert layouts == {"contiguous-le-v1": 679, "row-split-k128-v1": 439}
    resource_bytes = 12_833_441
    tensor_bytes, cursor = 0, resource_bytes
    for spec in specs:
        nbytes = geometry(FORMATS[spec.format], spec.shape).nbytes
        tensor_bytes += nbytes
        cursor = align_up(cursor, TENSOR_ALIGNMENT) + nbytes
    assert tensor_bytes == 17_482_342_304
    assert tensor_bytes + resource_bytes == 17_495_175_745
    assert cursor == 17_495_189_760


# --- identity, resources, sources ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "recipe_id"),
    [
        ("qwen3.6-27b/groupwise-int", "qwen3_6_27b-v2"),
        ("qwen3.6-27b/nvfp4", "qwen3_6_27b_nvfp4-v1"),
        ("qwen3.8-27b/groupwise-int", "qwen3_8_27b-v2"),
        ("qwen3.8-27b/nvfp4", "qwen3_8_27b_nvfp4-v1"),
    ],
)
def test_identity_is_the_one_the_name_says(name: str, recipe_id: str) -> None:
    recipe = shipped(name)
    assert recipe.id == recipe_id
    assert f"{recipe.model_id}/{recipe.weights_id}" == name


DIGESTS_36 = {
    "tokenizer.json": "5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42",
    "tokenizer_config.json": "5186f0defcd7f232382c7f0aebcd2252d073bb921ab240e407b7ae8745d2b29b",
    "chat_template.jinja": "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
    "generation_config.json": "e70c136c1b78ddc1fb0905bac8e733a4dc448d4f852a5dd75143fffc70be550e",
    "preprocessor_config.json": "27225450ac9c6529872ee1924fcb0962ff5634834f817040f444118116f4e516",
    "video_preprocessor_config.json": "7768af27c1fafa9cc9011c1dc20067e03f8915e03b63504550e11d5066986d13",
}
DIGESTS_38 = DIGESTS_36 | {
    "tokenizer.json": "0997f410c57a1f4e53b09e4be8f4a172d90edd9564368fb0847030937229b9f3",
    "tokenizer_config.json": "b11349aafa7cdc6a320767cf7ceb29ed82f7eda5d65e8e0819e76f0ce947bf27",
    "chat_template.jinja": "c3cf9e34abf4f9e36c2d72165aa9c132d3e2a725b6c2586aaa3a8af9d7a81041",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_six_resources_come_first_from_the_official_checkpoint_with_their_digests(name: str) -> None:
    recipe = shipped(name)
    digests = DIGESTS_36 if name.startswith("qwen3.6") else DIGESTS_38
    first = list(recipe.objects[:6])
    assert first == resources(recipe)
    assert [(spec.name, spec.sha256) for spec in resources(recipe)] == [
        (f"frontend/{file}", digest) for file, digest in digests.items()
    ]
    for spec in resources(recipe):
        origin = spec.origins[0]
        assert (origin.source, f"frontend/{origin.file}", origin.member) == ("base", spec.name, None)
    assert [origin.member for origin in resources(recipe)[2].origins] == [None, "chat_template"]


REPOSITORIES = {
    "qwen3.6-27b/groupwise-int": [("Qwen/Qwen3.6-27B", "6a9e13bd6fc8f0983b9b99948120bc37f49c13e9")],
    "qwen3.6-27b/nvfp4": [
        ("Qwen/Qwen3.6-27B", "6a9e13bd6fc8f0983b9b99948120bc37f49c13e9"),
        (
            "rdtand/Qwen3.6-27B-PrismaSCOUT-Blackwell-NVFP4-BF16-vllm",
            "9b5389d4a1e207daab2d47732efea57d7e946dcf",
        ),
    ],
    "qwen3.8-27b/groupwise-int": [("Qwen/Qwen3.8-27B", "1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0")],
    "qwen3.8-27b/nvfp4": [
        ("Qwen/Qwen3.8-27B", "1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0"),
        ("unsloth/Qwen3.8-27B-NVFP4", "60e813d4dbbdc5d64cf3f5a8caf2897bedf03679"),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_sources_and_the_ranking_are_pinned(name: str) -> None:
    recipe = shipped(name)
    assert list(recipe.sources) == ["base", "quantized"][: len(REPOSITORIES[name])]
    assert [(source.repo, source.revision) for source in recipe.sources.values()] == REPOSITORIES[name]
    assert recipe.sources["base"].dtypes == ("BF16",)
    ranking = "c692dc76388132c910547589b4fb4a0503fbd6ad50aaac6a509bbcb192a8afa5"
    assert {key: value.sha256 for key, value in recipe.inputs.items()} == {"ranking": ranking}


CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "language_model_only": False,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "image_token_id": 248056,
    "video_token_id": 248057,
    "text_config": {
        "tie_word_embeddings": False,
        "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000000, "mrope_section": [11, 11, 10]},
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
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
        "layer_types": ["full_attention" if n in ATTENTION else "linear_attention" for n in range(64)],
    },
    "vision_config": {
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
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_every_source_must_have_the_config_of_the_page(name: str) -> None:
    sources = shipped(name).sources
    assert sources["base"].config == CONFIG
    if "quantized" in sources:
        method = {"quantization_config": {"quant_method": "compressed-tensors"}}
        assert sources["quantized"].config == CONFIG | method


# --- which tensors exist, and that each is used or ignored -----------------------------------------------------


def linears(layer: int) -> list[str]:
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    gdn = [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")]
    mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    return [f"{P}layers.{layer}.{part}" for part in (attention if layer in ATTENTION else gdn) + mlp]


def controls(layer: int) -> list[str]:
    attention = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    gdn = [f"linear_attn.{part}" for part in ("A_log", "dt_bias", "conv1d.weight", "norm.weight")]
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    return [f"{P}layers.{layer}.{part}" for part in (attention if layer in ATTENTION else gdn) + norms]


def checkpoint(kinds: dict[str, str]) -> set[str]:
    """All tensor names of a checkpoint whose linears are BF16, except those that `kinds` calls NVFP4 or FP8."""
    fields = {
        "BF16": ["weight"],
        "FP8": ["weight", "weight_scale"],
        "NVFP4": ["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"],
    }
    names = {f"{P}embed_tokens.weight", f"{P}norm.weight"}
    names |= {row.value.removeprefix("base:") for row in mtp() if row.value.startswith("base:")}
    names |= {f"mtp.layers.0.self_attn.{part}_proj.weight" for part in "qkv"}
    names |= {f"mtp.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")}
    names |= {row.value.removeprefix("base:") for row in vision() if row.value.startswith("base:")}
    names.add("model.visual.patch_embed.proj.weight")
    for layer in range(64):
        names.update(controls(layer))
    for module in ["lm_head", *(module for layer in range(64) for module in linears(layer))]:
        names.update(f"{module}.{field}" for field in fields[kinds.get(module, "BF16")])
    return names


def prisma_kinds() -> dict[str, str]:
    kinds = {}
    for layer in range(64):
        for module in linears(layer):
            part = module.rpartition(".")[2]
            stays = (
                part in ("in_proj_a", "in_proj_b")
                or (part in ("q_proj", "k_proj", "v_proj") and layer in BF16_INPUT)
                or (part == "o_proj" and layer in BF16_OUTPUT)
                or (part == "out_proj" and layer == 4)
            )
            kinds[module] = "BF16" if stays else "NVFP4"
    return kinds


def unsloth_kinds() -> dict[str, str]:
    kinds = {"lm_head": "FP8"}
    for layer in range(64):
        for module in linears(layer):
            if module.endswith(("in_proj_a", "in_proj_b")):
                continue
            kinds[module] = "NVFP4" if ".mlp." in module and layer <= 55 else "FP8"
    return kinds


def checkpoints(name: str) -> dict[str, set[str]]:
    found = {"base": checkpoint({})}
    if name == "qwen3.6-27b/nvfp4":
        found["quantized"] = checkpoint(prisma_kinds())
    if name == "qwen3.8-27b/nvfp4":
        scales = {f"{P}layers.{layer}.self_attn.{part}_scale" for layer in ATTENTION for part in "kv"}
        found["quantized"] = checkpoint(unsloth_kinds()) | scales
    return found


def fields_of(spec: TensorSpec) -> list[str]:
    if spec.format == "NVFP4":
        return ["weight_packed", "weight_scale", "weight_global_scale"]
    return ["weight", "weight_scale"]


def used_names(recipe: Recipe, source: str) -> set[str]:
    used = set()
    for spec in tensors(recipe):
        for leaf in leaves(spec.value):
            if isinstance(leaf, Tensor) and leaf.source == source:
                used.add(leaf.name)
            elif isinstance(leaf, Module) and leaf.source == source:
                assert leaf.dialect == "compressed-tensors"
                used.update(f"{leaf.name}.{field}" for field in fields_of(spec))
    return used


def test_the_official_checkpoint_listed_here_has_the_1199_tensors_of_the_page() -> None:
    assert len(checkpoint({})) == 1199


def test_the_listed_linears_of_the_quantized_checkpoint_keep_117_in_bf16() -> None:
    assert Counter(prisma_kinds().values())["BF16"] == 117


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_every_source_is_used_or_ignored_and_never_both(name: str) -> None:
    recipe, existing = shipped(name), checkpoints(name)
    assert set(recipe.sources) == set(existing)
    for source, names in existing.items():
        used = used_names(recipe, source)
        globs = [glob for glob, _ in recipe.sources[source].ignore]
        ignored = {tensor for tensor in names for glob in globs if fnmatchcase(tensor, glob)}
        assert used - names == set(), source
        assert used & ignored == set(), source
        assert names - used - ignored == set(), source
        assert [glob for glob in globs if not any(fnmatchcase(tensor, glob) for tensor in names)] == []


@pytest.mark.parametrize("field", ["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"])
def test_no_glob_waves_through_a_quantized_field_beside_a_bf16_linear(field: str) -> None:
    globs = [glob for glob, _ in shipped("qwen3.6-27b/nvfp4").sources["quantized"].ignore]
    stray = [f"{module}.{field}" for module, kind in prisma_kinds().items() if kind == "BF16"]
    assert [name for name in stray for glob in globs if fnmatchcase(name, glob)] == []


# --- conditions, requirements, components, evidence ------------------------------------------------------------


def nodes(expression: Expression) -> Iterator[Expression]:
    yield expression
    for operand in operands(expression):
        yield from nodes(operand)


def test_the_117_bf16_linears_must_be_bit_identical_in_both_checkpoints() -> None:
    compared = set()
    for spec in tensors(shipped("qwen3.6-27b/nvfp4")):
        for node in nodes(spec.value):
            if isinstance(node, Same) and str(node.of[0]).startswith("base:"):
                base, quantized = node.of
                assert isinstance(base, Tensor)
                assert str(quantized) == f"quantized:{base.name}"
                compared.add(base.name)
    assert compared == {f"{module}.weight" for module, kind in prisma_kinds().items() if kind == "BF16"}


@pytest.mark.parametrize(("name", "count"), [("qwen3.6-27b/nvfp4", 247), ("qwen3.8-27b/nvfp4", 112)])
def test_every_nvfp4_parent_is_followed_by_its_positive_finite_divisor(name: str, count: int) -> None:
    specs = tensors(shipped(name))
    followers = [after for spec, after in pairwise(specs) if spec.format == "NVFP4"]
    assert followers == [spec for spec in specs if spec.name.endswith("input_scale_divisor")]
    assert len(followers) == count
    assert {tuple(rule.rule for rule in spec.requirements) for spec in followers} == {("finite", "positive")}


@pytest.mark.parametrize("name", NAMES)
def test_shortlist_ids_are_distinct_candidates(name: str) -> None:
    (spec,) = (spec for spec in tensors(shipped(name)) if spec.name == "text/draft_head_token_ids")
    rules = [(rule.rule, rule.low, rule.high) for rule in spec.requirements]
    assert rules == [("unique", None, None), ("range", 0, 248076)]


@pytest.mark.parametrize("name", NAMES)
def test_mtp_and_vision_are_components_that_must_be_there(name: str) -> None:
    recipe = shipped(name)
    assert recipe.optional_components == frozenset()
    for spec in recipe.objects:
        head = spec.name.partition("/")[0]
        assert spec.component == (head if head in ("mtp", "vision") else None), spec.name


@pytest.mark.parametrize(
    ("name", "cited"),
    [
        (
            "qwen3.6-27b/groupwise-int",
            ["neroued/Qwen3.6-27B-NInfer", "EvalScope 1.9.0", "86.67 % (26/30)", "93.33 % (28/30)",
             "86.87 % (172/198)"],
        ),
        (
            "qwen3.6-27b/nvfp4",
            ["rdtand/Qwen3.6-27B-PrismaSCOUT-Blackwell-NVFP4-BF16-vllm", "neroued/Qwen3.6-27B-nvfp4-NInfer",
             "EvalScope 1.9.0", "93.33 % (28/30)", "84.34 % (167/198)"],
        ),
        (
            "qwen3.8-27b/groupwise-int",
            ["taken over from qwen3.6-27b groupwise-int", "no evaluation of this checkpoint is at hand"],
        ),
        ("qwen3.8-27b/nvfp4", ["unsloth/Qwen3.8-27B-NVFP4", "embedding's FP8 encoding no evaluation is at hand"]),
    ],
)
def test_evidence_covers_every_lossy_object_and_cites_what_the_page_cites(name: str, cited: list[str]) -> None:
    recipe = shipped(name)
    text = "\n".join(evidence.text for evidence in recipe.evidence)
    assert [part for part in cited if part not in text] == []
    lossy = [spec.name for spec in tensors(recipe) if spec.encoder or spec.words]
    globs = [glob for evidence in recipe.evidence for glob, _ in evidence.objects]
    assert [spec for spec in lossy if not any(fnmatchcase(spec, glob) for glob in globs)] == []


def test_no_evaluation_is_claimed_for_an_encoding_of_qwen38_that_has_none() -> None:
    recipe = shipped("qwen3.8-27b/nvfp4")
    for name in ("text/token_embedding", "text/draft_head", "mtp/input_projection", "vision/merger/fc1"):
        (text,) = (
            evidence.text for evidence in recipe.evidence for glob, _ in evidence.objects if fnmatchcase(name, glob)
        )
        assert "is at hand" in text, name


# --- examples --------------------------------------------------------------------------------------------------


def test_fine_tune_example_changes_repository_template_and_two_mlps_in_five_lines() -> None:
    path = RECIPES / "examples" / "fine-tune.yaml"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert len(lines) == 5
    tune, parent = load_recipe(path), shipped("qwen3.6-27b/groupwise-int")
    assert (tune.sources["base"].repo, tune.sources["base"].config) == ("me/my-tune", CONFIG)
    assert [spec.name for spec in tune.objects] == [spec.name for spec in parent.objects]
    changed = {
        spec.name: spec.format
        for spec, old in zip(tensors(tune), tensors(parent), strict=True)
        if (spec.format, spec.encoder, str(spec.value)) != (old.format, old.encoder, str(old.value))
    }
    mlps = [f"text/layers/{layer}/mlp/{part}" for layer in (62, 63) for part in ("gate_up", "down")]
    assert changed == dict.fromkeys(mlps, "BF16")
    assert [spec.encoder for spec in tensors(tune) if spec.name in mlps] == [None] * 4
    template = resources(tune)[2]
    assert [spec.sha256 for spec in resources(tune)] == [None] * 6
    assert [(origin.file, origin.member) for origin in template.origins] == [("chat_template.jinja", None)]


def test_fine_tune_example_shows_how_to_name_the_weights(tmp_path: Path) -> None:
    text = (RECIPES / "examples" / "fine-tune.yaml").read_text(encoding="utf-8")
    assert text.count("\n# artifact: ") == 1
    (tmp_path / "tune.yaml").write_text(text.replace("\n# artifact: ", "\nartifact: "), encoding="utf-8")
    recipe = load_recipe(tmp_path / "tune.yaml")
    assert (recipe.model_id, recipe.weights_id) == ("qwen3.6-27b", "groupwise-int-my-tune")


def test_text_only_example_leaves_out_vision_and_mtp_and_nothing_else() -> None:
    recipe = load_recipe(RECIPES / "examples" / "text-only.yaml")
    parent = shipped("qwen3.6-27b/groupwise-int")
    gone = ("mtp/", "vision/", "frontend/preprocessor_config", "frontend/video_preprocessor_config")
    assert [spec.name for spec in recipe.objects] == [
        spec.name for spec in parent.objects if not spec.name.startswith(gone)
    ]
    globs = [glob for glob, _ in recipe.sources["base"].ignore]
    unused = checkpoint({}) - used_names(recipe, "base")
    assert len(unused) == 15 + 333
    assert {name for name in checkpoint({}) for glob in globs if fnmatchcase(name, glob)} == unused
    assert (recipe.model_id, recipe.weights_id) == ("qwen3.6-27b", "groupwise-int-text-only")
