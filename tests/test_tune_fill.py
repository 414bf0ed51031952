"""One choice for each object within a budget: against enumeration, against the bound, always the same."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from ninfer_convert.tune.fill import fill


def enumerated(items: Sequence[Sequence[tuple[int, float]]], budget: int) -> float:
    """Returns the least error of all combinations that fit."""
    return min(
        math.fsum(error for _, error in combination)
        for combination in itertools.product(*items)
        if sum(nbytes for nbytes, _ in combination) <= budget
    )


def test_the_solver_finds_what_enumeration_finds() -> None:
    draw = random.Random(1)
    for _ in range(300):
        unit = draw.choice((1, 256))
        items = [
            [(draw.randint(0, 50) * unit, draw.random() * 10) for _ in range(draw.randint(1, 4))]
            for _ in range(draw.randint(1, 6))
        ]
        smallest, largest = (sum(which(choices)[0] for choices in items) for which in (min, max))
        budget = draw.randint(smallest, largest + 5)
        best = enumerated(items, budget)
        found = fill(items, budget)
        assert found is not None
        chosen = [choices[i] for choices, i in zip(items, found.chosen, strict=True)]
        assert found.nbytes == sum(nbytes for nbytes, _ in chosen) <= budget
        assert found.error == pytest.approx(math.fsum(error for _, error in chosen))
        assert found.error == pytest.approx(best, abs=1e-9)
        assert found.least <= best + 1e-9
        assert fill(items, smallest - 1) is None


def test_where_the_budget_ends_a_step_of_the_hulls_the_bound_is_met() -> None:
    # The errors of each object fall convexly: 8, 2, 1 for 1, 2, 3 bytes and 6, 3, 2 for 10, 12, 14 bytes.
    items = [[(1, 8.0), (2, 2.0), (3, 1.0)], [(10, 6.0), (12, 3.0), (14, 2.0)]]
    # Saved for each byte, in order: 6, 1.5, 1, 0.5.
    for budget, error, slope in ((11, 14, 6), (12, 8, 1.5), (14, 5, 1), (15, 4, 0.5), (17, 3, 0), (99, 3, 0)):
        found = fill(items, budget)
        assert found is not None
        assert (found.nbytes, found.error, found.slope) == (min(budget, 17), error, slope)
        assert found.least == error == enumerated(items, budget)
    between = fill(items, 13)
    assert between is not None
    assert between.error == between.least == enumerated(items, 13) == 7


def test_choices_inside_of_the_hull_fill_what_is_left() -> None:
    # Along the hulls the second object has 0 or 10 bytes; 6 are left, and its middle choice fits them.
    items = [[(0, 20.0), (4, 0.0)], [(0, 10.0), (6, 9.0), (10, 0.0)]]
    found = fill(items, 10)
    assert found is not None
    assert (found.chosen, found.error, found.least) == ((1, 1), 9, 9)
    assert enumerated(items, 10) == 9


def tabulated(items: Sequence[Sequence[tuple[int, float]]], budget: int) -> list[float]:
    """Returns the least error of all combinations that fit, for every budget up to this one."""
    least = [0.0] * (budget + 1)
    for choices in items:
        least = [
            min((least[room - nbytes] + error for nbytes, error in choices if nbytes <= room), default=math.inf)
            for room in range(budget + 1)
        ]
    return least


def test_beside_an_object_that_dwarfs_all_others_the_best_is_found() -> None:
    """An embedding of half the bytes: whatever it is given leaves very much or very little for thirty others."""
    draw = random.Random(2)
    rates = ((17, 0.1077), (21, 0.0503), (25, 0.0243), (34, 0.00535))
    items = []
    for count in (60, *(draw.randint(1, 4) for _ in range(30))):
        weight = count * draw.uniform(0.3, 3)
        items.append([(count * size, weight * error**2) for size, error in rates])
    smallest, largest = (sum(which(choices)[0] for choices in items) for which in (min, max))
    best = tabulated(items, largest + 40)
    for budget in range(smallest, largest + 40, 97):
        found = fill(items, budget)
        assert found is not None
        assert found.nbytes <= budget
        assert found.error == pytest.approx(best[budget], rel=1e-5)
        assert found.error * 0.98 <= found.least <= found.error


def test_of_many_objects_the_gap_is_small_and_the_result_always_the_same() -> None:
    draw = random.Random(3)
    items = []
    for _ in range(450):
        count = draw.choice((5120 * 17408, 34816 * 5120, 5120 * 6144, 1152 * 4304))
        weight = count * draw.uniform(0.5, 2)
        rates = ((4.25, 0.1077), (5.25, 0.0503), (6.25, 0.0243), (8.5, 0.00535))
        items.append([(int(count * bits / 8), weight * error**2) for bits, error in rates])
    for part in (0.55, 0.7, 0.9):
        budget = int(sum(choices[-1][0] for choices in items) * part)
        found = fill(items, budget)
        assert found is not None
        assert found.nbytes <= budget
        assert found.least <= found.error <= found.least * 1.001
        assert fill(items, budget) == found
