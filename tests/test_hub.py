"""Sources on the hub, end to end: the real client in processes of its own, a real server on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tools import Ran, command, finish, run_cli, spawn, start
from checkpoints import bf16, write_directory
from hub_server import Hub, Repo, client_environment, serving
from hypothesis import given
from hypothesis import strategies as st
from miniatures import RECIPES
from pipeline import planned, stand_in_places

from ninfer_convert.errors import OutputError, UsageError
from ninfer_convert.plan.planner import PlannedResource
from ninfer_convert.plan.value import source_tensors
from ninfer_convert.source.hub import HubLocation, parse_location
from ninfer_convert.source.streaming import Shard, schedule, shard_directory
from ninfer_convert.stand_in.checkpoints import StandIn, write_stand_in

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"
ROWS, K = 128, 1024
SHARDS = 4

RECIPE = """\
schema: 1
id: hub
artifact: {{model_id: m, weights_id: w}}
evidence: none
sources: {{base: {{{pin}config: {{model_type: tiny}}}}}}
objects:
  - {{resource: frontend/tokenizer.json, file: tokenizer.json}}
  - {{resource: frontend/template, any: [{{file: template.jinja}}, {{file: tokenizer_config.json, member: template}}]}}
{objects}
{more}
"""
ENCODED = "format: Q4G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1"


def shard_name(number: int, count: int = SHARDS) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_model(directory: Path, shards: int = SHARDS) -> Path:
    """Writes a checkpoint: in shard n a matrix wn and a vector vn, in the last one something nobody wants."""
    draw = np.random.default_rng(7)
    content: dict[str, dict[str, Any]] = {}
    for number in range(1, shards):
        matrix = bf16(draw.standard_normal((ROWS, K)).astype(np.float32))
        vector = bf16(draw.standard_normal(700).astype(np.float32))
        content[shard_name(number, shards)] = {f"w{number}": matrix, f"v{number}": vector}
    content[shard_name(shards, shards)] = {"unwanted": bf16(np.ones((ROWS, K), np.float32))}
    files = {
        "tokenizer.json": b'{"tokens": []}',
        "tokenizer_config.json": b'{"template": "from the config"}',
        "README.md": b"about the model",
        "other.bin": bytes(1000),
    }
    return write_directory(directory, content, config={"model_type": "tiny"}, files=files)


def write_recipe(path: Path, shards: int = SHARDS, pin: str = "", more: str = "") -> Path:
    """Takes every matrix, pairs of them from neighbouring shards, and every vector."""
    objects = []
    for number in reversed(range(1, shards)):
        objects.append(f"  - {{name: w{number}, shape: [{ROWS}, {K}], {ENCODED}, value: w{number}}}")
        objects.append(f"  - {{name: v{number}, shape: [700], format: BF16, value: v{number}}}")
        if number > 1:
            pair = f"{{concat: [w{number - 1}, w{number}]}}"
            objects.append(f"  - {{name: p{number}, shape: [{2 * ROWS}, {K}], {ENCODED}, value: {pair}}}")
    text = RECIPE.format(pin=pin, objects="\n".join(objects), more=more or "ignore: [unwanted]")
    path.write_text(text, encoding="utf-8")
    return path


@dataclass
class Room:
    """A hub with one repository `o/n`, a cache, a recipe and an output that a run from the directory made."""

    root: Path
    hub: Hub
    repo: Repo
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def output(self) -> Path:
        return self.root / "out.ninfer"

    @property
    def snapshot(self) -> Path:
        return self.root / "home" / "hub" / "models--o--n" / "snapshots" / COMMIT

    def environment(self) -> dict[str, str]:
        return client_environment(self.hub, self.root / "home", **self.variables)

    def run(self, *options: object, where: str = "hf://o/n") -> Ran:
        words = ("run", self.recipe, "--source", where, "-o", self.output, *options)
        return spawn(*words, environment=self.environment())

    def plan(self, *options: object, where: str = "hf://o/n") -> Ran:
        return spawn("plan", self.recipe, "--source", where, *options, environment=self.environment())

    def source(self) -> dict[str, Any]:
        report = json.loads((self.root / "out.ninfer.conversion.json").read_bytes())
        return dict(report["sources"]["base"])

    def is_right(self) -> bool:
        return self.output.read_bytes() == (self.root / "local.ninfer").read_bytes()

    def leftovers(self) -> list[str]:
        """Returns what lies around, but for what the fixture put there."""
        known = {"home", "model", "recipe.yaml", "local.ninfer", "local.ninfer.conversion.json"}
        return sorted({path.name for path in self.root.iterdir()} - known)

    def fetched(self) -> Counter[str]:
        """Returns how often a weight file was sent whole."""
        sizes = {path.name: path.stat().st_size for path in self.repo.directory.iterdir()}
        names = [
            (path.rpartition("/")[2], nbytes)
            for method, path, nbytes in self.hub.requests
            if method == "GET" and "/lfs/" in path
        ]
        return Counter(name for name, nbytes in names if nbytes == sizes[name])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its recipe, and the artifact of a plain run."""
    root = tmp_path_factory.mktemp("hub")
    write_model(root / "model")
    write_recipe(root / "recipe.yaml")
    ran = spawn("run", root / "recipe.yaml", "--source", root / "model", "-o", root / "local.ninfer")
    assert ran.code == 0, ran.err
    return root


