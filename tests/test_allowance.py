"""Threads and memory this process may use."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer_convert import allowance
from ninfer_convert.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1GiB", 2**30),
        ("256MiB", 2**28),
        ("500MB", 500_000_000),
        ("2g", 2_000_000_000),
        ("1 KiB", 1024),
        ("4096", 4096),
        ("7B", 7),
        ("1.5GiB", 3 * 2**29),
        ("16.3GB", 16_300_000_000),
        ("0.001KiB", 1),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert allowance.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.GiB", ".5GiB", "1,5GiB", "1.2.3MB", "1XB", "1e9", "\u0661GiBx"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size; write for example 256MiB"):
        allowance.parse_size(text)


def test_affinity_bounds_the_threads() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});" \
           "from ninfer_convert.allowance import allowed_threads; print(allowed_threads())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "1\n"


def _pretend(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(allowance, "_read", lambda path: files.get(str(path), ""))


@pytest.mark.parametrize(
    ("quota", "threads"), [("150000 100000", 1), ("200000 100000", 2), ("50000 100000", 1), ("max 100000", 3)]
)
def test_a_cgroup_quota_bounds_the_threads(monkeypatch: pytest.MonkeyPatch, quota: str, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    _pretend(monkeypatch, {"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/cpu.max": quota + "\n"})
    assert allowance.allowed_threads() == threads


@pytest.mark.parametrize(
    ("given", "threads"), [("2", 2), ("1", 1), ("3", 3), ("64", 3), ("0", 3), ("", 3), ("two", 3), ("-1", 3)]
)
def test_what_slurm_gave_a_task_bounds_the_threads(monkeypatch: pytest.MonkeyPatch, given: str, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
    _pretend(monkeypatch, {})
    assert allowance.allowed_threads() == threads


def test_the_default_memory_is_a_gibibyte_or_eighty_percent_of_a_tighter_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _pretend(monkeypatch, {})
    assert allowance.default_memory() == 2**30
    limits = {"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/memory.max": "536870912\n"}
    _pretend(monkeypatch, limits)
    assert allowance.default_memory() == 536870912 * 4 // 5
    monkeypatch.setattr(resource, "getrlimit", lambda _: (400 << 20, 400 << 20))
    assert allowance.default_memory() == (400 << 20) * 4 // 5


def test_peak_memory_is_in_bytes() -> None:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    high_water = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert abs(allowance.peak_memory() - high_water * 1024) < 4 << 20


def test_processes_of_one_cgroup_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (800 << 20, 800 << 20))
    _pretend(monkeypatch, {"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/memory.max": str(2000 << 20)})
    assert [allowance.default_memory(processes) >> 20 for processes in (1, 2, 4)] == [640, 640, 400]


def test_workers_of_one_process_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their number, all their threads together are no more than are allowed, unless each has one."""
    _pretend(monkeypatch, {})
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [allowance.worker_slots(workers) for workers in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert [allowance.worker_threads(slots) for slots in (0, 1, 3, 8, 64)] == [1, 1, 3, 8, 8]
