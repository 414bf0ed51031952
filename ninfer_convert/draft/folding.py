"""Names to loops: entries whose names differ in one integer, and in nothing else, are told once.

Owns the search for repetition. Refuses to know what an entry becomes: it is compared, and nothing else.

Source: recipe.md, duty 3.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

Parts = tuple[str, ...]
"""The parts of a name, between its dots."""

Pair = tuple[Parts, Hashable]
"""A name, and what becomes of it."""

MAX_PARTS = 24
"""Parts that a name is split into; what is behind them stays together. Loops are no deeper than this either."""

MAX_DISTINCT = 2 / 3
"""A stack is a loop when it has at most so many distinct entries for each entry that it holds."""

_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_DIGITS = re.compile("([0-9]+)")

_FIRST = re.compile("(?:.*_)?(?:embed|embeddings?|embed_tokens|wte|wpe|shared|stem)(?:_.*)?|weight")
_BEFORE = re.compile("input_global_scale|input_scale")
"""They stand beside the words of their module, which has no part for its weight."""

_LAST = re.compile("(?:.*_)?(?:head|classifier|score|proj_out|decode_head)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One entry; `path` begins behind the index of the loop around it."""

    path: Parts
    thing: Hashable


@dataclass(frozen=True, slots=True)
class Block:
    """Nodes that are there for exactly these members of the loop around them."""

    members: tuple[int, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """Entries named `path`, an integer, and more; `blocks` are in order, each for some of the members."""

    path: Parts
    members: tuple[int, ...]
    blocks: tuple[Block, ...]


Node = Leaf | Loop


def split(name: str) -> Parts:
    """Returns the parts of a name; joined by dots they are the name again."""
    return tuple(name.split(".", MAX_PARTS - 1))


def fold(pairs: Iterable[Pair]) -> tuple[Node, ...]:
    """Returns entries as leaves and loops, in an order that depends on the names alone.

    Args:
        pairs: names, each only once, with what becomes of them.
    """
    return tuple(_fold(list(pairs)))


def is_index(part: str) -> bool:
    """Tells whether a part of a name is an integer that a loop can write: without leading zeros, not huge."""
    return _INDEX.fullmatch(part) is not None


def order(path: Sequence[str]) -> tuple[object, ...]:
    """Returns the key that puts names in the order of a recipe: embeddings and
    weights first, heads last, integers by value."""
    return tuple((_rank(part), _natural(part)) for part in path)


def _rank(part: str) -> int:
    if _BEFORE.fullmatch(part):
        return 0
    return 1 if _FIRST.fullmatch(part) else 3 if _LAST.fullmatch(part) else 2


def _natural(part: str) -> tuple[object, ...]:
    pieces: list[object] = [*_DIGITS.split(part)]
    pieces[1::2] = [(int(digits[:18]), len(digits), digits) for digits in _DIGITS.findall(part)]
    return tuple(pieces)


def _fold(pairs: Sequence[Pair]) -> list[Node]:
    groups: dict[str, list[Pair]] = {}
    nodes: list[Node] = []
    for path, thing in pairs:
        if path:
            groups.setdefault(path[0], []).append((path[1:], thing))
        else:
            nodes.append(Leaf((), thing))
    # Each group is folded once, whether or not it becomes part of a loop: groups lie within groups.
    folded = {part: _fold(group) for part, group in groups.items()}
    stack = sorted((part for part in groups if is_index(part)), key=int)
    indices = set(stack)
    loop = _loop({int(part): folded[part] for part in stack}) if len(stack) > 1 else None
    for part in sorted(groups, key=lambda part: order([part])):
        if loop is None or part not in indices:
            nodes += [dataclasses.replace(node, path=(part, *node.path)) for node in folded[part]]
        elif part == stack[0]:
            nodes.append(loop)
    return nodes


def _loop(members: Mapping[int, Sequence[Node]]) -> Loop | None:
    """Returns the loop over a stack; None when its members have too little in common."""
    holders: dict[Node, list[int]] = {}
    for index, nodes in members.items():
        for node in nodes:
            holders.setdefault(node, []).append(index)
    if len(holders) > MAX_DISTINCT * sum(map(len, holders.values())):
        return None
    ordered = sorted(holders, key=lambda node: (order(node.path), isinstance(node, Loop), holders[node]))
    blocks: list[Block] = []
    for _, group in groupby(ordered, key=lambda node: node.path[:1]):
        together: dict[tuple[int, ...], list[Node]] = {}
        for node in group:
            together.setdefault(tuple(holders[node]), []).append(node)
        for held, alike in together.items():
            if blocks and blocks[-1].members == held:
                blocks[-1] = Block(held, (*blocks[-1].nodes, *alike))
            else:
                blocks.append(Block(held, tuple(alike)))
    return Loop((), tuple(members), tuple(blocks))
