"""Runs the command line as people do: another process, two output streams, an exit code, a peak of memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_convert.stand_in.checkpoints import StandIn

COMMAND = (sys.executable, "-m", "ninfer_convert")

# The usage counter of a process begins at the peak of the one that started it, so a small one stands between.
_LAUNCHER = """
import os, sys
child = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
status, usage = os.wait4(child, 0)[1:]
print(usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime, file=open(sys.argv[1], "w"))
sys.exit(os.waitstatus_to_exitcode(status) % 256)
"""


@dataclass(frozen=True)
class Done:
    """What a finished command left: `peak_bytes` is its largest resident memory, `seconds` its processor time."""

    code: int
    out: str
    err: str
    peak_bytes: int
    seconds: float


def environment(**changes: str | None) -> dict[str, str]:
    """Returns this process's environment with changes; None takes a variable away."""
    merged: dict[str, str | None] = {**os.environ, "NINFER_CONVERT_DEBUG": None, **changes}
    return {name: text for name, text in merged.items() if text is not None}


def run(*arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Done:
    """Runs `ninfer-convert` with these arguments to its end."""
    with tempfile.NamedTemporaryFile("r") as usage:
        done = subprocess.run(
            [sys.executable, "-c", _LAUNCHER, usage.name, *COMMAND, *map(os.fspath, arguments)],
            cwd=cwd,
            env=env or environment(),
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        peak, seconds = usage.read().split()
        return Done(done.returncode, done.stdout, done.stderr, int(peak), float(seconds))


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Starts `ninfer-convert`; the caller signals it and waits for it."""
    return subprocess.Popen(
        [*COMMAND, *map(os.fspath, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        **options,
    )


def source_arguments(made: StandIn, *names: str) -> list[str]:
    """Returns the options that name the sources of a stand-in and its ranking input."""
    places = {"base": made.base, "quantized": made.quantized}
    options = [option for name in names for option in ("--source", f"{name}={places[name]}")]
    return [*options, "--input", f"ranking={made.ranking}"]
