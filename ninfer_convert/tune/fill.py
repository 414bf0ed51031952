"""One choice for each object, so that the bytes fit a budget and the errors sum to as little as can be.

This is the multiple-choice knapsack problem. Each object's choices are points (bytes, error); the lower convex
hull of an object holds the choices that are best at some price of a byte. Steps along the hulls are taken in the
order of error saved for each byte until the next one does not fit: that is the best there is for just these
bytes, and with the fraction of the next step that would fit a bound for everybody. The bytes that are left are
then filled with single moves and pairs of moves, hull or not, as long as one of them saves error.

Owns the solver. Refuses to know what the bytes and the errors are of.

Source: Sinha and Zoltners, "The Multiple-Choice Knapsack Problem", Operations Research 27 (1979).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_ROUNDS = 400
MAX_MOVES = 1_000_000
"""Moves that are looked at in all rounds of filling together, which bounds its time for very many objects."""

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
    """From one point of an object's hull to the next, larger one."""

    item: int
    choice: int
    nbytes: int
    saved: float


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
    hulls = [_hull(choices) for choices in items]
    chosen = [hull[0] for hull in hulls]
    left = budget - sum(items[i][choice][0] for i, choice in enumerate(chosen))
    if left < 0:
        return None
    steps = [step for i, hull in enumerate(hulls) for step in _steps(i, hull, items[i])]
    # A hull's own steps come in their order: each saves less for a byte than the one before.
    steps.sort(key=lambda step: -step.saved / step.nbytes)
    saved, slope = 0.0, 0.0
    for step in steps:
        if step.nbytes > left:
            slope = step.saved / step.nbytes
            saved = slope * left
            break
        left -= step.nbytes
        chosen[step.item] = step.choice
    least = max(0.0, math.fsum(items[i][choice][1] for i, choice in enumerate(chosen)) - saved)
    _fill_rest(items, chosen, left)
    nbytes = sum(items[i][choice][0] for i, choice in enumerate(chosen))
    error = math.fsum(items[i][choice][1] for i, choice in enumerate(chosen))
    return Filling(tuple(chosen), nbytes, error, min(least, error), slope)


def _hull(choices: Choices) -> list[int]:
    """Returns the choices on the lower convex hull, from the smallest to the one of least error."""
    hull: list[int] = []
    for index in sorted(range(len(choices)), key=lambda index: choices[index]):
        nbytes, error = choices[index]
        if hull and error >= choices[hull[-1]][1]:
            continue
        while len(hull) > 1 and _is_above(choices[hull[-2]], choices[hull[-1]], (nbytes, error)):
            hull.pop()
        hull.append(index)
    return hull


def _is_above(first: tuple[int, float], middle: tuple[int, float], last: tuple[int, float]) -> bool:
    """Tells whether the middle point lies on or above the line between the others."""
    return (first[1] - middle[1]) * (last[0] - middle[0]) <= (middle[1] - last[1]) * (middle[0] - first[0])


def _steps(item: int, hull: Sequence[int], choices: Choices) -> Iterator[_Step]:
    for before, after in itertools.pairwise(hull):
        nbytes, saved = choices[after][0] - choices[before][0], choices[before][1] - choices[after][1]
        yield _Step(item, after, nbytes, saved)


def _fill_rest(items: Sequence[Choices], chosen: list[int], left: int) -> None:
    """Makes single moves and pairs of moves, the best first, as long as one of them fits and saves error."""
    count = sum(len(choices) - 1 for choices in items)
    for _ in range(min(MAX_ROUNDS, MAX_MOVES // max(count, 1))):
        best = _best_moves(items, chosen, left)
        for move in best:
            chosen[move.item] = move.choice
            left -= move.nbytes
        if not best:
            return


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
