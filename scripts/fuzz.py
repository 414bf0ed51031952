"""Feeds mutated headers, indexes, configs, artifacts, reports, journals and recipes to what reads them.

Nothing but a message may come of any of them: no other exception, no more than two seconds of processor time,
no more memory than four times the input and 64 MiB. Every input that does more is written to a directory, with
the reason, for a test to be made of it. Ends with exit code 1 when there is one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hostile import KINDS, prepare, require_contained
from hypothesis import HealthCheck, Phase, given, seed, settings

ROUND = 250
"""Inputs of one kind before the next kind has its turn."""


class Fuzzing:
    """One run: counts what came of the inputs, and writes down what should not have come."""

    def __init__(self, findings: Path, directory: Path, count: int, deadline: float) -> None:
        self.findings, self.directory, self.count, self.deadline = findings, directory, count, deadline
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()

    def is_over(self) -> bool:
        return self.outcomes.total() >= self.count or time.monotonic() >= self.deadline

    def round(self, name: str, number: int) -> None:
        """Uses a round of inputs of one kind."""
        kind = KINDS[name]

        def use(data: bytes) -> None:
            if self.is_over():
                return
            try:
                outcome = require_contained(kind, data, self.directory)
            except AssertionError as error:
                outcome = "BAD"
                self._write_down(name, data, str(error))
            self.outcomes[name, outcome] += 1

        checks = settings(
            max_examples=ROUND,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(number)(checks(given(kind.inputs)(use)))()

    def _write_down(self, name: str, data: bytes, reason: str) -> None:
        key = f"{name}: {reason[:100]}"
        self.reasons[key] += 1
        if self.reasons[key] > 3:
            return
        self.findings.mkdir(parents=True, exist_ok=True)
        path = self.findings / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        path.with_suffix(".reason").write_text(reason + "\n", encoding="utf-8", errors="backslashreplace")
        print(f"{path}: {reason[:300]!r}", flush=True)


@contextlib.contextmanager
def prepared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ninfer-fuzz-") as directory:
        prepare(Path(directory))
        yield Path(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this time (default 10)")
    parser.add_argument("--count", type=int, default=100_000, help="stop after so many inputs (default 100000)")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal inputs (default 0)")
    parser.add_argument("--kind", choices=sorted(KINDS), action="append", help="only this kind; may be repeated")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where bad inputs are written")
    options = parser.parse_args()
    started = time.monotonic()
    with prepared() as directory:
        fuzzing = Fuzzing(options.findings, directory, options.count, started + 60 * options.minutes)
        for number in itertools.count(options.seed << 32):
            for name in options.kind or KINDS:
                if not fuzzing.is_over():
                    fuzzing.round(name, number)
            if fuzzing.is_over():
                break
    for name in KINDS:
        counts = {outcome: fuzzing.outcomes[name, outcome] for outcome in ("taken", "refused", "BAD")}
        if any(counts.values()):
            print(f"{name:<12} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    minutes = (time.monotonic() - started) / 60
    print(f"{fuzzing.outcomes.total()} inputs in {minutes:.1f} min; {len(fuzzing.reasons)} kinds of findings")
    return 1 if fuzzing.reasons else 0


if __name__ == "__main__":
    sys.exit(main())
