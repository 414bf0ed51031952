"""Many conversions by one command: told all at once if the file is wrong, then each for itself."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import dask_tools
import pytest
from case_tools import Case, Ran, command, entry, filled, finish, interrupted_command, run_cli, snapshot, spawn, start
from commands import source_arguments
from hub_server import Repo, client_environment, serving
from miniatures import Miniatures
from test_hub import write_model, write_recipe

from ninfer_convert.run.jobs import Job, read_jobs


class Batch:
    """Two good conversions, `a` and `b` of the checkpoint `source`, and a file of jobs beside them."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "jobs.yaml"
        case = Case(root)
        case.source({"a": filled("BF16", [64, 64], 0x3F80), "b": filled("BF16", [64, 64], 0x4000)}, "source")
        for name, other in ("ab", "ba"):
            case.recipe(entry(name, [64, 64], "Q4G64_F16S", name), more=f"ignore: [{other}]\n")
            case.recipe_path.rename(root / f"{name}.yaml")

    def write(self, *jobs: str, schema: str = "schema: 1") -> Batch:
        """Writes the file of jobs, one to a line; the first is on line 3."""
        lines = "".join(f"  - {job}\n" for job in jobs)
        self.path.write_text(f"{schema}\njobs:\n{lines}", encoding="utf-8")
        return self

    def good(self, *names: str) -> Batch:
        return self.write(*map(job, names))

    def run(self, *extra: object) -> Ran:
        return run_cli("batch", self.path, *extra)

    def document(self, *extra: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("--json", *extra).out)
        return found

    def places(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


def job(name: str, **more: str) -> str:
    members = {"recipe": f"{name}.yaml", "source": "source", "output": name, **more}
    return "{" + ", ".join(f"{key}: {text}" for key, text in members.items() if text) + "}"


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def digest(path: Path) -> str:
    document = json.loads(path.with_name(path.name + ".conversion.json").read_bytes())
    text: str = document["artifact"]["sha256"]
    return text


# -- jobs -----------------------------------------------------------------------------------------------------------


def test_jobs_make_what_single_runs_make_and_each_is_reported(batch: Batch) -> None:
    for name in "ab":
        ended = run_cli("run", batch.root / f"{name}.yaml", "--source", batch.root / "source", "-o", batch.root / "one")
        assert ended.code == 0, ended.err
        (batch.root / "one").rename(batch.root / f"plain-{name}")
    ended = batch.good("a", "b").run()
    assert ended.code == 0
    outputs = [batch.root / name for name in "ab"]
    for path in outputs:
        assert path.read_bytes() == (batch.root / f"plain-{path.name}").read_bytes()
    assert ended.out == "".join(f"{digest(path)}  {path}\n" for path in outputs)
    lines = ended.err.splitlines()
    assert [line.partition(": ")[0] for line in lines[:2]] == [f"1/2 wrote {outputs[0]}", f"2/2 wrote {outputs[1]}"]
    assert lines[2:] == ["2 jobs: 2 written"]


def test_every_kind_of_argument_reaches_the_conversion(batch: Batch, miniatures: Miniatures) -> None:
    made = miniatures.models["qwen3.6-27b"]
    recipe = miniatures.recipes / "qwen3.6-27b" / "nvfp4.yaml"
    words = [recipe, *source_arguments(made, "base", "quantized"), "--unpinned"]
    assert run_cli("run", *words, "-o", batch.root / "plain").code == 0
    places = f"{{base: {made.base}, quantized: {made.quantized}}}"
    more = f"sources: {places}, inputs: {{ranking: {made.ranking}}}, unpinned: true, report: told.json"
    ended = batch.write(f"{{recipe: {recipe}, output: out, {more}}}").run()
    assert ended.code == 0, ended.err
    assert (batch.root / "out").read_bytes() == (batch.root / "plain").read_bytes()
    assert json.loads((batch.root / "told.json").read_bytes())["waived"]


def test_a_file_of_jobs_says_what_run_takes(batch: Batch) -> None:
    batch.write(
        job("a", prefix="{x.: y., z.: ''}", overwrite="true", verify_source="true", report="r/a.json"),
        "{recipe: qwen3.6-27b/nvfp4, sources: {base: hf://o/n@main, quantized: /q}, inputs: {n: n.bin}, output: /o, "
        "stream: true}",
    )
    first, second = read_jobs(str(batch.path))
    root = str(batch.root)
    assert first == Job(
        recipe=f"{root}/a.yaml",
        sources=(f"{root}/source",),
        inputs=(),
        prefixes=("x.=y.", "z.="),
        unpinned=False,
        output=batch.root / "a",
        report=batch.root / "r/a.json",
        overwrite=True,
        stream=False,
        verify_source=True,
    )
    assert second == Job(
        recipe="qwen3.6-27b/nvfp4",
        sources=("base=hf://o/n@main", "quantized=/q"),
        inputs=(f"n={root}/n.bin",),
        prefixes=(),
        unpinned=False,
        output=Path("/o"),
        report=None,
        overwrite=False,
        stream=True,
        verify_source=False,
    )
    assert second.report_path == Path("/o.conversion.json")


def test_prefixes_of_a_job_rename_tensors(batch: Batch) -> None:
    tensors = {f"old.{name}": filled("BF16", [64, 64], 0x3F80) for name in "ab"}
    Case(batch.root).source(tensors, "source")
    ended = batch.write(job("a", prefix="{old.: ''}")).run()
    assert ended.code == 0, ended.err


def test_paths_are_relative_to_the_file_of_jobs(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.good("a")
    monkeypatch.chdir(batch.root.parent)
    ended = run_cli("batch", f"{batch.root.name}/jobs.yaml")
    assert ended.code == 0, ended.err
    assert ended.out.endswith(f"  {batch.root.name}/a\n")
    assert (batch.root / "a").exists()


# -- failing --------------------------------------------------------------------------------------------------------


def test_a_job_that_fails_does_not_stop_the_others(batch: Batch) -> None:
    batch.write(job("a", source="nowhere", output="x"), job("b"))
    ended = batch.run()
    assert ended.code == 1
    lines = ended.err.splitlines()
    assert lines[0] == f"1/2 {batch.root / 'x'} failed:"
    assert lines[1].startswith(f"error: {batch.root / 'nowhere'}")
    assert lines[-1] == "2 jobs: 1 written, 1 failed"
    assert ended.out == f"{digest(batch.root / 'b')}  {batch.root / 'b'}\n"


def test_the_most_serious_exit_code_is_that_of_all(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, wrong = job("a", output="no/a"), job("a", source="nowhere")
    exists = job("a", output="a.yaml")
    for jobs, code in (
        ([missing, job("b")], 74),
        ([job("b"), missing, wrong], 1),
        ([missing, exists], 1),
        ([job("b")], 0),
    ):
        assert batch.write(*jobs).run().code == code


def test_one_document_tells_of_all_jobs(batch: Batch) -> None:
    batch.write(job("a"), job("b", source="nowhere"))
    found = batch.document()
    size = (batch.root / "a").stat().st_size
    done, failed = found["jobs"]
    assert done.pop("seconds") >= 0
    assert done == {
        "recipe": str(batch.root / "a.yaml"),
        "output": str(batch.root / "a"),
        "report": str(batch.root / "a.conversion.json"),
        "status": "written",
        "exit_code": 0,
        "sha256": digest(batch.root / "a"),
        "bytes": size,
        "errors": [],
    }
    assert (failed["status"], failed["exit_code"], failed["sha256"], len(failed["errors"])) == ("failed", 1, None, 1)
    counts = {"jobs": 2, "written": 1, "complete": 0, "failed": 1, "interrupted": 0, "pending": 0}
    assert (found["ok"], found["totals"]) == (False, counts)


def test_quiet_tells_of_failures_only(batch: Batch) -> None:
    ended = batch.write(job("a"), job("b", source="nowhere")).run("-q")
    assert ended.out == ""
    assert [line.split(":")[0] for line in ended.err.splitlines()] == [f"2/2 {batch.root / 'b'} failed", "error"]


def test_an_internal_failure_of_one_job_is_that_job_s(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Job.report_path

    def broken(job: Job) -> Path:
        if job.output.name == "a":
            raise ZeroDivisionError("no")
        found: Path = real.fget(job)  # type: ignore[attr-defined]
        return found

    batch.good("a", "b")
    jobs = read_jobs(str(batch.path))
    assert len(jobs) == 2
    monkeypatch.setattr(Job, "report_path", property(broken))
    ended = batch.run()
    assert ended.code == 1
    assert "error: internal: ZeroDivisionError: no (NINFER_CONVERT_DEBUG=1 shows where)" in ended.err
    assert (batch.root / "b").exists()


# -- again ----------------------------------------------------------------------------------------------------------


def test_what_is_there_already_counts_as_done_and_is_not_touched(batch: Batch) -> None:
    assert batch.good("a").run().code == 0
    before = {name: (batch.root / name).stat().st_mtime_ns for name in batch.places()}
    ended = batch.run()
    assert (ended.code, ended.err) == (0, f"1/1 {batch.root / 'a'} is complete already\n1 job: 1 complete already\n")
    assert ended.out == f"{digest(batch.root / 'a')}  {batch.root / 'a'}\n"
    assert {name: (batch.root / name).stat().st_mtime_ns for name in batch.places()} == before
    assert batch.write(job("a", overwrite="true")).document()["totals"]["complete"] == 1


def test_what_run_has_made_counts_too_wherever_its_parts_lie_now(batch: Batch) -> None:
    ended = run_cli("run", batch.root / "a.yaml", "--source", batch.root / "source", "-o", batch.root / "a")
    assert ended.code == 0
    (batch.root / "source").rename(batch.root / "moved")
    assert batch.write(job("a", source="moved")).document()["totals"]["complete"] == 1


@pytest.mark.parametrize("stream", ["true", "false"])
def test_what_was_made_from_the_hub_counts_too(stream: str, batch: Batch) -> None:
    """The first run reads values; whether that is proven is told by headers alone."""
    write_recipe(batch.root / "hub.yaml")
    with serving(n=Repo(write_model(batch.root / "model"))) as hub:
        environment = client_environment(hub, batch.root / "home")
        batch.write(f"{{recipe: hub.yaml, source: hf://o/n, output: out, stream: {stream}}}")
        for told in ("1 job: 1 written", "1 job: 1 complete already"):
            ended = spawn("batch", batch.path, environment=environment)
            assert (ended.code, ended.err.splitlines()[-1]) == (0, told)


def spoil_artifact(batch: Batch) -> None:
    with (batch.root / "a").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def cut_artifact(batch: Batch) -> None:
    os.truncate(batch.root / "a", (batch.root / "a").stat().st_size - 1)


def change_recipe(batch: Batch) -> None:
    path = batch.root / "a.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "# another\n", encoding="utf-8")


def change_values(batch: Batch) -> None:
    """The header stays as it was: only the time of the file tells."""
    (shard,) = (batch.root / "source").glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x41")
    earlier = shard.stat().st_mtime_ns - 10**9
    os.utime(batch.root / "a", ns=(earlier, earlier))


def edit_report(batch: Batch, **changes: Any) -> None:
    path = batch.root / "a.conversion.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}), encoding="utf-8")


def lose_report(batch: Batch) -> None:
    (batch.root / "a.conversion.json").unlink()


@pytest.mark.parametrize(
    "change",
    [
        spoil_artifact,
        cut_artifact,
        change_recipe,
        change_values,
        lose_report,
        lambda batch: edit_report(batch, objects=[]),
        lambda batch: edit_report(batch, totals={}),
        lambda batch: edit_report(batch, sources={}),
        lambda batch: edit_report(batch, artifact=None),
        lambda batch: edit_report(batch, inputs=[]),
        lambda batch: (batch.root / "a.conversion.json").write_text("[]"),
        lambda batch: (batch.root / "a.conversion.json").write_text("[" * 100_000),
    ],
)
def test_what_is_not_proven_is_refused_and_replaced_when_told(change: Any, batch: Batch) -> None:
    assert batch.good("a").run().code == 0
    change(batch)
    ended = batch.run()
    assert (ended.code, ended.errors) == (
        1,
        [f"error: {batch.root / 'a'} exists; --overwrite replaces it when the new one is complete"],
    )
    assert batch.write(job("a", overwrite="true")).document()["totals"]["written"] == 1
    assert batch.document()["totals"]["complete"] == 1


def test_an_interrupted_batch_goes_on_where_it_was(batch: Batch) -> None:
    batch.write(job("a", source="nowhere"), job("b"))
    action = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5)"
    ended = finish(start(interrupted_command(action, 1, "batch", batch.path, "--json")))
    assert ended.code == 75
    assert ended.err.splitlines()[-1] == "interrupted; give the same command again"
    jobs = json.loads(ended.out)["jobs"]
    assert [(entry["status"], entry["exit_code"]) for entry in jobs] == [("failed", 1), ("interrupted", 75)]
    assert (batch.root / "b.part").exists()
    assert batch.good("a", "b").document()["totals"]["written"] == 2


def test_jobs_that_were_not_begun_are_told(batch: Batch) -> None:
    batch.good("a", "b")
    action = f"os.kill(os.getpid(), {int(signal.SIGINT)}); time.sleep(0.5)"
    ended = finish(start(interrupted_command(action, 1, "batch", batch.path)))
    assert ended.code == 75
    assert "2 jobs: 1 interrupted, 1 not begun" in ended.err.splitlines()


# -- wrong files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{recipe: r.yaml, source: s, output: o, sorce: s}", "3:44: unknown key 'sorce' in a job; nearest is '"),
        ("{source: s, output: o}", "3:5: a job needs 'recipe'"),
        ("{recipe: r.yaml, source: s}", "3:5: a job needs 'output'"),
        ("{recipe: r.yaml, output: o}", "3:5: a job needs 'source', or 'sources' with names, and not both"),
        ("{recipe: r, output: o, source: s, sources: {a: s}}", "3:5: a job needs 'source', or 'sources'"),
        ("{recipe: 7, output: o, source: s}", "3:14: expected a path or the name of a shipped recipe, found '7'"),
        ("{recipe: r, output: [o], source: s}", "3:25: expected a path, found a list"),
        ("{recipe: r, output: o, source: {a: s}}", "3:36: expected a path, or hf://owner/name[@revision], found a map"),
        ("{recipe: r, output: o, sources: s}", "3:37: expected a mapping of sources, found 's'"),
        ("{recipe: r, output: o, sources: {}}", "3:37: expected a mapping of sources, found an empty one"),
        ("{recipe: r, output: o, source: s, inputs: [i]}", "3:47: expected a mapping of inputs, found a list"),
        ("{recipe: r, output: o, source: s, prefix: {a=b: c}}", "3:48: 'a=b' cannot be a prefix"),
        ("{recipe: r, output: o, source: s, prefix: x}", "3:47: expected a mapping of prefixes, FROM: TO, found 'x'"),
        ("{recipe: r, output: o, source: s, unpinned: yes}", "3:49: expected a boolean, found 'yes'; write true or"),
        ("{recipe: r, output: o, source: s, report: o}", "3:25: output and report of {root}/o are the same"),
        ("{recipe: r, output: o, source: s, threads: 2}", "3:39: unknown key 'threads' in a job"),
        ("[]", "3:5: expected a job, a mapping, found a list"),
        ("{recipe: r, output: o, output: p, source: s}", "3:28: key 'output' is given twice; first on line 3"),
    ],
)
def test_what_is_wrong_with_a_job_is_told_with_its_place(text: str, told: str, batch: Batch) -> None:
    ended = batch.write(text, job("a")).run()
    assert ended.code == 1
    assert ended.errors[0].startswith(f"error: {batch.path}:{told.replace('{root}', str(batch.root))}")
    assert not (batch.root / "a").exists()


@pytest.mark.parametrize(
    ("output", "what"),
    [
        ("jobs.yaml", "the file of jobs"),
        ("./b.yaml", "the recipe of line 4"),
        ("source/model.safetensors", "the source or input of line 3"),
        ("source/../link", "the source or input of line 3"),
        ("source/config.json", "the source or input of line 3"),
        ("other.safetensors", "the source or input of line 4"),
    ],
)
def test_what_any_job_reads_is_never_written_over(output: str, what: str, batch: Batch) -> None:
    (batch.root / "link").symlink_to("source/model.safetensors")
    batch.write(job("a", output=output, overwrite="true"), job("b", source="other.safetensors"))
    (batch.root / "other.safetensors").write_bytes(b"")
    before = snapshot(batch.root)
    ran = batch.run()
    place = os.path.realpath(batch.root / output)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"error: {batch.path}:3:46: {place} belongs to {what}, and is never written over\n"
    assert snapshot(batch.root) == before


def test_a_report_written_over_a_file_that_is_read_is_told_at_its_job(batch: Batch) -> None:
    ran = batch.write(job("a", report="jobs.yaml", overwrite="true")).run()
    assert ran.code == 1
    assert "jobs.yaml belongs to the file of jobs, and is never written over" in ran.err


def test_outputs_beside_weights_are_no_parts_of_the_checkpoint(batch: Batch) -> None:
    batch.write(job("a", output="source/a.ninfer"))
    assert batch.run().code == 0
    assert batch.document()["jobs"][0]["status"] == "complete"


def test_everything_that_is_wrong_is_told_at_once_before_any_job(batch: Batch) -> None:
    (batch.root / "link").symlink_to(batch.root)
    ended = batch.write(
        job("a"), job("b", output="a"), job("b", output="link/a"), job("b", report="a.part"), job("b", unpinned="1")
    ).run()
    assert ended.code == 1
    assert [line.removeprefix(f"error: {batch.path}:") for line in ended.errors] == [
        f"4:46: {batch.root / 'a'} is written by the job of line 3 already",
        f"5:46: {batch.root / 'link/a'} is written by the job of line 3 already",
        f"6:46: {batch.root / 'a.part'} is written by the job of line 3 already",
        "7:59: expected a boolean, found '1'; write true or false",
    ]
    assert not (batch.root / "a").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("schema: 2\njobs: [{}]\n", ":1:9: schema 2 is not supported; this version reads schema 1"),
        ("jobs: [{}]\n", ":1:1: a file of jobs needs 'schema'"),
        ("schema: 1\n", ":1:1: a file of jobs needs 'jobs'"),
        ("schema: 1\njobs: []\n", ":2:7: expected a list of jobs, found an empty list"),
        ("schema: 1\njobs: {}\n", ":2:7: expected a list of jobs, found a mapping"),
        ("schema: 1\njobs: []\nmore: 1\n", ":3:1: unknown key 'more' in a file of jobs"),
        ("- 1\n", ":1:1: expected a file of jobs, a mapping, found a list"),
        ("schema: 1\njobs: [\n", "not valid YAML"),
        ("", ":1:1: the file holds no YAML document"),
        (f"schema: 1\njobs: {'[' * 70}\n", ":2:70: nested more than 64 deep"),
        ("x" * ((4 << 20) + 1), ":1:1: the file has more than 4194304 bytes"),
    ],
)
def test_what_is_no_file_of_jobs_is_told(text: str, told: str, batch: Batch) -> None:
    batch.path.write_text(text, encoding="utf-8")
    ended = batch.run()
    assert ended.code == 1
    assert told in ended.err


