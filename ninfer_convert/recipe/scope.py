"""What a name stands for at one place of a recipe: placeholders, loop variables, named values, index sets.

Owns lookup and substitution. Refuses to know expressions (`recipe_expressions`) and objects
(`recipe_objects`).

Source: recipe.md, duties 3 and 4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ninfer_convert.layout import MAX_RANK
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.model import Round
from ninfer_convert.recipe.problems import PlacedError, Problems, ReportedError, nearest, quoted, suggestion
from ninfer_convert.recipe.scalars import (
    read_integer,
    read_list,
    read_literal,
    read_members,
    read_number,
    read_scalar,
    read_text,
    require_text,
)
from ninfer_convert.recipe.yaml_nodes import ListNode, MapNode, Node, ScalarNode, yaml_reading

MAX_TEXT = 1024
"""Characters of one name after substitution; without a limit, names made of names grow exponentially."""

MAX_MEMBERS = 100_000
"""Members of all index sets of a recipe together, operands of set algebra counted too."""

_PLACEHOLDER = re.compile("<([A-Za-z_][A-Za-z0-9_-]*)>")


@dataclass(slots=True, eq=False)
class NamedValue:
    """One entry of a `values` mapping: read where it is first used, in the scope it was written in.

    `results` holds what each way of reading it gave.
    """

    node: Node
    scope: Scope
    results: dict[str, Any] = field(default_factory=dict)
    busy: bool = False


@dataclass(slots=True, eq=False)
class Scope:
    """Names, loop variables and named values that are visible in one block.

    `variables` holds names and loop variables together, None for a name whose definition is wrong; `loops`
    says which are loop variables. `templates` caches the split text of nodes that loops read again and again.
    `rounds` are the blocks around it, the outermost first.
    """

    variables: Mapping[str, str | int | None]
    loops: frozenset[str]
    parent: Scope | None
    templates: dict[ScalarNode, list[str]]
    values: dict[str, NamedValue] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()

    @staticmethod
    def outermost(variables: Mapping[str, str | int | None]) -> Scope:
        """Returns the scope of a whole recipe."""
        return Scope(variables, frozenset(), None, {})

    def inner(self, loop: Mapping[str, int], values: Mapping[str, Node], block: Mark | None = None) -> Scope:
        """Returns the scope of a block, which lies at `block`, with more loop variables and named values."""
        variables = {**self.variables, **loop} if loop else self.variables
        scope = Scope(variables, self.loops.union(loop), self, self.templates)
        scope.values = {name: NamedValue(node, scope) for name, node in values.items()}
        scope.rounds = self.rounds if block is None else (*self.rounds, Round(block, loop))
        return scope

    def value(self, name: str) -> NamedValue | None:
        """Returns the named value that is visible here, the innermost one."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        return None

    def value_names(self) -> list[str]:
        """Returns the names of every visible named value."""
        return [*self.values, *(self.parent.value_names() if self.parent is not None else ())]

    def text(self, node: Node, wanted: str = "text") -> str:
        """Returns text with its placeholders filled in: one line, not empty."""
        text = self.literal(node, wanted)
        if not text:
            raise PlacedError(node.mark, f"expected {wanted}, found empty text")
        return text

    def literal(self, node: Node, wanted: str = "text") -> str:
        """Returns text with its placeholders filled in; it may be empty if it is quoted."""
        parts = self.templates.get(node) if isinstance(node, ScalarNode) else None
        if parts is None:
            scalar = read_scalar(node, wanted)
            parts = self.templates[scalar] = _split(scalar, read_literal(scalar, wanted))
        return self._filled(node, parts)

    def integer(self, node: Node) -> int:
        """Returns a plain decimal, or the integer that a placeholder stands for."""
        if isinstance(node, ScalarNode) and (found := _PLACEHOLDER.fullmatch(node.text)):
            value = self._lookup(node, found[1])
            if not isinstance(value, int):
                raise PlacedError(node.mark, f"expected an integer, but <{found[1]}> is text")
            return value
        return read_integer(node)

    def number(self, node: Node) -> float:
        """Returns a finite number, or the integer that a placeholder stands for."""
        if isinstance(node, ScalarNode) and _PLACEHOLDER.fullmatch(node.text):
            return float(self.integer(node))
        return read_number(node)

    def free(self, scalar: ScalarNode) -> str | int:
        """Returns what a plain scalar of free-form YAML stands for: a lone placeholder keeps its type."""
        require_text(scalar)
        found = _PLACEHOLDER.fullmatch(scalar.text)
        return self._lookup(scalar, found[1]) if found else self._filled(scalar, _split(scalar, scalar.text))

    def _filled(self, node: Node, parts: list[str]) -> str:
        if len(parts) == 1:
            return parts[0]
        filled = list(parts)
        for i in range(1, len(parts), 2):
            filled[i] = str(self._lookup(node, parts[i]))
        text = "".join(filled)
        if len(text) > MAX_TEXT:
            raise PlacedError(node.mark, f"the text has more than {MAX_TEXT} characters, placeholders filled in")
        return text

    def _lookup(self, node: Node, name: str) -> str | int:
        if name not in self.variables:
            close = nearest(name, self.variables)
            known = ", ".join(f"<{known}>" for known in self.variables) if len(self.variables) <= 16 else ""
            hint = f"; nearest is <{close}>" if close else f"; known: {known}" if known else ""
            raise PlacedError(node.mark, f"placeholder <{name}> is not defined here{hint}")
        value = self.variables[name]
        if value is None:
            raise ReportedError(node.mark)
        return value


