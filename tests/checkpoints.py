"""Small checkpoints for tests, written by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize_file

Words = np.ndarray[Any, np.dtype[Any]]
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "U16": "uint16",
    "BOOL": "bool",
}


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, Words]]) -> Path:
    """Writes tensors given as (safetensors dtype, array of words); the words' bytes are stored as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dense = {name: np.ascontiguousarray(words).reshape(words.shape) for name, (_, words) in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=_DTYPES[dtype], shape=words.shape, data_ptr=dense[name].ctypes.data, data_len=words.nbytes
        )
        for name, (dtype, words) in tensors.items()
    }
    serialize_file(specs, str(path), None)
    return path


def write_directory(
    directory: Path,
    shards: Mapping[str, Mapping[str, tuple[str, Words]]],
    *,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes a checkpoint directory; an index is written when there is more than one shard."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        write_safetensors(directory / name, tensors)
    if len(shards) > 1:
        weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
        total = sum(words.nbytes for tensors in shards.values() for _, words in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, content in (files or {}).items():
        (directory / name).write_bytes(content)
    return directory


def bf16(values: Any) -> tuple[str, Words]:
    """Returns binary32 values truncated to BF16 words."""
    wide = np.asarray(values, np.float32).view(np.uint32)
    return "BF16", (wide >> 16).astype("<u2").reshape(np.shape(values))
