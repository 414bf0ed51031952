"""Many names that differ in layer numbers only, as one: `text/layers/{0..63}/mlp/down`.

Owns how numbers of names are folded and written. Refuses to know what is named.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<![^/.])(?:0|[1-9][0-9]*)(?![^/.])")
"""A number that is a whole part of a name between slashes or dots."""

_PART = re.compile(r"(?<=[./])(?:0|[1-9][0-9]*)(?=[./,)]|$)")
"""The same in the text of an expression."""

MAX_NUMBERS = 4
"""Numbers of one name that are folded; a name with more of them stands for itself."""


def pattern(name: str) -> tuple[str, tuple[int, ...]]:
    """Returns a name with `{}` in the place of its numbers, and the numbers."""
    numbers = tuple(map(int, _NUMBER.findall(name)))
    if not numbers or len(numbers) > MAX_NUMBERS:
        return _escaped(name), ()
    return _NUMBER.sub("{}", _escaped(name)), numbers


def placed(text: str, numbers: Sequence[int]) -> str:
    """Returns the text of an expression in which the numbers of an object's name are `<n>`, or `<n1>`, `<n2>`, ...

    Only numbers that are parts of names are replaced. What two objects of one pattern are made of is then alike if it
    differs in their numbers only; a number that a name has several times is counted through in turn.
    """
    places: dict[str, list[str]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(str(number), []).append(f"<n{place + 1}>" if len(numbers) > 1 else "<n>")
    turns = {number: itertools.cycle(found) for number, found in places.items()}
    return _PART.sub(lambda match: next(turns[match[0]]) if match[0] in turns else match[0], text)


def folded(form: str, numbers: Iterable[tuple[int, ...]]) -> list[str]:
    """Returns as few names as possible for one pattern with several groups of numbers, in ascending order."""
    return [_filled(form, sets) for sets in sorted(_products(set(numbers)))]


def number_set(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as `3`, `{0..63}`, `{3..63 step 4}`, `{0..62 except 3..59 step 4}`, or as runs."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs = _runs(numbers)
    if len(runs) > 2:
        missing = sorted(set(range(numbers[0], numbers[-1] + 1)) - set(numbers))
        if step := _step(numbers):
            return f"{{{numbers[0]}..{numbers[-1]} step {step}}}"
        if step := _step(missing):
            return f"{{{numbers[0]}..{numbers[-1]} except {missing[0]}..{missing[-1]} step {step}}}"
    return "{" + ",".join(_run_text(run) for run in runs) + "}"


def _products(numbers: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Splits groups of numbers into products of sets, each given as its sets."""
    if numbers == {()}:
        return [()]
    rests: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in numbers:
        rests.setdefault(first, set()).add(tuple(rest))
    firsts: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, found in rests.items():
        firsts.setdefault(frozenset(found), []).append(first)
    return [(tuple(sorted(heads)), *product) for tails, heads in firsts.items() for product in _products(set(tails))]


def _filled(form: str, sets: Sequence[Sequence[int]]) -> str:
    parts = form.split("{}")
    texts = [*map(number_set, sets), ""]
    return "".join(part + text for part, text in zip(parts, texts, strict=True))


def _escaped(name: str) -> str:
    """Returns a name whose own braces cannot be taken for a place of a number."""
    return name.replace("{}", "{ }")


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def _run_text(run: tuple[int, int]) -> str:
    begin, last = run
    return f"{begin}..{last}" if last > begin + 1 else ",".join(map(str, range(begin, last + 1)))


def _step(numbers: Sequence[int]) -> int | None:
    """Returns the one distance of three or more numbers."""
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    return steps.pop() if len(numbers) > 2 and len(steps) == 1 else None
