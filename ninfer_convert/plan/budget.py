"""How much memory a run will need, and how large its blocks may be.

Source: cli.md, `--max-memory`.
"""

from __future__ import annotations

from ninfer_convert.errors import UsageError, printable
from ninfer_convert.plan.block import BLOCK_BYTES, block_memory
from ninfer_convert.plan.planner import Plan, PlannedResource, PlannedTensor
from ninfer_convert.plan.value import PIECE_BYTES
from ninfer_convert.recipe.counting import counted

BASE_BYTES = 190 << 20
"""Resident memory of the interpreter with numpy, numba and the compiled kernels, before any block."""

THREAD_BYTES = 2 * PIECE_BYTES + (1 << 20)
"""Of one worker beside its block: hash buffer, comparison scratch, stack."""

MIN_BLOCK_BYTES = 64 << 10


def block_bytes(plan: Plan, threads: int, max_memory: int) -> int:
    """Returns the largest useful block size that keeps the peak below `max_memory`.

    Raises:
        UsageError: even the smallest blocks need more; names the object and what would do.
    """
    size = BLOCK_BYTES
    while peak_memory(plan, threads, size) > max_memory:
        if size <= MIN_BLOCK_BYTES:
            name, need = _largest(plan, size)
            raise UsageError(
                f"--max-memory {max_memory} is too small for {counted(threads, 'thread')}: one block of "
                f"{printable(name)} takes {need} bytes, {peak_memory(plan, threads, size)} in all; "
                "use fewer --threads or more memory"
            )
        size //= 2
    return size


def peak_memory(plan: Plan, threads: int, size: int) -> int:
    """Returns the expected peak resident memory of a run, in bytes."""
    held = sum(item.nbytes for item in plan.objects if isinstance(item, PlannedResource))
    return BASE_BYTES + held + threads * (THREAD_BYTES + _largest(plan, size)[1])


def _largest(plan: Plan, size: int) -> tuple[str, int]:
    needs = [(block_memory(item, size), item.name) for item in plan.objects if isinstance(item, PlannedTensor)]
    need, name = max(needs, default=(0, ""))
    return name, need
