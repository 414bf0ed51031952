"""The index sets of a draft: a name and a definition for every set of layers that something is said of.

Source: recipe.md, duty 3.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from ninfer_convert.draft.folding import Loop, Node, Parts, is_index
from ninfer_convert.recipe.yaml_nodes import yaml_reading

Members = tuple[int, ...]

MAX_LISTED = 4
"""Members that are as easily read as the name of another set."""

_PLURALS = {"h": "layers", "layer": "layers", "block": "blocks", "expert": "experts"}
_WORD = re.compile("[^A-Za-z0-9_]+")


class Sets:
    """Names of stacks and of parts of them; each is defined once and in the order it was first asked for."""

    def __init__(self, trees: Iterable[Sequence[Node]], prefix: str = "") -> None:
        self._prefix = prefix
        stacks: dict[Parts, None] = {}
        for tree in trees:
            _stacks(tree, (), stacks)
        self._stacks = _distinct(list(stacks))
        self._names: dict[tuple[Parts, Members], str] = {}
        self._wholes: dict[Parts, Members] = {}

    def stack(self, path: Parts, members: Members, hints: Sequence[str]) -> str:
        """Returns the name of the members of a stack, given by the parts of its name with `#` for indices.

        What is met first is the whole; less or more of it, elsewhere, is named like a part.
        """
        whole = self._wholes.setdefault(path, members)
        return self._named(path, members, [self._stacks[path]]) if members == whole else self.part(path, members, hints)

    def part(self, path: Parts, members: Members, hints: Sequence[str]) -> str:
        """Returns the name of some members of a stack: the first hint that is not another set's."""
        stack = self._stacks[path]
        return self._named(path, members, [f"{stack}_{hint}" for hint in hints])

    def variable(self, path: Parts, taken: Iterable[str]) -> str:
        """Returns a loop variable that is none of those of the loops around it."""
        word = self._stacks[path].rpartition("_")[2]
        word = word if _is_identifier(word) else "i"
        choices = [word[0].lower(), word, *(f"{word}{number}" for number in range(2, 100))]
        return next(choice for choice in choices if choice not in taken and _is_identifier(choice))

    def lines(self) -> list[str]:
        """Returns the definitions, one on a line."""
        texts: dict[tuple[Parts, Members], str] = {}
        for key in self._names:
            if (text := _direct(key[1])) or self._wholes[key[0]] == key[1]:
                texts[key] = text or str(list(key[1]))
        # A set refers to sets that are defined without it, so that none is made of itself.
        for key in self._names:
            if key not in texts:
                texts[key] = self._difference(*key, texts)
        return [f"  {name}: {texts[key]}" for key, name in self._names.items()]

    def _named(self, path: Parts, members: Members, hints: Sequence[str]) -> str:
        if (path, members) not in self._names:
            words = [self._prefix + _identifier(hint) for hint in hints]
            words += [f"{words[-1]}_{number}" for number in range(2, len(self._names) + 3)]
            known = set(self._names.values())
            self._names[path, members] = next(word for word in words if word not in known)
        return self._names[path, members]

    def _difference(self, path: Parts, members: Members, known: Collection[tuple[Parts, Members]]) -> str:
        """Returns the shortest definition as a set without another one; the list of members where that is shorter."""
        best, shortest = str(list(members)), len(members)
        for owner, whole in [key for key in known if key[0] == path and set(members) < set(key[1])]:
            others = tuple(member for member in whole if member not in members)
            excepted = self._names.get((owner, others)) if (owner, others) in known else _direct(others)
            cost = 1 if excepted else len(others)
            if cost < shortest:
                best = f"{{all: {self._names[owner, whole]}, except: {excepted or list(others)}}}"
                shortest = cost
        return best


def _direct(members: Members) -> str:
    """Returns the definition of a set that needs no other one: a few members, or integers in equal steps."""
    return _progression(members) or (str(list(members)) if len(members) <= MAX_LISTED else "")


def _progression(members: Members) -> str:
    """Returns the definition of at least three integers in equal steps; nothing for others."""
    if len(members) < 3:
        return ""
    step = members[1] - members[0]
    if any(after - before != step for before, after in pairwise(members)):
        return ""
    text = f"from: {members[0]}, through: {members[-1]}"
    return "{" + (text if step == 1 else f"{text}, step: {step}") + "}"


def _stacks(nodes: Sequence[Node], prefix: Parts, found: dict[Parts, None]) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            path = skeleton((*prefix, *node.path))
            found.setdefault(path)
            for block in node.blocks:
                _stacks(block.nodes, (*path, "#"), found)


def skeleton(path: Parts) -> Parts:
    """Returns the parts of a name with its indices taken out."""
    return tuple("#" if is_index(part) else part for part in path)


def _distinct(paths: Sequence[Parts]) -> dict[Parts, str]:
    """Returns a name for every stack: its last part, with the parts before it where others end alike."""
    words = {path: [part for part in path if part != "#"] or ["items"] for path in paths}
    names: dict[Parts, str] = {}
    for depth in range(1, 64):
        proposed = {path: _name(words[path], depth) for path in paths}
        count: dict[str, int] = {}
        for name in proposed.values():
            count[name] = count.get(name, 0) + 1
        for path, name in proposed.items():
            if path not in names and count[name] == 1 and name not in names.values():
                names[path] = name
    for number, path in enumerate(path for path in paths if path not in names):
        names[path] = f"stack_{number}"
    return names


def _name(words: Sequence[str], depth: int) -> str:
    last = _PLURALS.get(words[-1], words[-1])
    return _identifier("_".join([*words[max(0, len(words) - depth) : -1], last]))


def _identifier(text: str) -> str:
    word = _WORD.sub("_", text).strip("_")[:80]
    return word if _is_identifier(word) else f"set_{word}"


def _is_identifier(word: str) -> bool:
    """Tells whether a word names a set or a variable, and is nothing else to YAML, such as `no` or `null`."""
    return word[:1].isalpha() and yaml_reading(word) is None
