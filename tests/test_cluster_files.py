"""The shipped files for clusters: valid by the published schema, and their commands are run as they are written.

The Slurm scripts run on a real cluster: see test_slurm.py.
"""

from __future__ import annotations

import copy
import os
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
