"""Which share a scheduler's variables mean; and that what does not fit is told instead of guessed."""

from __future__ import annotations

import pytest
from case_tools import run_cli

from ninfer_convert.errors import UsageError
from ninfer_convert.run.cluster_env import MAX_SHARES, choose_share


def slurm_array(task: int, low: int, count: int, step: int = 1, **more: object) -> dict[str, str]:
    """Returns what Slurm 22.05 sets in a task of an array, and in the shell of any batch job."""
    variables = {
        "SLURM_ARRAY_TASK_ID": task,
        "SLURM_ARRAY_TASK_COUNT": count,
        "SLURM_ARRAY_TASK_MIN": low,
        "SLURM_ARRAY_TASK_MAX": low + (count - 1) * step,
        "SLURM_ARRAY_TASK_STEP": step,
        "SLURM_PROCID": 0,
        **more,
    }
    return {name: str(value) for name, value in variables.items()}


def slurm_step(process: int, count: int) -> dict[str, str]:
    """Returns what `srun` sets beside."""
    names = {"SLURM_STEP_ID": 0, "SLURM_PROCID": process, "SLURM_NTASKS": count, "SLURM_STEP_NUM_TASKS": count}
    return {name: str(value) for name, value in names.items()}


LSF = {"LSB_JOBINDEX": "3", "LSB_JOBINDEX_END": "4", "LSB_JOBINDEX_STEP": "1"}
SGE = {"SGE_TASK_ID": "5", "SGE_TASK_FIRST": "1", "SGE_TASK_LAST": "7", "SGE_TASK_STEPSIZE": "2"}


@pytest.mark.parametrize(
    ("text", "environment", "index", "count", "origin"),
    [
        ("0/1", {}, 0, 1, "as given"),
        ("3/4", slurm_array(0, 0, 9), 3, 4, "as given"),
        (f"0/{MAX_SHARES}", {}, 0, MAX_SHARES, "as given"),
        ("auto", slurm_array(0, 0, 8), 0, 8, "SLURM_ARRAY_TASK_ID=0, from 0, 8 tasks"),
        ("auto", slurm_array(8, 1, 8), 7, 8, "SLURM_ARRAY_TASK_ID=8, from 1, 8 tasks"),
        ("auto", slurm_array(9, 3, 4, 2), 3, 4, "SLURM_ARRAY_TASK_ID=9, from 3, 4 tasks"),
        ("auto/8", slurm_array(5, 0, 8), 5, 8, "SLURM_ARRAY_TASK_ID=5, from 0, 8 tasks"),
        ("auto", slurm_array(2, 0, 4) | slurm_step(0, 1), 2, 4, "SLURM_ARRAY_TASK_ID=2, from 0, 4 tasks"),
        (
            "auto",
            slurm_array(2, 0, 4) | slurm_step(1, 3),
            *(7, 12, "SLURM_ARRAY_TASK_ID=2, from 0, 4 tasks; SLURM_PROCID=1, 3 processes"),
        ),
        ("auto", slurm_step(1, 3), 1, 3, "SLURM_PROCID=1, 3 processes"),
        ("auto/8", {"JOB_COMPLETION_INDEX": "0"}, 0, 8, "JOB_COMPLETION_INDEX=0"),
        ("auto/8", {"JOB_COMPLETION_INDEX": "7"}, 7, 8, "JOB_COMPLETION_INDEX=7"),
        ("auto/4", {"PBS_ARRAY_INDEX": "1"}, 0, 4, "PBS_ARRAY_INDEX=1, from 1"),
        ("auto/4", {"PBS_ARRAY_INDEX": "4"}, 3, 4, "PBS_ARRAY_INDEX=4, from 1"),
        ("auto", LSF, 2, 4, "LSB_JOBINDEX=3, from 1 to 4"),
        ("auto/6", {"LSB_JOBINDEX": "3"}, 2, 6, "LSB_JOBINDEX=3, from 1"),
        ("auto", SGE, 2, 4, "SGE_TASK_ID=5, from 1 to 7 by 2"),
        ("auto/9", {"SGE_TASK_ID": "5"}, 4, 9, "SGE_TASK_ID=5, from 1"),
        # A scheduler inside another one's job: the inner one's numbers are the finer ones.
        ("auto", slurm_array(1, 0, 2) | {"JOB_COMPLETION_INDEX": "3"}, 1, 2, "SLURM_ARRAY_TASK_ID=1, from 0, 2 tasks"),
    ],
)
def test_the_share_is_the_one_the_variables_mean(
    text: str, environment: dict[str, str], index: int, count: int, origin: str
) -> None:
    chosen = choose_share(text, environment)
    assert (chosen.index, chosen.count, chosen.origin) == (index, count, origin)


