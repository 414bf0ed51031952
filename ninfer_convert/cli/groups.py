"""Groups of commands that import a command's module when the command is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem


class Entry(NamedTuple):
    """A command of a group: where it lies, as `module:attribute`, and its line in the help of the group."""

    place: str
    line: str


class EndedError(Exception):
    """Carries what ended a command past click, which would give a broken pipe exit code 1."""


class LazyGroup(click.Group):
    """A group that lists its commands, in help and in completion, without importing them.

    `sections` holds the commands under the titles that they have in the group's help; `notes` are paragraphs and
    lists of terms behind them, also by title.
    """

    def __init__(
        self,
        *arguments: Any,
        sections: Mapping[str, Mapping[str, Entry]],
        notes: Mapping[str, Sequence[tuple[str, str]]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._sections = sections
        self._notes = notes or {}
        self._entries = {name: entry for entries in sections.values() for name, entry in entries.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._entries:
            return None
        module, _, attribute = self._entries[cmd_name].place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is no command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Tells the nearest commands to one that is unknown; click itself would look among the imported ones."""
        name = args[0]
        if name not in self._entries and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, self._entries)
            if near:
                ctx.fail(f"No such command {name!r}. Did you mean {' or '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name, help=line) for name, (_, line) in self._entries.items()
                 if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, KeyboardInterrupt) as error:
            raise EndedError from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, [*self._entries, *(term for notes in self._notes.values() for term, _ in notes)]))
        for title, entries in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in entries.items()])
        for title, notes in self._notes.items():
            with formatter.section(title):
                formatter.write_dl([(term.ljust(width), text) for term, text in notes])
