"""Options and output that several commands share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ninfer_convert import allowance
from ninfer_convert.cli import candidates
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable
from ninfer_convert.recipe.counting import counted

if TYPE_CHECKING:
    # at run time these load when a command runs, so that its help does not wait for numpy
    from tqdm import tqdm

    from ninfer_convert.plan.planner import Plan
    from ninfer_convert.recipe.model import Recipe
    from ninfer_convert.source.acquisition import Access
    from ninfer_convert.source.checkpoint import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])
LOG_SECONDS = 10.0


def source_options(command: F) -> F:
    """Adds RECIPE and the options that say where its sources lie."""
    return click.argument("recipe_name", metavar="RECIPE", shell_complete=candidates.recipe_names)(
        where_options(command)
    )


def where_options(command: F) -> F:
    """Adds the options that say where a recipe's sources lie, and whether their pins count."""
    help_text = "Accept sources whose digests or revision do not match the recipe's; the report says so."
    return place_options(click.option("--unpinned", is_flag=True, help=help_text)(command))


def place_options(command: F) -> F:
    """Adds the options that say where a recipe's sources lie."""
    for option in (
        click.option(
            "--prefix",
            "prefixes",
            multiple=True,
            metavar="[NAME:]FROM=TO",
            help="Read tensor names that begin with FROM as if they began with TO (of source NAME, or the first).",
        ),
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="NAME=PATH",
            shell_complete=candidates.inputs,
            help="The file of an input of the recipe.",
        ),
        click.option(
            "--source",
            "sources",
            multiple=True,
            metavar="[NAME=]WHERE",
            shell_complete=candidates.sources,
            help="A checkpoint: a directory, a .safetensors file, or hf://owner/name[@revision]. NAME may be left out "
            "when there is one source.",
        ),
    ):
        command = option(command)
    return command


def threads_option(command: F) -> F:
    """Adds `--threads` and `--max-memory`."""
    command = click.option(
        "--max-memory",
        metavar="SIZE",
        help="Peak memory of the whole process, such as 512MiB  [default: 1GiB, less under a tighter limit]",
    )(command)
    return click.option(
        "--threads",
        type=click.IntRange(1, allowance.MAX_THREADS), metavar="N",
        help="Worker threads  [default: the processors this process may use]",
    )(command)


def chosen_threads(threads: int | None) -> int:
    """Returns the number of worker threads; one note when it is more than the process was given."""
    allowed = allowance.allowed_threads()
    if threads is None:
        return allowed
    if threads > allowed:
        processors = counted(allowed, "processor")
        say(f"note: --threads {threads} is more than the {processors} this process may use", err=True)
    return threads


def chosen_memory(text: str | None) -> int:
    """Returns `--max-memory` in bytes."""
    if text is None:
        return max(allowance.MIN_MEMORY_BYTES, allowance.default_memory())
    size = allowance.parse_size(text)
    if size < allowance.MIN_MEMORY_BYTES:
        raise UsageError(f"--max-memory {text} is below the minimum of 256MiB")
    return size


@contextlib.contextmanager
def planned(
    recipe_name: str,
    sources: tuple[str, ...],
    inputs: tuple[str, ...],
    prefixes: tuple[str, ...],
    unpinned: bool,
    access: Access = "values",
    *,
    change: Callable[[Recipe], Recipe] | None = None,
    verbose: bool = False,
) -> Iterator[Plan]:
    """Loads the recipe, opens its sources, plans; closes the sources afterwards. Warnings go to stderr.

    Args:
        change: makes of the loaded recipe the one that is planned.
        verbose: tell every pin that is waived, not only how many.
    """
    from ninfer_convert.plan.planner import make_plan
    from ninfer_convert.recipe.loader import load_recipe

    recipe = load_recipe(recipe_name)
    if change is not None:
        recipe = change(recipe)
    with opened_sources(recipe, sources, inputs, prefixes, access, unpinned=unpinned) as (opened, files):
        plan = make_plan(recipe, opened, files, unpinned=unpinned)
        for warning in plan.warnings:
            say(f"warning: {warning}", err=True)
        if plan.waived:
            count = "1 pin does" if len(plan.waived) == 1 else f"{len(plan.waived)} pins do"
            listed = "" if verbose else ", listed by plan -v, plan --json and in the report"
            say(f"warning: {count} not match; accepted by --unpinned{listed}", err=True)
            for text in plan.waived if verbose else ():
                say(f"waived: {text}", err=True)
        yield plan


@contextlib.contextmanager
def opened_sources(
    recipe: Recipe,
    sources: tuple[str, ...],
    inputs: tuple[str, ...],
    prefixes: tuple[str, ...],
    access: Access,
    *,
    unpinned: bool = False,
) -> Iterator[tuple[dict[str, Checkpoint], dict[str, Path]]]:
    """Opens what the options name: the checkpoints and the auxiliary files of a recipe, by the recipe's names."""
    from ninfer_convert.source.acquisition import Place, open_sources

    places = _places(recipe, sources)
    rules = _prefix_rules(recipe, prefixes)
    files = _files(recipe, inputs)
    wanted = {
        name: Place(where, {**recipe.sources[name].prefixes, **rules.get(name, {})}) for name, where in places.items()
    }

    def tell(text: str) -> None:
        say(text, err=True)

    with open_sources(recipe, wanted, files, access=access, unpinned=unpinned, tell=tell) as opened:
        yield opened, files


