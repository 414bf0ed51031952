"""Makes the bytes of one block: reads its source rows, encodes or packs them, hands out planes and places.

Owns the per-thread buffers and the wording of value errors. Refuses to know files (`writer`) and scheduling
(`convert`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ninfer_convert.encode.interface import LOSS_WORDS
from ninfer_convert.encode.loss import Loss
from ninfer_convert.encode.rows import encode_rows
from ninfer_convert.encode.words import pack_fp8_rows, pack_nvfp4_rows
from ninfer_convert.errors import EncodeError, printable
from ninfer_convert.formats import DirectFormat, GroupedFormat, RowScaledFormat
from ninfer_convert.layout import Plane
from ninfer_convert.plan.block import Block
from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.planner import PlannedTensor
from ninfer_convert.plan.requirements import require
from ninfer_convert.plan.transform import Words
from ninfer_convert.plan.value import Buffer, Value, where
from ninfer_convert.row_error import RowError

Piece = tuple[int, npt.NDArray[np.uint8]]
"""Bytes and their offset from the object's first byte."""


class BlockMaker:
    """Makes the bytes of blocks, one at a time, in buffers it reuses. One per thread.

    `loss` is what encoding the last block has cost; None if nothing was encoded, or if nobody wants to know.
    """

    def __init__(self, *, has_stats: bool = False) -> None:
        self.loss: Loss | None = None
        self._has_stats = has_stats
        self._buffers: dict[str, Buffer] = {}

    def _buffer(self, name: str, nbytes: int) -> Buffer:
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def _read(self, name: str, value: Value, begin: int, end: int) -> Buffer:
        out = self._buffer(name, (end - begin) * WORD_BYTES[value.dtype])
        value.read(begin, end, out)
        return out

    def scan(self, value: Value, begin: int, end: int) -> None:
        """Reads elements for the comparisons that reading them makes."""
        self._read("source", value, begin, end)

    def make(self, item: PlannedTensor, block: Block) -> list[Piece]:
        """Returns the plane bytes of one block; they are valid until the next call.

        Raises:
            EncodeError: a value cannot be encoded or a word breaks its format's rules; names the object, and
                tensor, row and column of the source.
            SourceError: a read failed, or values that must be identical differ.
        """
        self.loss = None
        if isinstance(item.value, Words):
            return self._copied(item, item.value, block)
        if isinstance(item.numeric, DirectFormat):
            return self._direct(item, item.value, block)
        return self._encoded(item, item.value, block)

    def _direct(self, item: PlannedTensor, value: Value, block: Block) -> list[Piece]:
        words = self._read("source", value, block.begin, block.end)
        require(
            item.spec.requirements,
            item.numeric.name,
            words,
            lambda index: f"object {printable(item.name)}: {where(value, block.begin + index)}",
        )
        return [(block.begin * WORD_BYTES[value.dtype], words)]

    def _planes(self, item: PlannedTensor, block: Block) -> list[tuple[Plane, npt.NDArray[np.uint8]]]:
        rows = block.end - block.begin
        return [
            (plane, self._buffer(plane.name, rows * plane.row_bytes).reshape(rows, plane.row_bytes))
            for plane in item.geometry.planes
            if plane.row_bytes
        ]

    def _encoded(self, item: PlannedTensor, value: Value, block: Block) -> list[Piece]:
        k = item.shape[1]
        words = self._read("source", value, block.begin * k, block.end * k)
        rows = words.view(f"<u{WORD_BYTES[value.dtype]}").reshape(block.end - block.begin, k)
        planes = self._planes(item, block)
        numeric = item.numeric
        if not isinstance(numeric, (GroupedFormat, RowScaledFormat)):
            raise TypeError(f"{numeric.name} has no encoder")
        found = np.zeros(LOSS_WORDS, np.int64) if self._has_stats else None
        try:
            encode_rows(numeric, value.dtype, rows, {plane.name: out for plane, out in planes}, found)
        except RowError as error:
            raise _value_error(item, value, block, error) from error
        if found is not None:
            self.loss = Loss.of_block(found, rows.size, block.begin * k)
        return _placed(planes, block)

    def _copied(self, item: PlannedTensor, words: Words, block: Block) -> list[Piece]:
        rows = block.end - block.begin
        width, groups = words.codes.shape[1], words.scales.shape[1]
        codes = self._read("source", words.codes, block.begin * width, block.end * width).reshape(rows, width)
        scales = self._read("scales", words.scales, block.begin * groups, block.end * groups)
        planes = self._planes(item, block)
        outputs = {plane.name: out for plane, out in planes}
        try:
            if words.format == "NVFP4":
                pack_nvfp4_rows(codes, scales.reshape(rows, groups), outputs)
            else:
                pack_fp8_rows(codes, scales.view("<u2"), outputs)
        except RowError as error:
            raise _word_error(item, words, block, error) from error
        pieces = _placed(planes, block)
        if words.divisor is not None and block.begin == 0:
            divisor = np.array([words.divisor], "<u4").view(np.uint8)
            pieces.append((item.geometry.planes[-1].offset, divisor))
        return pieces


def _placed(planes: list[tuple[Plane, npt.NDArray[np.uint8]]], block: Block) -> list[Piece]:
    return [(plane.offset + block.begin * plane.row_bytes, out.reshape(-1)) for plane, out in planes]


def _value_error(item: PlannedTensor, value: Value, block: Block, error: RowError) -> EncodeError:
    """Names the source tensor of a value that cannot be encoded; a whole group is named by its first column."""
    k, row = item.shape[1], block.begin + error.row
    column = error.column
    if column is None:
        column = 0 if error.group is None else error.group * getattr(item.numeric, "group", k)
    group = "" if error.group is None else f", group {error.group}"
    return EncodeError(
        f"object {printable(item.name)}: {where(value, row * k + column)}{group}: {error.reason}"
        f" (object row {row}); {item.numeric.name} cannot store it"
    )


def _word_error(item: PlannedTensor, words: Words, block: Block, error: RowError) -> EncodeError:
    """Names the tensor of a word that breaks a rule: a scale tensor by row and group, a code by row and column."""
    row = block.begin + error.row
    if error.column is not None:
        place = where(words.codes, row * words.codes.shape[1] + error.column)
    else:
        groups = words.scales.shape[1]
        name, index, _ = words.scales.locate(row * groups + (error.group or 0))
        place = f"tensor {printable(name)}, row {index // groups}"
        if words.format == "NVFP4":
            place += f", block {index % groups}"
    return EncodeError(f"object {printable(item.name)}: {place}: {error.reason}")
