"""Which share of a conversion this process is to do, as given by hand or told by a cluster's variables.

Owns the variables of the schedulers and what their numbers mean. Refuses to know what a share is (`cuts`).

Source: cli.md, `--shard I/N|auto|auto/N`; the manuals of the schedulers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ninfer_convert.errors import UsageError, printable

MAX_SHARES = 9999


@dataclass(frozen=True, slots=True)
class Choice:
    """Share `index` of `count`, counted from 0; `origin` says where the numbers came from."""

    index: int
    count: int
    origin: str


@dataclass(frozen=True, slots=True)
class _Found:
    """What a scheduler says. `count` is None where it does not tell how many there are."""

    index: int
    count: int | None
    origin: str


def choose_share(text: str, environment: Mapping[str, str]) -> Choice:
    """Returns the share that `--shard` names.

    Args:
        text: `I/N` with I from 0 to N-1; `auto`; or `auto/N` where the scheduler does not tell N.
        environment: the variables of this process.

    Raises:
        UsageError: none of these, no scheduler's variables are set, or what they say does not fit.
    """
    if match := re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text):
        return _checked(_Found(int(match[1]), None, "as given"), int(match[2]), f"--shard {text}")
    match = re.fullmatch(r"auto(?:/([0-9]{1,9}))?", text)
    if not match:
        raise UsageError(f"--shard {printable(text)}: write I/N with I from 0 to N-1, such as 0/4, or auto, or auto/N")
    for read in _SCHEDULERS:
        found = read(environment)
        if found is not None:
            return _checked(found, int(match[1]) if match[1] else None, f"--shard {text}")
    raise UsageError(
        f"--shard {text}: none of {', '.join(_VARIABLES)} is set, by which Slurm, Kubernetes, PBS, LSF and SGE number "
        "the tasks of an array; give --shard I/N"
    )


def _checked(found: _Found, given: int | None, option: str) -> Choice:
    count = given if found.count is None else found.count
    if count is None:
        raise UsageError(f"{option}: {found.origin}, which does not tell how many there are; give --shard auto/N")
    if given is not None and given != count:
        raise UsageError(
            f"{option}: {found.origin} is one of {count}, not of {given}; a task that is run again alone needs "
            f"--shard I/{given}"
        )
    if not 1 <= count <= MAX_SHARES:
        raise UsageError(f"{option}: {count} shares; from 1 to {MAX_SHARES} can be made")
    if not 0 <= found.index < count:
        where = "" if found.origin == "as given" else f"{found.origin}: "
        raise UsageError(f"{option}: {where}share {found.index} of {count}; shares are counted from 0 to {count - 1}")
    return Choice(found.index, count, found.origin)


def _slurm_array(environment: Mapping[str, str]) -> _Found | None:
    """An array may begin anywhere and have steps; each task of it may run several processes by `srun`."""
    task = _number(environment, "SLURM_ARRAY_TASK_ID")
    if task is None:
        return None
    count = _required(environment, "SLURM_ARRAY_TASK_COUNT")
    low, step = _required(environment, "SLURM_ARRAY_TASK_MIN"), _number(environment, "SLURM_ARRAY_TASK_STEP") or 1
    high = _number(environment, "SLURM_ARRAY_TASK_MAX")
    origin = f"SLURM_ARRAY_TASK_ID={task}, from {low}, {count} tasks"
    if (task - low) % step or (high is not None and (high - low) // step + 1 != count):
        raise UsageError(f"--shard auto: {origin}, which is an array with holes; give --shard I/N")
    index = (task - low) // step
    process = _slurm_step(environment)
    if process is None or process.count in (None, 1):
        return _Found(index, count, origin)
    return _Found(index * process.count + process.index, count * process.count, f"{origin}; {process.origin}")


def _slurm_step(environment: Mapping[str, str]) -> _Found | None:
    # The shell of a batch job has a SLURM_PROCID too, though it is no process of a step.
    if _number(environment, "SLURM_STEP_ID") is None or _number(environment, "SLURM_PROCID") is None:
        return None
    index, count = _required(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS")
    count = _required(environment, "SLURM_NTASKS") if count is None else count
    return _Found(index, count, f"SLURM_PROCID={index}, {count} processes")


def _kubernetes(environment: Mapping[str, str]) -> _Found | None:
    index = _number(environment, "JOB_COMPLETION_INDEX")
    return None if index is None else _Found(index, None, f"JOB_COMPLETION_INDEX={index}")


def _pbs(environment: Mapping[str, str]) -> _Found | None:
    """The first index of an array is not told; it is 1, as in the manual's examples."""
    index = _number(environment, "PBS_ARRAY_INDEX")
    return None if index is None else _Found(index - 1, None, f"PBS_ARRAY_INDEX={index}, from 1")


def _lsf(environment: Mapping[str, str]) -> _Found | None:
    """A job that is no array has the index 0."""
    index = _number(environment, "LSB_JOBINDEX")
    if not index:
        return None
    last, step = _number(environment, "LSB_JOBINDEX_END"), _number(environment, "LSB_JOBINDEX_STEP") or 1
    if step != 1:
        raise UsageError(f"--shard auto: LSB_JOBINDEX={index} with a step of {step}; give --shard I/N")
    return _Found(index - 1, last or None, f"LSB_JOBINDEX={index}, from 1" + (f" to {last}" if last else ""))


def _sge(environment: Mapping[str, str]) -> _Found | None:
    """A job that is no array has the index `undefined`."""
    if environment.get("SGE_TASK_ID") == "undefined":
        return None
    index = _number(environment, "SGE_TASK_ID")
    if index is None:
        return None
    first, last = _number(environment, "SGE_TASK_FIRST"), _number(environment, "SGE_TASK_LAST")
    step = _number(environment, "SGE_TASK_STEPSIZE") or 1
    if first is None or last is None:
        return _Found(index - 1, None, f"SGE_TASK_ID={index}, from 1")
    origin = f"SGE_TASK_ID={index}, from {first} to {last}" + (f" by {step}" if step > 1 else "")
    return _Found((index - first) // step, (last - first) // step + 1, origin)


_SCHEDULERS: tuple[Callable[[Mapping[str, str]], _Found | None], ...] = (
    _slurm_array,
    _slurm_step,
    _kubernetes,
    _pbs,
    _lsf,
    _sge,
)
_VARIABLES = (
    *("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX"),
    *("PBS_ARRAY_INDEX", "LSB_JOBINDEX", "SGE_TASK_ID"),
)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UsageError(f"--shard auto: {name} is {printable(text)!r}, which is no number; give --shard I/N")
    return int(text)


def _required(environment: Mapping[str, str], name: str) -> int:
    found = _number(environment, name)
    if found is None:
        raise UsageError(f"--shard auto: {name} is not set; give --shard I/N")
    return found
