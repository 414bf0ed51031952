"""The frequency shortlist.

Source: targets/qwen3.6-27b.md, "Shortlist".
"""

from collections.abc import Mapping, Sequence

from .binary import OracleError


def row_zero(data: bytes, vocabulary: int) -> list[int]:
    """Returns the first row of raw little-endian signed 64-bit counts."""
    return [int.from_bytes(data[8 * i : 8 * i + 8], "little", signed=True) for i in range(vocabulary)]


def forced_ids(tokenizer_config: Mapping[str, object], candidates: int) -> list[int]:
    """Returns ascending ids of special added tokens that are candidates."""
    decoder = tokenizer_config["added_tokens_decoder"]
    ids = [int(token) for token, entry in decoder.items() if entry.get("special") is True]
    return sorted(token for token in ids if token < candidates)


def shortlist(counts: Sequence[int], candidates: int, take: int, forced: Sequence[int]) -> list[int]:
    """Returns take distinct ids out of [0, candidates), by descending count.

    Equal counts: the ids taken by count come in ascending order, the forced ones after them in ascending order
    (the last sort is stable and the forced ids were appended last).

    Raises:
        OracleError: `cannot take` when there are not exactly take ids to be had.
    """
    kept = set(forced)
    by_count = sorted(range(candidates), key=lambda token: (-counts[token], token))
    free = [token for token in by_count if token not in kept]
    chosen = free[: max(take - len(forced), 0)] + sorted(forced)
    if len(chosen) != take or len(set(chosen)) != take:
        raise OracleError("cannot take")
    return sorted(chosen, key=lambda token: -counts[token])
