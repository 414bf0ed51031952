"""Numbers with what they count, in the words of messages."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """Returns `1 tensor`, `2 tensors`."""
    return f"{number} {plural(number, what)}"


def plural(number: int, what: str) -> str:
    """Returns what is counted as one or as many: `tensor` or `tensors`."""
    return what if number == 1 else f"{what}s"