def _split(scalar: ScalarNode, text: str) -> list[str]:
    """Returns literal pieces and placeholder names in turn, a literal piece first and last."""
    if len(text) > MAX_TEXT:
        raise PlacedError(scalar.mark, f"the text has more than {MAX_TEXT} characters")
    parts = _PLACEHOLDER.split(text)
    if scalar.plain and any(character in piece for piece in parts[::2] for character in "<>"):
        raise PlacedError(
            scalar.mark, f"{quoted(text)} has a < or > that belongs to no placeholder <name>; quote it if it is meant"
        )
    return parts


def placeholders(text: str) -> list[str]:
    """Returns the names of the placeholders in a text."""
    return _PLACEHOLDER.findall(text)


def read_names(nodes: Mapping[str, Node], problems: Problems) -> dict[str, str | int | None]:
    """Returns the value of every name: an integer, or text that may use the names before it."""
    names: dict[str, str | int | None] = {}
    scope = Scope.outermost(names)
    for name, node in nodes.items():
        names[name] = problems.attempt(_read_name, node, scope, nodes)
    return names


def _read_name(node: Node, scope: Scope, nodes: Mapping[str, Node]) -> str | int:
    scalar = read_scalar(node, "text or an integer")
    for used in _PLACEHOLDER.findall(scalar.text):
        if used in nodes and used not in scope.variables:
            raise PlacedError(node.mark, f"<{used}> is defined further down; a name may use the names before it")
    found = _PLACEHOLDER.fullmatch(scalar.text)
    if found or (scalar.plain and yaml_reading(scalar.text) == "an integer"):
        return scope.free(scalar) if found else read_integer(scalar)
    return scope.literal(scalar, "text or an integer")


