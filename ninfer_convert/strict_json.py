"""JSON text as the specifications mean it: UTF-8, one object, no member twice, bounded depth and memory.

Owns what the standard parser lets pass, and how much memory a document may cost: four times its own size and
64 MiB, what its reader keeps of it included. Parsed in one go, three bytes of text can become a hundred, so a
large document is counted first, or walked through piece by piece. Refuses to know what a document is for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from ninfer_convert.errors import SourceError, printable

MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 400

SPARE_BYTES = 48 << 20
"""What a document may cost beside three times its size; the rest of the 64 MiB is for its reader."""

PIECES_FROM_BYTES = 1 << 20
"""A smaller document is parsed in one go whatever it holds."""

RECORD_BYTES = 320
"""What one record that a reader keeps of a document costs at most, beside the text of its name."""

_COSTS = ((b'"', 32), (b",", 42), (b":", 160), (b"[", 96), (b"{", 200))
"""What one of these can cost while CPython parses it: half a string, an item, a member, a list, an object."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(rb"[ \t\n\r]*+")
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_FLAT = re.compile(rb'\{(?:[^{}"]++|' + _TEXT.pattern + rb")*+\}", re.DOTALL)
_PAIR = re.compile(_TEXT.pattern + _SPACE.pattern + b":" + _SPACE.pattern + _FLAT.pattern, re.DOTALL)


class _RejectedError(ValueError):
    """A reason that the parser itself does not know."""


