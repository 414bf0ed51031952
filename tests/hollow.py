"""Checkpoints of headers and holes: any shape, no bytes on the disk, every value zero."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ninfer_convert.source.header import DTYPE_BITS

Shapes = Mapping[str, tuple[str, Sequence[int]]]


def write_hollow(
    directory: Path,
    tensors: Shapes,
    *,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    shards: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Writes tensors given as name -> (safetensors dtype, shape); `shards` says which of them lie in which file."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, names in (shards or {"model.safetensors": list(tensors)}).items():
        header, end = {}, 0
        for name in names:
            dtype, shape = tensors[name]
            begin, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    if shards:
        index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, content in (files or {}).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    return directory
