"""What the workers of a cluster are told of a conversion, and what they tell of it.

An order travels with every task. It does not hold the plan, but what leads to it again, and its identity.

Source: cli.md, `run --dask`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.errors import PlanError, printable
from ninfer_convert.plan.planner import Plan, make_plan
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.run.plan_file import PlanFile, plan_file
from ninfer_convert.source.acquisition import Place, open_sources


@dataclass(frozen=True, slots=True)
class Order:
    """One conversion in `count` shares.

    `prefixes` holds the prefix rules of every source; `threads` and `memory` (bytes) are those of one worker
    process, None where the worker decides; `stats` asks for what encoding costs; `run` names this run among all
    others.
    """

    file: PlanFile
    prefixes: Mapping[str, Mapping[str, str]]
    count: int
    threads: int | None
    memory: int | None
    stats: bool
    run: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a share cannot be made. `is_input` tells that it cannot be made anywhere: a value or word is not legal."""

    exit_code: int
    messages: tuple[str, ...]
    is_input: bool = False


@dataclass(frozen=True, slots=True)
class ShareEnd:
    """How a share ended: with neither failure nor stop, it is complete. `threads` are those it was made with."""

    index: int
    threads: int = 0
    failure: Failure | None = None
    is_stopped: bool = False


def make_order(
    plan: Plan,
    recipe_name: str,
    output: Path,
    *,
    unpinned: bool,
    count: int,
    threads: int | None,
    memory: int | None,
    stats: bool,
    run: str,
) -> Order:
    """Returns the order of an accepted plan. All places in it are absolute, or on the hub at a commit."""
    file = plan_file(output, plan, recipe_name, (), output, unpinned=unpinned)
    # A rule that has changed no name changes none elsewhere.
    prefixes = {name: dict(checkpoint.applied_prefixes) for name, checkpoint in plan.sources.items()}
    return Order(file, prefixes, count, threads, memory, stats, run)


@contextlib.contextmanager
def planned_again(order: Order) -> Iterator[Plan]:
    """Plans what an order says, with values at hand, and requires that it is the same conversion still.

    Raises:
        ConvertError: like `load_recipe`, `open_sources` and `make_plan`, or it is another one.
    """
    file = order.file
    recipe = load_recipe(file.recipe)
    if recipe.sha256 != file.identity["recipe"]:
        raise PlanError(f"{printable(recipe.path)}: the recipe has changed since the conversion was planned")
    inputs = {name: Path(place) for name, place in file.inputs.items()}
    places = {name: Place(where, order.prefixes[name]) for name, where in file.sources.items()}
    with open_sources(recipe, places, inputs, unpinned=file.unpinned) as opened:
        plan = make_plan(recipe, opened, inputs, unpinned=file.unpinned)
        file.require_same(plan)
        yield plan
