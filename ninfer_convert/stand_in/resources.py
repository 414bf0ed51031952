"""The small files of stand-in checkpoints: config.json, tokenizer and processor files, the ranking input.

Owns their content: the members that the target pages name, at the size of the stand-in, and seeded filler of
the right length elsewhere. Refuses to know tensors' words (`stand_in_weights`) and directories (`stand_in`).

Source: targets/qwen3.6-27b.md, "Source: the BF16 checkpoint"; container.md, "Identities in use".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ninfer_convert.stand_in.weights import TOKENS_BEGIN, TOKENS_END, Scale, Weight, is_attention

RESOURCE_BYTES = 12_833_441
"""All six resources of the full-shape base together, as published."""

RANKING_FILE = "ranking.i64"

_SPECIAL = (
    *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"),
    *("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
)
_PLAIN = (
    *("tool_call", "/tool_call", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep"),
    *("tool_response", "/tool_response", "think", "/think"),
)
_MORE_SPECIAL = ("audio_start", "audio_end", "audio_pad", "text_start", "text_end", "text_pad", "mask")
TOKENS = (*_SPECIAL, *_PLAIN, *_MORE_SPECIAL)
"""The added tokens, from id 248044 to the last candidate."""


_TEXT_CONFIG = {
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}
_VISION_CONFIG = {
    "model_type": "qwen3_5",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 5120,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "language_model_only": False,
    "text_config": _TEXT_CONFIG,
    "tie_word_embeddings": False,
    "video_token_id": 248057,
    "vision_config": _VISION_CONFIG,
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def model_config(scale: Scale) -> dict[str, Any]:
    """Returns config.json of a BF16 checkpoint."""
    scaled: dict[str, Any] = _scaled(_CONFIG, scale)
    kinds = ["full_attention" if is_attention(layer) else "linear_attention" for layer in scale.layers]
    scaled["text_config"] |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    scaled["vision_config"]["depth"] = scale.blocks
    return scaled


def quantized_config(model: str, weights: Sequence[Weight]) -> dict[str, Any]:
    """Returns the `quantization_config` of a compressed-tensors checkpoint with these tensors."""
    nvfp4 = [weight.name.removesuffix(".weight_packed") for weight in weights if weight.kind == "code-pairs"]
    fp8 = [weight.name.removesuffix(".weight") for weight in weights if weight.kind == "fp8-codes"]
    kept = [weight.name.removesuffix(".weight") for weight in weights if _is_plain_linear(weight)]
    common: dict[str, Any] = {
        "global_compression_ratio": None,
        "ignore": sorted(kept),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    if model == "qwen3.6-27b":
        groups = {"group_0": _nvfp4_group(["Linear"])}
        return {"config_groups": groups, "format": "nvfp4-pack-quantized"} | common
    groups = {
        "group_0": _nvfp4_group(sorted(nvfp4)) | {"format": "nvfp4-pack-quantized"},
        "group_1": _fp8_group(sorted(fp8)) | {"format": "float-quantized"},
    }
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {"config_groups": groups, "format": "mixed-precision"} | common | {"kv_cache_scheme": cache}


def _is_plain_linear(weight: Weight) -> bool:
    embedding = weight.name.endswith(("embed_tokens.weight", "pos_embed.weight"))
    return weight.kind == "values" and len(weight.shape) == 2 and not embedding


def _nvfp4_group(targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    return {"targets": targets, "weights": weights, "input_activations": weights | {"dynamic": "local"}}


def _fp8_group(targets: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    activations = weights | {"strategy": "token", "dynamic": True}
    return {"targets": targets, "weights": weights, "input_activations": activations}


def _scaled(value: Any, scale: Scale) -> Any:
    """The same JSON value with every integer replaced, truth values left alone."""
    if isinstance(value, dict):
        return {key: _scaled(member, scale) for key, member in value.items()}
    if isinstance(value, list):
        return [_scaled(member, scale) for member in value]
    return scale.number(value) if type(value) is int else value


def _added_tokens(scale: Scale) -> dict[str, dict[str, Any]]:
    tokens = {scale.number(TOKENS_BEGIN + place): name for place, name in enumerate(TOKENS)}
    tokens[scale.number(TOKENS_END - 1)] = "beyond_candidates"
    return {
        str(token): {
            "content": f"<|{name}|>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in _PLAIN,
        }
        for token, name in tokens.items()
    }


_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""


def resources(family: str, scale: Scale, seed: int, published_size: bool) -> dict[str, bytes]:
    """Returns the six resource files of a checkpoint by name, in stored order.

    The generation and processor files are the same in every family, as they are in the official checkpoints.
    """
    added = _added_tokens(scale)
    files = {
        "tokenizer.json": b"",
        "tokenizer_config.json": _json_bytes(
            {
                "add_prefix_space": False,
                "added_tokens_decoder": added,
                "eos_token": "<|im_end|>",
                "model_max_length": 262144,
                "name_or_path": family,
                "pad_token": "<|endoftext|>",
                "tokenizer_class": "Qwen2Tokenizer",
            }
        ),
        "chat_template.jinja": f"{{#- stand-in for {family} -#}}\n{_TEMPLATE}".encode(),
        "generation_config.json": _json_bytes(
            {
                "do_sample": True,
                "eos_token_id": [scale.number(248046), scale.number(248044)],
                "pad_token_id": scale.number(248044),
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
            }
        ),
        "preprocessor_config.json": _json_bytes(_processor("Qwen2VLImageProcessorFast", 65536, 16777216)),
        "video_preprocessor_config.json": _json_bytes(_processor("Qwen3VLVideoProcessor", 4096, 25165824)),
    }
    rest = sum(map(len, files.values()))
    size = RESOURCE_BYTES - rest if published_size else 8192
    files["tokenizer.json"] = _tokenizer(f"{seed} {family} tokenizer.json", added, size)
    return files


def _processor(kind: str, shortest: int, longest: int) -> dict[str, Any]:
    return {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": longest, "shortest_edge": shortest},
        "temporal_patch_size": 2,
        f"{'video' if 'Video' in kind else 'image'}_processor_type": kind,
    }


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _tokenizer(key: str, added: dict[str, dict[str, Any]], size: int) -> bytes:
    """Valid JSON of exactly this many bytes; the merges of a real tokenizer are one filler text here."""
    listed = [{"id": int(token)} | entry for token, entry in added.items()]
    model = {"type": "BPE", "vocab": {}, "merges": []}
    empty = json.dumps({"version": "1.0", "added_tokens": listed, "model": model, "filler": ""})
    count = size - len(empty)
    filler = hashlib.shake_128(key.encode()).hexdigest(count // 2 + 1)[:count]
    return (empty.removesuffix('"}') + filler + '"}').encode()


def ranking(scale: Scale, seed: int) -> bytes:
    """Returns raw little-endian I64 counts: a row of totals, then the two rows that add up to it, full of ties."""
    vocabulary = scale.number(248320)
    parts = [
        np.frombuffer(hashlib.shake_128(f"{seed} ranking {row}".encode()).digest(vocabulary * 2), "<u2").astype("<i8")
        % (vocabulary // 4)
        for row in (1, 2)
    ]
    return np.stack([parts[0] + parts[1], *parts]).astype("<i8").tobytes()
