"""The same checkpoint written otherwise: other shards, another order in header and file, other names."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def raw_tensors(directory: Path) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Returns header entry and bytes of every tensor of a small checkpoint."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            low, high = entry["data_offsets"]
            found[name] = (entry, data[begin + low : begin + high])
    return found


def rewrite(
    directory: Path,
    target: Path,
    *,
    shards: int = 1,
    seed: int | None = None,
    rename: Callable[[str], str] = str,
) -> Path:
    """Writes the tensors and the small files of a checkpoint anew.

    Args:
        directory: the checkpoint.
        target: where the new one goes; made here.
        shards: how many weight files; an index is written where there is more than one.
        seed: shuffles the tensors over shards and positions, and each header against its positions.
        rename: the new name of each tensor.
    """
    target.mkdir(parents=True)
    for path in directory.iterdir():
        if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            shutil.copyfile(path, target / path.name)
    tensors = [(rename(name), entry, data) for name, (entry, data) in raw_tensors(directory).items()]
    draw = random.Random(seed)
    if seed is not None:
        draw.shuffle(tensors)
    owners = {}
    for number in range(shards):
        part = tensors[number::shards]
        name = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        entries, body = [], bytearray()
        for tensor, entry, data in part:
            entries.append((tensor, entry | {"data_offsets": [len(body), len(body) + len(data)]}))
            body += data
            owners[tensor] = name
        if seed is not None:
            draw.shuffle(entries)
        text = json.dumps(dict(entries)).encode()
        (target / name).write_bytes(len(text).to_bytes(8, "little") + text + body)
    if shards > 1:
        index = {"metadata": {"total_size": sum(len(data) for _, _, data in tensors)}, "weight_map": owners}
        (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return target
