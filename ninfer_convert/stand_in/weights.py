"""The tensors of stand-in Qwen3.6-family checkpoints: names, shapes, and seeded words.

Owns which tensors a stand-in holds and what their words are: a pure function of seed, origin, name and line.
Every shape is written once, at full size; a smaller checkpoint is the same list with its numbers replaced.
Refuses to know files, configs and resources (`stand_in`).

Source: targets/qwen3.6-27b.md, targets/qwen3.8-27b-nvfp4.md; layouts.md, "Sources of already selected words".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENS_BEGIN, TOKENS_END = 248044, 248101
"""Token ids that stand-ins name: the added tokens, and one beyond the shortlist's candidates."""

MINIATURE_NUMBERS: Mapping[int, int] = MappingProxyType(
    {
        # Products stay products: 24 heads of 256 are 6144 rows, so 8 heads of 16 are 128.
        24: 8,
        27: 2,
        48: 32,
        64: 12,
        96: 64,
        128: 4,
        256: 16,
        512: 32,
        1024: 64,
        1152: 64,
        2048: 64,
        2304: 36,
        3456: 192,
        4096: 128,
        # Not a multiple of 64, as 4304 is not: the last group of a row is partly filled.
        4304: 208,
        4608: 256,
        5120: 128,
        6144: 128,
        7168: 192,
        10240: 256,
        12288: 256,
        14336: 384,
        16384: 384,
        # A multiple of 64 but not of 128.
        17408: 320,
        34816: 640,
        131072: 320,
        248320: 640,
        **{token: token - 247477 for token in range(TOKENS_BEGIN, TOKENS_END)},
    }
)
"""Full-size integer to miniature integer; a number that is no key (4 taps, 16 pixels) stays as it is."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a stand-in is.

    Attributes:
        numbers: the replacement of each full-size integer.
        layers: for each text layer, the full-size layer whose kind of modules it has.
        blocks: how many vision blocks.
        dense: whether every line is seeded, or only those of `seeded_lines`.
    """

    numbers: Mapping[int, int]
    layers: tuple[int, ...]
    blocks: int
    dense: bool

    def number(self, full_size: int) -> int:
        """Returns what stands for a full-size integer."""
        return self.numbers.get(full_size, full_size)


