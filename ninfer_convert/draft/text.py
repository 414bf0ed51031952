"""The text of a draft: scalars of YAML, entries of `objects` and `ignore`, loops around them.

Owns how a recipe is written. Refuses to know what is worth writing.

Source: recipe.md, "Sketch".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer_convert.draft.choices import Object
from ninfer_convert.draft.folding import Block, Leaf, Loop, Node, Parts, split
from ninfer_convert.draft.naming import Names
from ninfer_convert.draft.sets import Sets, skeleton
from ninfer_convert.recipe.yaml_nodes import yaml_reading

WIDTH = 118

MAX_GLOB = 300
"""Characters of a name that a glob spells out."""

_PLAIN = re.compile(r"[A-Za-z_](?:[A-Za-z0-9_./-]|<[a-z][A-Za-z0-9_]*>)*")
_WILD = re.compile(r"[*?[]")
_HEX = re.compile("[0-9a-f]{40,64}")


def scalar(value: Any) -> str:
    """Returns a text, number, boolean, None, or list of these as YAML of one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(scalar, value))}]"
    if isinstance(value, str) and (_PLAIN.fullmatch(value) or _HEX.fullmatch(value)) and yaml_reading(value) is None:
        return value
    return json.dumps(value, ensure_ascii=False)


def comment(text: str, indent: int) -> list[str]:
    """Returns a comment, wrapped at the width of the page."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            if line and indent + 2 + len(line) + 1 + len(word) > WIDTH:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
    return [f"{' ' * indent}# {line}".rstrip() for line in lines]


def glob_parts(name: str) -> Parts:
    """Returns the parts of a glob that matches a name and, if a recipe can write all of it, nothing else."""
    escaped = _WILD.sub(r"[\g<0>]", name[:MAX_GLOB])
    glob = "".join("?" if letter in "<>" or not letter.isprintable() else letter for letter in escaped)
    if len(name) > MAX_GLOB:
        glob += "*"
    return split(glob)


@dataclass(frozen=True, slots=True)
class _Round:
    """Where an entry stands: the names of the loops around it, and its indent."""

    path: Parts = ()
    variables: tuple[str, ...] = ()
    indent: int = 2

    def deeper(self) -> _Round:
        return _Round(self.path, self.variables, self.indent + 4)


@dataclass(slots=True)
class Writer:
    """Writes trees of entries as lines.

    `default` is the source of a name that is written without one; `body` is the key of the list in a loop.
    """

    names: Names
    sets: Sets
    default: str
    body: str = "objects"
    _last: str = field(default="", init=False)

    def lines(self, nodes: Sequence[Node], *, indent: int = 2) -> list[str]:
        """Returns the entries of a list."""
        self._last = ""
        return self._nodes(nodes, _Round(indent=indent))

    def _nodes(self, nodes: Sequence[Node], place: _Round) -> list[str]:
        lines: list[str] = []
        for node in nodes:
            if isinstance(node, Loop):
                lines += self._loop(node, place)
            else:
                lines += self._leaf(node, place)
        return lines

    def _loop(self, loop: Loop, place: _Round) -> list[str]:
        path = (*place.path, *loop.path)
        key = skeleton(_plain(path))
        name = self.sets.stack(key, loop.members, _hints(loop, loop.blocks[0]))
        variable = self.sets.variable(key, place.variables)
        inner = _Round((*path, f"<{variable}>"), (*place.variables, variable), place.indent + 4)
        lines = [f"{' ' * place.indent}- for: {{{variable}: {name}}}", f"{' ' * place.indent}  {self.body}:"]
        for block in loop.blocks:
            self._last = ""
            if block.members == loop.members:
                lines += self._nodes(block.nodes, inner)
                continue
            part = self.sets.part(key, block.members, _hints(loop, block))
            lines += [f"{' ' * inner.indent}- when: {{{variable}: {part}}}", f"{' ' * inner.indent}  {self.body}:"]
            lines += self._nodes(block.nodes, inner.deeper())
        self._last = ""
        return lines

    def _leaf(self, leaf: Leaf, place: _Round) -> list[str]:
        path = (*place.path, *leaf.path)
        if not isinstance(leaf.thing, Object):
            return [f"{' ' * place.indent}- {scalar('.'.join(path))}"]
        made, lines = leaf.thing, []
        if made.comment and made.comment != self._last:
            lines = comment(f"{made.comment[0].upper()}{made.comment[1:]}.", place.indent)
        self._last = made.comment
        return lines + _entry(self.names.of(path, made), made, self._tensor(path, made), place.indent)

    def _tensor(self, path: Parts, made: Object) -> str:
        name = ".".join(path)
        if made.source != self.default or ":" in name or name.startswith("$"):
            name = f"{made.source}:{name}"
        bare = name.partition(":")[2] if name.startswith(f"{made.source}:") else name
        is_plain = _PLAIN.fullmatch(bare) and yaml_reading(name) is None
        return name if is_plain else scalar(name)


def _entry(name: str, made: Object, tensor: str, indent: int) -> list[str]:
    """Returns an object on as few lines as the width of the page takes."""
    encoder = f", encoder: {made.numeric.encoders[0]}" if made.numeric.encoders and not made.is_copy else ""
    key = "words" if made.is_copy else "value"
    parts = [
        f"{{name: {scalar(name)}, shape: {list(made.shape)},",
        f"format: {made.numeric.name}{encoder},",
        f"{key}: {made.before}{tensor}{made.after}",
    ]
    if made.role == "divisor":
        parts[-1] += ","
        parts.append("require: [finite, positive]")
    parts[-1] += "}"
    lines = [f"{' ' * indent}- {parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) <= WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(f"{' ' * indent}   {part}")
    return lines


def _hints(loop: Loop, block: Block) -> list[str]:
    """Returns names for some members of a loop: by what only they have, else by how they have it."""
    node = block.nodes[0]
    parts = _told(node)
    every = [(held, other) for other in loop.blocks for held in other.nodes]
    holders = {member for held, other in every if held.path[:1] == node.path[:1] for member in other.members}
    hints = [parts[0]] if holders == set(block.members) else []
    whole = "_".join(parts)
    if all(other is block for held, other in every if _told(held) == parts):
        hints.append(whole)
    if isinstance(node, Leaf) and isinstance(node.thing, Object):
        hints.append(f"{whole}_{node.thing.numeric.name.partition('_')[0].lower()}")
    return [*hints, whole]


def _told(node: Node) -> list[str]:
    return [part for part in node.path if part != "weight"] or [*node.path] or ["self"]


def _plain(path: Parts) -> Parts:
    """Returns a path with its loop variables as indices."""
    return tuple("0" if part.startswith("<") and part.endswith(">") else part for part in path)
