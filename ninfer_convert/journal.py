"""What of a part file is proven done: a header that says for which conversion, then one line per object.

One writer appends to one journal; writers of separate shares of one part file have a journal each, of this same
form. A line is written only after the object's bytes are on the disk, and names their digest, so that a reader
checks instead of trusting.

Source: cli.md, exit code 75 and `--resume`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ninfer_convert.errors import OutputError, printable
from ninfer_convert.writer import JOURNAL_SUFFIX, MAX_LINE_BYTES

JOURNAL_SCHEMA = 1


class Journal:
    """An open journal; use as a context manager."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, keep_entries: bool) -> None:
        """Begins a journal, or with `keep_entries` goes on with the one that is there.

        Raises:
            OutputError: it cannot be written.
        """
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags if keep_entries else flags | os.O_TRUNC, 0o666)
        except OSError as error:
            raise self._failure(error) from error
        if not keep_entries:
            writer = {"pid": os.getpid(), "host": platform.node()}
            try:
                self._append([{"schema": JOURNAL_SCHEMA, "writer": writer, "identity": identity}])
            except BaseException:
                self.discard()
                raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def record(self, entries: Iterable[tuple[int, str]]) -> None:
        """Appends (object index, SHA-256) of objects whose bytes are already synced, and syncs the lines."""
        self._append([{"object": index, "sha256": digest} for index, digest in entries])

    def discard(self) -> None:
        """Removes the journal."""
        self.__exit__()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _append(self, lines: list[dict[str, Any]]) -> None:
        data = memoryview("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode())
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {printable(str(self.path))}: {error.strerror}")


def journal_path(part: Path) -> Path:
    """Returns where the journal of a part file lies."""
    return part.with_name(part.name + JOURNAL_SUFFIX)


def read_journal(path: Path, objects: int) -> tuple[Mapping[str, Any], dict[int, str]] | None:
    """Returns the identity and the claimed digests of a journal, or None if there is no usable one.

    A torn last line, as a power cut leaves it, ends the journal. Nothing here is trusted: the caller compares
    the identity and hashes what is claimed.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            header = _line(file.readline(MAX_LINE_BYTES))
            if header is None or header.get("schema") != JOURNAL_SCHEMA or not isinstance(header.get("identity"), dict):
                return None
            claims: dict[int, str] = {}
            for _ in range(2 * objects + 1):
                entry = _line(file.readline(MAX_LINE_BYTES))
                if entry is None:
                    break
                index, digest = entry.get("object"), entry.get("sha256")
                if type(index) is not int or not 0 <= index < objects or not isinstance(digest, str):
                    break
                claims[index] = digest
    except OSError:
        return None
    return header["identity"], claims


def _line(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Returns the members in which two identities differ, each with both values when they are short."""
    changed = []
    for key in [*wanted, *(key for key in found if key not in wanted)]:
        old, new = found.get(key), wanted.get(key)
        if old != new:
            texts = [printable(json.dumps(value)) for value in (old, new)]
            short = all(len(text) <= 80 for text in texts)
            changed.append(f"{printable(key)} ({texts[0]} then, {texts[1]} now)" if short else printable(key))
    return changed
