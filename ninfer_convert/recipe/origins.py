"""Which lines of which files decided one object: its entry, the blocks around it, changes, and what those name.

Owns the way back from an object to the documents of its recipe. Refuses to know what an expression means.

Source: recipe.md, duties 3 and 7.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_convert.errors import printable
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.files import Document
from ninfer_convert.recipe.globs import Globs
from ninfer_convert.recipe.loader import is_lossy
from ninfer_convert.recipe.model import ObjectSpec, Recipe, TensorSpec
from ninfer_convert.recipe.problems import Problems
from ninfer_convert.recipe.sections import merged_section
from ninfer_convert.recipe.yaml_nodes import ListNode, MapNode, Node, ScalarNode

_PLACEHOLDER = re.compile("<([A-Za-z_][A-Za-z0-9_-]*)>")
_SHOWN = 100
"""Characters of a definition."""

_MOVED = "another repository: the SHA-256 of its files no longer holds"
_SAME_VALUE = ("value", "words")
_PLACE = ("file", "input", "source", "member", "any")


@dataclass(frozen=True, slots=True)
class Line:
    """One place that had a say.

    `role` is `declared`, `component`, `for`, `when`, `changed`, `moved`, `value`, `name`, `set`, `evidence` or
    `extends`; `text` is what is written there, shortened.
    """

    role: str
    mark: Mark
    text: str


class Origins:
    """Finds the lines behind the objects of one recipe, given the documents it was read from, the base first."""

    def __init__(self, recipe: Recipe, chain: Sequence[Document]) -> None:
        self._recipe = recipe
        self._chain = chain
        self._names = merged_section(chain, "names", "placeholder", Problems())
        self._sets = merged_section(chain, "sets", "set", Problems())
        self._values = merged_section(chain, "values", "value", Problems())
        self._globs = Globs()

    def lines(self, spec: ObjectSpec) -> list[Line]:
        """Returns every line that decided an object: blocks from the outside in, then the entry, then the rest."""
        document = next(one for one in self._chain if printable(one.path) == spec.mark.file)
        blocks, entry = self._path(document, spec)
        found = [_block_line(block, dict(step.loop)) for block, step in zip(blocks, spec.rounds, strict=True)]
        found.append(Line("declared", spec.mark, _flow(entry)))
        decisive = dict(entry.members)
        for mark in spec.changes:
            change = self._change(mark)
            found.append(Line("moved", mark, _MOVED) if change is None else Line("changed", mark, _flow(change)))
            decisive = _overlaid(decisive, change.members if change is not None else {})
        loops = {variable for step in spec.rounds for variable in step.loop}
        found += dict.fromkeys(self._uses(decisive, blocks, loops))
        found += self._evidence(spec)
        found += [
            Line("extends", document.sections["extends"].mark, _flow(document.sections["extends"]))
            for document in reversed(self._chain)
            if "extends" in document.sections
        ]
        return found

    def _path(self, document: Document, spec: ObjectSpec) -> tuple[list[MapNode], MapNode]:
        """Returns the blocks around an entry, and the entry."""
        blocks: list[MapNode] = []
        entries: Node = document.sections["objects"]
        for step in spec.rounds:
            blocks.append(_at(entries, step.mark))
            entries = blocks[-1].members["objects"]
        return blocks, _at(entries, spec.mark)

    def _change(self, mark: Mark) -> MapNode | None:
        """Returns the change at a place; None where a source that moved stands there."""
        for document in self._chain:
            changes = document.sections.get("change")
            for entry in changes.items if isinstance(changes, ListNode) else ():
                if entry.mark == mark and isinstance(entry, MapNode):
                    return entry
        return None

    def _evidence(self, spec: ObjectSpec) -> Iterator[Line]:
        if not (isinstance(spec, TensorSpec) and is_lossy(spec)):
            return
        for entry in self._recipe.evidence:
            if any(self._globs.matching(glob, {spec.name}) for glob, _ in entry.objects):
                yield Line("evidence", entry.mark, _short(entry.text))

    # -- definitions ----------------------------------------------------------------------------------------

    def _uses(self, members: Mapping[str, Node], blocks: Sequence[MapNode], loops: set[str]) -> Iterator[Line]:
        for block in blocks:
            for kind in ("for", "when"):
                picks = block.members.get(kind)
                for node in picks.members.values() if isinstance(picks, MapNode) else ():
                    yield from self._set_lines(node)
        for key, node in members.items():
            is_value = key in _SAME_VALUE
            yield from self._node_lines(node, blocks, loops) if is_value else self._name_lines(node, loops)

    def _node_lines(self, node: Node, blocks: Sequence[MapNode], loops: set[str]) -> Iterator[Line]:
        """Yields the named values and names that an expression uses, those they use included."""
        yield from self._name_lines(node, loops)
        for scalar in _scalars(node):
            if scalar.plain and scalar.text.startswith("$"):
                defined, around = self._value(scalar.text[1:], blocks)
                if defined is not None:
                    yield Line("value", defined.mark, f"{scalar.text}: {_flow(defined)}")
                    yield from self._node_lines(defined, around, loops)

    def _value(self, name: str, blocks: Sequence[MapNode]) -> tuple[Node | None, Sequence[MapNode]]:
        """Returns a named value, the innermost one, and the blocks around its definition."""
        for depth in range(len(blocks), 0, -1):
            values = blocks[depth - 1].members.get("values")
            if isinstance(values, MapNode) and name in values.members:
                return values.members[name], blocks[:depth]
        return self._values.get(name), ()

    def _name_lines(self, node: Node, loops: set[str]) -> Iterator[Line]:
        for scalar in _scalars(node):
            for name in _PLACEHOLDER.findall(scalar.text):
                defined = self._names.get(name)
                if defined is not None and name not in loops:
                    yield Line("name", defined.mark, f"<{name}>: {_flow(defined)}")
                    yield from self._name_lines(defined, loops)

    def _set_lines(self, node: Node) -> Iterator[Line]:
        yield from self._name_lines(node, set())
        for scalar in _scalars(node):
            defined = self._sets.get(scalar.text)
            if defined is not None:
                yield Line("set", defined.mark, f"{scalar.text}: {_flow(defined)}")
                yield from self._set_lines(defined)


def _at(entries: Node, mark: Mark) -> MapNode:
    items = entries.items if isinstance(entries, ListNode) else ()
    return next(item for item in items if item.mark == mark and isinstance(item, MapNode))


def _block_line(block: MapNode, loop: Mapping[str, int]) -> Line:
    role = next(kind for kind in ("component", "for", "when") if kind in block.members)
    chosen = "".join(f", {variable} = {index}" for variable, index in loop.items())
    return Line(role, block.mark, f"{_flow(block.members[role])}{chosen}")


def _overlaid(members: Mapping[str, Node], change: Mapping[str, Node]) -> dict[str, Node]:
    """Returns the members of an entry as a change leaves them: another value or place replaces the whole of it."""
    replaced = {key for group in (_SAME_VALUE, _PLACE) if any(key in change for key in group) for key in group}
    return {key: node for key, node in members.items() if key not in replaced} | {
        key: node for key, node in change.items() if key not in ("objects", "resource")
    }


def _scalars(node: Node) -> Iterator[ScalarNode]:
    if isinstance(node, ScalarNode):
        yield node
    else:
        for part in node.items if isinstance(node, ListNode) else node.members.values():
            yield from _scalars(part)


def _flow(node: Node) -> str:
    return _short(_written(node))


def _written(node: Node) -> str:
    """Returns a node about as it is written, on one line."""
    if isinstance(node, ScalarNode):
        return node.text
    if isinstance(node, ListNode):
        return f"[{', '.join(map(_written, node.items))}]"
    return "{" + ", ".join(f"{key}: {_written(value)}" for key, value in node.members.items()) + "}"


def _short(text: str) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def line_json(line: Line) -> dict[str, Any]:
    """Returns a line as a JSON value."""
    mark = line.mark
    return {"role": line.role, "file": mark.file, "line": mark.line, "column": mark.column, "text": line.text}