def test_a_file_that_is_not_there_or_cannot_be_read_is_told(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = batch.run()
    told = f"error: {batch.path}: the jobs cannot be read: No such file or directory"
    assert (ended.code, ended.errors) == (1, [told])

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("builtins.open", fail)
    ended = batch.run()
    monkeypatch.undo()
    assert (ended.code, ended.errors) == (74, [f"error: {batch.path}: the jobs cannot be read: Input/output error"])


# -- by a cluster ---------------------------------------------------------------------------------------------------


def test_a_cluster_does_the_jobs_and_is_started_once(batch: Batch) -> None:
    assert batch.good("a", "b").run().code == 0
    plain = [(batch.root / name).read_bytes() for name in "ab"]
    for name in "ab":
        (batch.root / name).unlink()
    with dask_tools.cluster(2) as client:
        before = set(client.run(os.getpid).values())
        ended = batch.write(job("a"), job("a", source="nowhere", output="x"), job("b")).run(
            "--dask", dask_tools.address(client)
        )
        assert set(client.run(os.getpid).values()) == before
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == "3 jobs: 2 written, 1 failed"
    assert [(batch.root / name).read_bytes() for name in "ab"] == plain


def test_a_job_that_streams_is_refused_with_a_cluster(batch: Batch) -> None:
    ended = batch.write(job("a", stream="true")).run("--dask", "local:2")
    told = f"error: {batch.path}:3:57: 'stream' does not go with --dask; leave it out"
    assert (ended.code, ended.errors) == (1, [told])


def test_no_cluster_no_jobs(batch: Batch) -> None:
    ended = batch.good("a").run("--dask", "local:none")
    assert (ended.code, ended.out) == (2, "")
    assert not (batch.root / "a").exists()


def test_help_says_which_exit_code_wins() -> None:
    told = " ".join(run_cli("batch", "--help").out.split())
    assert "0 all done; 75 interrupted; else 1 if something is wrong with a job, 74 if input/output failed." in told


def test_a_batch_in_a_process_of_its_own_ends_as_in_this_one(batch: Batch) -> None:
    ended = finish(start(command("batch", batch.good("a").path)))
    assert (ended.code, ended.out) == (0, f"{digest(batch.root / 'a')}  {batch.root / 'a'}\n")
