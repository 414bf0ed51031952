"""The error of `encode` and `pack`: where in a block of rows something cannot be stored, and why.

A module of its own, so that catching it does not load the compiled kernels.
"""

from __future__ import annotations

from ninfer_convert.errors import EncodeError


class RowError(EncodeError):
    """A row of a block cannot be stored; the caller knows which tensor the block is part of.

    Attributes:
        row: index in the block.
        column: index of the value or code word at fault, or None if it is not a single one.
        group: index of the group at fault, or None where there are no groups.
        reason: what was found.
    """

    def __init__(self, row: int, reason: str, *, column: int | None = None, group: int | None = None) -> None:
        place = f"row {row}"
        place += "" if group is None else f", group {group}"
        place += "" if column is None else f", column {column}"
        super().__init__(f"{place}: {reason}")
        self.row = row
        self.column = column
        self.group = group
        self.reason = reason
