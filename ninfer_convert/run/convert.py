"""A conversion in one process: the part file begun or gone on with, the pipeline, publication.

Owns what is left behind when something ends a run: nothing, or a part file with its journal. Refuses to know how
bytes are made (`pipeline`).

Source: cli.md, `run` and "Exit codes".
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ninfer_convert.errors import NetworkError, OutputError, PlanError, printable
from ninfer_convert.plan.block import BLOCK_BYTES
from ninfer_convert.plan.planner import Plan
from ninfer_convert.plan.provenance import Outcome, plan_identity
from ninfer_convert.run.journal import Journal, Kept, differences, journal_path, read_journal, remove_journal
from ninfer_convert.run.pipeline import Pipeline, Progress
from ninfer_convert.run.tasks import Tasks
from ninfer_convert.run.writer import PartFile

BeforePublish = Callable[[Outcome], Callable[[], None] | None]
"""Called when all bytes are on the disk; what it returns takes back what it did, should publishing fail."""


def convert(
    plan: Plan,
    output: Path,
    *,
    threads: int,
    block_bytes: int = BLOCK_BYTES,
    stats: bool = True,
    resume: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    before_publish: BeforePublish | None = None,
) -> Outcome:
    """Writes the artifact of a plan and returns what came out; the output appears only when complete.

    Args:
        plan: an accepted plan; its sources are open.
        output: the artifact's path; already checked by `writer.require_output`.
        threads: worker threads, at least 1.
        block_bytes: about how many source bytes one block holds.
        stats: measure what encoding costs each object.
        resume: go on from what an interrupted run of the same conversion left; else start over.
        overwrite: replace an existing output.
        progress: reports bytes written.
        before_publish: called before the file gets its name, for what must be there when the file is.

    Raises:
        EncodeError, SourceError: a value or word is not legal, a source changed; nothing is left behind.
        OutputError: writing failed; nothing is left behind.
        NetworkError: a remote source did not answer; part file and journal are kept.
        PlanError: what an interrupted run left belongs to another conversion; names what differs. Or the output
            is being made in shares.
        KeyboardInterrupt: passed on when nobody writes any more, though a worker may still be computing for
            nothing; part file and journal are kept. One that comes when the output has its name is too late, and
            is not passed on.

    Source: cli.md, `run` and "Exit codes".
    """
    started = time.monotonic()
    if not overwrite and os.path.lexists(output):
        raise OutputError(f"{printable(str(output))} exists; --overwrite replaces it when the new one is complete")
    identity = plan_identity(plan)
    undo: Callable[[], None] | None = None
    with PartFile(output, plan.file_bytes) as part:
        part.require_free_name(overwrite=overwrite)
        path = journal_path(part.path)
        found = None if part.is_empty() else read_journal(path, len(plan.objects))
        kept = _kept(part, found, identity, resume=resume)
        _begin(part, path, kept)
        with Journal(path, identity, kept) as journal:
            run = Pipeline(plan, part, Tasks(plan, threads, block_bytes, stats=stats), journal)
            try:
                part.write(0, plan.head)
                if kept is not None:
                    run.resume(kept)
                run.execute(progress)
                for checkpoint in plan.sources.values():
                    checkpoint.verify_unchanged()
                outcome = run.outcome(started)
                part.sync()
                part.require_free_name(overwrite=overwrite)
                if before_publish:
                    undo = before_publish(outcome)
            except KeyboardInterrupt:
                with contextlib.suppress(OutputError):
                    run.record_done()
                raise
            except NetworkError as error:
                run.record_done()
                part.keep()
                raise NetworkError(*error.messages, "what is done is kept: the same command goes on") from error
            except BaseException:
                journal.discard()
                raise
            # A part file without a journal starts over, so a death between these two lines leaves no lie.
            journal.discard()
            _publish(part, overwrite, undo)
    return outcome


def _kept(part: PartFile, found: Kept | None, identity: Mapping[str, Any], *, resume: bool) -> Kept | None:
    """Returns what an interrupted run of the same conversion claims to have done, or None to start over."""
    if found is not None and found.shares:
        part.keep()
        raise PlanError(
            f"{printable(str(part.path))} is prepared for a conversion in shares, which `run --plan` and `finalize` or "
            f"`run --dask` complete; remove {printable(str(part.path))}* to give it up"
        )
    if found is None or not resume:
        return None
    if changed := differences(found.identity, identity):
        part.keep()
        raise PlanError(
            f"{printable(str(part.path))} was left by an interrupted conversion that differs in "
            f"{', '.join(changed)}; --resume never starts over"
        )
    return found if part.is_full_size() else None


def _begin(part: PartFile, journal: Path, kept: Kept | None) -> None:
    if kept is None:
        # No claim outlives the bytes it was about.
        remove_journal(journal)
    try:
        part.begin(keep_content=kept is not None, whole=False)
    except Exception:
        remove_journal(journal)
        raise


def _publish(part: PartFile, overwrite: bool, undo: Callable[[], None] | None) -> None:
    try:
        part.publish(overwrite=overwrite)
    except BaseException as error:
        if not part.is_published():
            if undo is not None:
                undo()
            raise
        if not isinstance(error, KeyboardInterrupt):
            raise


def scan(
    plan: Plan,
    *,
    threads: int,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
) -> None:
    """Makes every block and writes nothing: `plan --deep`. Raises like `convert`."""
    Pipeline(plan, None, Tasks(plan, threads, block_bytes), None).execute(progress)
