"""A line of a file with a mark under the place that a message is about, as compilers print it.

Owns how wide characters are on a terminal and what of a long line is shown. Refuses to know what is wrong.

Source: recipe.md, duties; Unicode Standard Annex 11, East Asian Width.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from ninfer_convert.errors import printable
from ninfer_convert.recipe.expression import Mark

MAX_WIDTH = 120
"""Columns of a line that are shown; of a longer one, those around the place."""

BEFORE = 40
"""Columns before the place that stay when a line is cut."""

ELLIPSIS = "..."
_LINE_BREAK = re.compile("\r\n|\r|\n")


class Excerpts:
    """Shows lines of the files that have been read."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._lines: dict[str, Sequence[str]] = {}

    def at(self, mark: Mark) -> list[str]:
        """Returns the line at a place and one that points into it; nothing if there is no such line."""
        if mark.file not in self._lines:
            # Bytes that are not UTF-8 are shown escaped, each in the place of one character.
            text = self._files.get(mark.file, b"").decode("utf-8-sig", "surrogateescape")
            self._lines[mark.file] = _LINE_BREAK.split(text)
        lines = self._lines[mark.file]
        if mark.line > len(lines) or not lines[mark.line - 1]:
            return []
        shown, pointer = pointed(lines[mark.line - 1], mark.column, mark.end_column)
        number = f"{mark.line:>5}"
        return [f"{number} | {shown}", f"{' ' * len(number)} | {pointer}"]


def pointed(line: str, column: int, end_column: int | None) -> tuple[str, str]:
    """Returns a line as it can be printed, and what to print below: `^` under a column, `~` up to its end.

    Args:
        line: the text of the line, without its end.
        column: where to point, characters counted from 1.
        end_column: just after the last character meant; None for one.
    """
    begin = min(column - 1, len(line))
    end = min(max(begin + 1, (end_column or 0) - 1), max(len(line), begin + 1))
    shown = [printable(character) for character in line]
    widths = [_width(text) for text in shown]
    first, last = _window(widths, begin)
    head = ELLIPSIS if first else ""
    tail = ELLIPSIS if last < len(line) else ""
    indent = len(head) + sum(widths[first:begin])
    marked = sum(widths[begin : min(end, last)])
    return head + "".join(shown[first:last]) + tail, " " * indent + "^" + "~" * (marked - 1)


def _window(widths: Sequence[int], begin: int) -> tuple[int, int]:
    """Returns the first character that is shown of a line, and the one after the last."""
    if sum(widths) <= MAX_WIDTH:
        return 0, len(widths)
    first, before = begin, 0
    while first > 0 and before + widths[first - 1] <= BEFORE:
        first -= 1
        before += widths[first]
    last, whole = begin, before
    while last < len(widths) and whole + widths[last] <= MAX_WIDTH:
        whole += widths[last]
        last += 1
    return first, last




def _width(text: str) -> int:
    """Returns the columns that one printable character, or an escape of several, takes on a terminal."""
    if len(text) > 1:
        return len(text)
    if unicodedata.category(text) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(text) in ("W", "F") else 1
