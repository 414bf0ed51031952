"""The frequency shortlist: which token ids a draft head can propose, from counts and the tokenizer's special tokens.

Source: targets/qwen3.6-27b.md, "Shortlist".
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ninfer_convert.errors import PlanError, SourceError, printable
from ninfer_convert.plan.value import Constant
from ninfer_convert.recipe.expression import Shortlist
from ninfer_convert.source.checkpoint import Checkpoint
from ninfer_convert.source.io import open_regular, read_range
from ninfer_convert.strict_json import load_object


def shortlist(leaf: Shortlist, counts_file: Path, tokenizer: Checkpoint) -> Constant:
    """Returns the ids, I32 [take], most frequent first.

    Candidates are ordered by descending count, equal counts by ascending id; the special tokens take the last
    places whatever their counts; the whole is then ordered by descending count once more, equal counts staying
    in the order they had.

    Raises:
        PlanError: the input is too short or unusable, or fewer distinct ids come out than wanted.
        SourceError: a file cannot be read.
    """
    label = f"{leaf.mark}: shortlist"
    counts = _total_counts(leaf, counts_file)
    special = [number for number in _special_ids(leaf, tokenizer) if 0 <= number < leaf.candidates]
    order = _descending(counts)
    ordinary = order[~np.isin(order, special)][: max(0, leaf.take - len(special))]
    chosen = np.concatenate([ordinary, np.array(special, np.int64)])
    chosen = chosen[_descending(counts[chosen])]
    distinct = len(np.unique(chosen))
    if len(chosen) != leaf.take or distinct != leaf.take:
        raise PlanError(
            f"{label} yields {distinct} distinct ids ({len(special)} of them special) out of "
            f"{leaf.candidates} candidates; {leaf.take} are required"
        )
    return Constant(str(leaf), (leaf.take,), "I32", chosen.astype("<i4"))


def _descending(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    # The complement orders like the negative but cannot overflow.
    return np.argsort(~counts, kind="stable")


def _total_counts(leaf: Shortlist, path: Path) -> npt.NDArray[np.int64]:
    """Returns row 0 of the counts, which begins the file; only the candidates' part of it is needed."""
    needed, descriptor = leaf.candidates * 8, open_regular(os.fspath(path))
    try:
        held = os.fstat(descriptor).st_size
        if held < needed:
            raise PlanError(
                f"{leaf.mark}: input {leaf.counts} ({printable(str(path))}) holds {held} bytes; "
                f"{leaf.candidates} I64 counts need {needed}"
            )
        return np.frombuffer(read_range(descriptor, 0, needed, os.fspath(path)), "<i8").astype(np.int64)
    finally:
        os.close(descriptor)


def _special_ids(leaf: Shortlist, tokenizer: Checkpoint) -> list[int]:
    content = tokenizer.resource(leaf.special)
    try:
        tokens = load_object(content, leaf.special, lenient=True)["added_tokens_decoder"]
        return sorted(int(number) for number, token in tokens.items() if token.get("special") is True)
    except (SourceError, ValueError, KeyError, AttributeError) as error:
        raise PlanError(
            f"{leaf.mark}: {printable(leaf.special)} of source {leaf.source} has no usable added_tokens_decoder "
            "(an object of ids, each an object with special: true or false)"
        ) from error
