"""Strict YAML: bytes to nodes that know their place, with limits, and without YAML's silent readings.

Owns syntax: encoding, limits, duplicate keys, merge keys, aliases, and the collecting of problems. Scalars
stay text; what they mean is read in `recipe_scalars`. Refuses to know what any key is for.

Source: engineering_facts.md D4; cases C31, C54, C55.
"""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import yaml

from ninfer_convert.errors import RecipeError, printable
from ninfer_convert.expression import Mark

MAX_FILE_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_NODES = 100_000
"""Nodes of one document, counted after every alias has been written out."""

MAX_MESSAGES = 100

Result = TypeVar("Result")

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_READINGS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "null": re.compile("~|null|Null|NULL"),
        "a boolean": re.compile("(?:[Yy]es|YES|[Nn]o|NO|[Tt]rue|TRUE|[Ff]alse|FALSE|[Oo]n|ON|[Oo]ff|OFF)"),
        "an integer": re.compile("[-+]?(?:[0-9][0-9_]*(?::[0-5]?[0-9])*|0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+)"),
        "a number": re.compile(
            r"[-+]?(?:(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)(?:[eE][-+]?[0-9]+)?"
            r"|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*|\.(?:inf|Inf|INF|nan|NaN|NAN))"
        ),
        "a date": re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:(?:[Tt]|[ ]+)[0-9]{1,2}:[0-9]{2}:[0-9]{2}.*)?"),
        "a merge key": re.compile("<<"),
        "a default value": re.compile("="),
    }
)
"""What YAML 1.1 or 1.2 takes an unquoted scalar for, where it is not text."""

_FORBIDDEN = re.compile("[^\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_DIRECTIVE = re.compile("^%", re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_BREAK = re.compile("\r\n|\r|\n")


@dataclass(frozen=True, slots=True, eq=False)
class ScalarNode:
    """Text as written; `plain` tells an unquoted scalar, which YAML may read as something else."""

    text: str
    plain: bool
    mark: Mark


@dataclass(frozen=True, slots=True, eq=False)
class ListNode:
    """A YAML sequence."""

    items: tuple[Node, ...]
    mark: Mark


@dataclass(frozen=True, slots=True, eq=False)
class MapNode:
    """A YAML mapping with text keys, merge keys applied; `keys` holds the key nodes of `members`."""

    members: Mapping[str, Node]
    keys: Mapping[str, ScalarNode]
    mark: Mark


Node = ScalarNode | ListNode | MapNode


class PlacedError(RecipeError):
    """One problem at one place."""

    def __init__(self, mark: Mark, text: str) -> None:
        super().__init__(f"{mark}: {text}")
        self.mark = mark
        self.text = text


class ReportedError(PlacedError):
    """A problem that follows from one that has been noted; nobody needs to read of it."""

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark, "follows from another problem")


class Problems:
    """Collects problems so that all of them are reported at once, in the order of their places.

    A loop reads the same nodes again and again: `next_turn` says that another round begins, and a place that
    has been complained about in an earlier turn stays quiet.
    """

    def __init__(self) -> None:
        self._texts: dict[Mark, list[str]] = {}
        self._turns: dict[Mark, int] = {}
        self._turn = 0

    def next_turn(self) -> None:
        """Begins another round over nodes that may have been read before."""
        self._turn += 1

    def add(self, mark: Mark, text: str) -> None:
        """Notes one problem."""
        if self._turns.setdefault(mark, self._turn) == self._turn:
            texts = self._texts.setdefault(mark, [])
            if text not in texts:
                texts.append(text)

    def attempt(self, function: Callable[..., Result], *arguments: Any) -> Result | None:
        """Returns the function's result, or None after noting the `PlacedError` it raised."""
        try:
            return function(*arguments)
        except PlacedError as error:
            if not isinstance(error, ReportedError):
                self.add(error.mark, error.text)
            return None

    def stop(self, mark: Mark, text: str) -> NoReturn:
        """Notes a problem that makes going on pointless, and raises everything noted so far."""
        self._texts.setdefault(mark, []).append(text)
        self.raise_if_any()
        raise AssertionError("there is at least one problem")

    def raise_if_any(self) -> None:
        """Raises one `RecipeError` with every problem, sorted by place, if there is one."""
        messages = [f"{mark}: {text}" for mark in sorted(self._texts) for text in self._texts[mark]]
        if len(messages) > MAX_MESSAGES:
            messages[MAX_MESSAGES:] = [f"{len(messages) - MAX_MESSAGES} more problems are not shown"]
        if messages:
            raise RecipeError(*messages)


def yaml_reading(text: str) -> str | None:
    """Returns what YAML reads an unquoted scalar as, in words; None if every YAML reads it as text."""
    if not text:
        return "null"
    return next((reading for reading, pattern in _READINGS.items() if pattern.fullmatch(text)), None)


