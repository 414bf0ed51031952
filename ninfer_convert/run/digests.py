"""Hashing a whole artifact in one pass: the file, every object, and the ranges that somebody has claimed.

Owns the reading in large pieces and the taking of several digests of each at once. Refuses to know what follows
from them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PIECE_BYTES = 8 << 20

Read = Callable[[int, memoryview], None]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256 in hexadecimal of the file and of every range that was asked for, in the order of asking."""

    file: str
    ranges: tuple[tuple[str, ...], ...]


@dataclass(slots=True)
class _Open:
    """A range that is being hashed."""

    place: int
    end: int
    digest: Any = field(default_factory=hashlib.sha256)


class _Ranges:
    """Hashes ranges, which may overlap, of a file that passes by in order."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = ranges
        self.order = sorted(range(len(ranges)), key=lambda place: ranges[place])
        self.next = 0
        self.open: list[_Open] = []
        self.digests = [""] * len(ranges)

    def feed(self, begin: int, piece: memoryview) -> None:
        end = begin + len(piece)
        while self.next < len(self.order) and self.ranges[self.order[self.next]][0] < end:
            place = self.order[self.next]
            self.open.append(_Open(place, self.ranges[place][1]))
            self.next += 1
        still = []
        for each in self.open:
            low = max(self.ranges[each.place][0], begin)
            each.digest.update(piece[low - begin : min(each.end, end) - begin])
            if each.end > end:
                still.append(each)
            else:
                self.digests[each.place] = each.digest.hexdigest()
        self.open = still


def take_digests(read: Read, nbytes: int, wanted: Sequence[Sequence[Range]], threads: int) -> Digests:
    """Returns the digests of a file and of ranges of it, reading every byte once.

    Args:
        read: fills a buffer from a file offset.
        nbytes: of the file.
        wanted: lists of ranges `[begin, end)` inside the file; each list is hashed beside the others.
        threads: at most so many hash at a time.
    """
    whole = hashlib.sha256()
    lists = [_Ranges(ranges) for ranges in wanted]
    jobs: list[Callable[[int, memoryview], None]] = [lambda _, piece: whole.update(piece)]
    jobs += [ranges.feed for ranges in lists]
    buffers = [np.empty(PIECE_BYTES, np.uint8) for _ in range(2)]
    with ThreadPoolExecutor(min(threads, len(jobs))) as pool:
        futures: list[Future[None]] = []
        try:
            for number, begin in enumerate(range(0, nbytes, PIECE_BYTES)):
                piece = buffers[number % 2].data[: min(PIECE_BYTES, nbytes - begin)]
                # While this piece is read the one before it is hashed.
                read(begin, piece)
                for future in futures:
                    future.result()
                futures = [pool.submit(job, begin, piece) for job in jobs]
            for future in futures:
                future.result()
        finally:
            while any(not future.done() for future in futures):
                with contextlib.suppress(KeyboardInterrupt):
                    wait(futures)
    return Digests(whole.hexdigest(), tuple(tuple(ranges.digests) for ranges in lists))
