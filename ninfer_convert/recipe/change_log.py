"""What became of the entries of a `change` list: which had an effect, and which were overwritten by later ones.

Owns the bookkeeping; it looks on while changes are made. Refuses to know what a change may say (`recipe_changes`).

Source: recipe.md, duty 7.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ninfer_convert.recipe.changes import ORIGIN_CHANGES
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.model import ObjectSpec, ResourceSpec
from ninfer_convert.recipe.yaml_nodes import MapNode

_FIELDS = ("format", "encoder", "value", "shape", "require", "sha256", "origins")
"""What of an object an entry can settle."""


@dataclass(slots=True)
class Step:
    """What became of one entry."""

    mark: Mark
    has_effect: bool = False
    """Whether any object is another than before."""
    standing: int = 0
    """Fields of objects it wrote that no later entry wrote again."""
    last_overwritten: Mark | None = None
    """The later entry that wrote one of its fields again, the last of them."""


class ChangeLog:
    """Takes down what every entry did.

    Attributes:
        steps: the entries that could be applied, in order.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._writers: dict[tuple[str, str], Step] = {}
        """Who wrote a field of an object last."""

    def note(self, entry: MapNode, before: Sequence[ObjectSpec], after: Sequence[ObjectSpec]) -> None:
        """Takes down one entry, the objects before and after it."""
        step = Step(entry.mark)
        self.steps.append(step)
        became: Iterable[ObjectSpec | None] = after
        if "drop" in entry.members:
            left = {spec.name: spec for spec in after}
            became = (left.get(spec.name) for spec in before)
        for old, new in zip(before, became, strict=True):
            if old is new:
                continue
            step.has_effect = step.has_effect or old != new
            for field in _FIELDS if new is None else _written(entry.members, new):
                if (earlier := self._writers.pop((old.name, field), None)) is not None:
                    earlier.standing -= 1
                    earlier.last_overwritten = step.mark
                if new is not None:
                    self._writers[old.name, field] = step
                    step.standing += 1


def _written(keys: Collection[str], spec: ObjectSpec) -> Collection[str]:
    """Returns the fields of an object that an entry with these keys settles."""
    if isinstance(spec, ResourceSpec):
        return ("sha256", "origins") if any(key in keys for key in ORIGIN_CHANGES) else ("sha256",)
    fields = {"value" if key == "words" else key for key in keys} - {"objects"}
    # What has no encoder needs none of those that were given before.
    return fields | {"encoder"} if {"format", "words"} & set(keys) and spec.encoder is None else fields