def quoted(text: str) -> str:
    """Returns text as it may stand in a message: printable, shortened, in single quotes."""
    return f"'{printable(text[:80])}{'...' if len(text) > 80 else ''}'"


def nearest(text: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the candidate that was most likely meant, or None.

    Case, `_`, `-` and `.` do not count; a beginning that only one candidate has is near, too.
    """
    by_form = {_form(candidate): candidate for candidate in reversed(list(candidates))}
    form = _form(text)[:200]
    begun = [name for name in by_form if len(form) > 1 and name.startswith(form)]
    if form in by_form or len(begun) == 1:
        return by_form[form if form in by_form else begun[0]]
    close = difflib.get_close_matches(form, by_form, n=1, cutoff=cutoff)
    return by_form[close[0]] if close else None


def _form(text: str) -> str:
    return re.sub("[-_. ]", "", text.casefold())


def suggestion(text: str, candidates: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the nearest one, else a short list, else nothing."""
    names = list(candidates)
    close = nearest(text, names)
    if close is not None:
        return f"; nearest is {quoted(close)}"
    return f"; known: {', '.join(map(printable, names))}" if 0 < len(names) <= 16 else ""


def parse_document(data: bytes, file: str, problems: Problems, loader: Any = LOADER) -> Node:
    """Returns the root node of the one YAML document in data.

    Args:
        data: the bytes of the file, UTF-8 with or without a byte order mark.
        file: what messages call the file.
        problems: takes what does not keep the rest from being read: tags, duplicate and odd keys.
        loader: the PyYAML loader whose parser is used; all of them give the same nodes.

    Raises:
        PlacedError: bad encoding, bad syntax, a limit, a second document, an alias without an anchor.
    """
    text = _decoded(data, file)
    builder = _Builder(text, file, problems)
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise PlacedError(_mark(file, mark), f"not valid YAML: {printable(problem)}") from None
    if builder.root is None:
        raise PlacedError(Mark(file, 1, 1), "the file holds no YAML document")
    return builder.root


def _mark(file: str, mark: yaml.Mark | None) -> Mark:
    return Mark(file, mark.line + 1, mark.column + 1) if mark is not None else Mark(file, 1, 1)


def _place(file: str, text: str) -> Mark:
    """Returns the place just after text, which is the beginning of the file."""
    lines = _LINE_BREAK.split(text)
    return Mark(file, len(lines), len(lines[-1]) + 1)


def _decoded(data: bytes, file: str) -> str:
    if len(data) > MAX_FILE_BYTES:
        raise PlacedError(Mark(file, 1, 1), f"the file has more than {MAX_FILE_BYTES} bytes")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise PlacedError(Mark(file, 1, 1), "the file is UTF-16 or UTF-32; save it as UTF-8")
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        mark = _place(file, data[: error.start].decode())
        raise PlacedError(mark, f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8") from None
    if found := _FORBIDDEN.search(text):
        # The two parsers disagree about tabs and about which characters end a line.
        what = "a tab; write spaces" if found[0] == "\t" else f"character U+{ord(found[0]):04X} is not allowed"
        raise PlacedError(_place(file, text[: found.start()]), what)
    if found := _DIRECTIVE.search(text):
        raise PlacedError(_place(file, text[: found.start()]), "a line begins with %; YAML directives are not allowed")
    return text


class _Frame:
    """A collection whose end has not been seen."""

    __slots__ = ("anchor", "children", "flow", "height", "is_map", "mark", "size")

    def __init__(self, mark: Mark, anchor: str | None, is_map: bool, flow: bool) -> None:
        self.mark, self.anchor, self.is_map, self.flow = mark, anchor, is_map, flow
        self.children: list[Node] = []
        self.size = 1
        self.height = 1


class _Builder:
    """Takes parser events one by one, so that a limit is met before anything big has been built."""

    def __init__(self, text: str, file: str, problems: Problems) -> None:
        self.root: Node | None = None
        self._text = text
        self._file = file
        self._problems = problems
        self._stack: list[_Frame] = []
        self._anchors: dict[str, tuple[Node, int, int] | None] = {}
        self._nodes = 0
        self._documents = 0

    def take(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._open(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close()
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise PlacedError(self._mark(event), "a second YAML document begins; one file holds one document")

    def _mark(self, event: Any) -> Mark:
        return Mark(self._file, event.start_mark.line + 1, event.start_mark.column + 1)

    def _count(self, mark: Mark, size: int) -> None:
        self._nodes += size
        if self._nodes > MAX_NODES:
            raise PlacedError(mark, f"the document has more than {MAX_NODES} nodes, aliases written out")

    def _properties(self, event: Any, mark: Mark) -> None:
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._problems.add(mark, f"tag {quoted(tag)} is not allowed; remove it")
        if event.anchor is not None:
            if event.anchor in self._anchors:
                self._problems.add(mark, f"anchor &{event.anchor} is given twice")
            self._anchors[event.anchor] = None

    def _scalar(self, event: Any) -> None:
        mark = self._mark(event)
        self._properties(event, mark)
        self._count(mark, 1)
        plain = not event.style
        if _SURROGATE.search(event.value):
            self._problems.add(mark, "the text has half of a surrogate pair, which is no character")
        if plain and self._stack and self._stack[-1].flow:
            self._require_plain_flow(event, mark)
        if plain and not event.value and self._stack and self._stack[-1].is_map and self._stack[-1].children:
            # The parsers differ about where a value is that is not there.
            mark = self._stack[-1].children[-1].mark
        self._add(ScalarNode(event.value, plain, mark), event.anchor, 1, 1)

    def _require_plain_flow(self, event: Any, mark: Mark) -> None:
        """Refuses the unquoted spellings that the two parsers split differently."""
        after = self._text[event.end_mark.index : event.end_mark.index + 2]
        if "?" in event.value:
            self._problems.add(mark, f"{quoted(event.value)} has a ? between brackets; quote it")
        elif len(after) == 2 and after[0] == ":" and after[1] in ",?[]{}":
            raise PlacedError(mark, f"not valid YAML: the colon after {quoted(event.value)} needs a space after it")

    def _open(self, event: Any) -> None:
        mark = self._mark(event)
        self._properties(event, mark)
        self._count(mark, 1)
        if len(self._stack) >= MAX_DEPTH:
            raise PlacedError(mark, f"nested more than {MAX_DEPTH} deep")
        is_map = isinstance(event, yaml.MappingStartEvent)
        self._stack.append(_Frame(mark, event.anchor, is_map, bool(event.flow_style)))

    def _close(self) -> None:
        frame = self._stack.pop()
        node: Node = self._map(frame) if frame.is_map else ListNode(tuple(frame.children), frame.mark)
        self._add(node, frame.anchor, frame.size, frame.height)

    def _alias(self, event: Any) -> None:
        mark = self._mark(event)
        if event.anchor not in self._anchors:
            raise PlacedError(mark, f"*{event.anchor} has no anchor before it")
        target = self._anchors[event.anchor]
        if target is None:
            raise PlacedError(mark, f"*{event.anchor} stands inside its own anchor")
        node, size, height = target
        self._count(mark, size)
        if len(self._stack) + height > MAX_DEPTH:
            raise PlacedError(mark, f"nested more than {MAX_DEPTH} deep")
        self._add(node, None, size, height)

    def _add(self, node: Node, anchor: str | None, size: int, height: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = (node, size, height)
        if self._stack:
            parent = self._stack[-1]
            parent.children.append(node)
            parent.size += size
            parent.height = max(parent.height, height + 1)
        else:
            self.root = node

    def _map(self, frame: _Frame) -> MapNode:
        members: dict[str, Node] = {}
        keys: dict[str, ScalarNode] = {}
        merges: list[tuple[ScalarNode, Node]] = []
        for key, value in zip(frame.children[::2], frame.children[1::2], strict=True):
            if isinstance(key, ScalarNode) and key.plain and key.text == "<<":
                merges.append((key, value))
            elif (checked := self._problems.attempt(_require_key, key)) is None:
                continue
            elif (first := keys.get(checked.text)) is not None:
                self._twice(checked, first)
            else:
                keys[checked.text], members[checked.text] = checked, value
        for key, _value in merges[1:]:
            self._twice(key, merges[0][0])
        for merged in self._merged(merges[0][1]) if merges else ():
            members = {**merged.members, **members}
            keys = {**merged.keys, **keys}
        return MapNode(members, keys, frame.mark)

    def _twice(self, key: ScalarNode, first: ScalarNode) -> None:
        self._problems.add(key.mark, f"key {quoted(key.text)} is given twice; first on line {first.mark.line}")

    def _merged(self, value: Node) -> Iterable[MapNode]:
        """Yields the mappings of one merge key; the first has the last word, the mapping's own keys the very last."""
        for node in value.items if isinstance(value, ListNode) else (value,):
            if isinstance(node, MapNode):
                yield node
            else:
                self._problems.add(node.mark, "a merge key << takes a mapping or a list of mappings")


def _require_key(key: Node) -> ScalarNode:
    if not isinstance(key, ScalarNode):
        raise PlacedError(key.mark, "a key must be text, not a list or a mapping")
    reading = yaml_reading(key.text) if key.plain else None
    if reading is not None:
        raise PlacedError(key.mark, f"key {quoted(key.text)} is read by YAML as {reading}; quote it")
    return key
