"""The shipped files for clusters: valid by the published schema, and their commands are run as they are written.

The Slurm scripts run on a real cluster: see test_slurm.py.
"""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from case_tools import Case, Ran, entry, filled, run_cli
from miniatures import ROOT

CLUSTER = ROOT / "scripts" / "cluster"
STEPS = ("prepare", "shares", "finalize")
VERSIONS = ("1.33", "1.37")
"""Of Kubernetes: since 1.33 an index has attempts of its own."""


def manifest(step: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((CLUSTER / f"kubernetes_{step}.yaml").read_text(encoding="utf-8"))
    return document


def command(step: str) -> list[str]:
    """Returns the words of the one container of a job, the program's name left out."""
    (container,) = manifest(step)["spec"]["template"]["spec"]["containers"]
    assert container["command"][0] == "ninfer-convert"
    words: list[str] = container["command"][1:]
    return words


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid_by_the_published_schema(step: str, version: str) -> None:
    kubernetes_validate.validate(manifest(step), version, strict=True)


@pytest.mark.parametrize("change", ["unknown", "text"])
def test_the_schema_can_tell_a_wrong_manifest(change: str) -> None:
    document = copy.deepcopy(manifest("shares"))
    document["spec"]["completion" if change == "unknown" else "completions"] = "many"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


def test_there_are_as_many_indices_as_shares() -> None:
    spec = manifest("shares")["spec"]
    assert (spec["completionMode"], command("shares")[-1]) == ("Indexed", f"auto/{spec['completions']}")


@pytest.mark.parametrize("step", STEPS)
def test_a_job_gives_up_at_the_exit_codes_that_come_again(step: str) -> None:
    """cli.md: 1 and 2 are errors of the input; 74 and 75 are worth another attempt."""
    spec = manifest(step)["spec"]
    rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    action = "FailIndex" if step == "shares" else "FailJob"
    assert rules == [{"action": action, "onExitCodes": {"operator": "In", "values": [1, 2]}}]
    # A policy asks for it.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_slurm_is_given_nothing_when_the_artifact_is_there(tmp_path: Path) -> None:
    """The programs of the script are stand-ins that say what they are called with."""
    calls = tmp_path / "calls"

    def submit(told: str, code: int = 0) -> tuple[int, str, str, list[str]]:
        calls.unlink(missing_ok=True)
        programs = {"ninfer-convert": f"echo '{told}' >&2; exit {code}", "sbatch": f"echo $2 >> {calls}; echo 17"}
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            (tmp_path / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        words = [CLUSTER / "slurm_submit.sh", tmp_path / "plan.json", "2"]
        ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        return ran.returncode, ran.stdout, ran.stderr, calls.read_text().split() if calls.exists() else []

    complete = "out.ninfer is complete already"
    assert submit(complete) == (0, "", f"{complete}\n", [])
    prepared = "prepared out.ninfer.part: 17 bytes"
    assert submit(prepared) == (0, "17\n", f"{prepared}\n", ["--array=0-1", "--dependency=afterok:17"])
    again = "out.ninfer.part is prepared already"
    assert submit(again) == (0, "17\n", f"{again}\n", ["--array=0-1", "--dependency=afterok:17"])
    assert submit("error: no such plan", 1) == (1, "", "error: no such plan\n", [])


def test_the_jobs_make_the_artifact_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their volume is a directory here, their pods are calls, in an order that no cluster would choose."""
    case = Case(tmp_path / "case")
    case.root.mkdir()
    case.source({f"m{number}": filled("BF16", [40, 512], 0x3F80 + number) for number in range(9)})
    case.recipe(*(entry(f"m{number}", [40, 512], "Q5G64_F16S", f"m{number}") for number in range(9)))
    planned = run_cli(*case.arguments("plan", "-o", tmp_path / "plan.json", "--output", tmp_path / "out.ninfer"))
    assert planned.code == 0, planned.err

    def pod(step: str, index: int | None = None) -> Ran:
        with monkeypatch.context() as patch:
            if index is not None:
                patch.setenv("JOB_COMPLETION_INDEX", str(index))
            return run_cli(*(word.replace("/data", os.fspath(tmp_path)) for word in command(step)))

    assert pod("prepare").code == 0
    for index in reversed(range(manifest("shares")["spec"]["completions"])):
        assert pod("finalize").code == 1
        assert pod("shares", index).code == 0
    assert pod("finalize").code == 0
    assert case.run("-q").code == 0
    assert (tmp_path / "out.ninfer").read_bytes() == case.output.read_bytes()
