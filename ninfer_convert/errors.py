"""Every failure a user can meet: one root, one subclass per stage, each with its exit code.

A message says what, where (file, line, tensor, row, column), found, required. The command line prints it
as it stands; nothing else in the package prints or exits.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

WRONG_PATH = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR})
"""Failures of a path that leads nowhere, a mistake of who named it to be read (1); any other may pass (74)."""


class ConvertError(Exception):
    """Something is wrong with the input; a rerun will not help.

    Attributes:
        messages: one or more complete messages, in the order they were found.
    """

    exit_code = 1

    def __init__(self, *messages: str) -> None:
        if not messages:
            raise TypeError("an error needs at least one message")
        # Names from files are escaped where a message is made of them; none that was forgotten gets further.
        self.messages: Sequence[str] = tuple(map(printable, messages))
        super().__init__("\n".join(self.messages))


class UsageError(ConvertError):
    """The command line asks for something that cannot be meant."""

    exit_code = 2


class RecipeError(ConvertError):
    """The recipe is not well formed, or contradicts itself."""


class SourceError(ConvertError):
    """A checkpoint, resource or auxiliary input is not what it claims or what the recipe needs."""


class PlanError(ConvertError):
    """Recipe and sources are each well formed but do not fit together."""


class EncodeError(ConvertError):
    """A value cannot be encoded, or a word breaks a rule of its format."""


class ArtifactError(ConvertError):
    """A `.ninfer` file breaks the container or the format rules."""


class OutputError(ConvertError):
    """Input/output failed: disk full, permission, a vanished directory."""

    exit_code = 74


class NetworkError(OutputError):
    """A remote source did not answer; what is done so far is kept, and the same command goes on with it."""


INTERRUPTED_EXIT_CODE = 75
"""Of a run stopped by a signal, which is not an error of the input."""


def printable(text: str) -> str:
    """Returns text safe to print on a terminal: control characters and lone surrogates are escaped, once."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )
