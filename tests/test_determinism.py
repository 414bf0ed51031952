"""Equal inputs give equal bytes, whatever machine, process and path they were converted in.

Of the report, `run` may differ (time, host, memory, threads, command), and what says where the inputs and the
recipe lie: `sources.*.location`, `inputs.*.path`, `recipe.path`. A checkpoint written otherwise also has other
`sources.*.files` and other `file` members of the sources of objects. Nothing else varies.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import environment, run, source_arguments
from miniatures import RECIPES
from pipeline import converted, planned, stand_in_places
from reference import sha256
from rewriting import rewrite

from ninfer_convert.stand_in.checkpoints import StandIn

DEMO = RECIPES / "demo.yaml"


@pytest.fixture(scope="module")
def digest(demo: StandIn, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the demo artifact, which holds all nine formats, made by one thread in one go."""
    output = tmp_path_factory.mktemp("digest") / "demo.ninfer"
    return converted(DEMO, output, *stand_in_places(demo), threads=1, block_bytes=1 << 30).file_sha256


@pytest.fixture(scope="module")
def report(demo: StandIn, digest: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of an ordinary run."""
    return command_report(demo, digest, tmp_path_factory.mktemp("report"))


def command_report(
    made: StandIn, digest: str, directory: Path, *options: str, **variables: str | None
) -> dict[str, Any]:
    """Converts the demo in another process, checks the artifact's digest and returns the report."""
    output = directory / "demo.ninfer"
    arguments = [*source_arguments(made, "base", "quantized"), "-o", str(output), *options]
    done = run("run", DEMO, *arguments, env=environment(**variables))
    assert done.code == 0, done.err
    assert done.out == f"{digest}  {output}\n"
    assert sha256(output) == digest
    loaded: dict[str, Any] = json.loads((directory / "demo.ninfer.conversion.json").read_bytes())
    return loaded


def constant(report: dict[str, Any], *, rewritten: bool = False) -> dict[str, Any]:
    """Returns a report without the members that may differ."""
    kept = copy.deepcopy(report)
    del kept["run"], kept["recipe"]["path"]
    for source in kept["sources"].values():
        del source["location"]
        if rewritten:
            del source["files"]
    for entry in kept["inputs"].values():
        del entry["path"]
    if rewritten:
        for stored in kept["objects"]:
            if stored["kind"] == "tensor":
                for source in stored["sources"]:
                    if "tensor" in source:
                        del source["file"]
    return kept


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("block_bytes", [1, 1009, 65_537, 2 << 20])
def test_threads_and_blocks_do_not_change_a_byte(
    demo: StandIn, digest: str, tmp_path: Path, threads: int, block_bytes: int
) -> None:
    outcome = converted(DEMO, tmp_path / "x", *stand_in_places(demo), threads=threads, block_bytes=block_bytes)
    assert outcome.file_sha256 == sha256(tmp_path / "x") == digest


def test_every_object_digest_is_the_same_for_every_cut(demo: StandIn, tmp_path: Path) -> None:
    outcomes = [
        converted(DEMO, tmp_path / str(number), *stand_in_places(demo), threads=3, block_bytes=block_bytes).digests
        for number, block_bytes in enumerate((777, 8191, 1 << 20))
    ]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(outcomes[0]) == 56


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (["--threads", "7", "--max-memory", "1GiB"], {}),
        (["--threads", "1", "--max-memory", "256MiB"], {}),
        ([], {"NUMBA_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "NUMBA_THREADING_LAYER": "workqueue"}),
        ([], {"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ([], {"PYTHONHASHSEED": "4294967295", "LC_ALL": "tr_TR.UTF-8", "TZ": "Pacific/Kiritimati"}),
        ([], {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}),
    ],
    ids=lambda value: " ".join(value if isinstance(value, list) else (f"{k}={v}" for k, v in value.items())),
)
def test_options_and_environment_change_neither_artifact_nor_report(
    demo: StandIn,
    digest: str,
    report: dict[str, Any],
    tmp_path: Path,
    options: list[str],
    variables: dict[str, str],
) -> None:
    found = command_report(demo, digest, tmp_path, *options, **variables)
    assert constant(found) == constant(report)


def test_another_path_of_everything_changes_only_where_the_report_says_things_lie(
    demo: StandIn, digest: str, report: dict[str, Any], tmp_path: Path
) -> None:
    other = tmp_path / "é 空 {x}=y"
    other.mkdir()
    places = {}
    for name in ("base", "quantized", "ranking"):
        places[name] = other / name
        places[name].symlink_to(getattr(demo, name))
    made = StandIn(places["base"], places["quantized"], places["ranking"])
    recipe = other / "recipe.yaml"
    recipe.write_bytes(DEMO.read_bytes())
    output = other / "out.ninfer"
    done = run("run", recipe.name, *source_arguments(made, "base", "quantized"), "-o", output.name, cwd=other)
    assert done.code == 0, done.err
    assert done.out == f"{digest}  out.ninfer\n"
    found = json.loads((other / "out.ninfer.conversion.json").read_bytes())
    assert constant(found) == constant(report)
    assert found["sources"]["base"]["location"] == str(places["base"])
    assert found["inputs"]["ranking"]["path"] == str(places["ranking"])


def test_one_file_and_three_shards_in_any_order_give_the_same_artifact(
    demo: StandIn, digest: str, report: dict[str, Any], tmp_path: Path
) -> None:
    for shards, seed in ((1, None), (1, 5), (3, 6), (7, 7)):
        directory = tmp_path / f"{shards}-{seed}"
        base = rewrite(demo.base, directory / "base", shards=shards, seed=seed)
        quantized = rewrite(demo.quantized, directory / "quantized", shards=shards, seed=seed)
        made = StandIn(base, quantized, demo.ranking)
        if seed == 6:
            found = command_report(made, digest, directory)
            assert constant(found, rewritten=True) == constant(report, rewritten=True)
        else:
            assert converted(DEMO, directory / "x", *stand_in_places(made)).file_sha256 == digest
            assert sha256(directory / "x") == digest


def test_a_plan_does_not_depend_on_the_run(demo: StandIn) -> None:
    arguments = ["plan", "demo", *source_arguments(demo, "base", "quantized"), "--json"]
    documents = [run(*arguments, env=environment(PYTHONHASHSEED=seed)) for seed in ("1", "2")]
    assert documents[0].out == documents[1].out != ""
    with planned(DEMO, *stand_in_places(demo)) as first, planned(DEMO, *stand_in_places(demo)) as second:
        assert first.head == second.head


def test_repeated_runs_race_to_the_same_bytes(demo: StandIn, digest: str, tmp_path: Path) -> None:
    # Blocks finish in another order every time.
    for number in range(12):
        outcome = converted(DEMO, tmp_path / str(number), *stand_in_places(demo), threads=5, block_bytes=3000)
        assert outcome.file_sha256 == digest
        os.unlink(tmp_path / str(number))
