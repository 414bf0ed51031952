"""What planning finds: problems to raise all at once, facts for the report, pins that were waived."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ninfer_convert.errors import PlanError

_ALIKE = re.compile(r"(?P<place>.*?:[0-9]+:[0-9]+: |source \S+: (?=tensor ))(?P<text>.*?)(?P<near>; nearest: .*)?")
"""A message that a loop may repeat: its place or its source, and what it says there."""

_NAMES = re.compile(r"\S*[0-9./]\S*")
"""Words that tell one tensor, object or size from another."""


@dataclass(slots=True)
class Findings:
    """A collector that every part of planning writes to."""

    unpinned: bool = False
    """Whether pins that do not match are waived and recorded instead of being problems."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    waived: list[str] = field(default_factory=list)
    _problems: dict[str, None] = field(default_factory=dict)

    def problem(self, *messages: str) -> None:
        """Takes note of problems; one that is known already is not repeated."""
        self._problems.update(dict.fromkeys(messages))

    def pin(self, message: str) -> None:
        """Takes note of a pin that does not match."""
        if self.unpinned:
            self.waived.append(message)
        else:
            self.problem(message + "; --unpinned accepts it and records that")

    def raise_problems(self) -> None:
        """Raises one PlanError with every problem, what a loop repeats told once, if there are any."""
        if self._problems:
            raise PlanError(*folded(self._problems))


def folded(messages: Iterable[str]) -> list[str]:
    """Returns the first of the messages of one place that differ only in names and numbers, with how many there are.

    A loop makes one mistake as often as it goes round.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for message in messages:
        found = _ALIKE.fullmatch(message)
        key = (found["place"], _NAMES.sub("*", found["text"])) if found else ("", message)
        alike.setdefault(key, []).append(message)
    return [
        f"{first} (and {len(others)} more like it)" if others else first for first, *others in alike.values()
    ]
