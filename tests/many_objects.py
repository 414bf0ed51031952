"""A checkpoint whose conversion has several hundred objects, of every kind, and takes a moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from case_tools import ENCODERS, FP8, HEAD, NVFP4, Q4, Q5, Q6, W8, entry, fp8, nvfp4
from checkpoints import Words, write_directory

SHARDS = 3
ROUNDS = 40


@dataclass(frozen=True, slots=True)
class ManyObjects:
    """The parts of a conversion: a directory of three shards, and a recipe of `objects` objects."""

    source: Path
    recipe: Path
    objects: int

    def arguments(self, output: Path, *extra: object) -> list[object]:
        """Returns the words of a `run`."""
        return ["run", self.recipe, "--source", self.source, "-o", output, "--threads", "2", *extra]


def write_many_objects(root: Path, rounds: int = ROUNDS) -> ManyObjects:
    """Writes ten objects for each round, and two resources; about 3 MB."""
    draw = np.random.default_rng(20)
    shards: dict[str, dict[str, tuple[str, Words]]] = {
        f"model-0000{shard}-of-00003.safetensors": {} for shard in (1, 2, 3)
    }
    objects: list[str] = ["{resource: frontend/tokenizer.json, file: tokenizer.json}"]
    for number in range(rounds):
        tensors = list(shards.values())[number * SHARDS // rounds]
        name = f"layers.{number}"
        for position, numeric in enumerate((Q4, Q5, Q6, W8, FP8)):
            n, k = 8 + number % 5, 130 + position
            values = draw.standard_normal((n, k)).astype(np.float32)
            values[0] = 0.0
            tensors[f"{name}.{position}"] = ("BF16", (values.view("<u4") >> 16).astype("<u2"))
            objects.append(entry(f"text/{number}/{position}", [n, k], numeric, f"{name}.{position}"))
        for position, (dtype, numeric) in enumerate((("BF16", "BF16"), ("F32", "FP32"), ("I32", "I32"))):
            words = draw.integers(0, 2**15, 50 + number, np.int64).astype("<u2" if dtype == "BF16" else "<u4")
            tensors[f"{name}.d{position}"] = (dtype, words)
            objects.append(entry(f"text/{number}/d{position}", [50 + number], numeric, f"{name}.d{position}"))
        tensors.update(nvfp4(f"{name}.n", 128, 64, number))
        objects.append(entry(f"text/{number}/n", [128, 64], NVFP4, f"{name}.n", words=True))
        tensors.update(fp8(f"{name}.f", 5, 33, number))
        objects.append(entry(f"text/{number}/f", [5, 33], FP8, f"{name}.f", words=True))
    objects.append("{resource: frontend/config.json, file: config.json}")
    files = {"tokenizer.json": b'{"model": "tokenizer"}' * 20}
    source = write_directory(root / "source", shards, config={"model_type": "many"}, files=files)
    recipe = root / "recipe.yaml"
    lines = "".join(f"  - {text}\n" for text in objects)
    more = "sources: {base: {}}\nignore: [\"*.input_global_scale\"]\n"
    recipe.write_text(f"{HEAD}{more}objects:\n{lines}", encoding="utf-8")
    assert set(ENCODERS) == {Q4, Q5, Q6, W8, FP8}
    return ManyObjects(source, recipe, len(objects))
