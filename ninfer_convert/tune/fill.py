"""One choice for each object, so that the bytes fit a budget and the errors sum to as little as can be.

This is the multiple-choice knapsack problem. Each object's choices are points (bytes, error); the lower convex
hull of an object holds the choices that are best at some price of a byte. Steps along the hulls are taken in the
order of error saved for each byte until the next one does not fit: that is the best there is for just these
bytes, and with the fraction of the next step that would fit a bound for everybody. The bytes that are left are
then filled with single moves and pairs of moves, hull or not, as long as one of them saves error.

Where a few large objects leave much unfilled, that is not good enough: the object whose step did not fit is held
to the choices below the step, and to those above, and both halves are solved the same way, the half with the
lowest bound first, until nothing can be gained or the work that was allowed is done.

Owns the solver. Refuses to know what the bytes and the errors are of.

Source: Sinha and Zoltners, "The Multiple-Choice Knapsack Problem", Operations Research 27 (1979).
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_WORK = 200_000
"""Choices that are looked at, over and over again, which bounds the time: some tenths of a second."""
MAX_ROUNDS = 400
CLOSE = 1e-6
"""The part of the error that is not worth looking for."""

Choices = Sequence[tuple[int, float]]
"""Bytes and error of every choice of one object."""


@dataclass(frozen=True, slots=True)
class Filling:
    """What was chosen: an index into the choices of each object."""

    chosen: tuple[int, ...]
    nbytes: int
    error: float
    least: float
    """No choice of all objects within the budget has a smaller error."""
    slope: float
    """Error that one more byte would save, where the budget ended; 0 where it never did."""


@dataclass(frozen=True, slots=True)
class _Step:
    """From one point of an object's hull to the next, larger one: choices by their place among its useful ones."""

    item: int
    before: int
    after: int
    nbytes: int
    saved: float


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """The best choices where fractions are allowed: all but the one of `split`, whose step fits in part."""

    places: list[int]
    left: int
    bound: float
    split: _Step | None


@dataclass(frozen=True, slots=True, order=True)
class _Half:
    """A part of all combinations: of some objects a range of useful choices, [begin, end), and no others."""

    bound: float
    number: int
    relaxed: _Relaxed = field(compare=False)
    ranges: dict[int, tuple[int, int]] = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Move:
    """Any other choice of one object."""

    item: int
    choice: int
    nbytes: int
    error: float


def fill(items: Sequence[Choices], budget: int) -> Filling | None:
    """Returns a choice for every object that fits the budget; None if not even the smallest ones do.

    Ties go to the smaller choice, then to the object that comes first: the result depends on nothing else.

    Args:
        items: the choices of each object, at least one; bytes and errors not negative.
        budget: in bytes.
    """
    return _Search(items, budget).best()


