"""Writes a small checkpoint of the Llama family, dense, with made-up weights: one that no shipped recipe is for.

Nothing of a real checkpoint is in it but the scheme of names. Refuses to know how a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ninfer_convert.stand_in.checkpoints import write_json, write_shards
from ninfer_convert.stand_in.weights import Weight

LAYERS, WIDTH, MLP_WIDTH, KEY_VALUE_WIDTH, VOCABULARY = 4, 256, 704, 128, 1024
SHARDS = 2
TOKENS = ("<unk>", "<s>", "</s>")

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": MLP_WIDTH,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
}


def write_llama(directory: Path, seed: int = 0) -> None:
    """Writes the checkpoint, about 7 MB; equal seeds give equal bytes.

    Raises:
        FileExistsError: the directory is there already.
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True)
    write_json(directory / "config.json", _CONFIG)
    write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    pieces = {token: place for place, token in enumerate(TOKENS)}
    pieces |= {f"piece{place}": place for place in range(len(TOKENS), VOCABULARY)}
    model = {"type": "BPE", "vocab": pieces, "merges": []}
    write_json(directory / "tokenizer.json", {"version": "1.0", "model": model})
    write_json(directory / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    write_shards(directory, list(_weights()), SHARDS, seed, dense=True)


def _weights() -> Iterator[Weight]:
    yield _weight("model.embed_tokens", VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        module = f"model.layers.{layer}"
        yield _weight(f"{module}.input_layernorm", WIDTH)
        for name, rows in (("q", WIDTH), ("k", KEY_VALUE_WIDTH), ("v", KEY_VALUE_WIDTH), ("o", WIDTH)):
            yield _weight(f"{module}.self_attn.{name}_proj", rows, WIDTH)
        yield _weight(f"{module}.post_attention_layernorm", WIDTH)
        yield _weight(f"{module}.mlp.gate_proj", MLP_WIDTH, WIDTH)
        yield _weight(f"{module}.mlp.up_proj", MLP_WIDTH, WIDTH)
        yield _weight(f"{module}.mlp.down_proj", WIDTH, MLP_WIDTH)
    yield _weight("model.norm", WIDTH)
    yield _weight("lm_head", VOCABULARY, WIDTH)


def _weight(module: str, *shape: int) -> Weight:
    name = f"{module}.weight"
    return Weight(name, shape, "bell" if len(shape) > 1 else "gains", "stand-in/llama", name)
