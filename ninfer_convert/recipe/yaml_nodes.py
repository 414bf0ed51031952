"""Strict YAML: bytes to nodes that know their place, with limits, and without YAML's silent readings.

Owns syntax: encoding, limits, duplicate keys, merge keys, aliases. Scalars stay text; what they mean is read
in `recipe_scalars`. Refuses to know what any key is for.

Source: engineering_facts.md D4; cases C31, C54, C55.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import yaml

from ninfer_convert.errors import printable
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.problems import PlacedError, Problems, quoted

MAX_FILE_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_NODES = 100_000
"""Nodes of one document, counted after every alias has been written out."""

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

_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "alphabetic or numeric": "; quote text that begins with * or &",
        "',' or ": "; between brackets, quote text that has one of [ ] { } or a comma",
        "cannot start any token": "; quote text that begins so",
        "mapping values are not allowed": "; keys that stand together begin in one column; quote text that has ': '",
        "expected key": "; keys that stand together begin in one column",
        "'-' indicator": "; the entries of a list begin in one column, each with '- '",
        "<block end>": "; what stands together begins in one column",
    }
)
"""What to do about a syntax error, by a part of what both parsers say."""

_FORBIDDEN = re.compile("[^\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_DIRECTIVE = re.compile("^%", re.MULTILINE)
_CROWDED_COLON = re.compile(r"[ \r\n]*:[,?\[\]{}]")
_CROWDED_COMMENT = re.compile("[|>][-+0-9]*#")
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


def yaml_reading(text: str) -> str | None:
    """Returns what YAML reads an unquoted scalar as, in words; None if every YAML reads it as text."""
    if not text:
        return "null"
    return next((reading for reading, pattern in _READINGS.items() if pattern.fullmatch(text)), None)


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
        raise _syntax_error(error, text, file) from None
    if builder.root is None:
        raise PlacedError(Mark(file, 1, 1), "the file holds no YAML document")
    return builder.root


def _syntax_error(error: yaml.YAMLError, text: str, file: str) -> PlacedError:
    """Returns what a parser complains of; a bracket or quote that is never closed is told where it opens."""
    mark, opened = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or "cannot be parsed"
    if mark is not None and opened is not None:
        lines = [*_LINE_BREAK.split(text), ""]
        opener = lines[opened.line][opened.column : opened.column + 1]
        closer = lines[mark.line][mark.column : mark.column + 1]
        if opener in ("[", "{") and closer in ("]", "}"):
            return PlacedError(_mark(file, opened), f"not valid YAML: this {opener} is not closed before a {closer}")
        at_end = not any(line.strip() for line in lines[mark.line :])
        # What goes on after a bracket is indented more than the line that opens it.
        outside = at_end or _indent(lines[mark.line]) <= _indent(lines[opened.line])
        if mark.line > opened.line and (outside if opener in ("[", "{") else at_end and opener in ("'", '"')):
            found = "the file ends before that" if at_end else f"line {mark.line + 1} cannot go on with it"
            return PlacedError(_mark(file, opened), f"not valid YAML: this {opener} is never closed; {found}")
    if opened is not None and "could not find expected ':'" in problem:
        return PlacedError(_mark(file, opened), "not valid YAML: a key is expected here; it ends with ': '")
    hint = next((text for part, text in _HINTS.items() if part in problem), "")
    return PlacedError(_mark(file, mark or opened), f"not valid YAML: {printable(problem)}{hint}")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


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
        start, end = event.start_mark, event.end_mark
        is_text = isinstance(event, yaml.ScalarEvent | yaml.AliasEvent)
        ends_here = is_text and end.line == start.line and end.column > start.column
        return Mark(self._file, start.line + 1, start.column + 1, end.column + 1 if ends_here else None)

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
        self._require_portable(event, mark)
        if plain and not event.value:
            mark = self._place_of_nothing(mark)
        self._add(ScalarNode(event.value, plain, mark), event.anchor, 1, 1)

    def _place_of_nothing(self, mark: Mark) -> Mark:
        """Returns one place for a scalar that is not there; the parsers see it in different ones."""
        if not self._stack:
            return Mark(self._file, 1, 1)
        parent = self._stack[-1]
        return parent.children[-1].mark if parent.is_map and parent.children else mark

    def _require_portable(self, event: Any, mark: Mark) -> None:
        """Refuses the spellings that the C parser and the Python parser take differently."""
        if event.style and event.style in "|>":
            if _CROWDED_COMMENT.match(self._text, event.start_mark.index):
                raise PlacedError(mark, "not valid YAML: a comment needs a space before its #")
        elif not event.style and self._stack and self._stack[-1].flow:
            if "?" in event.value:
                self._problems.add(mark, f"{quoted(event.value)} has a ? between brackets; quote it")
            elif _CROWDED_COLON.match(self._text, event.end_mark.index):
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
            raise PlacedError(mark, f"*{event.anchor} has no anchor before it; quote text that begins with *")
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
