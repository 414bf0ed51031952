"""Writes stand-in Qwen3.6-family checkpoints: full-shape ones as sparse files, miniature ones in full.

Owns shards, index, config.json, resources, the ranking input, and the miniature form of a recipe. Nothing of
a real checkpoint is in a stand-in but names, shapes and dtypes. Refuses to know how a checkpoint is read.

Source: targets/qwen3.6-27b.md, "Source: the BF16 checkpoint"; targets/qwen3.8-27b-nvfp4.md.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ninfer_convert.stand_in.resources import RANKING_FILE, model_config, quantized_config, ranking, resources
from ninfer_convert.stand_in.weights import (
    DEMO,
    FULL,
    MINIATURE,
    Scale,
    Weight,
    base_weights,
    line_count,
    quantized_weights,
    seeded_lines,
    seeded_words,
)


@dataclass(frozen=True, slots=True)
class StandInModel:
    """The two checkpoints of one model; the repositories seed the words, so no two stand-ins share them."""

    base_repo: str
    quantized_repo: str
    quantized_shards: int


MODELS: Mapping[str, StandInModel] = MappingProxyType(
    {
        "qwen3.6-27b": StandInModel("Qwen/Qwen3.6-27B", "rdtand/Qwen3.6-27B-PrismaSCOUT-Blackwell-NVFP4-BF16-vllm", 5),
        "qwen3.8-27b": StandInModel("Qwen/Qwen3.8-27B", "unsloth/Qwen3.8-27B-NVFP4", 6),
    }
)

FULL_BASE_SHARDS = 15


@dataclass(frozen=True, slots=True)
class StandIn:
    """Where the parts of a written stand-in are."""

    base: Path
    quantized: Path
    ranking: Path


def write_stand_in(model: str, directory: Path, scale: Scale = FULL, seed: int = 0) -> StandIn:
    """Writes both checkpoints of a model and the ranking input under a directory.

    Args:
        model: a key of `MODELS`.
        directory: made if missing; gets `base/`, `quantized/` and the ranking file.
        scale: `FULL` writes headers and a few lines of each tensor, the rest is holes that read as zero.
        seed: chooses the words; equal arguments give equal bytes.

    Raises:
        KeyError: no such model.
        FileExistsError: the directory holds a stand-in already; shards of two sizes must not mix.
        OSError: a file cannot be written.
    """
    spec = MODELS[model]
    made = StandIn(directory / "base", directory / "quantized", directory / RANKING_FILE)
    made.base.mkdir(parents=True)
    made.quantized.mkdir()
    full = scale is FULL

    config = model_config(scale)
    write_json(made.base / "config.json", config)
    for name, content in resources(model, scale, seed, full).items():
        (made.base / name).write_bytes(content)
    base = base_weights(scale, spec.base_repo)
    write_shards(made.base, base, FULL_BASE_SHARDS if full else 3, seed, scale.dense)

    quantized = quantized_weights(model, scale, spec.quantized_repo, spec.base_repo)
    write_json(made.quantized / "config.json", config | {"quantization_config": quantized_config(model, quantized)})
    # Not the base's resources: a recipe that takes one from the wrong place must show.
    for name, content in resources(f"{model}/quantized", scale, seed, False).items():
        (made.quantized / name).write_bytes(content)
    write_shards(made.quantized, quantized, spec.quantized_shards if full else 1, seed, scale.dense)

    made.ranking.write_bytes(ranking(scale, seed))
    return made


def write_demo_checkpoint(directory: Path) -> StandIn:
    """Writes the pair of four-layer checkpoints that the recipe `demo` converts, about 5 MB in all.

    Raises:
        FileExistsError: the directory holds a stand-in already.
        OSError: a file cannot be written.
    """
    return write_stand_in("qwen3.8-27b", directory, DEMO)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file as checkpoints have it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_shards(directory: Path, weights: Sequence[Weight], shards: int, seed: int, dense: bool) -> None:
    """Writes the weight files, and an index where there is more than one; see `write_safetensors`."""
    ordered = sorted(weights, key=lambda weight: weight.name)
    total = sum(weight.nbytes for weight in ordered)
    parts: list[list[Weight]] = [[] for _ in range(shards)]
    begin = 0
    for weight in ordered:
        parts[begin * shards // total].append(weight)
        begin += weight.nbytes
    names = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    if shards == 1:
        names = ["model.safetensors"]
    for name, part in zip(names, parts, strict=True):
        write_safetensors(directory / name, part, seed, dense)
    if shards > 1:
        owners = {weight.name: name for name, part in zip(names, parts, strict=True) for weight in part}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owners.items()))}
        write_json(directory / "model.safetensors.index.json", index)


def write_safetensors(path: Path, weights: Sequence[Weight], seed: int, dense: bool) -> None:
    """Writes one safetensors file; lines that are not seeded become holes.

    Raises:
        OSError: the file cannot be written.
    """
    # Widest words first, as the library writes them, so that every tensor is aligned to its words.
    ordered = sorted(weights, key=lambda weight: (-_word_bytes(weight), weight.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for weight in ordered:
        end = begin + weight.nbytes
        header[weight.name] = {"dtype": weight.dtype, "shape": list(weight.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        offset = 8 + len(text)
        file.truncate(offset + begin)
        for weight in ordered:
            lines = line_count(weight)
            for line in seeded_lines(lines, dense):
                words = seeded_words(weight, seed, line)
                _pwrite(file.fileno(), words.tobytes(), offset + words.nbytes * line)
            offset += weight.nbytes


def _word_bytes(weight: Weight) -> int:
    return {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}[weight.dtype]


def _pwrite(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


_RANGE = re.compile(r"\{from: (\d+), through: (\d+)(?:, step: (\d+))?\}")
_LIST = re.compile(r"\[(\d+(?:, *\d+)*)\]")
_SETS = re.compile(r"^sets:\n(?:[ #].*\n|\n)*", re.MULTILINE)
_LAYER_TYPES = re.compile(r"(layer_types:\s*)\[([\w,\s]*)\]")
_EXTENDS = re.compile(r"^extends: ([\w.-]+/[\w.-]+)$", re.MULTILINE)
_INTEGER = re.compile(r"(?<![\w.])\d+(?!\w|\.\d)")


def miniature_recipe(text: str) -> str:
    """Returns a shipped recipe rewritten for the miniature checkpoints.

    Sets of layers and blocks keep those that the miniature has, `layer_types` likewise; every other whole
    number, in comments too, is replaced by the table that also made the checkpoints. `extends` becomes the
    path of the miniature recipe in the sister directory. Pins stay: they cannot match.
    """
    # Lists before ranges: a range that has become a list must not be taken for a full-size one.
    text = _SETS.sub(lambda block: _LIST.sub(lambda found: _represented(map(int, found[1].split(","))), block[0]), text)
    text = _RANGE.sub(lambda found: _represented(_range(found)), text)
    text = _LAYER_TYPES.sub(_layer_types, text)
    text = _EXTENDS.sub(r"extends: ../\1.yaml", text)
    return _INTEGER.sub(lambda found: str(MINIATURE.number(int(found[0]))), text)


def _range(found: re.Match[str]) -> range:
    return range(int(found[1]), int(found[2]) + 1, int(found[3] or 1))


def _represented(members: Iterable[int]) -> str:
    """The miniature layers (or blocks) that stand for any of a set of full-size ones."""
    full_size = frozenset(members)
    if full_size == frozenset(range(FULL.blocks)):
        return str(list(range(MINIATURE.blocks)))
    return str([layer for layer, stands_for in enumerate(MINIATURE.layers) if stands_for in full_size])


def _layer_types(found: re.Match[str]) -> str:
    kinds = [kind.strip() for kind in found[2].split(",")]
    return f"{found[1]}[{', '.join(kinds[layer] for layer in MINIATURE.layers)}]"
