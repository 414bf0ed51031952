"""The sources of a recipe that is not written yet.

Source: cli.md, `WHERE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.model import Recipe, SourceSpec
from ninfer_convert.source.acquisition import Place, open_sources
from ninfer_convert.source.checkpoint import Checkpoint

_NOWHERE = Mark("", 1, 1)


@contextmanager
def opened(places: Mapping[str, str]) -> Iterator[dict[str, Checkpoint]]:
    """Yields the open checkpoints by name; of those on the hub the headers alone.

    Raises:
        ConvertError: like `open_sources`.
    """
    specs = {name: SourceSpec(name, None, None, (), {}, {}, (), _NOWHERE) for name in places}
    recipe = Recipe("", "", "", (), specs, {}, (), (), frozenset(), "", "")
    wanted = {name: Place(where, {}) for name, where in places.items()}
    with open_sources(recipe, wanted, {}, access="headers") as sources:
        yield sources
