"""What of a part file is proven done: a header that says for which conversion, then one line per object.

One writer appends to one journal; writers of separate shares of one part file have a journal each
(`share_journal`). A line is written only after the object's bytes are on the disk, and names their digest, so
that a reader checks instead of trusting; it also says what encoding the object has cost. Every run that goes on
with a journal says so in a line of its own.

Source: cli.md, exit code 75 and `--resume`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_convert.encode.loss import Loss
from ninfer_convert.errors import OutputError, printable
from ninfer_convert.run.own_files import OPEN_FLAGS, is_own, make_own, read_lines, sync_directory
from ninfer_convert.run.writer import JOURNAL_SUFFIX, writer_identity

JOURNAL_SCHEMA = 1
MAX_LINES_PER_OBJECT = 4
MAX_OTHER_LINES = 1024
SHOWN_MEMBERS = 3

SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Kept:
    """What a journal says of an interrupted run. None of it is trusted: `claims` are hashed by the caller.

    `claims` maps the index of an object to the SHA-256 of its bytes, `losses` to what encoding it has cost;
    `nbytes` is where the sound lines end; `shares` tells that the file was prepared for shares, whose claims are
    in journals of their own.
    """

    identity: Mapping[str, Any]
    claims: Mapping[int, str]
    losses: Mapping[int, Loss]
    nbytes: int
    shares: bool = False


class Journal:
    """An open journal; use as a context manager."""

    def __init__(
        self, path: Path, identity: Mapping[str, Any], kept: Kept | None = None, *, shares: bool = False
    ) -> None:
        """Begins a journal, or goes on behind the sound lines of the one that was read.

        Raises:
            OutputError: it cannot be written.
        """
        self.path = path
        header: dict[str, Any] = {"writer": writer_identity()}
        if kept is None:
            header = {"schema": JOURNAL_SCHEMA, **header, "identity": identity}
            if shares:
                header["shares"] = True
        data = encoded([header])
        try:
            if kept is None:
                self._fd = make_own(path, os.O_APPEND)
            else:
                self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | OPEN_FLAGS)
        except OSError as error:
            raise self._failure(error, len(data)) from error
        try:
            if kept is not None:
                self._cut(kept.nbytes)
            self._append(data)
            sync_directory(path.parent)
        except OSError as error:
            self.discard()
            raise self._failure(error, len(data)) from error
        except Exception:
            self.discard()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)

    def record(self, entries: Iterable[tuple[int, str, Loss | None]]) -> None:
        """Appends (object index, SHA-256, loss) of objects whose bytes are already synced, and syncs the lines."""
        lines = [
            {"object": index, "sha256": digest} | ({"loss": loss.as_json()} if loss else {})
            for index, digest, loss in entries
        ]
        self._append(encoded(lines))

    def discard(self) -> None:
        """Removes the journal."""
        self.__exit__()
        remove_journal(self.path)

    def _cut(self, nbytes: int) -> None:
        """Removes a torn line, so that the next one does not become a part of it."""
        if not is_own(self._fd):
            raise OutputError(f"{printable(str(self.path))} was replaced by another process")
        os.ftruncate(self._fd, nbytes)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error, len(data)) from error

    def _failure(self, error: OSError, nbytes: int) -> OutputError:
        return OutputError(f"cannot write {printable(str(self.path))} ({nbytes} bytes): {error.strerror}")


def encoded(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Returns the lines of a journal."""
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def journal_path(part: Path) -> Path:
    """Returns where the journal of a part file lies."""
    return part.with_name(part.name + JOURNAL_SUFFIX)


def remove_journal(path: Path) -> None:
    """Removes a journal, if there is one."""
    with contextlib.suppress(OSError):
        path.unlink()


def read_journal(path: Path, objects: int) -> Kept | None:
    """Returns what a journal of this many objects says, or None if there is no usable one of our own.

    It ends at the first line that is torn, as a power cut leaves it, or that is no claim.
    """
    found, shares = None, False
    claims: dict[int, str] = {}
    losses: dict[int, Loss] = {}
    end = 0
    with contextlib.suppress(OSError):
        for line, position in read_lines(path, MAX_LINES_PER_OBJECT * objects + MAX_OTHER_LINES):
            if found is None:
                if line.get("schema") != JOURNAL_SCHEMA or not isinstance(line.get("identity"), dict):
                    return None
                found, shares = line["identity"], line.get("shares") is True
            elif line.keys() != {"writer"}:
                index, digest = line.get("object"), line.get("sha256")
                if type(index) is not int or not 0 <= index < objects:
                    break
                if not isinstance(digest, str) or not SHA256.fullmatch(digest):
                    break
                claims[index] = digest
                losses.pop(index, None)
                if (loss := Loss.from_json(line.get("loss"))) is not None:
                    losses[index] = loss
            end = position
    return None if found is None else Kept(found, claims, losses, end, shares)


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Returns the members in which two identities differ, each with both values when they are short."""
    changed = []
    for key in wanted:
        old, new = found.get(key), wanted[key]
        if old == new:
            continue
        texts = [printable(json.dumps(value)) for value in (old, new)]
        if all(len(text) <= 80 for text in texts):
            changed.append(f"{key} ({texts[0]} then, {texts[1]} now)")
        else:
            changed.append(key + _places(old, new))
    return changed + (["unknown members"] if found.keys() - wanted.keys() else [])


def _places(old: object, new: object) -> str:
    """Returns in which members two mappings differ, and of which files these tell something else."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return ""
    members = [str(key) for key in dict.fromkeys([*new, *old]) if old.get(key) != new.get(key)]
    shown = []
    for member in members[:SHOWN_MEMBERS]:
        before, now = _rows(old.get(member)), _rows(new.get(member))
        files = [name for name in {**now, **before} if before.get(name) != now.get(name)]
        names = ", ".join(name[:80] for name in files[:SHOWN_MEMBERS])
        shown.append(printable(f"{member[:80]}: {names}" if names else member[:80]))
    return f" ({'; '.join(shown)})"


def _rows(value: object) -> dict[str, Any]:
    """Returns rows of a table, such as one of files, by their first column."""
    return {str(row[0]): row for row in value if isinstance(row, list) and row} if isinstance(value, list) else {}
