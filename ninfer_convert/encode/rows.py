"""Rows of source words to rows of plane bytes, by the two encoder profiles; and casts between direct words.

Owns the checks in front of the encoding kernels and the wording of what a row is refused for. Refuses to know
files, recipes and where rows come from. Nothing proportional to the rows is allocated.

Source: tensor-formats.md section 7; targets/qwen3.8-27b-nvfp4.md, "Encoder"; layouts.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_convert.encode import interface
from ninfer_convert.encode.compiled import KERNELS
from ninfer_convert.formats import GroupedFormat, RowScaledFormat
from ninfer_convert.layout import geometry
from ninfer_convert.row_error import RowError

SOURCE_DTYPES = tuple(interface.WORDS)

_NO_PLANE = np.empty((0, 0), np.uint8)
_NO_LOSS = np.empty(0, np.int64)

Array = npt.NDArray[Any]
Plane = npt.NDArray[np.uint8]


def encode_rows(
    numeric: GroupedFormat | RowScaledFormat,
    dtype: str,
    words: Array,
    planes: Mapping[str, Plane],
    loss: npt.NDArray[np.int64] | None = None,
) -> None:
    """Encodes a block of rows; fills every byte of its planes, padding included.

    Every step rounds to nearest, ties to even. Rows do not influence each other, so the bytes are the same
    however a matrix is cut into blocks of rows.

    Args:
        numeric: the format; it implies the encoder profile and the layout.
        dtype: one of `SOURCE_DTYPES`.
        words: source words [rows, K], '<u2' (BF16, F16) or '<u4' (F32), C-contiguous.
        planes: for each plane of the layout that has rows, uint8 [rows, row bytes], C-contiguous. After an
            error their contents are undefined.
        loss: int64 [interface.LOSS_WORDS], to which the loss of the rows is added.

    Raises:
        RowError: the first row with a value that is not finite or a scale that cannot be stored.
        TypeError, ValueError: an array is not as described.

    Source: tensor-formats.md section 7.2; targets/qwen3.8-27b-nvfp4.md, "Encoder".
    """
    if not isinstance(numeric, (GroupedFormat, RowScaledFormat)):
        raise TypeError(f"{getattr(numeric, 'name', numeric)} has no encoder")
    if dtype not in interface.WORDS:
        raise ValueError(f"source dtype {dtype} has no encoder; required is one of {', '.join(SOURCE_DTYPES)}")
    require_array("words", words, np.dtype(interface.WORDS[dtype]), 2)
    rows, k = words.shape
    for plane in geometry(numeric, (rows, k)).planes:
        require_plane(planes, plane.name, (rows, plane.row_bytes))
    if loss is None:
        loss = _NO_LOSS
    else:
        require_array("loss", loss, np.dtype(np.int64), 1, (interface.LOSS_WORDS,))
        require_writable("loss", loss)
    scratch = {name: np.empty(length, kind) for name, (kind, length) in interface.SCRATCH.items()}
    if isinstance(numeric, RowScaledFormat):
        bad_row = KERNELS[f"encode_fp8_rows_{dtype.lower()}"](
            *(words, planes["code"], planes["scale"]),
            *(scratch["values"], scratch["errors"], scratch["lanes"], loss),
        )
        if bad_row >= 0:
            raise _bad_values(dtype, words, bad_row, 0, k) or _bad_row_scale(dtype, words, bad_row)
        return
    bad_group = KERNELS[f"encode_grouped_{dtype.lower()}"](
        words,
        numeric.code_bits,
        numeric.group,
        float(numeric.code_min),
        float(numeric.code_max),
        planes["base"],
        planes.get("high", _NO_PLANE),
        planes["scale"],
        *(scratch[name] for name in ("codes", "maxima", "scales", "inverses", "errors", "lanes")),
        loss,
    )
    if bad_group >= 0:
        row, group = divmod(bad_group, -(-k // numeric.group))
        begin, end = group * numeric.group, min(k, (group + 1) * numeric.group)
        raise _bad_values(dtype, words, row, begin, end, group) or _bad_group_scale(numeric, dtype, words, row, group)


def require_array(
    name: str, array: Array, dtype: np.dtype[Any], rank: int, shape: tuple[int, ...] | None = None
) -> None:
    """Raises unless array is C-contiguous, aligned, of this dtype, rank and (if given) shape."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = array.dtype.str if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} is {found}; an array of {dtype.str} is required")
    if array.ndim != rank or (shape is not None and array.shape != shape):
        required = f"rank {rank}" if shape is None else f"shape {list(shape)}"
        raise ValueError(f"{name} has shape {list(array.shape)}; {required} is required")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"{name} is not C-contiguous and aligned, which is required")


def require_plane(planes: Mapping[str, Plane], name: str, shape: tuple[int, int]) -> None:
    """Raises unless planes has a writable plane of this name and shape."""
    if name not in planes:
        raise ValueError(f"plane {name} is missing; the layout has it")
    require_array(f"plane {name}", planes[name], np.dtype(np.uint8), 2, shape)
    require_writable(f"plane {name}", planes[name])


def require_writable(name: str, array: Array) -> None:
    """Raises unless array can be written."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only; it is to be written")


def _values(dtype: str, words: Array) -> Array:
    """Returns a few words as float32; only the sign matters of a NaN."""
    if dtype == "BF16":
        return (words.astype("<u4") << np.uint32(16)).view("<f4")
    if dtype == "F16":
        with np.errstate(invalid="ignore"):
            return words.view("<f2").astype(np.float32)
    return words.view("<f4")


def _bad_values(
    dtype: str, words: Array, row: int, begin: int, end: int, group: int | None = None
) -> RowError | None:
    """Returns the error of the first value of columns [begin, end) that is not finite, if there is one."""
    values = _values(dtype, words[row, begin:end])
    offences = np.flatnonzero(~np.isfinite(values))
    if not len(offences):
        return None
    value = values[offences[0]]
    found = "NaN" if np.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return RowError(row, f"value is {found}", column=begin + int(offences[0]), group=group)


def _bad_group_scale(numeric: GroupedFormat, dtype: str, words: Array, row: int, group: int) -> RowError:
    largest = np.abs(_values(dtype, words[row, group * numeric.group : (group + 1) * numeric.group])).max()
    scale = largest / np.float32(numeric.code_max)
    reason = f"scale {scale:.6g} is not finite in binary16 (largest magnitude {largest:.6g})"
    return RowError(row, reason, group=group)


def _bad_row_scale(dtype: str, words: Array, row: int) -> RowError:
    largest = np.abs(_values(dtype, words[row])).max()
    scale = largest / np.float32(448)
    return RowError(row, f"scale {scale:.6g} has no finite binary32 reciprocal (largest magnitude {largest:.6g})")
