"""What every command prints goes through here: nothing that a stranger can name changes a terminal's state."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

import click

from ninfer_convert.errors import ConvertError, OutputError, printable
from ninfer_convert.recipe.counting import counted

SHOWN_MESSAGES = 50
"""Problems printed of one failure; a checkpoint of another model would tell hundreds."""


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints lines; whatever in them is not printable is escaped.

    A log that nobody can read is no reason to stop: what cannot be written to standard error is lost.
    """
    with contextlib.suppress(OSError) if err else contextlib.nullcontext():
        click.echo("\n".join(map(printable, text.split("\n"))), err=err, nl=nl)


def failure_of(error: Exception) -> tuple[int, Sequence[str]]:
    """Returns the exit code of what a command has raised, and the messages that tell it."""
    if isinstance(error, ConvertError):
        return error.exit_code, error.messages
    if isinstance(error, OSError):
        place = f"{os.fsdecode(error.filename)!r}: " if error.filename else ""
        return OutputError.exit_code, [f"{place}{error.strerror or error}"]
    text = f"internal: {type(error).__name__}: {error} (NINFER_CONVERT_DEBUG=1 shows where)"
    return ConvertError.exit_code, [text]


def say_errors(messages: Sequence[str]) -> None:
    """Prints the messages of one failure, the first ones of many."""
    for message in messages[:SHOWN_MESSAGES]:
        say(f"error: {message}", err=True)
    if len(messages) > SHOWN_MESSAGES:
        say(f"error: and {counted(len(messages) - SHOWN_MESSAGES, 'more problem')}", err=True)


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
