"""YAML nodes to stored objects: the entries of `objects`, with loops unrolled.

Owns what an entry may say and which format, encoder, layout and shape go together. Refuses to know the other
sections of a recipe (`recipe_loader`).

Source: recipe.md, duties 3, 5 and 6; tensor-formats.md sections 2.4 and 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ninfer_convert.formats import FORMATS, BlockScaledFormat, RowScaledFormat
from ninfer_convert.layout import LAYOUT_OF_FORMAT, LAYOUTS, LayoutError, geometry
from ninfer_convert.recipe.blocks import Block, BlockReader
from ninfer_convert.recipe.expression import Expression, Mark
from ninfer_convert.recipe.expressions import ExpressionReader
from ninfer_convert.recipe.model import ObjectSpec, Requirement, ResourceOrigin, ResourceSpec, TensorSpec
from ninfer_convert.recipe.problems import PlacedError, Problems, ReportedError, quoted
from ninfer_convert.recipe.scalars import (
    entry_kind,
    read_boolean,
    read_choice,
    read_filled_list,
    read_hex,
    read_list,
    read_members,
)
from ninfer_convert.recipe.scope import Scope, read_file, read_shape
from ninfer_convert.recipe.yaml_nodes import Node, ScalarNode

ENCODERS = tuple(sorted({encoder for numeric in FORMATS.values() for encoder in numeric.encoders}))

WORD_FORMATS = tuple(
    name for name, numeric in FORMATS.items() if isinstance(numeric, (BlockScaledFormat, RowScaledFormat))
)
"""The formats whose words can be copied from a source module."""

RULES = ("finite", "positive", "non-negative", "unique", "range")

_TENSOR_KEYS = ("encoder", "layout", "value", "words", "require")
_ORIGIN_KEYS = ("file", "input", "source", "member")
_RESOURCE_KEYS = ("resource", "any", "sha256", *_ORIGIN_KEYS)
_ENTRY_KEYS = ("shape", "format", *_TENSOR_KEYS, "any", "sha256", *_ORIGIN_KEYS, "values", "objects", "optional")


@dataclass(slots=True)
class TensorDraft:
    """The fields of a tensor with their places, before it is known whether they go together.

    `encoder` and `layout` are empty where none is written; `mark` and the nodes are the places to complain at.
    """

    mark: Mark
    nodes: Mapping[str, Node]
    shape: tuple[int, ...]
    format: str
    encoder: str
    layout: str
    value: Expression
    words: bool


class ObjectReader:
    """Reads the entries of `objects` of one recipe; every problem is noted."""

    def __init__(self, expressions: ExpressionReader, blocks: BlockReader, problems: Problems) -> None:
        self.optional: dict[str, bool] = {}
        """Every component, and whether it may be absent."""
        self._expressions = expressions
        self._blocks = blocks
        self._problems = problems

    def read(self, node: Node, scope: Scope) -> list[ObjectSpec]:
        """Returns the objects that a list of entries describes, in order."""
        found: list[ObjectSpec] = []
        self._entries(node, scope, None, found)
        self._blocks.check_conditions()
        return found

    def _entries(self, node: Node, scope: Scope, component: str | None, found: list[ObjectSpec]) -> None:
        for entry in self._problems.attempt(read_filled_list, node, "a list of objects") or ():
            self._problems.attempt(self._entry, entry, scope, component, found)

    def _entry(self, node: Node, scope: Scope, component: str | None, found: list[ObjectSpec]) -> None:
        kind = entry_kind(node, ("name", "resource", "for", "when", "component"), _ENTRY_KEYS, "an object")
        if kind == "name":
            found.append(self._tensor(node, scope, component))
        elif kind == "resource":
            found.append(self._resource(node, scope, component))
        elif kind == "component":
            self._component(node, scope, component, found)
        else:
            for block in self._blocks.read(node, kind, "objects", scope):
                self._entries(block.body, block.scope, component, found)
                self._expressions.check_unused(block.scope)

    def _component(self, node: Node, scope: Scope, outer: str | None, found: list[ObjectSpec]) -> None:
        members = read_members(
            node, "a component", ("component", "objects"), ("optional", "values"), self._problems
        )
        if members is None:
            raise ReportedError(node.mark)
        if outer is not None:
            raise PlacedError(node.mark, f"a component stands inside component {quoted(outer)}")
        name = scope.text(members["component"], "the name of a component")
        optional = "optional" in members and read_boolean(members["optional"])
        if self.optional.setdefault(name, optional) != optional:
            self._problems.add(node.mark, f"component {quoted(name)} is optional in one place and not in another")
        block: Block = self._blocks.plain(node.mark, members, "objects", scope)
        self._entries(block.body, block.scope, name, found)
        self._expressions.check_unused(block.scope)

    def _tensor(self, node: Node, scope: Scope, component: str | None) -> TensorSpec:
        attempt = self._problems.attempt
        members = read_members(node, "a tensor", ("name", "shape", "format"), _TENSOR_KEYS, self._problems)
        if members is None:
            raise ReportedError(node.mark)
        name = attempt(scope.text, members["name"], "the name of an object")
        shape = read_shape(members["shape"], scope, self._problems)
        numeric = attempt(read_choice, members["format"], FORMATS, "format")
        encoder = self.choice(members, "encoder", ENCODERS)
        layout = self.choice(members, "layout", LAYOUTS)
        value = attempt(self.value, members, scope)
        require = attempt(self.requirements, members["require"], scope) if "require" in members else ()
        if value is None and "value" not in members and "words" not in members:
            self._problems.add(node.mark, "a tensor needs 'value' or 'words'")
        if name is None or shape is None or numeric is None or encoder is None or layout is None:
            raise ReportedError(node.mark)
        if value is None or require is None:
            raise ReportedError(node.mark)
        draft = TensorDraft(node.mark, members, shape, numeric, encoder, layout, value, "words" in members)
        return dataclasses.replace(self.finished(draft, name, require, component), rounds=scope.rounds)

    def choice(self, members: Mapping[str, Node], key: str, choices: Collection[str]) -> str | None:
        """Returns the member if it is one of the choices, "" if it is not written, None if it is wrong."""
        if key not in members:
            return ""
        return self._problems.attempt(read_choice, members[key], choices, key)

    def value(self, members: Mapping[str, Node], scope: Scope) -> Expression | None:
        """Returns the expression under `value` or `words`; None if there is none, or none that is right."""
        if "value" in members and "words" in members:
            raise PlacedError(members["words"].mark, "an object has 'value' or 'words', not both")
        if "words" in members:
            return self._expressions.read(members["words"], scope, "words")
        return self._expressions.read(members["value"], scope, "value") if "value" in members else None

    def finished(
        self,
        draft: TensorDraft,
        name: str,
        require: tuple[Requirement, ...],
        component: str | None,
        about: str = "",
    ) -> TensorSpec:
        """Returns the tensor if its fields go together; messages begin with `about`.

        Raises:
            ReportedError: they do not; every reason has been noted.
        """
        reasons = [*_copy_reasons(draft), *_encoder_reasons(draft), *_layout_reasons(draft)]
        for key, reason in reasons:
            self._problems.add(draft.nodes[key].mark if key in draft.nodes else draft.mark, about + reason)
        if reasons:
            raise ReportedError(draft.mark)
        return TensorSpec(
            name=name,
            shape=draft.shape,
            format=draft.format,
            layout=LAYOUT_OF_FORMAT[draft.format],
            encoder=draft.encoder or None,
            value=draft.value,
            words=draft.words,
            requirements=require,
            component=component,
            mark=draft.mark,
        )

    def requirements(self, node: Node, scope: Scope) -> tuple[Requirement, ...] | None:
        """Returns the rules under `require`; None if one of them is wrong."""
        found: list[Requirement | None] = []
        rules: set[str] = set()
        for item in read_filled_list(node, "a list of rules"):
            requirement = self._problems.attempt(self._requirement, item, scope)
            if requirement is not None and requirement.rule in rules:
                self._problems.add(item.mark, f"rule {requirement.rule} is given twice")
            elif requirement is not None:
                rules.add(requirement.rule)
            found.append(requirement)
        present = tuple(requirement for requirement in found if requirement is not None)
        return present if len(present) == len(found) else None

    def _requirement(self, node: Node, scope: Scope) -> Requirement:
        if isinstance(node, ScalarNode):
            rule = read_choice(node, RULES, "rule")
            if rule == "range":
                raise PlacedError(node.mark, "rule range needs its bounds: {range: [low, high]}")
            return Requirement(rule, None, None, node.mark)
        members = read_members(node, "a rule", ("range",), (), self._problems)
        if members is None:
            raise ReportedError(node.mark)
        items = read_list(members["range"], "the bounds [low, high], both included")
        if len(items) != 2:
            raise PlacedError(members["range"].mark, f"expected the bounds [low, high], found {len(items)} items")
        low, high = (self._problems.attempt(scope.number, item) for item in items)
        if low is None or high is None:
            raise ReportedError(node.mark)
        if low > high:
            raise PlacedError(members["range"].mark, f"the range from {low} to {high} is empty")
        return Requirement("range", low, high, node.mark)

    def _resource(self, node: Node, scope: Scope, component: str | None) -> ResourceSpec:
        members = read_members(node, "a resource", ("resource",), _RESOURCE_KEYS[1:], self._problems)
        if members is None:
            raise ReportedError(node.mark)
        name = self._problems.attempt(scope.text, members["resource"], "the name of a resource")
        origins = self.origins(node, members, scope)
        sha256 = self.digest(members)
        if name is None:
            raise ReportedError(node.mark)
        return ResourceSpec(name, origins, sha256, component, node.mark, scope.rounds)

    def digest(self, members: Mapping[str, Node]) -> str | None:
        """Returns the SHA-256 that is written, if there is one."""
        return read_hex(members["sha256"], 64, "a SHA-256") if "sha256" in members else None

    def origins(self, node: Node, members: Mapping[str, Node], scope: Scope) -> tuple[ResourceOrigin, ...]:
        """Returns where a resource may come from: the alternatives under `any`, or the one written in place."""
        if "any" not in members:
            return (self._origin(node, members, scope),)
        if extra := [key for key in _ORIGIN_KEYS if key in members]:
            raise PlacedError(members[extra[0]].mark, f"{quoted(extra[0])} cannot stand beside 'any'; move it inside")
        items = read_filled_list(members["any"], "a list of places")
        found = [self._problems.attempt(self._alternative, item, scope) for item in items]
        present = tuple(origin for origin in found if origin is not None)
        if len(present) != len(found):
            raise ReportedError(node.mark)
        return present

    def _alternative(self, node: Node, scope: Scope) -> ResourceOrigin:
        members = read_members(node, "a place of a resource", (), _ORIGIN_KEYS, self._problems)
        return self._origin(node, members or {}, scope)

    def _origin(self, node: Node, members: Mapping[str, Node], scope: Scope) -> ResourceOrigin:
        attempt = self._problems.attempt
        if not ("file" in members or "input" in members) and not members.keys() <= set(_RESOURCE_KEYS):
            raise ReportedError(node.mark)
        if ("file" in members) == ("input" in members):
            raise PlacedError(node.mark, "a resource needs exactly one of 'file', 'input' and 'any'")
        member = attempt(scope.text, members["member"], "the name of a JSON member") if "member" in members else ""
        if "input" in members:
            if "source" in members:
                raise PlacedError(members["source"].mark, "'source' goes with 'file'; an input belongs to no source")
            name = attempt(self._expressions.input, members["input"], scope)
            if name is None or member is None:
                raise ReportedError(node.mark)
            return ResourceOrigin(self._expressions.default_source(node.mark), None, name, member or None, node.mark)
        file = attempt(read_file, members["file"], scope)
        if "source" in members:
            source = attempt(self._expressions.source, members["source"], scope)
        else:
            source = self._expressions.default_source(node.mark)
        if file is None or source is None or member is None:
            raise ReportedError(node.mark)
        return ResourceOrigin(source, file, None, member or None, node.mark)


def _copy_reasons(draft: TensorDraft) -> list[tuple[str, str]]:
    if draft.words and draft.format not in WORD_FORMATS:
        legal = " or ".join(WORD_FORMATS)
        return [("words", f"format {draft.format} has no words to copy (only {legal}); write 'value'")]
    if not draft.words and draft.format == "NVFP4":
        return [("value", "NVFP4 is copied from a source module and no encoder makes it; write 'words'")]
    return []


def _encoder_reasons(draft: TensorDraft) -> list[tuple[str, str]]:
    encoders = FORMATS[draft.format].encoders
    if draft.words:
        return [("encoder", "words are copied and not encoded; remove 'encoder'")] if draft.encoder else []
    if not encoders:
        return [("encoder", f"format {draft.format} has no encoder; remove it")] if draft.encoder else []
    if not draft.encoder:
        return [("format", f"format {draft.format} needs its encoder written out; add 'encoder: {encoders[0]}'")]
    if draft.encoder not in encoders:
        return [("encoder", f"{draft.encoder} does not make {draft.format}; its encoder is {encoders[0]}")]
    return []


def _layout_reasons(draft: TensorDraft) -> list[tuple[str, str]]:
    layout = LAYOUT_OF_FORMAT[draft.format]
    if draft.layout not in ("", layout):
        return [("layout", f"format {draft.format} is not stored as {draft.layout}; its layout is {layout}")]
    try:
        geometry(FORMATS[draft.format], draft.shape)
    except LayoutError as error:
        return [("shape", str(error))]
    return []

