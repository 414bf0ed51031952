"""The help pages: complete, within the width of a terminal, and with examples that the command line accepts."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from case_tools import run_cli

from ninfer_convert.cli import cli
from ninfer_convert.recipe.files import shipped_recipes

WIDTH = 80

SYNOPSIS = """
run      -o --source --input --threads --max-memory --resume --report --prefix --no-stats --stream --plan --shard
run      --dask -q -v --unpinned --dry-run --overwrite
plan     --source --input --json --objects --deep --set -o --output --unpinned --prefix
prepare  --plan
finalize --plan
batch    --dask
verify   --recipe --source --input --sample --json --unpinned
inspect  --objects --object --json
compare  --recipe --source --max-error --json --csv
export   -o --objects --dtype
report   --html --against
doctor   --warm
"""
"""Every option that other tools rely on. Source: cli.md."""


def commands(group: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yields every command, groups included, with the words that call it."""
    yield path, group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from commands(command, (*path, name))


COMMANDS = dict(commands())
HELPS = {path: inspect.cleandoc(command.help or "") for path, command in COMMANDS.items()}


def examples(text: str) -> list[str]:
    """Returns the command lines of a help text, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if line.strip().startswith("ninfer-convert ")]


EXAMPLES = sorted({line for text in HELPS.values() for line in examples(text)})


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Option):
            assert parameter.hidden or re.fullmatch(r"[A-Z0-9\"`].*[.\]]", parameter.help or ""), parameter.opts


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_argument_is_spoken_of(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Argument):
            found = re.search(r"\b[A-Z]{2,}\b(?!=)", (parameter.metavar or parameter.name or "").upper())
            assert found is not None
            assert re.search(rf"\b{found[0]}\b", HELPS[path]), found[0]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_page_begins_with_one_sentence_and_ends_before_the_margin(path: tuple[str, ...]) -> None:
    ran = run_cli(*path, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert [line for line in ran.out.splitlines() if len(line) > WIDTH] == []
    assert re.fullmatch(r"[A-Z].*[.\]]", " ".join(HELPS[path].split("\n\n")[0].split()))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_page_has_examples(path: tuple[str, ...]) -> None:
    own = " ".join(["ninfer-convert", *path])
    assert [line for line in examples(HELPS[path]) if line.startswith(own)], own


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_are_accepted(line: str) -> None:
    words = shlex.split(re.split(r" [>|] ?| {2,}#|\)| &&", line)[0])
    path: tuple[str, ...] = ()
    rest = words[1:]
    while rest and (*path, rest[0]) in COMMANDS:
        path, rest = (*path, rest[0]), rest[1:]
    command = COMMANDS[path]
    assert path
    assert not isinstance(command, click.Group), line
    with command.make_context(line, list(rest)) as context:
        recipe = context.params.get("recipe_name")
    assert recipe is None or recipe.endswith(".yaml") or recipe in shipped_recipes()


def test_examples_that_cannot_be_right_are_seen() -> None:
    with pytest.raises(click.NoSuchOption, match="--sauce"):
        COMMANDS[("plan",)].make_context("plan", ["my.yaml", "--sauce", "x"])


@pytest.mark.parametrize("line", SYNOPSIS.strip().splitlines())
def test_options_that_others_rely_on_exist(line: str) -> None:
    name, *options = line.split()
    known = {option for parameter in COMMANDS[(name,)].params for option in parameter.opts}
    assert set(options) <= known


def test_the_recipe_commands_are_those_of_the_specification() -> None:
    assert {path[1] for path in COMMANDS if path[0:1] == ("recipe",) and len(path) == 2} == {
        *("list", "show", "check", "init", "schema", "tune")
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["verfy"], "Error: No such command 'verfy'. Did you mean 'verify'?\n"),
        (["recipe", "lits"], "Error: No such command 'lits'. Did you mean 'list'?\n"),
        (["zzz"], "Error: No such command 'zzz'.\n"),
        (["comp\x1bare"], "Error: No such command 'comp\\x1bare'. Did you mean 'compare'?\n"),
    ],
)
def test_a_mistyped_command_is_told_the_nearest(words: list[str], told: str) -> None:
    ran = run_cli(*words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith(told)


def test_the_first_page_has_every_command_under_a_title() -> None:
    page = run_cli("--help").out
    titles = re.findall(r"^(\w[\w ]*):$", page, re.MULTILINE)
    assert titles[1:] == [
        *("Convert", "Look and check", "Recipes", "One artifact by many processes", "This machine"),
        *("Exit codes", "Environment"),
    ]
    for (name,) in (path for path in COMMANDS if len(path) == 1):
        assert re.search(rf"^  {name} +[A-Z]", page, re.MULTILINE)


@pytest.mark.parametrize("code", ["0", "1", "2", "74", "75"])
def test_the_first_page_has_every_exit_code(code: str) -> None:
    assert re.search(rf"^  {code} +[A-Z]", run_cli("--help").out, re.MULTILINE)


def test_variables_of_the_first_page_are_read_somewhere() -> None:
    page = run_cli("--help").out
    told = re.findall(r"^  ([A-Z_]{4,}) ", page.partition("Environment:")[2], re.MULTILINE)
    package = Path(str(inspect.getfile(cli.callback or cli))).parents[1]  # type: ignore[arg-type]
    source = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path.parent.name != "cli")
    # What begins with HF_ is the hub client's.
    own = [name for name in told if not name.startswith("HF_")]
    assert [name for name in own if name not in source and name != "NINFER_CONVERT_DEBUG"] == []
    assert {"NUMBA_CACHE_DIR", "TMPDIR", "HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "NINFER_CONVERT_DEBUG"} <= set(told)