FULL = Scale(MappingProxyType({}), tuple(range(64)), 27, dense=False)
MINIATURE = Scale(MINIATURE_NUMBERS, (0, 1, 2, 3, 4, 5, 6, 11, 56, 57, 62, 63), 2, dense=True)
"""Twelve layers that hold every mix of module kinds that the full checkpoints hold."""
DEMO = Scale(MINIATURE_NUMBERS, (0, 1, 62, 63), 2, dense=True)


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor; `origin` and `key` seed its words, so equal ones make equal tensors."""

    name: str
    shape: tuple[int, ...]
    kind: str
    origin: str
    key: str

    @property
    def dtype(self) -> str:
        """The safetensors spelling."""
        return WORDS[self.kind].dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * WORDS[self.kind].word.itemsize


@dataclass(frozen=True, slots=True)
class WordRule:
    """Words of one kind: random bits, a mask that keeps some of them, a constant added to the rest.

    With `summands`, BF16 values instead that are nearly normal: the sum of so many random bytes, 2^-14 a unit.
    """

    dtype: str
    word: np.dtype[Any]
    mask: int
    base: int
    summands: int = 0


WORDS: Mapping[str, WordRule] = MappingProxyType(
    {
        # Either sign, 2^-13 <= |x| < 2^-5.
        "values": WordRule("BF16", np.dtype("<u2"), 0x83FF, 0x3900),
        # As weights are spread: mean 0, standard deviation 0.0128, never beyond 0.063.
        "bell": WordRule("BF16", np.dtype("<u2"), 0, 0, summands=8),
        # 1 <= x < 2.
        "gains": WordRule("BF16", np.dtype("<u2"), 0x007F, 0x3F80),
        "code-pairs": WordRule("U8", np.dtype("<u1"), 0xFF, 0),
        "block-scales": WordRule("F8_E4M3", np.dtype("<u1"), 0x7F, 0),
        "fp8-codes": WordRule("F8_E4M3", np.dtype("<u1"), 0xFF, 0),
        # 2^-17 <= x < 2^-9.
        "row-scales": WordRule("BF16", np.dtype("<u2"), 0x03FF, 0x3700),
        # 512 <= x < 2048 and 32 <= x < 128.
        "weight-divisor": WordRule("F32", np.dtype("<u4"), 0x00FFFFFF, 0x44000000),
        "input-divisor": WordRule("F32", np.dtype("<u4"), 0x00FFFFFF, 0x42000000),
        "cache-scale": WordRule("BF16", np.dtype("<u2"), 0x007F, 0x3D00),
    }
)


def seeded_words(weight: Weight, seed: int, line: int) -> NDArray[Any]:
    """Returns the words of one line of a tensor, little-endian; valid for the kind, never a NaN.

    SHAKE128 instead of a random generator: its stream is the same in every version of every library.
    """
    rule = WORDS[weight.kind]
    count = math.prod(weight.shape) // line_count(weight)
    size = count * (rule.summands or rule.word.itemsize)
    bits = hashlib.shake_128(f"{seed} {weight.origin} {weight.key} {line}".encode()).digest(size)
    if rule.summands:
        return _sums(bits, rule.summands)
    words: NDArray[Any] = (np.frombuffer(bits, rule.word) & rule.word.type(rule.mask)) + rule.word.type(rule.base)
    if rule.dtype == "F8_E4M3":
        # 0x7f and 0xff are the NaN words.
        words = np.where((words & 0x7F) == 0x7F, words - rule.word.type(1), words)
    return words.astype(rule.word, copy=False)


def _sums(bits: bytes, summands: int) -> NDArray[Any]:
    """Returns BF16 words, one for so many bytes: their sum with its mean taken away, rounded to nearest even."""
    drawn = np.frombuffer(bits, np.uint8).reshape(-1, summands).sum(axis=1, dtype=np.int32)
    exact = ((drawn * 2 - 255 * summands).astype("<f4") * np.float32(2**-15)).view("<u4")
    rounded: NDArray[Any] = ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16).astype("<u2")
    return rounded


WHOLE_BYTES = 128 * 1024
"""A tensor of at most this size is one line: its rows are too short to seed one by one."""


def line_count(weight: Weight) -> int:
    """Returns how many runs of words of a tensor are seeded on their own: its rows, or 1 for all of it."""
    return 1 if weight.nbytes <= WHOLE_BYTES else weight.shape[0]


def seeded_lines(count: int, dense: bool) -> tuple[int, ...]:
    """Returns the lines with words; the others are zero.

    They follow from the number of rows alone, so that codes and scales of one module share them.
    """
    if dense:
        return tuple(range(count))
    return tuple(sorted({0, min(count * 5 // 8 + 37, count - 1), count - 1}))


MLP = (("mlp.gate_proj", 17408, 5120), ("mlp.up_proj", 17408, 5120), ("mlp.down_proj", 5120, 17408))
ATTENTION = (
    ("self_attn.q_proj", 12288, 5120),
    ("self_attn.k_proj", 1024, 5120),
    ("self_attn.v_proj", 1024, 5120),
    ("self_attn.o_proj", 5120, 6144),
)
GDN = (
    ("linear_attn.in_proj_qkv", 10240, 5120),
    ("linear_attn.in_proj_z", 6144, 5120),
    ("linear_attn.in_proj_a", 48, 5120),
    ("linear_attn.in_proj_b", 48, 5120),
    ("linear_attn.out_proj", 5120, 6144),
)
NORMS = (("input_layernorm.weight", (5120,)), ("post_attention_layernorm.weight", (5120,)))
ATTENTION_REST = (("self_attn.q_norm.weight", (256,)), ("self_attn.k_norm.weight", (256,)))
GDN_REST = (
    ("linear_attn.A_log", (48,)),
    ("linear_attn.dt_bias", (48,)),
    ("linear_attn.conv1d.weight", (10240, 1, 4)),
    ("linear_attn.norm.weight", (128,)),
)
MTP_REST = (
    ("mtp.fc.weight", (5120, 10240)),
    ("mtp.pre_fc_norm_embedding.weight", (5120,)),
    ("mtp.pre_fc_norm_hidden.weight", (5120,)),
    ("mtp.norm.weight", (5120,)),
)
VISION = (
    ("patch_embed.proj.weight", (1152, 3, 2, 16, 16)),
    ("patch_embed.proj.bias", (1152,)),
    ("pos_embed.weight", (2304, 1152)),
    ("merger.linear_fc1.weight", (4608, 4608)),
    ("merger.linear_fc1.bias", (4608,)),
    ("merger.linear_fc2.weight", (5120, 4608)),
    ("merger.linear_fc2.bias", (5120,)),
    ("merger.norm.weight", (1152,)),
    ("merger.norm.bias", (1152,)),
)
VISION_BLOCK = (
    ("attn.qkv.weight", (3456, 1152)),
    ("attn.qkv.bias", (3456,)),
    ("attn.proj.weight", (1152, 1152)),
    ("attn.proj.bias", (1152,)),
    ("mlp.linear_fc1.weight", (4304, 1152)),
    ("mlp.linear_fc1.bias", (4304,)),
    ("mlp.linear_fc2.weight", (1152, 4304)),
    ("mlp.linear_fc2.bias", (1152,)),
    ("norm1.weight", (1152,)),
    ("norm1.bias", (1152,)),
    ("norm2.weight", (1152,)),
    ("norm2.bias", (1152,)),
)

TEXT = "model.language_model."
FUSED_PARENT = MappingProxyType(
    {
        "self_attn.q_proj": "self_attn.qkv_proj",
        "self_attn.k_proj": "self_attn.qkv_proj",
        "self_attn.v_proj": "self_attn.qkv_proj",
        "mlp.gate_proj": "mlp.gate_up_proj",
        "mlp.up_proj": "mlp.gate_up_proj",
        "linear_attn.in_proj_qkv": "linear_attn.in_proj_qkvz",
        "linear_attn.in_proj_z": "linear_attn.in_proj_qkvz",
    }
)
"""Modules that execute as one matrix share its divisors, bit for bit."""


def is_attention(layer: int) -> bool:
    """Says whether a full-size text layer has full attention (else it is a GDN layer)."""
    return layer % 4 == 3


def module_kind(model: str, layer: int, module: str) -> str:
    """Returns `BF16`, `NVFP4` or `FP8`: how the quantized checkpoint of a model keeps a linear of a full-size layer.

    Source: targets/qwen3.6-27b.md, "nvfp4"; targets/qwen3.8-27b-nvfp4.md, the object table.
    """
    if module in ("linear_attn.in_proj_a", "linear_attn.in_proj_b"):
        return "BF16"
    if model == "qwen3.8-27b":
        return "NVFP4" if module.startswith("mlp.") and layer <= 55 else "FP8"
    kept = (
        (layer <= 23 and FUSED_PARENT.get(module) == "self_attn.qkv_proj")
        or (layer <= 7 and module == "self_attn.o_proj")
        or (layer == 4 and module == "linear_attn.out_proj")
    )
    return "BF16" if kept else "NVFP4"


def text_linears(scale: Scale) -> Iterator[tuple[int, int, str, int, int]]:
    """Yields (layer, full-size layer, module, N, K) of every linear of the text layers, by layer."""
    for layer, full_size in enumerate(scale.layers):
        for module, n, k in (*(ATTENTION if is_attention(full_size) else GDN), *MLP):
            yield layer, full_size, module, scale.number(n), scale.number(k)


def base_weights(scale: Scale, origin: str) -> list[Weight]:
    """Returns the tensors of a BF16 checkpoint, all of them."""
    weights = _rest(scale, origin)
    weights.append(_values("lm_head.weight", (248320, 5120), scale, origin))
    for layer, _, module, n, k in text_linears(scale):
        name = f"{TEXT}layers.{layer}.{module}.weight"
        weights.append(Weight(name, (n, k), "values", origin, name))
    return weights


def quantized_weights(model: str, scale: Scale, origin: str, base_origin: str) -> list[Weight]:
    """Returns the tensors of the compressed-tensors checkpoint of a model, all of them.

    The BF16 linears of `qwen3.6-27b` are seeded as the base's; every other tensor differs from the base's.
    """
    weights = _rest(scale, origin)
    head = (scale.number(248320), scale.number(5120))
    if model == "qwen3.8-27b":
        weights += _fp8_module("lm_head", head, origin)
        for layer, full_size in enumerate(scale.layers):
            if is_attention(full_size):
                for field in ("k_scale", "v_scale"):
                    name = f"{TEXT}layers.{layer}.self_attn.{field}"
                    weights.append(Weight(name, (1,), "cache-scale", origin, name))
    else:
        weights.append(Weight("lm_head.weight", head, "values", origin, "lm_head.weight"))
    for layer, full_size, module, n, k in text_linears(scale):
        name = f"{TEXT}layers.{layer}.{module}"
        kind = module_kind(model, full_size, module)
        if kind == "NVFP4":
            parent = f"{TEXT}layers.{layer}.{FUSED_PARENT.get(module, module)}"
            weights += _nvfp4_module(name, (n, k), origin, parent)
        elif kind == "FP8":
            weights += _fp8_module(name, (n, k), origin)
        else:
            shared = base_origin if model == "qwen3.6-27b" else origin
            weights.append(Weight(f"{name}.weight", (n, k), "values", shared, f"{name}.weight"))
    return weights


def _values(name: str, full_size: tuple[int, ...], scale: Scale, origin: str) -> Weight:
    return Weight(name, tuple(map(scale.number, full_size)), "values", origin, name)


def _rest(scale: Scale, origin: str) -> list[Weight]:
    """What no checkpoint of the family quantizes: embedding, norms, controls, MTP and vision."""
    shapes: dict[str, tuple[int, ...]] = {f"{TEXT}embed_tokens.weight": (248320, 5120), f"{TEXT}norm.weight": (5120,)}
    for layer, full_size in enumerate(scale.layers):
        rest = ATTENTION_REST if is_attention(full_size) else GDN_REST
        shapes |= {f"{TEXT}layers.{layer}.{name}": shape for name, shape in (*NORMS, *rest)}
    shapes |= dict(MTP_REST)
    shapes |= {f"mtp.layers.0.{name}": shape for name, shape in (*NORMS, *ATTENTION_REST)}
    shapes |= {f"mtp.layers.0.{module}.weight": (n, k) for module, n, k in (*ATTENTION, *MLP)}
    shapes |= {f"model.visual.{name}": shape for name, shape in VISION}
    for block in range(scale.blocks):
        shapes |= {f"model.visual.blocks.{block}.{name}": shape for name, shape in VISION_BLOCK}
    return [_values(name, shape, scale, origin) for name, shape in shapes.items()]


def _nvfp4_module(name: str, shape: tuple[int, int], origin: str, parent: str) -> Iterator[Weight]:
    n, k = shape
    for field, field_shape, kind, owner in (
        ("weight_packed", (n, k // 2), "code-pairs", name),
        ("weight_scale", (n, k // 16), "block-scales", name),
        ("weight_global_scale", (1,), "weight-divisor", parent),
        ("input_global_scale", (1,), "input-divisor", parent),
    ):
        yield Weight(f"{name}.{field}", field_shape, kind, origin, f"{owner}.{field}")


def _fp8_module(name: str, shape: tuple[int, int], origin: str) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", shape, "fp8-codes", origin, f"{name}.weight")
    yield Weight(f"{name}.weight_scale", (shape[0], 1), "row-scales", origin, f"{name}.weight_scale")
