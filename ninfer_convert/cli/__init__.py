"""The command line: parse, call one function, print, choose the exit code.

Command modules are imported only when their command runs, so that `--help` answers at once.

Source: cli.md.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from types import FrameType

import click

from ninfer_convert import __version__
from ninfer_convert.cli.groups import EndedError, Entry, LazyGroup
from ninfer_convert.cli.output import failure_of, open_streams, say, say_errors, settle_streams
from ninfer_convert.errors import INTERRUPTED_EXIT_CODE

SECTIONS = {
    "Convert": {
        "demo": Entry("ninfer_convert.cli.demo:demo", "Make, convert and verify a miniature checkpoint."),
        "plan": Entry("ninfer_convert.cli.convert:plan", "Check a conversion and show what it would write."),
        "run": Entry("ninfer_convert.cli.convert:run", "Convert a checkpoint by a recipe into one .ninfer artifact."),
        "batch": Entry("ninfer_convert.cli.batch:batch", "Do many conversions, one after another."),
    },
    "Look and check": {
        "inspect": Entry("ninfer_convert.cli.artifact:inspect", "Show what an artifact holds."),
        "verify": Entry("ninfer_convert.cli.artifact:verify", "Check every byte of an artifact."),
        "compare": Entry("ninfer_convert.cli.compare:compare", "Compare an artifact with another, or with its source."),
        "report": Entry("ninfer_convert.cli.report:report", "Write one HTML page about an artifact."),
        "export": Entry("ninfer_convert.cli.export:export", "Write an artifact's values to a .safetensors file."),
    },
    "Recipes": {
        "recipe": Entry("ninfer_convert.cli.recipes:recipe", "Draft, check, look at and tune recipes."),
        "formats": Entry("ninfer_convert.cli.recipes:formats", "List the numeric formats, layouts and encoders."),
    },
    "One artifact by many processes": {
        "prepare": Entry("ninfer_convert.cli.shares:prepare", "Make the part file for a conversion in shares."),
        "finalize": Entry("ninfer_convert.cli.shares:finalize", "Check the shares of a conversion and publish it."),
    },
    "This machine": {
        "doctor": Entry("ninfer_convert.cli.doctor:doctor", "Look at this machine: versions, caches, space."),
        "completion": Entry("ninfer_convert.cli.completion:completion", "Print the completion script of a shell."),
    },
}
"""Every command, as the help lists them."""

NOTES = {
    "Exit codes": [
        ("0", "Done. compare: equal, or within --max-error."),
        ("1", "Recipe, source or artifact are wrong; a rerun will not help. compare, recipe show --diff: different."),
        ("2", "Usage."),
        ("74", "Input or output failed."),
        ("75", "Interrupted; the same command goes on where it stopped."),
    ],
    "Environment": [
        ("NUMBA_CACHE_DIR", "Where compiled kernels are kept. [default: $XDG_CACHE_HOME or ~/.cache]"),
        ("TMPDIR", "Where they are kept if not there; temporary files. [default: /tmp]"),
        ("HF_HOME", "Where the hub's cache and token lie. [default: ~/.cache/huggingface]"),
        ("HF_TOKEN", "The token for hf:// sources that need one."),
        ("HF_HUB_OFFLINE", "1: hf:// sources come from the hub's cache alone."),
        ("NINFER_CONVERT_DEBUG", "1: errors come with a traceback."),
    ],
}

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COMPLETE_VARIABLE = "_NINFER_CONVERT_COMPLETE"
"""Set by the completion scripts: the command prints candidates and does nothing else."""

_outcome_stands = False


@click.group(
    cls=LazyGroup, sections=SECTIONS, notes=NOTES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, package_name="ninfer-convert", message="%(prog)s %(version)s")
def cli() -> None:
    """Turn safetensors checkpoints into .ninfer artifacts.

    A recipe (YAML) says what every stored tensor is made of: `recipe list` shows the shipped ones, `recipe init`
    drafts one for any other checkpoint. Every command has a help page of its own.

    \b
    Examples:
      ninfer-convert demo
      ninfer-convert recipe init my-model -o my-model.yaml
      ninfer-convert run my-model.yaml --source my-model -o my-model.ninfer
      ninfer-convert verify my-model.ninfer
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
    if COMPLETE_VARIABLE in os.environ:
        from ninfer_convert.cli.shells import add_shells

        add_shells()
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
    except (EndedError, BrokenPipeError) as error:
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
