"""Names that globs stand for, found with bounded work: many globs times many names is more than either allows.

Owns matching. Refuses to know what is named.

Source: recipe.md, duties 3 and 7.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping, Set

MAX_MATCHES = 3_000_000
"""Names that all globs of one recipe are held to, together: forty globs of a recipe for 70,000 objects."""

_WILDCARDS = re.compile(r"[*?[]")
_PIECE = re.compile(r"\[(?>!?)(?>\]?)[^]]*\]|.", re.DOTALL)


class Globs:
    """Finds what globs match, as long as the work is bounded."""

    def __init__(self) -> None:
        self._left = MAX_MATCHES

    def may_look_at(self, count: int) -> bool:
        """Tells whether so many more names may be looked at, and counts them."""
        self._left -= count
        return self._left >= 0

    def matching(self, glob: str, names: Collection[str]) -> list[str] | None:
        """Returns the names that a glob matches, in their order; None when too many names have been looked at.

        `*` crosses slashes and dots; upper and lower case differ. A glob without a wildcard costs nothing if
        `names` is a set or a mapping.
        """
        is_name = not _WILDCARDS.search(glob)
        if not (is_name and isinstance(names, Set | Mapping)) and not self.may_look_at(len(names)):
            return None
        if is_name:
            return [glob] if glob in names else []
        pattern = re.compile(fnmatch.translate(glob))
        return [name for name in names if pattern.match(name)]


def covers(wide: str, narrow: str) -> bool:
    """Tells whether every name that `narrow` matches is surely matched by `wide`, too.

    Brackets are compared as they are written, so that some that are covered are not seen to be.
    """
    pieces = _pieces(narrow)
    begun = [True, *([False] * len(pieces))]
    for piece in _pieces(wide):
        ended = [piece == "*" and begun[0]]
        for i, other in enumerate(pieces):
            if piece == "*":
                ended.append(ended[i] or begun[i + 1])
            else:
                ended.append(begun[i] and _covers_one(piece, other))
        begun = ended
    return begun[-1]


def _covers_one(piece: str, other: str) -> bool:
    if piece in (other, "?"):
        return other != "*"
    return len(piece) > 1 and len(other) == 1 and other not in "*?" and fnmatch.fnmatchcase(other, piece)


def _pieces(glob: str) -> list[str]:
    """Returns what a glob is made of: characters, the wildcards * and ?, and [...] as one piece."""
    return _PIECE.findall(glob)


def too_many() -> str:
    """Returns the message for a recipe whose globs would look at too many names."""
    return f"the globs of the recipe look at more than {MAX_MATCHES} names; use fewer, or names without wildcards"
