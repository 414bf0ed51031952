"""What a run would find on this machine: versions, processors, memory, where kernels are kept, the hub's cache, space.

Owns the looking and what counts as a problem. Refuses to mend anything, to use the network, and to tell secrets.

Source: cli.md, `doctor`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ninfer_convert import __version__, allowance
from ninfer_convert.errors import printable
from ninfer_convert.recipe.files import recipes_directory, shipped_recipes

DISTRIBUTION = "ninfer-convert"
LEAST_PYTHON = (3, 11)
LITTLE_SPACE = 1 << 30
"""Free bytes below which a directory is worth a note."""

Severity = Literal["ok", "note", "problem"]

_PINNED = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it is, in words and as a JSON value, and what to do about a problem."""

    subject: str
    severity: Severity
    text: str
    value: Any
    fix: str = ""


def examine(*, warm: bool = False) -> Iterator[Finding]:
    """Yields what is found, one thing after the other.

    Args:
        warm: compile every kernel that is not kept yet, and keep it.
    """
    yield from _versions()
    yield _recipes()
    yield from _allowance()
    if warm:
        yield _warmed()
    yield _kernels()
    yield from _hub()
    yield _directory("working directory", os.curdir, "note", "write elsewhere with -o")
    yield _directory("temporary files", os.environ.get("TMPDIR") or "/tmp", "note", "set TMPDIR")


# -- versions -------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    system = f"{platform.python_implementation()} on {platform.system()} {platform.release()}, {platform.machine()}"
    is_new = sys.version_info[:2] >= LEAST_PYTHON
    least = ".".join(map(str, LEAST_PYTHON))
    yield Finding(
        "Python", "ok" if is_new else "problem", f"{found}, {system}", found, "" if is_new else f"use {least} or later"
    )
    yield Finding(DISTRIBUTION, "ok", f"{__version__} in {_shown(Path(__file__).parent)}", __version__)
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        text = "not installed as a package, so that nobody knows what it needs"
        yield Finding("packages", "note", text, None, f"pip install {DISTRIBUTION}")
        return
    # What an extra asks for has a condition behind a semicolon.
    yield from (_package(requirement) for requirement in requirements if ";" not in requirement)


def _package(requirement: str) -> Finding:
    pinned = _PINNED.match(requirement)
    if pinned is None:
        return Finding(requirement, "note", "cannot be read as a requirement", None)
    name, least = pinned[1], pinned[2] or "0"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "problem", f"not installed, {requirement} is needed", None, f"pip install '{requirement}'")
    if _numbers(found) < _numbers(least):
        text = f"{found} is too old, {requirement} is needed"
        return Finding(name, "problem", text, found, f"pip install '{requirement}'")
    return Finding(name, "ok", found, found)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers a version begins with, trailing zeros left out: 2.10.0rc1 is (2, 10)."""
    numbers = [int(number) for number in re.findall(r"\d+", re.match(r"[0-9.]*", version)[0])]  # type: ignore[index]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _recipes() -> Finding:
    names, place = shipped_recipes(), _shown(recipes_directory())
    if not names:
        return Finding("shipped recipes", "problem", f"none in {place}", 0, f"install {DISTRIBUTION} again")
    return Finding("shipped recipes", "ok", f"{len(names)} in {place}", len(names))


# -- the machine ----------------------------------------------------------------------------------------------


def _allowance() -> Iterator[Finding]:
    allowed, present = allowance.allowed_threads(), os.cpu_count()
    yield Finding("processors", "ok", f"{allowed} of {present} may be used; --threads is {allowed} by default", allowed)
    limit, default = allowance.memory_limit(), allowance.default_memory()
    text = "no limit" if limit is None else f"a limit of {_size(limit)}"
    if default < allowance.MIN_MEMORY_BYTES:
        text += f", of which a run may take {_size(default)}; it takes {_size(allowance.MIN_MEMORY_BYTES)} at least"
        yield Finding("memory limit", "problem", text, limit, "raise the limit (cgroup, ulimit -v)")
    else:
        yield Finding("memory limit", "ok", f"{text}; --max-memory is {_size(default)} by default", limit)
    available = allowance.available_memory()
    if available is not None:
        enough = available >= default
        fix = "" if enough else "end other processes, or give --max-memory"
        yield Finding("memory available", "ok" if enough else "note", _size(available), available, fix)
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY:
        text = f"no file may be larger than {_size(largest)}"
        yield Finding("file size", "note", text, largest, "ulimit -f unlimited")


# -- kernels --------------------------------------------------------------------------------------------------


def _warmed() -> Finding:
    from ninfer_convert.encode.compiled import warm

    started = time.monotonic()
    try:
        warm()
    except (ImportError, OSError, RuntimeError) as error:
        text = printable(f"{type(error).__name__}: {error}")
        return Finding("compiling", "problem", text, None, "install numba again")
    seconds = time.monotonic() - started
    return Finding("compiling", "ok", f"every kernel is ready, after {seconds:.1f} s", round(seconds, 3))


def _kernels() -> Finding:
    from ninfer_convert.encode.compiled import kept

    place, found = kept()
    if place is None:
        text = "are kept nowhere, so that every run compiles them again"
        fix = "set NUMBA_CACHE_DIR to a directory of yours that nobody else can write to"
        return Finding("compiled kernels", "problem", text, None, fix)
    text = f"{sum(found.values())} of {len(found)} are kept in {_shown(place)}"
    missing = "" if all(found.values()) else "doctor --warm compiles the others, or the first run that needs them"
    return Finding("compiled kernels", "ok", text, {"kept": found, "directory": os.fspath(place)}, missing)


# -- the hub and the disk -------------------------------------------------------------------------------------


def _hub() -> Iterator[Finding]:
    from ninfer_convert.source.hub import client_settings

    settings = client_settings()
    offline = "HF_HUB_OFFLINE is set: nothing is fetched" if settings.is_offline else f"hf:// means {settings.server}"
    yield Finding("hub", "note" if settings.is_offline else "ok", printable(offline), settings.server)
    token = "there is one" if settings.has_token else "none; public repositories need none"
    yield Finding("hub token", "ok", token, settings.has_token)
    yield _directory("hub cache", settings.cache, "problem", "set HF_HOME, or use --stream or directories only")


def _directory(subject: str, place: str, unwritable: Severity, fix: str) -> Finding:
    """Looks at a directory, or at the one that it would be made in; `fix` is what to do if it cannot be written."""
    try:
        path = Path(place).absolute()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        text = f"{_shown(place)}: {error.strerror}"
        return Finding(subject, "problem", text, None, "change to a directory that is there")
    value = {"directory": os.fspath(path), "free_bytes": free}
    text = f"{_size(free)} free in {_shown(path)}"
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"{_shown(path)}: {_shown(existing)} cannot be written"
        return Finding(subject, unwritable, text, value, fix)
    if free < LITTLE_SPACE:
        return Finding(subject, "note", text, value, "an artifact may need more")
    return Finding(subject, "ok", text, value)


def _shown(path: str | Path) -> str:
    return printable(os.fspath(path))


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes} bytes"
