"""Plans and conversions in this process, for tests of what they yield."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ninfer_convert.plan.planner import Plan, make_plan
from ninfer_convert.plan.provenance import Outcome
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.run.convert import convert
from ninfer_convert.source.checkpoint import open_checkpoint
from ninfer_convert.stand_in.checkpoints import StandIn

Places = Mapping[str, Path]


@contextlib.contextmanager
def planned(
    recipe_path: Path, places: Places, inputs: Places | None = None, prefixes: Mapping[str, str] | None = None
) -> Iterator[Plan]:
    """Plans a recipe, pins waived; the sources stay open inside the block. Prefixes are those of every source."""
    recipe = load_recipe(recipe_path)
    with contextlib.ExitStack() as stack:
        sources = {
            name: stack.enter_context(
                open_checkpoint(places[name], name=name, prefixes={**spec.prefixes, **(prefixes or {})})
            )
            for name, spec in recipe.sources.items()
        }
        yield make_plan(recipe, sources, inputs, unpinned=True)


def converted(
    recipe_path: Path,
    output: Path,
    places: Places,
    inputs: Places | None = None,
    *,
    threads: int = 2,
    prefixes: Mapping[str, str] | None = None,
    **options: Any,
) -> Outcome:
    """Converts a checkpoint by a recipe, pins waived."""
    with planned(recipe_path, places, inputs, prefixes) as plan:
        return convert(plan, output, threads=threads, **options)


def stand_in_places(made: StandIn) -> tuple[Places, Places]:
    """Returns the sources and the inputs of a stand-in."""
    return {"base": made.base, "quantized": made.quantized}, {"ranking": made.ranking}
