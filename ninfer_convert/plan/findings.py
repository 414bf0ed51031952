"""What planning finds: problems to raise all at once, facts for the report, pins that were waived."""

from __future__ import annotations

from dataclasses import dataclass, field

from ninfer_convert.errors import PlanError


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
        """Raises one PlanError with every problem, if there are any."""
        if self._problems:
            raise PlanError(*self._problems)
