"""A stored tensor in pieces of bounded size: element ranges, the plane bytes of one, and its values.

Owns the cut, which depends on shape and format alone. A piece is a run of elements in C order; those of a
quantized tensor are whole rows.

Source: layouts.md, "A run of rows".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.container import TensorRecord
from ninfer_convert.artifact.decode import Values, decode_rows
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.errors import printable
from ninfer_convert.formats import FORMATS, DirectFormat
from ninfer_convert.layout import geometry

PIECE_ELEMENTS = 2**18
"""Elements of one piece, if a row is not longer: words, codes and values of it stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[begin, end)` of a tensor."""

    record: TensorRecord
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """About how many bytes are stored for it."""
        return self.record.nbytes * (self.end - self.begin) // math.prod(self.record.shape)


def pieces(record: TensorRecord, rows: int = 0) -> Iterator[Piece]:
    """Yields the pieces of a tensor in order.

    Args:
        rows: rows that must stay together beyond those that the layout keeps together; 0 for none, 1 for whole
            rows of a direct tensor as well.
    """
    numeric, total = FORMATS[record.format], math.prod(record.shape)
    if not isinstance(numeric, DirectFormat):
        unit = record.shape[1] * math.lcm(rows or 1, geometry(numeric, record.shape).row_quantum)
    else:
        unit = record.shape[-1] * rows if rows and record.shape else 1
    step = max(1, PIECE_ELEMENTS // unit) * unit
    for begin in range(0, total, step):
        yield Piece(record, begin, min(begin + step, total))


def read_piece(artifact: Artifact, piece: Piece) -> Mapping[str, NDArray[np.uint8]]:
    """Returns the plane bytes of a piece, plane name -> [rows, row_bytes]; direct words are one row.

    Raises:
        ArtifactError: the file was cut.
        OutputError: a read fails.
    """
    record, numeric = piece.record, FORMATS[piece.record.format]
    if not isinstance(numeric, DirectFormat):
        k = record.shape[1]
        return artifact.read_rows(record.name, piece.begin // k, piece.end // k)
    words = np.empty((piece.end - piece.begin) * numeric.word_bytes, np.uint8)
    begin = artifact.payload_offset + record.offset + piece.begin * numeric.word_bytes
    artifact.read_into(begin, words, f"object '{printable(record.name)}'")
    return {"words": words.reshape(1, -1)}


def piece_values(piece: Piece, planes: Mapping[str, NDArray[np.uint8]]) -> Values:
    """Returns the represented values of a piece, flat; as `decode.decode_rows`."""
    numeric = FORMATS[piece.record.format]
    k = piece.end - piece.begin if isinstance(numeric, DirectFormat) else piece.record.shape[1]
    return decode_rows(numeric, k, planes).reshape(-1)
