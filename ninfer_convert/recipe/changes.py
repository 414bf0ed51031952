"""The `change` list of a recipe that extends another: inherited objects altered or dropped.

Owns what a change may say and what it leaves alone. Refuses to know where the objects came from
(`recipe_loader`).

Source: recipe.md, duty 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ninfer_convert.formats import FORMATS
from ninfer_convert.recipe.expression import Expression, Mark
from ninfer_convert.recipe.globs import Globs, too_many
from ninfer_convert.recipe.model import ObjectSpec, Requirement, ResourceSpec, TensorSpec
from ninfer_convert.recipe.objects import ENCODERS, ObjectReader, TensorDraft
from ninfer_convert.recipe.problems import PlacedError, Problems, ReportedError, quoted, suggestion
from ninfer_convert.recipe.scalars import entry_kind, read_filled_list, read_members
from ninfer_convert.recipe.scope import Scope, read_shape
from ninfer_convert.recipe.yaml_nodes import MapNode, Node

_TENSOR_CHANGES = ("format", "encoder", "value", "words", "shape", "require")
ORIGIN_CHANGES = ("file", "input", "source", "member", "any")


@dataclass(frozen=True, slots=True)
class _Alteration:
    """What a change of tensors says; a field is empty or None where it says nothing."""

    nodes: Mapping[str, Node]
    format: str
    encoder: str
    value: Expression | None
    shape: tuple[int, ...] | None
    require: tuple[Requirement, ...] | None


Watcher = Callable[[MapNode, Sequence[ObjectSpec], Sequence[ObjectSpec]], None]
"""Is told of every change that could be made: its entry, the objects before and after it."""


class ChangeReader:
    """Applies changes to objects; every problem is noted."""

    def __init__(
        self, objects: ObjectReader, problems: Problems, globs: Globs, watcher: Watcher | None = None
    ) -> None:
        self._objects = objects
        self._problems = problems
        self._globs = globs
        self._watcher = watcher

    def apply(self, node: Node, inherited: Sequence[ObjectSpec], scope: Scope) -> list[ObjectSpec]:
        """Returns the objects with every change of the list made to them, in order."""
        current = list(inherited)
        for entry in self._problems.attempt(read_filled_list, node, "a list of changes") or ():
            changed = self._problems.attempt(self._change, entry, current, scope)
            if changed is not None:
                if self._watcher is not None and isinstance(entry, MapNode):
                    self._watcher(entry, current, changed)
                current = changed
        return current

    def _change(self, node: Node, current: list[ObjectSpec], scope: Scope) -> list[ObjectSpec]:
        kind = entry_kind(node, ("objects", "drop", "resource"), (*_TENSOR_CHANGES, *ORIGIN_CHANGES), "a change")
        if kind == "objects":
            return self._alter(node, current, scope)
        if kind == "resource":
            return self._replace(node, current, scope)
        members = read_members(node, "a drop", ("drop",), (), self._problems) or {}
        names = self._matches(members["drop"], scope, [spec.name for spec in current], "object")
        return [spec for spec in current if spec.name not in names]

    def _members(self, node: Node, what: str, key: str, changes: tuple[str, ...]) -> Mapping[str, Node]:
        members = read_members(node, what, (key,), changes, self._problems) or {}
        if not any(key in members for key in changes):
            raise PlacedError(node.mark, f"{what} changes nothing; it takes {', '.join(changes)}")
        return members

    def _alter(self, node: Node, current: list[ObjectSpec], scope: Scope) -> list[ObjectSpec]:
        members = self._members(node, "a change of tensors", "objects", _TENSOR_CHANGES)
        tensors = [spec.name for spec in current if isinstance(spec, TensorSpec)]
        names = self._problems.attempt(self._matches, members["objects"], scope, tensors, "tensor")
        alteration = self._alteration(node, members, scope)
        if names is None:
            raise ReportedError(node.mark)
        altered: list[ObjectSpec] = []
        for spec in current:
            if isinstance(spec, TensorSpec) and spec.name in names:
                self._problems.next_turn()
                altered.append(self._altered(spec, alteration, node))
            else:
                altered.append(spec)
        return altered

    def _alteration(self, node: Node, members: Mapping[str, Node], scope: Scope) -> _Alteration:
        attempt = self._problems.attempt
        numeric = self._objects.choice(members, "format", FORMATS)
        encoder = self._objects.choice(members, "encoder", ENCODERS)
        value = attempt(self._objects.value, members, scope)
        shape = read_shape(members["shape"], scope, self._problems) if "shape" in members else None
        require = attempt(self._objects.requirements, members["require"], scope) if "require" in members else None
        wrong = {"value": value, "words": value, "shape": shape, "require": require}
        if numeric is None or encoder is None or any(key in members and wrong[key] is None for key in wrong):
            raise ReportedError(node.mark)
        return _Alteration(members, numeric, encoder, value, shape, require)

    def _altered(self, spec: TensorSpec, alteration: _Alteration, node: Node) -> TensorSpec:
        numeric = alteration.format or spec.format
        words = spec.words if alteration.value is None else "words" in alteration.nodes
        encoder = alteration.encoder
        if not encoder and not words and spec.encoder in FORMATS[numeric].encoders:
            encoder = spec.encoder or ""
        draft = TensorDraft(
            mark=node.mark,
            nodes=alteration.nodes,
            shape=spec.shape if alteration.shape is None else alteration.shape,
            format=numeric,
            encoder=encoder,
            layout="",
            value=spec.value if alteration.value is None else alteration.value,
            words=words,
        )
        require = spec.requirements if alteration.require is None else alteration.require
        finished = self._objects.finished(draft, spec.name, require, spec.component, f"{quoted(spec.name)}: ")
        history = (*spec.changes, node.mark)
        format_change = node.mark if alteration.format else spec.format_change
        return dataclasses.replace(
            finished, mark=spec.mark, rounds=spec.rounds, changes=history, format_change=format_change
        )

    def _matches(self, node: Node, scope: Scope, names: Sequence[str], what: str) -> frozenset[str]:
        glob = scope.text(node, f"a glob of {what} names")
        found = self._globs.matching(glob, names)
        if found is None:
            self._problems.stop(node.mark, too_many())
        if not found:
            hint = suggestion(glob, names, listed=0)
            raise PlacedError(node.mark, f"{quoted(glob)} matches no inherited {what}{hint}")
        return frozenset(found)

    def _replace(self, node: Node, current: list[ObjectSpec], scope: Scope) -> list[ObjectSpec]:
        members = self._members(node, "a change of a resource", "resource", (*ORIGIN_CHANGES, "sha256"))
        name = scope.text(members["resource"], "the name of a resource")
        if not self._globs.may_look_at(len(current)):
            self._problems.stop(node.mark, too_many())
        resources = {spec.name: spec for spec in current if isinstance(spec, ResourceSpec)}
        if name not in resources:
            raise PlacedError(
                members["resource"].mark, f"no inherited resource is named {quoted(name)}{suggestion(name, resources)}"
            )
        spec = resources[name]
        origins = spec.origins
        if any(key in members for key in ORIGIN_CHANGES):
            origins = self._objects.origins(node, members, scope)
        # A digest belongs to the place it was taken from: with another place it has to be given anew.
        history = (*spec.changes, node.mark)
        changed = dataclasses.replace(
            spec, origins=origins, sha256=self._objects.digest(members), changes=history
        )
        return [changed if found is spec else found for found in current]


def without_pins(objects: Sequence[ObjectSpec], moved: Mapping[str, Mark]) -> list[ObjectSpec]:
    """Returns the objects, without the SHA-256 of resources that may be taken from one of the moved sources.

    Pins belong to the repository they were taken from: of another one they say nothing. `moved` holds the place
    where each source got another repository.
    """
    return [_without_pin(spec, moved) if isinstance(spec, ResourceSpec) else spec for spec in objects]


def _without_pin(spec: ResourceSpec, moved: Mapping[str, Mark]) -> ResourceSpec:
    files = (origin for origin in spec.origins if origin.file is not None)
    move = next((moved[origin.source] for origin in files if origin.source in moved), None)
    if spec.sha256 is None or move is None:
        return spec
    return dataclasses.replace(spec, sha256=None, changes=(*spec.changes, move))