@pytest.fixture
def room(template: Path, tmp_path: Path) -> Iterator[Room]:
    root = tmp_path / "room"
    shutil.copytree(template, root)
    repo = Repo(root / "model")
    with serving(n=repo) as hub:
        yield Room(root, hub, repo)


# -- good repositories ----------------------------------------------------------------------------------------------


def test_a_run_fetches_what_the_recipe_needs_and_records_where_it_came_from(room: Room) -> None:
    ran = room.run()
    assert ran.code == 0, ran.err
    assert "fetching 7 files" in ran.err
    assert room.is_right()
    names = sorted(path.name for path in room.snapshot.iterdir())
    assert names == [
        *("config.json", *(shard_name(number) for number in range(1, SHARDS)), "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert room.hub.paths("README.md") == room.hub.paths("other.bin") == []
    assert len(room.hub.paths("/api/")) == 1
    source = room.source()
    assert source["location"] == f"hf://o/n@{COMMIT}"
    assert (source["repo"], source["revision"], source["revision_requested"]) == ("o/n", COMMIT, "main")
    assert source["identified_by"] == "hub"
    for file in source["files"]:
        assert file["sha256"] == room.repo.digests(file["name"])[0]
        assert file["bytes"] == (room.repo.directory / file["name"]).stat().st_size
        assert file["verified"] is False
    # What is in the cache is not fetched again.
    room.hub.requests.clear()
    ran = room.run("--overwrite", "--verify-source")
    assert ran.code == 0, ran.err
    assert room.fetched() == {}
    assert all(file["verified"] for file in room.source()["files"])


def test_the_pinned_revision_is_the_one_that_is_asked_for(room: Room) -> None:
    write_recipe(room.recipe, pin=f"repo: o/n, revision: {COMMIT}, ")
    ran = room.plan("--json")
    assert ran.code == 0, ran.err
    assert room.hub.paths("/api/") == [f"/api/models/o/n/revision/{COMMIT}"]
    assert json.loads(ran.out)["waived"] == []


def test_another_revision_than_the_pinned_one_is_a_pin_that_does_not_match(room: Room) -> None:
    write_recipe(room.recipe, pin=f"repo: o/n, revision: {OTHER}, ")
    ran = room.plan(where="hf://o/n@main")
    assert ran.code == 1
    assert f"revision {COMMIT} found, {OTHER} required" in ran.err


def test_a_tag_is_resolved_once_and_the_cache_remembers_it(room: Room) -> None:
    room.repo.refs = {"v1/final": COMMIT}
    ran = room.run(where="hf://o/n@v1/final")
    assert ran.code == 0, ran.err
    assert room.hub.paths("/api/") == ["/api/models/o/n/revision/v1/final"]
    assert room.source()["revision_requested"] == "v1/final"
    room.hub.requests.clear()
    room.variables["HF_HUB_OFFLINE"] = "1"
    ran = room.run("--overwrite", where="hf://o/n@v1/final")
    assert ran.code == 0, ran.err
    assert room.hub.requests == []
    assert (room.source()["revision"], room.source()["identified_by"]) == (COMMIT, "hub cache")


def test_a_token_goes_to_the_hub_and_not_to_where_it_redirects(room: Room) -> None:
    room.variables["HF_TOKEN"] = "hf_" + "a" * 34
    ran = room.run("--stream")
    assert ran.code == 0, ran.err
    assert len(room.hub.paths("/lfs/")) == 2 * SHARDS - 1
    assert any("/api/" in path for path in room.hub.authorized)
    assert any("/resolve/" in path for path in room.hub.authorized)
    assert not any("/lfs/" in path for path in room.hub.authorized)
    assert "hf_aaa" not in ran.err + ran.out + json.dumps(room.source())


def test_verify_reads_a_source_of_the_hub(room: Room) -> None:
    words = ("verify", room.root / "local.ninfer", "--recipe", room.recipe, "--source", "hf://o/n")
    ran = spawn(*words, environment=room.environment())
    assert ran.code == 0, ran.err


def test_a_local_directory_needs_neither_the_client_nor_the_network(room: Room) -> None:
    script = (
        "import socket, sys\n"
        "def refuse(*_): raise SystemExit('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from ninfer_convert import cli\n"
        "sys.argv[0] = 'ninfer-convert'\n"
        "code = cli._run()\n"
        "print('client' if 'huggingface_hub' in sys.modules else 'no client')\n"
        "sys.exit(code)\n"
    )
    words = ["run", str(room.recipe), "--source", str(room.repo.directory), "-o", str(room.output)]
    ran = finish(start([sys.executable, "-c", script, *words], room.environment()))
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "no client"), ran.err
    assert room.hub.requests == []


# -- repositories that are not to be had ----------------------------------------------------------------------------


REFUSALS = [
    (403, "GatedRepo", "the repository is gated; ask for access at "),
    (401, "GatedRepo", "the repository is gated; ask for access at "),
    (401, "RepoNotFound", "no such repository, or a private one that is not yours to see (HTTP 401"),
    (401, "", "the hub refuses access (HTTP 401"),
    (403, "", "the hub refuses access (HTTP 403"),
    (503, "", "the hub cannot serve now (HTTP 503"),
    (429, "", "the hub cannot serve now (HTTP 429"),
]


def plans(room: Room, places: Sequence[str]) -> list[Ran]:
    """Plans from several places at a time."""
    words = [command("plan", room.recipe, "--source", where) for where in places]
    return [finish(process) for process in [start(line, room.environment()) for line in words]]


def test_a_refusal_keeps_its_own_cause(room: Room) -> None:
    for number, (status, code, _) in enumerate(REFUSALS):
        room.hub.repos[f"o/r{number}"] = Repo(room.repo.directory, status=status, code=code)
    room.hub.repos["o/gated"] = Repo(room.repo.directory, is_gated=True)
    *runs, gated = plans(room, [*(f"hf://o/r{number}" for number in range(len(REFUSALS))), "hf://o/gated"])
    assert gated.code == 1
    assert "the repository is gated; ask for access at " in gated.err
    for number, (ran, (status, _, message)) in enumerate(zip(runs, REFUSALS, strict=True)):
        assert ran.code == (74 if status in (503, 429) else 1)
        assert len(ran.err.splitlines()) == 1
        assert f"error: hf://o/r{number}: {message}" in ran.err


def test_what_does_not_exist_is_named(room: Room) -> None:
    expected = {
        "hf://o/absent": "hf://o/absent: no such repository",
        "hf://o/n@v9": "hf://o/n@v9: the repository has no revision v9",
        f"hf://o/n@{OTHER}": f"the repository has no revision {OTHER}",
    }
    for ran, message in zip(plans(room, list(expected)), expected.values(), strict=True):
        assert (ran.code, len(ran.errors), len(ran.err.splitlines())) == (1, 1, 1)
        assert message in ran.err
    assert room.leftovers() == []


def test_a_shard_that_the_repository_lacks_is_named(room: Room) -> None:
    room.repo.missing = (shard_name(2),)
    ran = room.run()
    assert ran.code == 1
    assert f"{shard_name(2)} is absent from hf://o/n@{COMMIT}: the repository has no such file" in ran.err
    assert room.fetched() == {}


def test_a_hub_that_cannot_be_reached_is_a_failure_of_the_network(room: Room) -> None:
    room.variables["HF_ENDPOINT"] = "http://127.0.0.1:9"
    ran = room.plan()
    assert (ran.code, len(ran.errors)) == (74, 1)
    assert "http://127.0.0.1:9 cannot be reached" in ran.err
    assert "HF_HUB_OFFLINE=1" in ran.err


def test_a_proxy_that_refuses_is_told_as_a_proxy(room: Room) -> None:
    room.variables |= {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": room.hub.endpoint, "NO_PROXY": ""}
    room.variables |= {"no_proxy": "", "https_proxy": room.hub.endpoint}
    ran = room.plan()
    assert (ran.code, len(ran.errors)) == (74, 1)
    assert "the proxy does not let us through" in ran.err


def test_a_hub_that_does_not_answer_is_given_up_soon(room: Room) -> None:
    room.repo.slow = 3600  # the command is waited for two minutes
    room.variables |= {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    ran = room.plan()
    assert (ran.code, len(ran.errors)) == (74, 1)
    assert "did not answer in time" in ran.err


@pytest.mark.parametrize(
    "where", ["hf://o", "hf://o/n/more", "hf://datasets/o/n", "hf://o/n@", "hf://o/../n", "hf://o/n@a b"]
)
def test_other_spellings_of_a_location_are_refused(where: str) -> None:
    with pytest.raises(UsageError, match="write hf://owner/name or hf://owner/name@revision"):
        parse_location(where)


NOWHERE = "no such file or directory"


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("Qwen/Qwen3.6-27B", f"{NOWHERE}; if the hub is meant, write hf://Qwen/Qwen3.6-27B"),
        ("https://huggingface.co/Qwen/Qwen3.6-27B", f"{NOWHERE}; if the hub is meant, write hf://Qwen/Qwen3.6-27B"),
        ("https://hf.co/o/n/", f"{NOWHERE}; if the hub is meant, write hf://o/n"),
        ("https://huggingface.co/o/n/tree/v1.0", f"{NOWHERE}; if the hub is meant, write hf://o/n@v1.0"),
        # A path: one name, three names, from the root or from here, below a directory that is there.
        *((path, NOWHERE) for path in ("Qwen3.6-27B", "a/b/c", "/o/n", "./n", "../n", "o/", "there/n", "https://o/n")),
    ],
)
def test_a_path_that_leads_nowhere_and_looks_like_the_hub_is_told_the_spelling(
    where: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    for words in (["plan", "minilm-l6-v2", "--source", where], ["recipe", "init", where]):
        ran = run_cli(*words)
        assert (ran.code, ran.errors) == (1, [f"error: {where}: {told}"])
    Path("Qwen/Qwen3.6-27B").mkdir(parents=True, exist_ok=True)
    assert "hf://Qwen" not in run_cli("plan", "minilm-l6-v2", "--source", "Qwen/Qwen3.6-27B").err


def test_a_location_has_a_repository_and_perhaps_a_revision() -> None:
    assert parse_location("hf://o/n-1.5_x") == HubLocation("o/n-1.5_x", None)
    assert parse_location("hf://o/n@refs/pr/4") == HubLocation("o/n", "refs/pr/4")


# -- offline --------------------------------------------------------------------------------------------------------


class TestOffline:
    """C48: a cache that holds what the recipe needs and no more."""

    @pytest.fixture
    def room(self, room: Room) -> Room:
        assert room.run().code == 0
        room.output.unlink()
        room.hub.requests.clear()
        room.variables["HF_HUB_OFFLINE"] = "1"
        return room

    def test_a_cache_with_the_needed_files_is_enough(self, room: Room) -> None:
        ran = room.run("--verify-source")
        assert ran.code == 0, ran.err
        assert room.is_right()
        assert (room.source()["revision"], room.source()["identified_by"]) == (COMMIT, "hub cache")
        # A commit needs no refs.
        shutil.rmtree(room.snapshot.parents[1] / "refs")
        ran = room.run("--overwrite", where=f"hf://o/n@{COMMIT}")
        assert ran.code == 0, ran.err
        ran = room.plan()
        assert (ran.code, len(ran.errors)) == (1, 1)
        assert "HF_HUB_OFFLINE is set and the hub cache" in ran.err
        assert "does not know revision main" in ran.err
        assert room.hub.requests == []

    def test_a_missing_shard_is_named_with_repository_commit_and_cause(self, room: Room) -> None:
        (room.snapshot / shard_name(2)).unlink()
        ran = room.run()
        assert ran.code == 1
        assert f"{shard_name(2)} is absent from hf://o/n@{COMMIT}" in ran.err
        assert "it is not in the hub cache, and HF_HUB_OFFLINE is set" in ran.err
        assert room.hub.requests == []

    def test_a_cache_without_index_and_weights_says_that_it_is_only_a_cache(self, room: Room) -> None:
        shutil.rmtree(room.snapshot)
        room.snapshot.mkdir()
        ran = room.plan()
        assert ran.code == 1
        assert f"hf://o/n@{COMMIT}: HF_HUB_OFFLINE is set, so nothing but the hub cache was looked at" in ran.err

    def test_streaming_is_refused(self, room: Room) -> None:
        ran = room.run("--stream")
        assert ran.code == 2
        assert "--stream fetches from the hub, and HF_HUB_OFFLINE is set" in ran.err


# -- wrong bytes and broken connections -----------------------------------------------------------------------------


def test_wrong_bytes_in_the_cache_are_found_by_verify_source(room: Room) -> None:
    """C35."""
    assert room.run().code == 0
    name = shard_name(2)
    blob = (room.snapshot / name).resolve()
    raw = bytearray(blob.read_bytes())
    raw[-1] ^= 1
    blob.write_bytes(raw)
    room.output.unlink()
    for where in ("hf://o/n", str(room.snapshot)):
        ran = room.run("--verify-source", where=where)
        assert (ran.code, len(ran.errors)) == (1, 1)
        assert name in ran.err
        assert f"{room.repo.digests(name)[0]} required by the hub" in ran.err
        assert not room.output.exists()
    ran = room.run()
    assert ran.code == 0, ran.err
    assert not room.is_right()
    digests = {file["name"]: (file["sha256"], file["verified"]) for file in room.source()["files"]}
    assert digests[name] == (room.repo.digests(name)[0], False)


def test_wrong_bytes_end_a_stream_and_leave_nothing(room: Room) -> None:
    room.repo.listed[shard_name(2)] = "b" * 64
    ran = room.run("--stream")
    assert (ran.code, len(ran.errors)) == (1, 1)
    found = room.repo.digests(shard_name(1))  # a true one, of another file
    assert found[0] not in ran.err
    assert shard_name(2) in ran.err
    assert f"the hub lists {'b' * 64}" in ran.err
    assert room.leftovers() == []


def test_a_cut_connection_is_taken_up_where_it_broke(room: Room) -> None:
    room.repo.cut, room.repo.cuts = {shard_name(2): 150_000}, 2
    ran = room.run("--stream")
    assert ran.code == 0, ran.err
    assert room.repo.cuts == 0
    assert room.is_right()


def test_a_connection_that_stays_cut_keeps_what_is_done(room: Room) -> None:
    room.repo.cut, room.repo.cuts = {shard_name(3): 150_000}, 10**6
    ran = room.run("--stream")
    assert ran.code == 74
    assert shard_name(3) in ran.err
    assert "what is done is kept: the same command goes on" in ran.err
    assert room.leftovers() == ["out.ninfer.part", "out.ninfer.part.journal"]
    room.repo.cuts = 0
    room.hub.requests.clear()
    ran = room.run("--stream")
    assert ran.code == 0, ran.err
    assert room.is_right()
    assert shard_name(1) not in room.fetched()
    assert room.leftovers() == ["out.ninfer", "out.ninfer.conversion.json"]


def test_a_cut_download_into_the_cache_is_a_failure_of_the_network(room: Room) -> None:
    room.repo.cut, room.repo.cuts = {shard_name(3): 150_000}, 10**6
    room.variables["HF_HUB_DOWNLOAD_TIMEOUT"] = "1"
    ran = room.run()
    assert (ran.code, len(ran.errors)) == (74, 1)
    assert shard_name(3) in ran.err
    assert room.leftovers() == []


@pytest.mark.parametrize(("option", "timeout"), [("--quiet", 3600), ("--stream", 3)])
def test_an_interrupt_does_not_wait_for_the_end_of_a_transfer(room: Room, option: str, timeout: int) -> None:
    """The transfer never ends, and the command is waited for two minutes; a stream waits for the client's timeout."""
    room.repo.stalled = (shard_name(2),)
    room.variables["HF_HUB_DOWNLOAD_TIMEOUT"] = str(timeout)
    words = command("run", room.recipe, "--source", "hf://o/n", option, "-o", room.output)
    process = start(words, room.environment())
    assert room.hub.stalled.wait(60)
    process.send_signal(signal.SIGTERM)
    ran = finish(process)
    assert ran.code == 75, ran.err
    assert not (room.root / "out.ninfer.part.shards").exists()


# -- plans from headers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """The full-shape stand-in of a model of 27B parameters, nearly all of it holes."""
    return write_stand_in("qwen3.6-27b", tmp_path_factory.mktemp("full") / "checkpoint")


def test_a_plan_of_a_full_size_checkpoint_needs_few_requests_and_bytes(full: StandIn, tmp_path: Path) -> None:
    made = full
    with serving(base=Repo(made.base, is_hashed=False)) as hub:
        words = ("plan", "qwen3.6-27b/groupwise-int", "--source", "hf://o/base", "--input", f"ranking={made.ranking}")
        environment = client_environment(hub, tmp_path / "home")
        ran = spawn(*words, "--unpinned", "--json", environment=environment)
        assert ran.code == 0, ran.err
        # Redirects count, too.
        assert len(hub.requests) < 40
        assert hub.nbytes < 6_000_000
        document = json.loads(ran.out)
        totals = document["totals"]
        assert totals["file_bytes"] == 17_495_365_888
        assert totals["source_bytes"] == 55_562_855_904
        # Every file of the stand-in is needed.
        assert totals["download_bytes"] == sum(path.stat().st_size for path in made.base.iterdir())
        assert totals["disk_bytes"] == totals["download_bytes"] + totals["file_bytes"]
        largest = sorted(path.stat().st_size for path in made.base.iterdir())[-2:]
        assert totals["stream_disk_bytes"] <= totals["file_bytes"] + sum(largest)
        assert "source base: planned from headers alone; no value of it was read" in document["notes"]
        assert not (tmp_path / "home" / "hub" / "models--o--base" / "snapshots").exists()


def test_a_plan_of_the_hub_is_that_of_the_directory(room: Room) -> None:
    there, here = (json.loads(room.plan("--json", where=where).out) for where in ("hf://o/n", str(room.repo.directory)))
    assert there["objects"] == here["objects"]
    assert {key: there["totals"][key] for key in here["totals"]} == here["totals"]
    assert set(there["totals"]) - set(here["totals"]) == {"download_bytes", "disk_bytes", "stream_disk_bytes"}
    ran = room.run("--dry-run")
    assert ran.code == 0, ran.err
    assert f"downloads {there['totals']['download_bytes']:,} bytes" in ran.out
    assert room.leftovers() == []
    assert room.fetched() == {}
    # What is in the cache need not be downloaded.
    assert room.run().code == 0
    assert json.loads(room.plan("--json").out)["totals"]["download_bytes"] == 0


# -- streams --------------------------------------------------------------------------------------------------------

WATCHED = """
import os, signal, sys, threading, time
from ninfer_convert import cli
from ninfer_convert.run import pipeline
from ninfer_convert.source import remote as remote_source

def die(number):
    "Dies when something is recorded."
    while b'"object"' not in open("JOURNAL", "rb").read():
        time.sleep(0.01)
    os.kill(os.getpid(), number)

Checkpoint = remote_source.RemoteCheckpoint
bring, drop, here, most, count = Checkpoint.bring, Checkpoint.drop, {}, 0, 0
lock = threading.Lock()

def watched_bring(self, file, directory, is_stopped):
    global most, count
    with lock:
        on_disk = {entry.name for entry in os.scandir(directory)}
        assert on_disk == {other for _, other in here}, (on_disk, here)
        here[self.name, file] = self.files[file].size
        most = max(most, len([1 for name, _ in here if name == self.name]))
        count += 1
    EVENT
    bring(self, file, directory, is_stopped)

def watched_drop(self, file):
    with lock:
        drop(self, file)
        del here[self.name, file]

Checkpoint.bring, Checkpoint.drop = watched_bring, watched_drop
pipeline.FLUSH_SECONDS = 0
sys.argv[0] = "ninfer-convert"
code = cli._run()
print(f"most {most} count {count}")
sys.exit(code)
"""


def watched(room: Room, event: str = "pass", *options: object) -> Ran:
    """Streams in a process that says how many shards were here at most, and how many came."""
    words = ["run", room.recipe, "--source", "hf://o/n", "--stream", "-o", room.output, *options]
    journal = f"{room.output}.part.journal"
    script = WATCHED.replace("EVENT", event).replace("JOURNAL", journal)
    return finish(start([sys.executable, "-c", script, *map(str, words)], room.environment()))


@pytest.fixture(scope="module")
def long_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen shards, and a condition between two of them that lie far apart."""
    root = tmp_path_factory.mktemp("long")
    model = write_model(root / "model", 15)
    write_recipe(root / "recipe.yaml", 15, more="ignore: [unwanted]\nconditions: [{same: [v3, v3]}]")
    ran = spawn("run", root / "recipe.yaml", "--source", model, "-o", root / "local.ninfer")
    assert ran.code == 0, ran.err
    return root


@pytest.fixture
def long_room(long_template: Path, tmp_path: Path) -> Iterator[Room]:
    root = tmp_path / "long"
    shutil.copytree(long_template, root)
    repo = Repo(root / "model")
    with serving(n=repo) as hub:
        yield Room(root, hub, repo)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_stream_keeps_two_shards_and_fetches_each_needed_one_once(long_room: Room, threads: int) -> None:
    ran = watched(long_room, "pass", "--threads", threads)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == "most 2 count 14"
    assert long_room.is_right()
    assert long_room.fetched() == {shard_name(number, 15): 1 for number in range(1, 15)}
    assert long_room.leftovers() == ["out.ninfer", "out.ninfer.conversion.json"]
    # The shared cache is left alone.
    assert not long_room.snapshot.exists()
    verified = {file["name"]: file["verified"] for file in long_room.source()["files"]}
    assert verified == {shard_name(number, 15): number < 15 for number in range(1, 16)}


def test_a_killed_stream_goes_on_where_it_was(long_room: Room) -> None:
    ran = watched(long_room, "if count == 7: die(signal.SIGKILL)", "--threads", 1)
    assert ran.code == -signal.SIGKILL
    assert "out.ninfer.part.shards" in long_room.leftovers()
    long_room.hub.requests.clear()
    ran = watched(long_room)
    assert ran.code == 0, ran.err
    assert long_room.is_right()
    assert sum(long_room.fetched().values()) < 14
    assert long_room.leftovers() == ["out.ninfer", "out.ninfer.conversion.json"]


def test_an_interrupted_stream_takes_its_shards_away_and_goes_on(long_room: Room) -> None:
    ran = watched(long_room, "if count == 7: die(signal.SIGINT)", "--threads", 1)
    assert ran.code == 75, ran.err
    assert long_room.leftovers() == ["out.ninfer.part", "out.ninfer.part.journal"]
    long_room.hub.requests.clear()
    ran = watched(long_room)
    assert ran.code == 0, ran.err
    assert long_room.is_right()
    assert sum(long_room.fetched().values()) < 14


def test_an_object_of_three_shards_has_them_all(room: Room) -> None:
    text = room.recipe.read_text(encoding="utf-8")
    more = f"  - {{name: all, shape: [{3 * ROWS}, {K}], {ENCODED}, value: {{concat: [w3, w1, w2]}}}}\nignore:"
    room.recipe.write_text(text.replace("ignore:", more), encoding="utf-8")
    ran = watched(room)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1].startswith("most 3 ")
    local = room.root / "local.ninfer"
    ran = spawn("run", room.recipe, "--source", room.repo.directory, "-o", local, "--overwrite")
    assert ran.code == 0, ran.err
    assert room.is_right()


def test_conditions_between_far_shards_are_checked_in_the_same_pass(room: Room) -> None:
    text = room.recipe.read_text(encoding="utf-8")
    room.recipe.write_text(text + "conditions: [{same: [v1, v3]}]\n", encoding="utf-8")
    ran = watched(room)
    assert ran.code == 1
    assert "the recipe requires them to be bit-identical" in ran.err
    assert room.leftovers() == []


def test_streaming_a_directory_is_a_mistake(room: Room) -> None:
    ran = room.run("--stream", where=str(room.repo.directory))
    assert ran.code == 2
    assert "--stream: no source is on the hub" in ran.err


def test_a_directory_has_nothing_to_be_verified_with(room: Room) -> None:
    ran = room.run("--verify-source", where=str(room.repo.directory))
    assert ran.code == 1
    assert len(ran.errors) == SHARDS - 1
    assert "no SHA-256 of the hub is known, so nothing can be verified" in ran.err
    ran = room.run("--verify-source", "--dry-run", where=str(room.repo.directory))
    assert ran.code == 2
    assert "--dry-run stops before that" in ran.err


# -- the schedule ---------------------------------------------------------------------------------------------------

SOURCES = st.sampled_from("ab")
NEEDS = st.dictionaries(
    st.integers(-5, 40), st.frozensets(st.builds(Shard, SOURCES, st.sampled_from("123456")), max_size=4), max_size=30
)


@given(NEEDS)
def test_a_schedule_works_on_every_unit_once_and_never_holds_too_much(needs: dict[int, frozenset[Shard]]) -> None:
    steps = schedule(needs)
    assert sorted(unit for step in steps for unit in step.units) == sorted(needs)
    for step in steps:
        assert all(needs[unit] == step.needs for unit in step.units)
        assert step.needs <= step.held
        for source in "ab":
            needed = sum(shard.source == source for shard in step.needs)
            assert sum(shard.source == source for shard in step.held) <= max(2, needed)
    # The order of the objects does not matter to the order of the shards.
    again = schedule(dict(reversed(needs.items())))
    assert [(step.needs, sorted(step.units)) for step in again] == [(step.needs, sorted(step.units)) for step in steps]


@given(st.integers(1, 30), st.randoms(use_true_random=False))
def test_shards_in_a_chain_are_each_fetched_once(count: int, draw: Any) -> None:
    sets = [frozenset({Shard("a", f"{n:02}")}) for n in range(count)]
    sets += [frozenset({Shard("a", f"{n:02}"), Shard("a", f"{n + 1:02}")}) for n in range(count - 1)]
    draw.shuffle(sets)
    here: frozenset[Shard] = frozenset()
    fetched = 0
    for step in schedule(dict(enumerate(sets))):
        fetched += len(step.needs - here)
        here = step.held
    assert fetched == count


@pytest.mark.parametrize("kind", ["groupwise-int", "nvfp4"])
def test_the_recipes_for_qwen_fetch_every_shard_once(full: StandIn, kind: str) -> None:
    places, inputs = stand_in_places(full)
    needs: dict[int, frozenset[Shard]] = {}
    with planned(RECIPES / "qwen3.6-27b" / f"{kind}.yaml", places, inputs) as plan:
        for index, item in enumerate(plan.objects):
            leaves = () if isinstance(item, PlannedResource) else item.leaves()
            needs[index] = frozenset(Shard(leaf.source, leaf.info.file) for leaf in leaves)
        for number, value in enumerate(plan.conditions):
            needs[-1 - number] = frozenset(Shard(leaf.source, leaf.info.file) for leaf in source_tensors(value))
    here: frozenset[Shard] = frozenset()
    fetched: list[Shard] = []
    for step in schedule(needs):
        fetched += step.needs - here
        here = step.held
    assert len(fetched) == len(set(fetched)) == (15 if kind == "groupwise-int" else 19)


def test_a_directory_for_shards_is_ours_empty_and_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "out.part.shards"
    path.mkdir()
    (path / "left").write_bytes(b"by a dead run")
    with shard_directory(path):
        assert os.listdir(path) == []
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "shard").write_bytes(b"x")
    assert not path.exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "dear").write_bytes(b"x")
    path.symlink_to(elsewhere)
    with pytest.raises(OutputError, match="is in the way: it is no directory of ours"):
        with shard_directory(path):
            pass
    assert (elsewhere / "dear").exists()
