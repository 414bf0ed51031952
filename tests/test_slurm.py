"""Shares on a real Slurm cluster of one node, by the scripts that are shipped: see scripts/ci_slurm.sh."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from case_tools import Case, entry, run_cli
from miniatures import ROOT

pytestmark = pytest.mark.slurm

SUBMIT = ROOT / "scripts" / "cluster" / "slurm_submit.sh"
SECONDS = 600


INTERRUPTED = """
import os, signal, sys, time

from ninfer_convert import cli

real, calls = os.pwrite, 0


def pwrite(*arguments):
    global calls
    calls += 1
    if calls == 5 and "SLURM_RESTART_COUNT" not in os.environ and "0/2" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    return real(*arguments)


os.pwrite = pwrite
cli.main()
"""
"""The command line of a process that is told to end while it writes, as at the end of its time; but once."""


def bin_path(directory: Path, program: str = "from ninfer_convert import cli; cli.main()") -> str:
    """Returns a PATH on which `ninfer-convert` is a program over this working copy."""
    (directory / "bin").mkdir()
    (directory / "bin" / "program.py").write_text(program, encoding="utf-8")
    script = directory / "bin" / "ninfer-convert"
    text = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {script.parent}/program.py "$@"\n'
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Eight matrices, 16 MB."""
    made = Case(tmp_path / "case")
    made.root.mkdir()
    draw = np.random.default_rng(3)
    words = draw.integers(0x3C00, 0x3F80, (256, 4096)).astype("<u2")
    made.source({f"m{number}": ("BF16", words) for number in range(8)})
    made.recipe(*(entry(f"m{number}", [256, 4096], "Q4G64_F16S", f"m{number}") for number in range(8)))
    return made


def call(*words: object, **environment: str) -> str:
    """Returns what a command prints, which must succeed."""
    done = subprocess.run(
        [str(word) for word in words], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state(job: str) -> str:
    """Returns the state of a job, such as COMPLETED."""
    words = call("scontrol", "--oneliner", "show", "job", job).split()
    return next(word.partition("=")[2] for word in words if word.startswith("JobState="))


def submit(case: Case, directory: Path, shares: int, path: str) -> str:
    """Plans, submits, waits for the job that finalizes, which must succeed; returns what all jobs printed."""
    planned = run_cli(*case.arguments("plan", "-o", directory / "plan.json", "--output", directory / "out"))
    assert planned.code == 0, planned.err
    last = call(SUBMIT, directory / "plan.json", shares, "--cpus-per-task=1", PATH=path)
    end = time.monotonic() + SECONDS
    while state(last) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < end, call("squeue", "--all")
        time.sleep(0.2)
    logs = "".join(path.read_text() for path in sorted(directory.glob("*.log")))
    assert state(last) == "COMPLETED", logs
    return logs


def test_an_array_of_shares_and_its_dependent_job_make_the_artifact_of_one_run(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = submit(case, tmp_path, 4, bin_path(tmp_path))
    assert [f"share {index}/4: wrote " in logs for index in range(4)] == [True] * 4
    assert " of 4 shares, " in logs
    assert case.run("-q").code == 0
    assert (tmp_path / "out").read_bytes() == case.output.read_bytes()


def test_an_interrupted_share_is_queued_again_and_the_artifact_is_the_same(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = submit(case, tmp_path, 2, bin_path(tmp_path, INTERRUPTED))
    assert logs.count("interrupted; give the same command again\n") == 1
    assert logs.count("share 0/2 (as given): ") == 2
    assert case.run("-q").code == 0
    assert (tmp_path / "out").read_bytes() == case.output.read_bytes()


def test_auto_finds_the_share_in_what_slurm_really_sets(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(*case.arguments("plan", "-o", tmp_path / "plan.json", "--output", tmp_path / "out")).code == 0
    assert run_cli("prepare", "--plan", tmp_path / "plan.json").code == 0
    path = bin_path(tmp_path)
    run = f"ninfer-convert run --plan {tmp_path}/plan.json --shard auto"
    call("sbatch", "--wait", "--array=3-5", "--output=array-%a.log", "--wrap", run, PATH=path)
    for task in (3, 4, 5):
        origin = f"share {task - 3}/3 (SLURM_ARRAY_TASK_ID={task}, from 3, 3 tasks): "
        assert origin in (tmp_path / f"array-{task}.log").read_text()
    told = call("srun", "--ntasks=2", "--overcommit", "sh", "-c", f"{run} 2>&1", PATH=path)
    assert "share 0/2 (SLURM_PROCID=0, 2 processes): " in told
    assert "share 1/2 (SLURM_PROCID=1, 2 processes): " in told
    assert run_cli("finalize", "--plan", tmp_path / "plan.json").code == 0