class _Search:
    def __init__(self, items: Sequence[Choices], budget: int) -> None:
        self._items, self._budget = items, budget
        self._useful = [_useful(choices) for choices in items]
        self._steps: dict[tuple[int, int, int], list[_Step]] = {}
        self._count = sum(map(len, items))
        self._work = MAX_WORK
        self._chosen: list[int] = []
        self._error = math.inf

    def best(self) -> Filling | None:
        first = self._relax({})
        if first is None:
            return None
        self._round(first)
        numbers = itertools.count(1)
        halves = [_Half(first.bound, 0, first, {})]
        while halves and self._is_worth(halves[0].bound) and self._work > 0:
            half = heapq.heappop(halves)
            for ranges in self._divided(half):
                relaxed = self._relax(ranges)
                if relaxed is not None and self._is_worth(relaxed.bound):
                    self._round(relaxed)
                    heapq.heappush(halves, _Half(relaxed.bound, next(numbers), relaxed, ranges))
        least = min([self._error, *(half.bound for half in halves[:1])])
        nbytes = sum(choices[i][0] for choices, i in zip(self._items, self._chosen, strict=True))
        slope = first.split.saved / first.split.nbytes if first.split else 0.0
        return Filling(tuple(self._chosen), nbytes, self._error, max(0.0, least), slope)

    def _is_worth(self, bound: float) -> bool:
        return bound < self._error * (1 - CLOSE)

    def _relax(self, ranges: dict[int, tuple[int, int]]) -> _Relaxed | None:
        """Returns the best choices within the ranges, fractions allowed; None if the smallest do not fit."""
        self._work -= self._count
        places = [0] * len(self._items)
        for item, (begin, _) in ranges.items():
            places[item] = begin
        left = self._budget - sum(self._point(i, place)[0] for i, place in enumerate(places))
        if left < 0:
            return None
        steps: list[_Step] = []
        for i, useful in enumerate(self._useful):
            steps += self._hull(i, *ranges.get(i, (0, len(useful))))
        # A hull's own steps come in their order: each saves less for a byte than the one before.
        steps.sort(key=lambda step: -step.saved / step.nbytes)
        split = None
        for step in steps:
            if step.nbytes > left:
                split = step
                break
            left -= step.nbytes
            places[step.item] = step.after
        error = math.fsum(self._point(i, place)[1] for i, place in enumerate(places))
        bound = error - (split.saved / split.nbytes * left if split else 0.0)
        return _Relaxed(places, left, bound, split)

    def _divided(self, half: _Half) -> list[dict[int, tuple[int, int]]]:
        """Returns the ranges of both halves of a half; none where its relaxed choices are whole."""
        split = half.relaxed.split
        if split is None or not half.relaxed.left:
            return []
        begin, end = half.ranges.get(split.item, (0, len(self._useful[split.item])))
        # Choices between the two points of the hull lie above it: they belong to the larger half.
        return [{**half.ranges, split.item: part} for part in ((begin, split.before + 1), (split.before + 1, end))]

    def _round(self, relaxed: _Relaxed) -> None:
        """Fills what is left behind relaxed choices, and keeps the result if it is the best so far."""
        chosen = [useful[place] for useful, place in zip(self._useful, relaxed.places, strict=True)]
        self._work -= _fill_rest(self._items, chosen, relaxed.left, self._work)
        error = math.fsum(choices[i][1] for choices, i in zip(self._items, chosen, strict=True))
        if error < self._error:
            self._chosen, self._error = chosen, error

    def _point(self, item: int, place: int) -> tuple[int, float]:
        return self._items[item][self._useful[item][place]]

    def _hull(self, item: int, begin: int, end: int) -> list[_Step]:
        """Returns the steps along the lower convex hull of a range of useful choices."""
        key = (item, begin, end)
        if key not in self._steps:
            hull: list[int] = []
            for place in range(begin, end):
                point = self._point(item, place)
                while len(hull) > 1 and _is_above(self._point(item, hull[-2]), self._point(item, hull[-1]), point):
                    hull.pop()
                hull.append(place)
            self._steps[key] = [
                _Step(item, before, after, more[0] - less[0], less[1] - more[1])
                for before, after in itertools.pairwise(hull)
                for less, more in [(self._point(item, before), self._point(item, after))]
            ]
        return self._steps[key]


def _useful(choices: Choices) -> list[int]:
    """Returns the choices that no smaller one is as good as, from the smallest on."""
    found: list[int] = []
    for index in sorted(range(len(choices)), key=lambda index: choices[index]):
        if not found or choices[index][1] < choices[found[-1]][1]:
            found.append(index)
    return found


def _is_above(first: tuple[int, float], middle: tuple[int, float], last: tuple[int, float]) -> bool:
    """Tells whether the middle point lies on or above the line between the others."""
    return (first[1] - middle[1]) * (last[0] - middle[0]) <= (middle[1] - last[1]) * (middle[0] - first[0])


def _fill_rest(items: Sequence[Choices], chosen: list[int], left: int, work: int) -> int:
    """Makes single moves and pairs of moves, the best first, as long as one of them fits and saves error.

    Returns the work that was done, at most about as much as is given.
    """
    count = sum(map(len, items))
    rounds = max(1, min(MAX_ROUNDS, work // count))
    for done in range(rounds):
        best = _best_moves(items, chosen, left)
        for move in best:
            chosen[move.item] = move.choice
            left -= move.nbytes
        if not best:
            return (done + 1) * count
    return rounds * count


def _best_moves(items: Sequence[Choices], chosen: Sequence[int], left: int) -> tuple[_Move, ...]:
    moves = [
        _Move(i, choice, nbytes - choices[chosen[i]][0], error - choices[chosen[i]][1])
        for i, choices in enumerate(items)
        for choice, (nbytes, error) in enumerate(choices)
        if choice != chosen[i]
    ]
    moves.sort(key=lambda move: (move.nbytes, move.error, move.item))
    sizes = [move.nbytes for move in moves]
    # Of the moves up to each place, the best one, and the best one of another object.
    leaders: list[tuple[_Move, _Move | None]] = []
    for move in moves:
        leaders.append(_leading(leaders[-1], move) if leaders else (move, None))
    best: tuple[_Move, ...] = ()
    gain = 0.0
    for move in moves:
        if move.nbytes <= left and move.error < gain:
            best, gain = (move,), move.error
        place = bisect.bisect_right(sizes, left - move.nbytes)
        if place:
            first, second = leaders[place - 1]
            other = first if first.item != move.item else second
            if other is not None and move.error + other.error < gain:
                best, gain = (move, other), move.error + other.error
    return best


def _leading(leaders: tuple[_Move, _Move | None], move: _Move) -> tuple[_Move, _Move | None]:
    first, second = leaders
    if move.error < first.error:
        return move, first if first.item != move.item else second
    if move.item != first.item and (second is None or move.error < second.error):
        return first, move
    return leaders
