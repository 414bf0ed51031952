"""JSON text as the specifications mean it: UTF-8, one object, no member twice, bounded depth.

Owns what the standard parser lets pass. Refuses to know what a document is for.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from ninfer_convert.errors import SourceError, printable

MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 400

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


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
            than 64, an integer of more than 400 digits, a string that is not Unicode text.
    """
    try:
        text = raw.decode("utf-8-sig" if lenient else "utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique_members,
            parse_int=_integer,
            parse_constant=float if lenient else _constant,
        )
        _require_depth(value)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{where}: byte {error.start} is not UTF-8 text") from error
    except UnicodeEncodeError as error:
        raise SourceError(f"{where}: a string holds half of a surrogate pair, which is not Unicode text") from error
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


def _require_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
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
