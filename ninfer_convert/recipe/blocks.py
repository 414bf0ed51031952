"""Blocks of a recipe: `for` repeats, `when` picks, both may hold named values.

Owns unrolling and its limit. Refuses to know what a block holds (`recipe_sections`, `recipe_objects`,
`recipe_loader`).

Source: recipe.md, duty 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.problems import PlacedError, Problems, ReportedError, quoted, suggestion
from ninfer_convert.recipe.scalars import IDENTIFIER, read_map, read_members, read_named
from ninfer_convert.recipe.scope import IndexSets, Scope
from ninfer_convert.recipe.yaml_nodes import ListNode, MapNode, Node

MAX_ENTRIES = 100_000
"""Entries, named values and blocks of a recipe, loops unrolled."""


class Block(NamedTuple):
    """One round of a block: the list it holds, and the scope to read it in."""

    body: Node
    scope: Scope


class BlockReader:
    """Reads the blocks of one recipe; every problem is noted."""

    def __init__(self, sets: IndexSets, problems: Problems) -> None:
        self._sets = sets
        self._problems = problems
        self._members: dict[Node, frozenset[int]] = {}
        self._held: dict[MapNode, bool] = {}
        self._failed: set[MapNode] = set()

    def count(self, node: Node, body: str) -> int:
        """Returns how many entries a list of entries has at most, loops unrolled; 1 for what is no list."""
        if not isinstance(node, ListNode):
            return 1
        return 1 + sum(self._count_entry(entry, body) for entry in node.items)

    def _count_entry(self, entry: Node, body: str) -> int:
        if not isinstance(entry, MapNode):
            return 1
        values = entry.members.get("values")
        inside = 1 + (len(values.members) if isinstance(values, MapNode) else 0)
        if body in entry.members:
            inside += self.count(entry.members[body], body)
        loops = entry.members.get("for")
        if isinstance(loops, MapNode):
            return inside * math.prod(len(self._sets.read(node) or ()) or 1 for node in loops.members.values())
        return inside

    def read(
        self, node: Node, kind: str, body: str, scope: Scope, optional: Sequence[str] = ("values",)
    ) -> Iterator[Block]:
        """Yields the rounds of a `for` block, or the one round of a `when` block that holds."""
        members = read_members(node, f"a {quoted(kind)} block", (kind, body), optional, self._problems)
        if members is None:
            return
        picks = read_map(members[kind], "loop variables, each with a set")
        if not picks.members:
            raise PlacedError(picks.mark, f"{quoted(kind)} names no variable")
        if kind == "when":
            if self._holds(picks, scope):
                yield self.plain(node.mark, members, body, scope)
            return
        sets = [self._loop(picks, variable, scope) for variable in picks.members]
        if any(indices is None for indices in sets):
            return
        for chosen in itertools.product(*(indices for indices in sets if indices is not None)):
            self._problems.next_turn()
            yield self.plain(node.mark, members, body, scope, dict(zip(picks.members, chosen, strict=True)))

    def plain(
        self, mark: Mark, members: Mapping[str, Node], body: str, scope: Scope, loop: Mapping[str, int] | None = None
    ) -> Block:
        """Returns one round of a block at `mark` whose members have been read."""
        values: Mapping[str, Node] = {}
        if "values" in members:
            values = self._problems.attempt(read_named, members["values"], "value", self._problems) or {}
        return Block(members[body], scope.inner(loop or {}, values, mark))

    def check_conditions(self) -> None:
        """Notes the `when` blocks that were met and never held."""
        for picks, held in self._held.items():
            if not held:
                self._problems.add(picks.mark, "'when' never holds: no round of the loops around it is in its sets")

    def always_true(self) -> list[Mark]:
        """Returns the places of the `when` conditions that were met and held in every round."""
        return [picks.mark for picks in self._held if picks not in self._failed]

    def _loop(self, picks: MapNode, variable: str, scope: Scope) -> tuple[int, ...] | None:
        if not self._problems.attempt(_is_new, picks.keys[variable].mark, variable, scope):
            return None
        return self._sets.read(picks.members[variable])

    def _holds(self, picks: MapNode, scope: Scope) -> bool:
        holds = True
        for variable, node in picks.members.items():
            if variable not in scope.loops:
                hint = suggestion(variable, sorted(scope.loops)) if scope.loops else "; no loop is around it"
                raise PlacedError(picks.keys[variable].mark, f"{quoted(variable)} is no loop variable here{hint}")
            if node not in self._members:
                indices = self._sets.read(node)
                if indices is None:
                    raise ReportedError(node.mark)
                self._members[node] = frozenset(indices)
            holds = holds and scope.variables[variable] in self._members[node]
        self._held[picks] = self._held.get(picks, False) or holds
        if not holds:
            self._failed.add(picks)
        return holds


def _is_new(mark: Mark, variable: str, scope: Scope) -> bool:
    if not IDENTIFIER.fullmatch(variable):
        raise PlacedError(mark, f"{quoted(variable)} cannot be a loop variable; use letters, digits, - and _")
    if variable in scope.variables:
        what = "a loop variable" if variable in scope.loops else "one of the names"
        raise PlacedError(mark, f"loop variable {quoted(variable)} is {what} already; choose another")
    return True
