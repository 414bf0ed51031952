"""A set of integers as disjoint half-open intervals: what of a file has been covered so far."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Intervals:
    """Grows by intervals in any order; neighbours become one."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(self._ends) - sum(self._begins)

    def add(self, begin: int, end: int) -> None:
        """Adds `[begin, end)`, which is not empty."""
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]

    def covers(self, begin: int, end: int) -> bool:
        """Tells whether all of `[begin, end)` is in the set."""
        place = bisect_right(self._begins, begin) - 1
        return place >= 0 and end <= self._ends[place]

    def missing(self, begin: int, end: int) -> int:
        """Returns how many integers of `[begin, end)` are not in the set."""
        place = max(0, bisect_right(self._begins, begin) - 1)
        found = 0
        while place < len(self._begins) and self._begins[place] < end:
            found += max(0, min(end, self._ends[place]) - max(begin, self._begins[place]))
            place += 1
        return end - begin - found