def _places(recipe: Recipe, sources: tuple[str, ...]) -> dict[str, str]:
    places: dict[str, str] = {}
    for text in sources:
        name, equals, where = text.partition("=")
        if not equals or name not in recipe.sources:
            # A path may hold an equals sign, and is one when it is there.
            is_name = bool(equals) and "/" not in name
            if len(recipe.sources) > 1 or (is_name and not os.path.lexists(text)):
                raise UsageError(_unknown_source(recipe, text, is_name=is_name))
            name, where = next(iter(recipe.sources)), text
        if name in places:
            raise UsageError(f"--source {name} is given twice")
        places[name] = where
    missing = [spec for spec in recipe.sources.values() if spec.name not in places]
    if missing:
        wanted = [f"--source {spec.name}=WHERE" + (f" ({spec.repo})" if spec.repo else "") for spec in missing]
        raise UsageError("a source is not given; add " + " and ".join(wanted))
    return places


def _unknown_source(recipe: Recipe, text: str, *, is_name: bool) -> str:
    label, known = f"--source {printable(text)}", ", ".join(recipe.sources)
    if not is_name:
        return f"{label}: write NAME=WHERE; the recipe's sources are {known}"
    name, _, where = text.partition("=")
    if len(recipe.sources) > 1:
        return f"{label}: {_unknown('source', name, recipe.sources)}"
    place = printable(where)
    return (
        f"{label}: the recipe's source is called {known}, and no path is called {printable(text)}; "
        f"write --source {known}={place} or --source {place}"
    )


def _unknown(kind: str, name: str, known: Collection[str]) -> str:
    from ninfer_convert.recipe.problems import nearest

    near = nearest(name, known)
    return (
        f"the recipe has no {kind} {printable(name)}" + (f"; nearest: {near}" if near else "")
        + f"; it has {', '.join(known) or 'none'}"
    )


def _files(recipe: Recipe, inputs: tuple[str, ...]) -> dict[str, Path]:
    pairs = _pairs("--input", inputs)
    unknown = [name for name in pairs if name not in recipe.inputs]
    if unknown:
        raise UsageError(
            *(f"--input {printable(name)}={printable(pairs[name])}: {_unknown('input', name, recipe.inputs)}"
              for name in unknown)
        )
    return {name: Path(path) for name, path in pairs.items()}


def _pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name and value):
            raise UsageError(f"{option} {printable(text)}: write NAME=PATH")
        if name in pairs:
            raise UsageError(f"{option} {printable(name)} is given twice")
        pairs[name] = value
    return pairs


def _prefix_rules(recipe: Recipe, texts: tuple[str, ...]) -> Mapping[str, dict[str, str]]:
    rules: dict[str, dict[str, str]] = {}
    for text in texts:
        begin, equals, to = text.partition("=")
        name, colon, rest = begin.partition(":")
        if not (colon and name in recipe.sources):
            name, rest = next(iter(recipe.sources)), begin
        if not equals or not rest:
            raise UsageError(f"--prefix {printable(text)}: write FROM=TO, FROM not empty")
        rules.setdefault(name, {})[rest] = to
    return rules


def print_json(document: Any) -> None:
    """Prints exactly one JSON document."""
    click.echo(json.dumps(document, ensure_ascii=True, indent=1).replace("\x7f", "\\u007f"))


def size_text(nbytes: int) -> str:
    """Returns bytes as people read them: `17,495,365,888 bytes (16.3 GiB)`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes:,} bytes ({nbytes / size:.1f} {unit})"
    return f"{nbytes:,} bytes"


@contextlib.contextmanager
def progress(verb: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a progress callback: a bar on a terminal, at most a line every ten seconds in a log.

    What ends well ends at its total, though gaps between objects may not have been counted on the way.
    """
    if quiet:
        yield None
        return
    reached = whole = 0
    with _bar(verb) if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _log_lines(verb) as show:

        def advance(done: int, total: int) -> None:
            nonlocal reached, whole
            reached, whole = done, total
            show(done, total)

        yield advance
        if reached != whole:
            show(whole, whole)


@contextlib.contextmanager
def _bar(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Yields what moves a bar. A terminal that goes away meanwhile takes the bar with it, and nothing else."""
    from tqdm import tqdm

    bar: tqdm[NoReturn] | None = None
    with contextlib.suppress(OSError):
        bar = tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc=verb, leave=False)

    def show(done: int, total: int) -> None:
        if bar is not None:
            bar.total = total
            with contextlib.suppress(OSError):
                bar.update(done - bar.n)

    try:
        yield show
    finally:
        with contextlib.suppress(OSError):
            if bar is not None:
                bar.close()


@contextlib.contextmanager
def _log_lines(verb: str) -> Iterator[Callable[[int, int], None]]:
    last = time.monotonic()
    # When something was done first: before that kernels may have been compiled.
    begun: tuple[float, int] | None = None

    def show(done: int, total: int) -> None:
        nonlocal last, begun
        now = time.monotonic()
        if not done:
            return
        begun = begun or (now, done)
        if now - last < LOG_SECONDS:
            return
        last = now
        text = f"{verb}: {done / total:.0%}"
        if now > begun[0] and done > begun[1]:
            rate = (done - begun[1]) / (now - begun[0])
            text += f", {rate / 2**20:.0f} MiB/s, {(total - done) / rate:.0f} s left"
        say(text, err=True)

    yield show