def load_object(raw: bytes, where: str, *, lenient: bool = False) -> dict[str, Any]:
    """Returns the JSON object that `raw` spells.

    Args:
        raw: the whole document; UTF-8, whatever the locale.
        where: the document's name, already printable; it begins every message.
        lenient: also take a byte order mark and `NaN`, `Infinity`, `-Infinity`, which editors and
            Python-written configs leave behind.

    Raises:
        SourceError: not UTF-8, not JSON, not an object, a member given twice at any level, nesting deeper
            than 64, an integer of more than 400 digits, a string that is not Unicode text, or so many small
            values that parsing them would take far more memory than the document.
    """
    try:
        _require_frugal(raw)
        text = raw.decode("utf-8-sig" if lenient else "utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique_members,
            parse_int=_integer,
            parse_constant=float if lenient else _constant,
        )
        _require_sound(value, has_surrogates=_SURROGATE_ESCAPE.search(text) is not None)
    except UnicodeDecodeError as error:
        raise SourceError(f"{where}: byte {error.start} is not UTF-8 text") from error
    except RecursionError as error:
        raise SourceError(f"{where}: JSON nested deeper than {MAX_DEPTH} levels") from error
    except _RejectedError as error:
        raise SourceError(f"{where}: {error}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise SourceError(f"{where}: not JSON: {error.msg} at {place}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{where}: is {kind_of(value)}; required: a JSON object")
    return value


def kind_of(value: object) -> str:
    """Returns the JSON name of a parsed value, with its article."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number with a fraction", str: "a string", list: "a list"}
    return names.get(type(value), "an object")


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RejectedError(f'member "{printable(key[:200])}" is given twice')
            seen.add(key)
    return members


def _integer(literal: str) -> int:
    # Conversion takes quadratic time, and the interpreter's own limit may be switched off.
    if len(literal) > MAX_INTEGER_DIGITS:
        raise _RejectedError(f"an integer has {len(literal)} digits; at most {MAX_INTEGER_DIGITS} are read")
    return int(literal)


def _constant(literal: str) -> NoReturn:
    raise _RejectedError(f"{literal} is not JSON")


def _require_frugal(raw: bytes) -> None:
    if len(raw) <= PIECES_FROM_BYTES:
        return
    # The text, and the strings made of it, take up to four bytes for each of a character outside ASCII.
    cost = len(raw) * (2 if raw.isascii() else 8) + sum(raw.count(mark) * each for mark, each in _COSTS)
    if cost > 3 * len(raw) + SPARE_BYTES:
        raise _RejectedError(
            f"{len(raw)} bytes hold so many small values that parsing them could take {cost} bytes of memory;"
            f" at most {3 * len(raw) + SPARE_BYTES} are spent"
        )


def _require_sound(value: object, *, has_surrogates: bool) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        if has_surrogates:
            _require_unicode(level)
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _RejectedError(f"JSON nested deeper than {MAX_DEPTH} levels")


def _require_unicode(parents: list[object]) -> None:
    for parent in parents:
        texts = [*parent, *parent.values()] if isinstance(parent, dict) else parent
        if isinstance(texts, list) and any(isinstance(text, str) and _SURROGATE.search(text) for text in texts):
            raise _RejectedError("a string holds half of a surrogate pair, which is not Unicode text")


class Walk:
    """A walk through a large document of a known outline, in which only the pieces are parsed, one at a time.

    Every method raises SourceError, naming the place, when the document goes on otherwise.
    """

    def __init__(self, raw: bytes, where: str, begin: int = 0) -> None:
        self._raw, self._where, self._begin, self._at = raw, where, begin, begin

    def members(self) -> Iterator[str]:
        """Yields the name of each member of an object; its value must be taken before the next name."""
        seen: set[str] = set()
        for _ in self._listed(b"{", b"}"):
            # As a document of its own, so that a name is held to what every text is held to.
            (name,) = self._parsed(_TEXT, b"{%b:0}", "the name of a member")
            self._expect(b":")
            yield self._once(name, seen)

    def pairs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields each member of an object, name and value, whose values are objects that hold no other object."""
        seen: set[str] = set()
        for _ in self._listed(b"{", b"}"):
            ((name, value),) = self._parsed(_PAIR, b"{%b}", "a name with an object of texts, numbers and lists").items()
            yield self._once(name, seen), value

    def items(self) -> Iterator[dict[str, Any]]:
        """Yields the items of a list, each an object that holds no other object."""
        for count, _ in enumerate(self._listed(b"[", b"]")):
            self._require_room(count)
            yield self.flat()

    def flat(self) -> dict[str, Any]:
        """Returns an object that holds no other object."""
        return self._parsed(_FLAT, b"%b", "an object of texts, numbers and lists")

    def end(self) -> None:
        """Requires that nothing follows."""
        self._skip()
        if self._at < len(self._raw):
            raise self._otherwise("the end")

    def _listed(self, opening: bytes, closing: bytes) -> Iterator[None]:
        self._expect(opening)
        if self._is_next(closing):
            return
        while True:
            yield
            if self._is_next(closing):
                return
            self._expect(b",")

    def _once(self, name: str, seen: set[str]) -> str:
        if name in seen:
            raise SourceError(f'{self._where}: member "{printable(name[:200])}" is given twice')
        self._require_room(len(seen))
        seen.add(name)
        return name

    def _parsed(self, pattern: re.Pattern[bytes], frame: bytes, wanted: str) -> dict[str, Any]:
        self._skip()
        found = pattern.match(self._raw, self._at)
        if found is None:
            raise self._otherwise(wanted)
        self._at = found.end()
        return load_object(frame % found[0], self._where)

    def _skip(self) -> None:
        found = _SPACE.match(self._raw, self._at)
        self._at = self._at if found is None else found.end()

    def _is_next(self, mark: bytes) -> bool:
        self._skip()
        is_next = self._raw.startswith(mark, self._at)
        self._at += is_next
        return is_next

    def _expect(self, mark: bytes) -> None:
        if not self._is_next(mark):
            raise self._otherwise(mark.decode())

    def _require_room(self, count: int) -> None:
        if count * RECORD_BYTES > len(self._raw) + SPARE_BYTES:
            raise SourceError(
                f"{self._where}: more than {count} entries in {len(self._raw)} bytes;"
                f" at most {SPARE_BYTES // RECORD_BYTES} and one for each {RECORD_BYTES} bytes are read"
            )

    def _otherwise(self, wanted: str) -> SourceError:
        return SourceError(
            f"{self._where}: byte {self._at - self._begin}: required: {wanted}; a document of more than"
            f" {PIECES_FROM_BYTES} bytes holds nothing else here"
        )
