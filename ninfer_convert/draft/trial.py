"""A draft tried before it is handed out: loaded and planned as the user will.

Source: cli.md, `plan`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ninfer_convert.errors import ConvertError, OutputError, PlanError
from ninfer_convert.plan.planner import make_plan
from ninfer_convert.recipe.expression import Shortlist, Tensor, leaves
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import ObjectSpec, Recipe, ResourceSpec, TensorSpec
from ninfer_convert.source.checkpoint import Checkpoint

NAME = "draft.yaml"


def tried(
    text: str, sources: Mapping[str, Checkpoint], inputs: Mapping[str, Path], without: Collection[str] = ()
) -> int:
    """Loads and plans a draft; returns the number of its objects.

    Args:
        without: inputs that are not at hand; what is made of them is left out of the plan.

    Raises:
        PlanError: it does not load, or does not fit the sources; messages call it `draft.yaml`.
        OutputError: a medium did not answer.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / NAME
        path.write_text(text, encoding="utf-8")
        try:
            recipe = load_recipe(path)
            make_plan(_without(recipe, without), sources, inputs)
        except OutputError:
            raise
        except ConvertError as error:
            prefix = f"{directory}/"
            raise PlanError(*(message.replace(prefix, "") for message in error.messages)) from error
    return len(recipe.objects)


def needs(spec: ObjectSpec) -> set[str]:
    """Returns the inputs that an object is made of."""
    if isinstance(spec, ResourceSpec):
        return {origin.input for origin in spec.origins if origin.input is not None}
    return {leaf.counts for leaf in leaves(spec.value) if isinstance(leaf, Shortlist)}


def _without(recipe: Recipe, inputs: Collection[str]) -> Recipe:
    """Returns a recipe without what is made of some inputs; the tensors that only that needs are ignored."""
    kept: list[ObjectSpec] = []
    left: list[ObjectSpec] = []
    for spec in recipe.objects:
        (left if needs(spec).intersection(inputs) else kept).append(spec)
    used = {str(leaf) for leaf in _tensors(kept)}
    ignored = [leaf for leaf in _tensors(left) if str(leaf) not in used]
    sources = {
        name: dataclasses.replace(
            source, ignore=(*source.ignore, *((leaf.name, leaf.mark) for leaf in ignored if leaf.source == name))
        )
        for name, source in recipe.sources.items()
    }
    files = {name: spec for name, spec in recipe.inputs.items() if name not in inputs}
    return dataclasses.replace(recipe, objects=tuple(kept), inputs=files, sources=sources)


def _tensors(objects: Sequence[ObjectSpec]) -> Iterator[Tensor]:
    for spec in objects:
        if isinstance(spec, TensorSpec):
            yield from (leaf for leaf in leaves(spec.value) if isinstance(leaf, Tensor))
