"""Small artifacts for tests, built by the oracle: legal payloads of every format, whole files, edited directories."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oracle import container, layouts
from oracle.container import Resource, Tensor
from oracle.encoders import GROUPED

TINY = Path(__file__).parent / "golden" / "tiny.ninfer"
DIRECT = ("BF16", "FP32", "I32")
NVFP4, FP8 = "NVFP4", "FP8_E4M3FN_ROW_BF16S"
FORMATS = (*GROUPED, NVFP4, FP8, *DIRECT)


def payload(name: str, shape: Sequence[int], seed: int = 0, zero_groups: float = 0.2) -> bytes:
    """Returns a legal payload of random words; about that share of groups, or rows, has a zero scale."""
    draw = random.Random(f"{name} {list(shape)} {seed}")
    if name in DIRECT:
        return draw.randbytes(math.prod(shape) * layouts.WORD_BYTES[name])
    n, k = shape
    if name in GROUPED:
        grouped = GROUPED[name]
        scales, codes = [], []
        for _ in range(n):
            groups = -(-k // grouped.group)
            words = [0 if draw.random() < zero_groups else draw.randrange(1, 0x7C00) for _ in range(groups)]
            scales.append(words)
            codes.append(
                [draw.randint(grouped.qmin, grouped.qmax) if words[i // grouped.group] else 0 for i in range(k)]
            )
        return layouts.pack_row_split(name, scales, codes)
    if name == NVFP4:
        codes = [[draw.randrange(16) for _ in range(k)] for _ in range(n)]
        scales = [[draw.randrange(0x7F) for _ in range(k // 16)] for _ in range(n)]
        return layouts.pack_blockscale(codes, scales, draw.randrange(1, 0x7F800000))
    row_scales = [0 if draw.random() < zero_groups else draw.randrange(1, 0x7F80) for _ in range(n)]
    legal = [word for word in range(256) if word & 0x7F != 0x7F]
    codes = [[draw.choice(legal if scale else (0, 0x80)) for _ in range(k)] for scale in row_scales]
    return layouts.pack_row_scale(row_scales, codes)


def tensor(name: str, format_name: str, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Returns a tensor object with a legal payload."""
    return Tensor(name, tuple(shape), format_name, payload(format_name, shape, seed))


def write(path: Path, objects: Sequence[Tensor | Resource]) -> Path:
    """Writes an artifact of these objects."""
    path.write_bytes(container.build("test-model", "test-weights", objects))
    return path


def frame(text: bytes, payload_bytes: int = 0) -> bytes:
    """Returns a file with this directory text, honestly framed, and a payload of zeros."""
    head = container.MAGIC + len(text).to_bytes(8, "little") + text
    return head + bytes(layouts.align_up(len(head), 4096) - len(head) + payload_bytes)


def tiny_directory() -> dict[str, Any]:
    """Returns the directory of the golden artifact, to be edited."""
    data = TINY.read_bytes()
    directory: dict[str, Any] = json.loads(data[16 : 16 + int.from_bytes(data[8:16], "little")])
    return directory


def reframe(directory: object) -> bytes:
    """Returns the golden artifact's payload behind another directory."""
    text = json.dumps(directory, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return frame(text) + TINY.read_bytes()[4096:]
