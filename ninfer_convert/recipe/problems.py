"""Problems of a recipe: each with its place, all of them told at once, with the nearest right spelling.

Owns collecting and wording. Refuses to know what is being read.

Source: recipe.md, duties; case C34.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

from ninfer_convert.errors import RecipeError, printable
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.expression import Mark

MAX_MESSAGES = 100
MAX_CANDIDATES = 4096
"""Names that one misspelling is compared with."""

MAX_COMPARISONS = 10_000
"""Names that all misspellings of one recipe are compared with; the ones that are left get no suggestion."""

_comparisons_left = ContextVar("comparisons_left", default=MAX_COMPARISONS)

Result = TypeVar("Result")


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


class WrongRecipeError(RecipeError):
    """Everything that is wrong with a recipe: `problems` has all of it, in the order of the places.

    `files` holds what was read, by the names that the places give. The messages stop after `MAX_MESSAGES` and
    say how many are missing.
    """

    def __init__(self, problems: Sequence[tuple[Mark, str]], files: Mapping[str, bytes] | None = None) -> None:
        messages = [f"{mark}: {text}" for mark, text in problems]
        if len(messages) > MAX_MESSAGES:
            more = len(messages) - MAX_MESSAGES
            messages[MAX_MESSAGES:] = [f"{counted(more, 'more problem')} {'is' if more == 1 else 'are'} not shown"]
        super().__init__(*messages)
        self.problems = problems
        self.files: Mapping[str, bytes] = files or {}


class Problems:
    """Collects problems so that all of them are reported at once, in the order of their places.

    A loop reads the same nodes again and again: `next_turn` says that another round begins, and a place that
    has been complained about in an earlier turn stays quiet.
    """

    def __init__(self) -> None:
        _comparisons_left.set(MAX_COMPARISONS)
        self.files: dict[str, bytes] = {}
        """What has been read, by the names that places give."""
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
        """Raises one `WrongRecipeError` with every problem, if there is one."""
        if self._texts:
            problems = [(mark, text) for mark in sorted(self._texts) for text in self._texts[mark]]
            raise WrongRecipeError(problems, self.files)


def quoted(text: str) -> str:
    """Returns text as it may stand in a message: printable, shortened, in single quotes."""
    return f"'{printable(text[:80])}{'...' if len(text) > 80 else ''}'"


def nearest(text: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the candidate that was most likely meant, or None.

    Case, `_`, `-` and `.` do not count; a candidate is near, too, if it alone begins with the text, if the text
    begins with it, or if it has the same letters in another order.
    """
    compared = list(candidates)[:MAX_CANDIDATES]
    _comparisons_left.set(_comparisons_left.get() - len(compared))
    if _comparisons_left.get() < 0:
        return None
    by_form: dict[str, str] = {}
    for candidate in compared:
        other = by_form.setdefault(_form(candidate), candidate)
        if other != candidate and _likeness(text, candidate) > _likeness(text, other):
            by_form[_form(candidate)] = candidate
    form = _form(text)[:200]
    begun = [name for name in by_form if len(form) > 1 and name.startswith(form)]
    begins = [name for name in by_form if len(name) > 1 and form.startswith(name)]
    if form in by_form:
        return by_form[form]
    if len(begun) == 1 or len(begins) == 1:
        return by_form[begun[0] if len(begun) == 1 else begins[0]]
    letters = sorted(form)
    swapped = [name for name in by_form if sorted(name) == letters]
    if len(swapped) == 1:
        return by_form[swapped[0]]
    close = difflib.get_close_matches(form, by_form, n=1, cutoff=cutoff)
    return by_form[close[0]] if close else None


def _likeness(text: str, other: str) -> float:
    return difflib.SequenceMatcher(None, text[:200], other[:200]).ratio()


def _form(text: str) -> str:
    return re.sub("[-_. ]", "", text.casefold())


_TOLD = re.compile(
    r"nearest is '(?P<quoted>[^']*)'|nearest is <(?P<placeholder>[^>]*)>|nearest: (?P<tensor>[^,; ]+)"
    r"|its (?:encoder|layout) is (?P<only>\S+)"
)
"""What `suggestion` and those who word a message themselves write of what was most likely meant."""


def told_nearest(text: str) -> str | None:
    """Returns what a message says was most likely meant; None if it says nothing, or says it shortened."""
    every = list(_TOLD.finditer(text))
    if not every:
        return None
    found = every[-1]
    if found["placeholder"] is not None:
        return f"<{found['placeholder']}>"
    told = found["quoted"] or found["tensor"] or found["only"]
    return None if not told or told.endswith("...") else told


def suggestion(text: str, candidates: Iterable[str], listed: int = 16) -> str:
    """Returns the end of a message about an unknown name: the nearest one, else a list if it is short."""
    if _comparisons_left.get() < 0:
        return ""
    names = list(candidates)
    close = nearest(text, names)
    if close is not None:
        return f"; nearest is {quoted(close)}"
    return f"; known: {', '.join(map(printable, names))}" if 0 < len(names) <= listed else ""
