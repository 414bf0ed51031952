"""The command line: parse, call one function, print, choose the exit code.

Command modules are imported only when their command runs, so that `--help` answers at once.

Source: cli.md.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import click

from ninfer_convert import __version__
from ninfer_convert.cli.output import failure_of, open_streams, say, say_errors, settle_streams
from ninfer_convert.errors import INTERRUPTED_EXIT_CODE

COMMANDS = {
    "run": ("ninfer_convert.cli.convert:run", "Convert a checkpoint by a recipe into one .ninfer artifact."),
    "plan": ("ninfer_convert.cli.convert:plan", "Check a conversion and show what it would write."),
    "prepare": ("ninfer_convert.cli.shares:prepare", "Make the part file for a conversion in shares."),
    "batch": ("ninfer_convert.cli.batch:batch", "Do many conversions, one after another."),
    "finalize": ("ninfer_convert.cli.shares:finalize", "Check the shares of a conversion and publish it."),
    "verify": ("ninfer_convert.cli.artifact:verify", "Check every byte of an artifact."),
    "inspect": ("ninfer_convert.cli.artifact:inspect", "Show what an artifact holds."),
    "compare": ("ninfer_convert.cli.compare:compare", "Compare an artifact with another, or with its source."),
    "export": ("ninfer_convert.cli.export:export", "Write an artifact's values to a .safetensors file."),
    "report": ("ninfer_convert.cli.report:report", "Write one HTML page about an artifact."),
    "recipe": ("ninfer_convert.cli.recipes:recipe", "Look at recipes."),
    "formats": ("ninfer_convert.cli.recipes:formats", "List the numeric formats, layouts and encoders."),
    "demo": ("ninfer_convert.cli.demo:demo", "Make, convert and verify a miniature checkpoint."),
    "doctor": ("ninfer_convert.cli.doctor:doctor", "Look at this machine: versions, caches, space."),
}
"""Every command: where it lives, and its line in `--help`."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_outcome_stands = False


class _EndedError(Exception):
    """Carries what ended a command past click, which would give a broken pipe exit code 1."""


class LazyGroup(click.Group):
    """A command group that imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is no command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, KeyboardInterrupt) as error:
            raise _EndedError from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="ninfer-convert", message="%(prog)s %(version)s")
def cli() -> None:
    """Turn safetensors checkpoints into .ninfer artifacts.

    A recipe (YAML) says what every stored tensor is made of; `recipe list` shows the shipped ones. Start with
    `ninfer-convert demo`.
    """


def main() -> None:
    """Runs the command line and exits with its code. Source: cli.md, "Exit codes"."""
    open_streams()
    # numpy's BLAS, of which nothing here makes use, would take 40 MB of address space for each processor.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for number in SIGNALS:
        # What a parent has told us to ignore, as nohup does, stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    global _outcome_stands
    try:
        code = _run()
    except KeyboardInterrupt:
        # Another signal, while the first one was being answered.
        code = INTERRUPTED_EXIT_CODE
    # A signal that comes while the interpreter winds up must not replace the exit code.
    _outcome_stands = True
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Under `python -m` an interrupt that passed through exec of a text ends the process as signal 2, caught or not,
    # unless another text is executed afterwards.
    exec("")
    settle_streams()
    if any(thread.daemon for thread in threading.enumerate()):
        # A worker that an interrupt has left compiling must not meet an interpreter that is being taken down.
        os._exit(code)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _outcome_stands:
        raise KeyboardInterrupt


def _run() -> int:
    try:
        outcome = cli.main(prog_name="ninfer-convert", standalone_mode=False)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except click.ClickException as error:
        # It repeats what was on the command line, such as the name of a file that a glob has found.
        shown = io.StringIO()
        error.show(shown)
        say(shown.getvalue(), err=True, nl=False)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except (_EndedError, BrokenPipeError) as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            return _interrupted()
        # The reader of our output went away; what it had read was enough for it.
        return 0
    except SystemExit:
        # click, told to leave the exit to us, still exits on a broken pipe outside of commands, such as that of help.
        return 0
    except Exception as error:
        if os.environ.get("NINFER_CONVERT_DEBUG") == "1":
            raise
        return _report(error)


def _interrupted() -> int:
    say("interrupted; give the same command again", err=True)
    return INTERRUPTED_EXIT_CODE


def _report(error: Exception) -> int:
    code, messages = failure_of(error)
    say_errors(messages)
    return code
