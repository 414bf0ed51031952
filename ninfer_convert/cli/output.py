"""What every command prints goes through here: nothing that a stranger can name changes a terminal's state."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import click

from ninfer_convert.errors import printable


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints lines; whatever in them is not printable is escaped.

    A log that nobody can read is no reason to stop: what cannot be written to standard error is lost.
    """
    with contextlib.suppress(OSError) if err else contextlib.nullcontext():
        click.echo("\n".join(map(printable, text.split("\n"))), err=err, nl=nl)


def open_streams() -> None:
    """Gives the process the standard streams that it was started without, so that no file takes their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is the one that is missing.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
        if number and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def settle_streams() -> None:
    """Flushes the standard streams; what cannot be written goes nowhere, instead of failing when Python ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