@pytest.mark.parametrize(
    ("scheduler", "environment", "is_auto"),
    [
        ("Slurm", slurm_array(0, 0, 8), True),
        ("LSF", LSF, True),
        ("SGE", SGE, True),
        ("Kubernetes", {"JOB_COMPLETION_INDEX": "0"}, False),
        ("PBS", {"PBS_ARRAY_INDEX": "1"}, False),
    ],
)
def test_the_help_says_where_auto_is_enough(scheduler: str, environment: dict[str, str], is_auto: bool) -> None:
    auto, slash, given = " ".join(run_cli("prepare", "--help").out.split()).partition("--shard auto/N takes I from ")
    assert slash
    assert (scheduler in auto, scheduler in given.split(".")[0]) == (is_auto, not is_auto)
    if is_auto:
        assert choose_share("auto", environment).index >= 0
    else:
        with pytest.raises(UsageError, match="give --shard auto/N"):
            choose_share("auto", environment)
        assert choose_share("auto/4", environment).count == 4


def test_the_help_of_run_shows_every_spelling_of_a_share() -> None:
    assert "--shard I/N|auto|auto/N " in run_cli("run", "--help").out


@pytest.mark.parametrize("low", [0, 1, 5])
@pytest.mark.parametrize("step", [1, 3])
def test_the_tasks_of_an_array_are_all_the_shares_once(low: int, step: int) -> None:
    chosen = [choose_share("auto", slurm_array(low + step * task, low, 6, step)) for task in range(6)]
    assert [(choice.index, choice.count) for choice in chosen] == [(task, 6) for task in range(6)]


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("4/4", {}, "--shard 4/4: share 4 of 4; shares are counted from 0 to 3"),
        ("0/0", {}, "--shard 0/0: 0 shares; from 1 to 9999 can be made"),
        ("0/10000", {}, "--shard 0/10000: 10000 shares; from 1 to 9999 can be made"),
        *(
            (text, {}, f"--shard {text}: write I/N with I from 0 to N-1, such as 0/4, or auto, or auto/N")
            for text in ("1", "1/", "-1/4", "a/b", "1/2/3", "auto/", "auto/x", "AUTO", "")
        ),
        ("\x1b/2", {}, r"--shard \x1b/2: write I/N with I from 0 to N-1, such as 0/4, or auto, or auto/N"),
        (
            "auto",
            {"SLURM_PROCID": "0", "LSB_JOBINDEX": "0", "SGE_TASK_ID": "undefined"},
            "--shard auto: none of SLURM_ARRAY_TASK_ID, SLURM_PROCID, JOB_COMPLETION_INDEX, PBS_ARRAY_INDEX, "
            "LSB_JOBINDEX, SGE_TASK_ID is set, by which Slurm, Kubernetes, PBS, LSF and SGE number the tasks of an "
            "array; give --shard I/N",
        ),
        (
            "auto",
            {"JOB_COMPLETION_INDEX": "2"},
            "--shard auto: JOB_COMPLETION_INDEX=2, which does not tell how many there are; give --shard auto/N",
        ),
        (
            "auto",
            {"PBS_ARRAY_INDEX": "2"},
            "--shard auto: PBS_ARRAY_INDEX=2, from 1, which does not tell how many there are; give --shard auto/N",
        ),
        (
            "auto/4",
            {"PBS_ARRAY_INDEX": "0"},
            "--shard auto/4: PBS_ARRAY_INDEX=0, from 1: share -1 of 4; shares are counted from 0 to 3",
        ),
        (
            "auto/2",
            {"JOB_COMPLETION_INDEX": "2"},
            "--shard auto/2: JOB_COMPLETION_INDEX=2: share 2 of 2; shares are counted from 0 to 1",
        ),
        (
            "auto/8",
            slurm_array(3, 3, 1),
            "--shard auto/8: SLURM_ARRAY_TASK_ID=3, from 3, 1 tasks is one of 1, not of 8; a task that is run again "
            "alone needs --shard I/8",
        ),
        (
            "auto",
            slurm_array(3, 1, 3, SLURM_ARRAY_TASK_MAX=7),
            "--shard auto: SLURM_ARRAY_TASK_ID=3, from 1, 3 tasks, which is an array with holes; give --shard I/N",
        ),
        (
            "auto",
            slurm_array(2, 1, 3, 2),
            "--shard auto: SLURM_ARRAY_TASK_ID=2, from 1, 3 tasks, which is an array with holes; give --shard I/N",
        ),
        (
            "auto",
            {"SLURM_ARRAY_TASK_ID": "2"},
            "--shard auto: SLURM_ARRAY_TASK_COUNT is not set; give --shard I/N",
        ),
        (
            "auto",
            {"JOB_COMPLETION_INDEX": "two"},
            "--shard auto: JOB_COMPLETION_INDEX is 'two', which is no number; give --shard I/N",
        ),
        (
            "auto",
            LSF | {"LSB_JOBINDEX_STEP": "2"},
            "--shard auto: LSB_JOBINDEX=3 with a step of 2; give --shard I/N",
        ),
    ],
)
def test_what_does_not_fit_is_told(text: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_share(text, environment)
    assert str(caught.value) == message