class IndexSets:
    """The named index sets of a recipe; members are non-negative, in ascending order."""

    def __init__(self, nodes: Mapping[str, Node], scope: Scope, problems: Problems) -> None:
        self._nodes = nodes
        self._scope = scope
        self._problems = problems
        self._named: dict[str, tuple[int, ...] | None] = {}
        self._inline: dict[Node, tuple[int, ...] | None] = {}
        self._busy: list[str] = []
        self._charged = 0
        for name in nodes:
            self._by_name(name)

    def read(self, node: Node) -> tuple[int, ...] | None:
        """Returns a set given by name or written in place; None if it is wrong, which has been noted."""
        if node not in self._inline:
            self._inline[node] = self._problems.attempt(self._read, node)
        return self._inline[node]

    def _by_name(self, name: str) -> tuple[int, ...] | None:
        if name not in self._named:
            self._busy.append(name)
            self._named[name] = self.read(self._nodes[name])
            self._busy.pop()
        return self._named[name]

    def _read(self, node: Node) -> tuple[int, ...] | None:
        if isinstance(node, ScalarNode):
            return self._reference(node)
        members = self._listed(node) if isinstance(node, ListNode) else self._computed(node)
        if members is not None and not members:
            raise PlacedError(node.mark, "the set is empty")
        return members

    def _reference(self, node: ScalarNode) -> tuple[int, ...] | None:
        if _is_integer(node):
            raise PlacedError(node.mark, f"expected a set, found {quoted(node.text)}; write [{node.text}]")
        name = read_text(node, "the name of a set, a list of integers, or a mapping")
        if name not in self._nodes:
            raise PlacedError(node.mark, f"unknown set {quoted(name)}{suggestion(name, self._nodes)}")
        if name in self._busy:
            chain = " -> ".join([*self._busy[self._busy.index(name) :], name])
            raise PlacedError(node.mark, f"the set is defined by itself: {chain}")
        if len(self._busy) > 64:
            raise PlacedError(node.mark, "sets refer to each other more than 64 deep")
        return self._by_name(name)

    def _charge(self, node: Node, count: int) -> None:
        self._charged += count
        if self._charged > MAX_MEMBERS:
            self._problems.stop(node.mark, f"the sets of the recipe have more than {MAX_MEMBERS} members together")

    def _listed(self, node: ListNode) -> tuple[int, ...] | None:
        self._charge(node, len(node.items))
        members: set[int] = set()
        complete = True
        for item in node.items:
            member = self._problems.attempt(self._member, item)
            if member in members:
                self._problems.add(item.mark, f"{member} is in the set twice")
            complete = complete and member is not None
            members.add(member or 0)
        return tuple(sorted(members)) if complete else None

    def _member(self, node: Node) -> int:
        member = self._scope.integer(node)
        if member < 0:
            raise PlacedError(node.mark, f"{member} is negative; members of a set are 0 or more")
        return member

    def _computed(self, node: MapNode) -> tuple[int, ...] | None:
        keys = ("from", "through") if "all" not in node.members and "except" not in node.members else ("all",)
        optional = ("step",) if keys[0] == "from" else ("except",)
        members = read_members(node, "a set", keys, optional, self._problems)
        if members is None:
            return None
        return self._range(members) if keys[0] == "from" else self._algebra(members)

    def _range(self, members: Mapping[str, Node]) -> tuple[int, ...] | None:
        begin = self._problems.attempt(self._member, members["from"])
        last = self._problems.attempt(self._member, members["through"])
        step = self._problems.attempt(self._scope.integer, members["step"]) if "step" in members else 1
        if begin is None or last is None or step is None:
            return None
        if begin > last:
            raise PlacedError(members["through"].mark, f"the set is empty: it begins at {begin} and ends at {last}")
        if step < 1:
            raise PlacedError(members["step"].mark, f"step is {step}; it must be 1 or more")
        self._charge(members["through"], (last - begin) // step + 1)
        return tuple(range(begin, last + 1, step))

    def _algebra(self, members: Mapping[str, Node]) -> tuple[int, ...] | None:
        union = self._union(members["all"])
        removed = self._union(members["except"]) if "except" in members else frozenset()
        if union is None or removed is None:
            return None
        if strangers := removed - union:
            listed = ", ".join(map(str, sorted(strangers)[:8])) + (", ..." if len(strangers) > 8 else "")
            raise PlacedError(members["except"].mark, f"'except' names what is not in 'all': {listed}")
        return tuple(sorted(union - removed))

    def _union(self, node: Node) -> frozenset[int] | None:
        """Reads one set, or a list whose items are integers, or sets that are united."""
        if not isinstance(node, ListNode) or all(_is_integer(item) for item in node.items):
            parts = [self.read(node)]
        else:
            parts = [self.read(item) for item in node.items]
        self._charge(node, sum(len(part) for part in parts if part))
        return None if None in parts else frozenset(member for part in parts if part for member in part)


def _is_integer(node: Node) -> bool:
    if not isinstance(node, ScalarNode):
        return False
    return bool(_PLACEHOLDER.fullmatch(node.text)) or (node.plain and yaml_reading(node.text) == "an integer")


def read_at_least(node: Node, scope: Scope, least: int) -> int:
    """Returns an integer that is not below least."""
    value = scope.integer(node)
    if value < least:
        raise PlacedError(node.mark, f"expected an integer that is {least} or more, found {value}")
    return value


def read_shape(node: Node, scope: Scope, problems: Problems) -> tuple[int, ...] | None:
    """Returns a list of positive integers; [] is the shape of a scalar."""
    items = problems.attempt(read_list, node, "a list of positive integers ([] is a scalar)")
    if items is None:
        return None
    found = [problems.attempt(read_at_least, item, scope, 1) for item in items]
    present = tuple(dimension for dimension in found if dimension is not None)
    if len(present) > MAX_RANK:
        problems.add(node.mark, f"the shape has rank {len(present)}; at most {MAX_RANK}")
        return None
    return present if len(present) == len(found) else None


def read_file(node: Node, scope: Scope) -> str:
    """Returns a relative path with `/` that stays inside its directory."""
    path = scope.text(node, "a file name")
    if "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise PlacedError(node.mark, f"{quoted(path)} is no plain path inside a checkpoint directory")
    return path

