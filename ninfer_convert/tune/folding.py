"""Names of objects as few globs, each of which matches those names and no others.

`text/layers/3/mlp/down` has one place, a whole number between separators. Names that agree outside of their
places are folded: a star where all numbers are meant, else classes of digits: 8 to 12 are `[89]` and `1[0-2]`.

Owns the folding. Refuses to know what the objects are.

Source: recipe.md, duty 7.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

_PLACE = re.compile(r"(?<![0-9A-Za-z])([0-9]{1,6})(?![0-9A-Za-z])")
# `<` begins a placeholder of the recipe language.
_SPECIAL = re.compile(r"[*?\[<]")

Digits = tuple[str, ...]


def fold(wanted: Sequence[str], names: Collection[str]) -> list[str]:
    """Returns globs that together match the wanted names and none of the others, in the order of the wanted.

    Args:
        wanted: some of the names, at least one.
        names: everything the globs will be held against.
    """
    universe: dict[Digits, list[Digits]] = {}
    for name in names:
        literals, numbers = _split(name)
        universe.setdefault(literals, []).append(numbers)
    groups: dict[Digits, list[Digits]] = {}
    for name in wanted:
        literals, numbers = _split(name)
        groups.setdefault(literals, []).append(numbers)
    found = []
    for literals, rows in groups.items():
        meant = {_joined(literals, row) for row in rows}
        patterns = list(_patterns(rows, universe[literals]))
        starred = [_glob(literals, row) for row in patterns if "*" in row]
        if not all(_matches(glob, names) <= meant for glob in starred):
            # Another object lies where a star would reach; classes of digits reach no further than they say.
            patterns = list(_patterns(rows, None))
        found += [_glob(literals, row) for row in patterns]
    return found


def role(names: Sequence[str]) -> str:
    """Returns names that agree outside of their places as people write them, such as `layers/{3,7}/mlp/down`.

    Runs of three numbers or more are written as `{0..63}`.
    """
    literals = _split(names[0])[0]
    places = list(zip(*(_split(name)[1] for name in names), strict=True))
    return _joined(literals, [_listed(column) for column in places])


def by_role(names: Iterable[str]) -> list[list[str]]:
    """Returns the names in groups that agree outside of their places, in the order of the first of each."""
    groups: dict[Digits, list[str]] = {}
    for name in names:
        groups.setdefault(_split(name)[0], []).append(name)
    return list(groups.values())


def _split(name: str) -> tuple[Digits, Digits]:
    parts = _PLACE.split(name)
    return tuple(parts[::2]), tuple(parts[1::2])


def _joined(literals: Sequence[str], places: Sequence[str]) -> str:
    return "".join(itertools.chain.from_iterable(itertools.zip_longest(literals, places, fillvalue="")))


def _glob(literals: Sequence[str], places: Sequence[str]) -> str:
    return _joined([_SPECIAL.sub(lambda found: f"[{found[0]}]", literal) for literal in literals], places)


def _matches(glob: str, names: Iterable[str]) -> set[str]:
    pattern = re.compile(fnmatch.translate(glob))
    return {name for name in names if pattern.match(name)}


def _patterns(rows: Sequence[Digits], universe: Sequence[Digits] | None) -> Iterator[Digits]:
    """Yields rows of patterns, one pattern for each place, whose products are the rows of numbers.

    Args:
        universe: all rows there are, which allows stars; None allows none.
    """
    if not rows[0]:
        yield ()
        return
    rests: dict[str, list[Digits]] = {}
    for first, *rest in rows:
        rests.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[Digits, ...], list[str]] = {}
    for first, tails in rests.items():
        alike.setdefault(tuple(sorted(tails)), []).append(first)
    for inner, firsts in alike.items():
        chosen = set(firsts)
        within = None if universe is None else [row for row in universe if row[0] in chosen]
        is_all = universe is not None and len(chosen) > 1 and chosen == {row[0] for row in universe}
        heads = ["*"] if is_all else list(_digit_globs(firsts))
        for tail in _patterns(inner, None if within is None else [row[1:] for row in within]):
            for head in heads:
                yield (head, *tail)


def _digit_globs(numbers: Iterable[str]) -> Iterator[str]:
    """Yields globs of digit classes that match exactly these numbers, shorter numbers first."""
    by_length: dict[int, list[str]] = {}
    for number in sorted(numbers):
        by_length.setdefault(len(number), []).append(number)
    for length in sorted(by_length):
        yield from _same_length(by_length[length])


def _same_length(numbers: Sequence[str]) -> Iterator[str]:
    if not numbers[0]:
        yield ""
        return
    last: dict[str, list[str]] = {}
    for number in numbers:
        last.setdefault(number[:-1], []).append(number[-1])
    alike: dict[str, list[str]] = {}
    for head, digits in last.items():
        alike.setdefault("".join(digits), []).append(head)
    for ending, heads in alike.items():
        for head in _same_length(heads):
            yield head + _class(ending)


def _class(digits: str) -> str:
    if len(digits) == 1:
        return digits
    return "[" + "".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else run for run in _runs(digits)) + "]"


def _runs(digits: str) -> Iterator[str]:
    run = digits[0]
    for digit in digits[1:]:
        if int(digit) == int(run[-1]) + 1:
            run += digit
        else:
            yield run
            run = digit
    yield run


def _listed(column: Sequence[str]) -> str:
    numbers = sorted(set(column), key=lambda number: (int(number), number))
    if len(numbers) == 1:
        return numbers[0]
    runs: list[list[str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(run) for run in runs]
    return "{" + ",".join(texts) + "}"
