"""The shares of a part file become an artifact: everything is there, every digest is true, then it gets its name.

Source: cli.md, `finalize`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_convert.encode.loss import Loss
from ninfer_convert.errors import OutputError, PlanError, UsageError, printable
from ninfer_convert.plan.planner import Plan
from ninfer_convert.plan.provenance import Outcome, plan_identity
from ninfer_convert.run.convert import BeforePublish
from ninfer_convert.run.cuts import Share, cut, stored_ranges
from ninfer_convert.run.digests import Digests, Range, take_digests
from ninfer_convert.run.intervals import Intervals
from ninfer_convert.run.journal import journal_path, remove_journal
from ninfer_convert.run.own_files import OPEN_FLAGS, is_own
from ninfer_convert.run.pipeline import Progress
from ninfer_convert.run.share_journal import (
    Segment,
    read_share_journal,
    share_journal_path,
    share_journals,
    share_writers,
)
from ninfer_convert.run.shares import part_path, require_prepared
from ninfer_convert.run.tasks import is_loss_of
from ninfer_convert.run.writer import NO_LOCKS, PartFile, read_at

SHOWN_PROBLEMS = 20


class _PreparedFile(PartFile):
    """A prepared part file, locked against shares; it is never made and never removed, only published."""

    def _open_locked(self) -> int:
        with self._failing("open"):
            fd = os.open(self.path, os.O_RDWR | OPEN_FLAGS)
        try:
            if not is_own(fd):
                raise OutputError(f"{printable(str(self.path))} is not a file of ours, or has a second name")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                writers = ", ".join(share_writers(self.path)) or "another process"
                raise OutputError(f"{printable(str(self.output))} is still being written: {writers}") from error
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise OutputError(f"cannot lock {printable(str(self.path))}: {error.strerror}") from error
            if not self._is_current(fd):
                raise OutputError(f"{printable(str(self.path))} was removed or published by another process")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            self.keep()


@dataclass(frozen=True, slots=True)
class _Claim:
    segment: Segment
    share: Share


def finalize(
    plan: Plan,
    output: Path,
    plan_name: str | None,
    *,
    threads: int,
    overwrite: bool = False,
    progress: Progress | None = None,
    before_publish: BeforePublish | None = None,
) -> tuple[Outcome, int]:
    """Checks what the shares have written and publishes it; returns what came out, and of how many shares.

    Args:
        plan: an accepted plan; its sources are open.
        output: the artifact's path.
        plan_name: what messages call the plan file; None if one command does all, and mends it when given again.
        threads: how many hash at a time.
        overwrite: replace an existing output.
        progress: reports bytes of the file.
        before_publish: as of `convert.convert`.

    Raises:
        PlanError: nothing is prepared, a share is missing, or bytes are not what a share has written; all is kept.
        OutputError: a share is being written, or a call failed; all is kept.
    """
    started = time.monotonic()
    require_prepared(plan, output, plan_name or "")
    with _PreparedFile(output, plan.file_bytes) as part:
        part.require_free_name(overwrite=overwrite)
        count, claims, losses = _complete_claims(plan, part.path, plan_name)
        _write_between(plan, part)
        objects = _object_ranges(plan)
        segments = [(claim.segment.begin, claim.segment.end) for claim in claims]

        def read(begin: int, piece: memoryview) -> None:
            part.read_into(begin, piece)
            if progress:
                progress(begin + len(piece), plan.file_bytes)

        digests = take_digests(read, plan.file_bytes, [objects, segments], threads)
        _require_true(plan, part.path, claims, digests.ranges[1], plan_name)
        for checkpoint in plan.sources.values():
            checkpoint.verify_unchanged()
        outcome = Outcome(digests.ranges[0], digests.file, time.monotonic() - started, losses)
        part.sync()
        undo = before_publish(outcome) if before_publish else None
        try:
            part.publish(overwrite=overwrite)
        except BaseException:
            if undo is not None and not part.is_published():
                undo()
            raise
    remove_journals(output)
    return outcome, count


def remove_journals(output: Path) -> None:
    """Removes the journals of an output that has been published."""
    part = part_path(output)
    for path in (journal_path(part), *share_journals(part)):
        remove_journal(path)


def _object_ranges(plan: Plan) -> list[Range]:
    begins = [plan.payload_offset + item.offset for item in plan.objects]
    return [(begin, begin + item.nbytes) for begin, item in zip(begins, plan.objects, strict=True)]


def _write_between(plan: Plan, part: PartFile) -> None:
    """Writes what no share writes, the head and the zeros between the data, once more."""
    part.write(0, plan.head)
    cursor = plan.payload_offset
    for begin, end, _ in stored_ranges(plan):
        if cursor < begin:
            part.write(cursor, bytes(begin - cursor))
        cursor = end
    if cursor < plan.file_bytes:
        part.write(cursor, bytes(plan.file_bytes - cursor))


# -- what the journals say ----------------------------------------------------------------------------------------


def _complete_claims(plan: Plan, part: Path, plan_name: str | None) -> tuple[int, list[_Claim], dict[int, Loss]]:
    """Returns a number of shares that have all been run, what their journals claim of every byte, and the losses."""
    counts = sorted({count for _, count in share_journals(part).values() if count > 0})
    problems: list[str] = []
    for count in counts:
        try:
            return count, *_claims(plan, part, count, plan_name)
        except PlanError as error:
            problems += error.messages
    if not counts:
        problems.append(f"no share of {printable(str(part))} has been run; {_again(plan_name, 'I/N')}")
    elif len(counts) > 1:
        problems.append(f"shares of {' and of '.join(map(str, counts))} are there; those of one number are enough")
    raise PlanError(*problems)


def _claims(
    plan: Plan, part: Path, count: int, plan_name: str | None
) -> tuple[list[_Claim], dict[int, Loss]]:
    claims: list[_Claim] = []
    losses: dict[int, Loss] = {}
    problems = []
    stored = list(stored_ranges(plan))
    identity: Mapping[str, Any] = plan_identity(plan)
    for share in cut(plan, count):
        found = read_share_journal(share_journal_path(part, share), share, identity)
        covered = Intervals()
        for segment in dict.fromkeys(found.segments) if found is not None else ():
            covered.add(segment.begin, segment.end)
            claims.append(_Claim(segment, share))
        losses.update(found.losses if found is not None else {})
        own = [(max(begin, share.begin), min(end, share.end)) for begin, end, _ in stored]
        lacking = sum(covered.missing(begin, end) for begin, end in own if begin < end)
        where = f"share {share.name} (file bytes [{share.begin}, {share.end}))"
        again = _again(plan_name, share.name)
        if found is None:
            problems.append(f"{where} is missing; {again}")
        elif lacking or not found.is_complete:
            problems.append(f"{where} is not complete, {lacking} bytes are missing; {again}")
    if problems:
        raise PlanError(*problems)
    _require_agreement(plan, claims)
    # A share may have been run without measuring.
    return claims, {index: loss for index, loss in sorted(losses.items()) if is_loss_of(plan, index, loss)}


def _require_agreement(plan: Plan, claims: Sequence[_Claim]) -> None:
    """Raises PlanError if two processes have claimed other bytes of one range: one of them computed wrongly."""
    seen: dict[Range, _Claim] = {}
    for claim in claims:
        segment = claim.segment
        other = seen.setdefault((segment.begin, segment.end), claim)
        if other.segment.sha256 != segment.sha256:
            raise PlanError(
                f"object {_object_at(plan, segment.begin)}: two runs of share {claim.share.name} made different bytes "
                f"of [{segment.begin}, {segment.end}): SHA-256 {other.segment.sha256}, then {segment.sha256}; one of "
                f"their machines is not sound: give `run --shard {claim.share.name} --resume never` on another"
            )


def _require_true(
    plan: Plan, part: Path, claims: Sequence[_Claim], digests: Sequence[str], plan_name: str | None
) -> None:
    wrong = [
        f"object {_object_at(plan, claim.segment.begin)}: bytes [{claim.segment.begin}, {claim.segment.end}) of "
        f"{printable(str(part))} have SHA-256 {digest}, but share {claim.share.name} wrote {claim.segment.sha256}; "
        f"{_again(plan_name, claim.share.name)}{' again' if plan_name else ''}"
        for claim, digest in zip(claims, digests, strict=True)
        if digest != claim.segment.sha256
    ]
    if wrong:
        more = [f"and {len(wrong) - SHOWN_PROBLEMS} more ranges"] if len(wrong) > SHOWN_PROBLEMS else []
        raise PlanError(*wrong[:SHOWN_PROBLEMS], *more)


def _object_at(plan: Plan, position: int) -> str:
    begins = [plan.payload_offset + item.offset for item in plan.objects]
    return printable(plan.objects[bisect_right(begins, position) - 1].name)


def _again(plan_name: str | None, share: str) -> str:
    if plan_name is None:
        return "give the same command again"
    return f"give `run --plan {printable(plan_name)} --shard {share}`"


# -- what was published before ------------------------------------------------------------------------------------


def is_published(plan: Plan, output: Path) -> bool:
    """Tells whether the output begins and ends as the plan says: nothing is left to do for a share."""
    with contextlib.suppress(OSError), output.open("rb") as file:
        return os.fstat(file.fileno()).st_size == plan.file_bytes and file.read(len(plan.head)) == plan.head
    return False


def published_digests(
    plan: Plan, output: Path, *, threads: int, progress: Progress | None = None
) -> Outcome:
    """Returns the digests of an output that exists.

    Raises:
        UsageError: it is not what the plan makes.
        OutputError: it cannot be read.
    """
    started, name = time.monotonic(), printable(str(output))
    if not is_published(plan, output):
        raise UsageError(f"{name} exists, and is not what the plan makes")
    try:
        with output.open("rb") as file:

            def read(begin: int, piece: memoryview) -> None:
                if read_at(file.fileno(), begin, piece) is not None:
                    raise OutputError(f"{name} was cut by another process")
                if progress:
                    progress(begin + len(piece), plan.file_bytes)

            digests: Digests = take_digests(read, plan.file_bytes, [_object_ranges(plan)], threads)
    except OSError as error:
        raise OutputError(f"cannot read {name}: {error.strerror}") from error
    return Outcome(digests.ranges[0], digests.file, time.monotonic() - started)
