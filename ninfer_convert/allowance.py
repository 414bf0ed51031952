"""How many threads and how much memory this process may use: the one place that decides.

Counts affinity, cgroup quota, limits and a cluster's setting; nothing else in the package asks the machine.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from fractions import Fraction
from pathlib import Path

from ninfer_convert.errors import UsageError

MAX_THREADS = 256
MIN_MEMORY_BYTES = 256 << 20
DEFAULT_MEMORY_BYTES = 1 << 30

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as `256MiB`, `1GiB`, `16.5GB` or `1073741824`; parts of a byte are dropped.

    Raises:
        UsageError: the text is no size.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(?:\s*([KMGT]I?)?B?)?", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(f"{text!r} is not a size; write for example 256MiB, 1GiB or 500MB")
    return int(Fraction(match[1]) * _UNITS[(match[2] or "").upper()])


def allowed_threads() -> int:
    """Returns the processors this process may use, at least 1: affinity, cgroup CPU quota and Slurm's share counted.

    Slurm does not bind its tasks everywhere, but says in SLURM_CPUS_PER_TASK what a task was given.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpus()
    limits = [count, MAX_THREADS]
    if quota is not None:
        limits.append(int(quota))
    if re.fullmatch("[1-9][0-9]{0,6}", share := os.environ.get("SLURM_CPUS_PER_TASK", "")):
        limits.append(int(share))
    return max(1, min(limits))


def worker_threads(slots: int) -> int:
    """Returns the threads of one worker process of a cluster: one for each of its slots, as far as they are allowed.

    A cluster gives a worker as many slots as it is to use processors, and knows how many workers a machine has.
    """
    return max(1, min(slots, allowed_threads()))


def worker_slots(workers: int) -> int:
    """Returns the slots of each of several workers that share what this process may use."""
    return max(1, allowed_threads() // workers)


def default_memory(processes: int = 1) -> int:
    """Returns the default of `--max-memory`: 1 GiB, or 80 % of a tighter cgroup or address-space limit.

    Args:
        processes: so many of them share a cgroup's limit.
    """
    shared, own = _cgroup_memory(), _address_space()
    limits = ([] if shared is None else [shared // processes]) + ([] if own is None else [own])
    return min([DEFAULT_MEMORY_BYTES, *(limit * 4 // 5 for limit in limits)])


def memory_limit() -> int | None:
    """Returns the tighter one of the cgroup's and the address space's limit in bytes; None without either."""
    return min((limit for limit in (_cgroup_memory(), _address_space()) if limit is not None), default=None)


def peak_memory() -> int:
    """Returns the peak resident memory of this process so far, in bytes."""
    # The usage counter of a process starts at the peak of the one that started it; the high-water mark does not.
    if match := re.search(r"^VmHWM:\s+(\d+) kB", _read(Path("/proc/self/status")), re.MULTILINE):
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory() -> int | None:
    """Returns the bytes of memory the machine can still give, or None where it does not say."""
    text = _read(Path("/proc/meminfo"))
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _address_space() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_directories() -> list[Path]:
    """Returns this process's version 2 control group and its ancestors, innermost first."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            group = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
            return [group, *group.parents][: len(group.parts) - 3]
    return []


def _cgroup_cpus() -> float | None:
    quotas = []
    for directory in _cgroup_directories():
        quota, _, period = _read(directory / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    quota, period = (_read(Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us")).strip() for name in ("quota", "period"))
    if quota.isdigit() and period.isdigit() and int(period):
        quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_memory() -> int | None:
    texts = [_read(directory / "memory.max").strip() for directory in _cgroup_directories()]
    texts.append(_read(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")).strip())
    limits = [int(text) for text in texts if text.isdigit() and int(text) < 2**60]
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
