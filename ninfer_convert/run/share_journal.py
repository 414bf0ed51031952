"""What of one share of a part file is proven done: byte ranges with their digests, each after it was synced.

One process writes a share at a time, and holds its journal locked. None of what a journal says is trusted: a
resumed share hashes the ranges again before it works, `finalize` before it publishes.

Source: cli.md, `run --shard` and `finalize`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_convert.encode.loss import Loss
from ninfer_convert.errors import OutputError, printable
from ninfer_convert.run.cuts import Share
from ninfer_convert.run.journal import SHA256, encoded, journal_path
from ninfer_convert.run.own_files import OPEN_FLAGS, is_at, is_own, read_lines, sync_directory
from ninfer_convert.run.writer import NO_LOCKS, named_writer, writer_identity

SCHEMA = 1
MAX_LINES = 50_000_000


class ShareHeldError(OutputError):
    """Another process writes a share; it may have died without its file system having noticed."""


@dataclass(frozen=True, slots=True)
class Segment:
    """File bytes `[begin, end)` and their SHA-256 in hexadecimal."""

    begin: int
    end: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Claims:
    """What a journal of a share says; `nbytes` is where its sound lines end."""

    segments: tuple[Segment, ...]
    losses: Mapping[int, Loss]
    """What encoding each object that begins in the share has cost."""
    is_complete: bool
    nbytes: int


def share_journal_path(part: Path, share: Share) -> Path:
    """Returns where the journal of a share lies."""
    path = journal_path(part)
    return path.with_name(f"{path.name}.{share.index}-of-{share.count}")


def share_journals(part: Path) -> dict[Path, tuple[int, int]]:
    """Returns the journals of shares beside a part file, with the number of the share and the count of shares."""
    begin = re.escape(journal_path(part).name)
    found = {}
    for path in sorted(part.parent.iterdir()):
        if match := re.fullmatch(begin + r"\.([0-9]{1,9})-of-([0-9]{1,9})", path.name):
            found[path] = int(match[1]), int(match[2])
    return found


def share_writers(part: Path) -> list[str]:
    """Returns the shares that are being written, each with the process that does."""
    writers = []
    for path, (index, count) in share_journals(part).items():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                writers.append(f"share {index}/{count} by {named_writer(_last_writer(path))}")
            finally:
                os.close(fd)
    return writers


def _last_writer(path: Path) -> Mapping[str, Any] | None:
    found: object = None
    with contextlib.suppress(OSError):
        for line, _ in read_lines(path, MAX_LINES):
            found = line.get("writer", found)
    return found if isinstance(found, Mapping) else None


def read_share_journal(path: Path, share: Share, identity: Mapping[str, Any]) -> Claims | None:
    """Returns what the journal of a share says, or None if there is none of this share of this conversion.

    It ends at the first line that is torn, as a power cut leaves it, or that is no claim.
    """
    segments: list[Segment] = []
    losses: dict[int, Loss] = {}
    is_begun = is_complete = False
    end = 0
    with contextlib.suppress(OSError):
        for line, position in read_lines(path, MAX_LINES):
            if not is_begun:
                if line != _header(share, identity, line.get("writer")):
                    return None
                is_begun = True
            elif line == {"complete": True}:
                is_complete = True
            elif line.keys() == {"object", "loss"}:
                index, loss = line["object"], Loss.from_json(line["loss"])
                if type(index) is not int or loss is None:
                    break
                losses[index] = loss
            elif line.keys() != {"writer"}:
                segment = _segment(line, share)
                if segment is None:
                    break
                segments.append(segment)
            end = position
    return Claims(tuple(segments), losses, is_complete, end) if is_begun else None


def _segment(line: Mapping[str, Any], share: Share) -> Segment | None:
    begin, end, digest = (line.get(name) for name in ("begin", "end", "sha256"))
    if type(begin) is not int or type(end) is not int or not isinstance(digest, str):
        return None
    if not share.begin <= begin < end <= share.end or not SHA256.fullmatch(digest):
        return None
    return Segment(begin, end, digest)


def _header(share: Share, identity: Mapping[str, Any], writer: object) -> dict[str, Any]:
    place = {"index": share.index, "count": share.count, "begin": share.begin, "end": share.end}
    return {"schema": SCHEMA, "writer": writer, "identity": identity, "share": place}


class ShareJournal:
    """The journal of a share, locked while this process lives; use as a context manager.

    `claims` is what an earlier process has left; empty with `resume` false.
    """

    def __init__(self, part: Path, share: Share, identity: Mapping[str, Any], *, resume: bool = True) -> None:
        """Opens or begins the journal.

        Raises:
            ShareHeldError: another process writes this share.
            OutputError: the journal cannot be written.
        """
        self.path = share_journal_path(part, share)
        try:
            self._fd = self._open_locked(share)
        except OSError as error:
            raise self._failure(error) from error
        try:
            found = read_share_journal(self.path, share, identity) if resume else None
            os.ftruncate(self._fd, found.nbytes if found else 0)
            self.is_new = found is None
            self.claims = found or Claims((), {}, False, 0)
            writer = writer_identity()
            self._append([{"writer": writer} if found else _header(share, identity, writer)])
            sync_directory(self.path.parent)
        except OSError as error:
            self.__exit__()
            raise self._failure(error) from error
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> ShareJournal:
        return self

    def __exit__(self, *_: object) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)

    def _open_locked(self, share: Share) -> int:
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | OPEN_FLAGS, 0o666)
            try:
                if not is_own(fd):
                    raise OutputError(f"{printable(str(self.path))} is not a file of ours; remove it")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    writer = named_writer(_last_writer(self.path))
                    raise ShareHeldError(f"share {share.name} is being written by {writer}") from error
                except OSError as error:
                    # Two writers of one share write the same bytes, and no claim is trusted.
                    if error.errno not in NO_LOCKS:
                        raise
                if is_at(fd, self.path):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def record(self, segments: Iterable[Segment], losses: Mapping[int, Loss]) -> None:
        """Appends ranges whose bytes are already synced, and losses of objects all of whose are; syncs the lines."""
        ranges = [{"begin": segment.begin, "end": segment.end, "sha256": segment.sha256} for segment in segments]
        self._append([*ranges, *({"object": index, "loss": loss.as_json()} for index, loss in losses.items())])

    def complete(self) -> None:
        """Says that nothing of the share is left to do."""
        self._append([{"complete": True}])

    def _append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        rest = memoryview(encoded(lines))
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {printable(str(self.path))}: {error.strerror}")
