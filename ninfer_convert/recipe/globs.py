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


def too_many() -> str:
    """Returns the message for a recipe whose globs would look at too many names."""
    return f"the globs of the recipe look at more than {MAX_MATCHES} names; use fewer, or names without wildcards"
