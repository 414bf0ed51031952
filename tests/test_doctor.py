"""`doctor`: what it tells of a machine, what it takes for a problem, and that it keeps secrets.

Source: cli.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
from case_tools import run_cli
from huggingface_hub import constants

from ninfer_convert import __version__, allowance, doctor
from ninfer_convert.encode import compiled
from ninfer_convert.encode.interface import SIGNATURES
from ninfer_convert.source import hub

PACKAGES = ["click", "huggingface-hub", "ml-dtypes", "numba", "numpy", "pyyaml", "safetensors", "tqdm"]
GIB = 1 << 30
CLIENT_SETTINGS = hub.client_settings


@pytest.fixture(autouse=True)
def _settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a machine of which everything is known: room enough, no limits, no token, nothing kept."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiled, "kept", lambda: (tmp_path / "kernels", dict.fromkeys(SIGNATURES, True)))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage(5 * GIB))
    monkeypatch.setattr(allowance, "available_memory", lambda: 8 * GIB)
    monkeypatch.setattr(allowance, "memory_limit", lambda: None)
    monkeypatch.setattr(allowance, "default_memory", lambda: GIB)
    monkeypatch.setattr(allowance, "allowed_threads", lambda: 3)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    settings = hub.ClientSettings(str(tmp_path / "hub"), "https://hub.example", is_offline=False, has_token=False)
    monkeypatch.setattr(hub, "client_settings", lambda: settings)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


class usage:  # noqa: N801
    """What `shutil.disk_usage` returns, as far as it is looked at."""

    def __init__(self, free: int) -> None:
        self.free = free


def findings(code: int, *options: str) -> dict[str, dict[str, Any]]:
    ran = run_cli("doctor", "--json", *options)
    assert (ran.code, ran.err) == (code, "")
    document = json.loads(ran.out)
    assert document["ok"] is (code == 0)
    return {found["subject"]: found for found in document["findings"]}


def test_a_machine_without_problems_is_told_line_by_line(tmp_path: Path) -> None:
    ran = run_cli("doctor")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    system = f"{platform.python_implementation()} on {platform.system()} {platform.release()}, {platform.machine()}"
    assert lines[0] == f"ok       Python: {platform.python_version()}, {system}"
    assert lines[1] == f"ok       ninfer-convert: {__version__} in {Path(doctor.__file__).parent}"
    assert lines[2:10] == [f"ok       {name}: {importlib.metadata.version(name)}" for name in PACKAGES]
    assert lines[10].startswith("ok       shipped recipes: 6 in ")
    assert lines[11:] == [
        "ok       processors: 3 of 64 may be used; --threads is 3 by default",
        "ok       memory limit: no limit; --max-memory is 1.0 GiB by default",
        "ok       memory available: 8.0 GiB",
        f"ok       compiled kernels: {len(SIGNATURES)} of {len(SIGNATURES)} are kept in {tmp_path}/kernels",
        "ok       hub: hf:// means https://hub.example",
        "ok       hub token: none; public repositories need none",
        f"ok       hub cache: 5.0 GiB free in {tmp_path}/hub",
        f"ok       working directory: 5.0 GiB free in {tmp_path}",
        f"ok       temporary files: 5.0 GiB free in {tmp_path}",
    ]


def test_the_same_is_told_as_json(tmp_path: Path) -> None:
    found = findings(0)
    assert {name: found[name]["value"] for name in PACKAGES} == {n: importlib.metadata.version(n) for n in PACKAGES}
    values = {name: made["value"] for name, made in found.items() if name not in PACKAGES}
    assert values == {
        "Python": platform.python_version(),
        "ninfer-convert": __version__,
        "shipped recipes": 6,
        "processors": 3,
        "memory limit": None,
        "memory available": 8 * GIB,
        "compiled kernels": {"directory": f"{tmp_path}/kernels", "kept": dict.fromkeys(SIGNATURES, True)},
        "hub": "https://hub.example",
        "hub token": False,
        "hub cache": {"directory": f"{tmp_path}/hub", "free_bytes": 5 * GIB},
        "working directory": {"directory": f"{tmp_path}", "free_bytes": 5 * GIB},
        "temporary files": {"directory": f"{tmp_path}", "free_bytes": 5 * GIB},
    }
    text = [f"{made['severity']:<9}{name}: {made['text']}" for name, made in found.items()]
    assert run_cli("doctor").out.splitlines() == text


Patch = Callable[[pytest.MonkeyPatch, Path], object]


def requires(*needed: str) -> Patch:
    return lambda patch, _: patch.setattr(importlib.metadata, "requires", lambda name: list(needed))


def gone(patch: pytest.MonkeyPatch, place: Path) -> None:
    (place / "here").mkdir()
    patch.chdir(place / "here")
    (place / "here").rmdir()


def below_a_file(patch: pytest.MonkeyPatch, place: Path) -> None:
    (place / "file").touch(mode=0o600)
    patch.setenv("TMPDIR", str(place / "file" / "tmp"))


def hub_below_a_file(patch: pytest.MonkeyPatch, place: Path) -> None:
    (place / "file").touch(mode=0o600)
    settings = hub.ClientSettings(str(place / "file" / "hub"), "https://hub.example", is_offline=False, has_token=False)
    patch.setattr(hub, "client_settings", lambda: settings)


def failing_warm() -> None:
    raise RuntimeError("numba 9 passes arguments in another way: \x1b")


def no_metadata(name: str) -> Any:
    raise importlib.metadata.PackageNotFoundError(name)


LIMITED = "a limit of 300.0 MiB, of which a run may take 240.0 MiB; it takes 256.0 MiB at least"
TOLD: list[tuple[Patch, str, str]] = [
    (requires("no-such-thing>=1"), "problem  no-such-thing: not installed, no-such-thing>=1 is needed; "
     "pip install 'no-such-thing>=1'", "problem"),
    (requires("numpy>=999.1"), f"problem  numpy: {importlib.metadata.version('numpy')} is too old, numpy>=999.1 is "
     "needed; pip install 'numpy>=999.1'", "problem"),
    (requires("numpy", "no-such-thing; extra == 'dev'"),
     f"ok       numpy: {importlib.metadata.version('numpy')}", "ok"),
    (lambda patch, _: patch.setattr(importlib.metadata, "requires", no_metadata),
     "note     packages: not installed as a package, so that nobody knows what it needs; pip install ninfer-convert",
     "note"),
    (lambda patch, _: patch.setattr(doctor.sys, "version_info", (3, 10, 9)), "problem  Python: 3.10.9, ", "problem"),
    (lambda patch, _: patch.setattr(doctor, "shipped_recipes", list), "problem  shipped recipes: none in ", "problem"),
    (lambda patch, _: (patch.setattr(allowance, "memory_limit", lambda: 300 << 20),
                       patch.setattr(allowance, "default_memory", lambda: 240 << 20)),
     f"problem  memory limit: {LIMITED}; raise the limit (cgroup, ulimit -v)", "problem"),
    (lambda patch, _: patch.setattr(allowance, "memory_limit", lambda: 4 * GIB),
     "ok       memory limit: a limit of 4.0 GiB; --max-memory is 1.0 GiB by default", "ok"),
    (lambda patch, _: patch.setattr(allowance, "available_memory", lambda: 100 << 20),
     "note     memory available: 100.0 MiB; end other processes, or give --max-memory", "note"),
    (lambda patch, _: patch.setattr(doctor.resource, "getrlimit", lambda which: (2048, 4096)),
     "note     file size: no file may be larger than 2.0 KiB; ulimit -f unlimited", "note"),
    (lambda patch, _: patch.setattr(compiled, "kept", lambda: (None, dict.fromkeys(SIGNATURES, False))),
     "problem  compiled kernels: are kept nowhere, so that every run compiles them again; set NUMBA_CACHE_DIR to a "
     "directory of yours that nobody else can write to", "problem"),
    (lambda patch, place: patch.setattr(compiled, "kept", lambda: (place, {"a": True, "b": False})),
     "ok       compiled kernels: 1 of 2 are kept in ", "ok"),
    (lambda patch, _: patch.setattr(doctor.shutil, "disk_usage", lambda place: usage(1000)),
     "note     working directory: 1000 bytes free in ", "note"),
    (gone, "problem  working directory: .: No such file or directory; change to a directory that is there", "problem"),
    (below_a_file, "/file cannot be written; set TMPDIR", "note"),
    (hub_below_a_file, "/file cannot be written; set HF_HOME, or use --stream or directories only", "problem"),
]  # fmt: skip


@pytest.mark.parametrize(("patch", "told", "severity"), TOLD)
def test_what_is_amiss_is_told_and_a_problem_fails(
    patch: Patch, told: str, severity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, tmp_path)
    ran = run_cli("doctor")
    assert (ran.code, ran.err) == (1 if severity == "problem" else 0, "")
    (line,) = [line for line in ran.out.splitlines() if told in line]
    assert line.startswith(severity)
    assert [line] == [line for line in ran.out.splitlines() if line.startswith("problem")] or severity != "problem"


def test_kernels_that_cannot_be_compiled_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "warm", failing_warm)
    told = "problem  compiling: RuntimeError: numba 9 passes arguments in another way: \\x1b; install numba again\n"
    ran = run_cli("doctor", "--warm")
    assert ran.code == 1
    assert told in ran.out
    assert run_cli("doctor").code == 0


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.10.0", (2, 10)), ("2.9", (2, 9)), ("1.0rc1", (1,)), ("0.68.1+local", (0, 68, 1)), ("3", (3,)), ("x", ())],
)
def test_versions_are_compared_as_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert doctor._numbers(version) == numbers


def test_a_token_is_told_of_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "client_settings", CLIENT_SETTINGS)
    monkeypatch.setenv("HF_TOKEN", "hf_SECRETSECRETSECRET")
    monkeypatch.setattr(constants, "ENDPOINT", "https://user:SECRET@mirror.example/hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    texts = [run_cli("doctor").out, run_cli("doctor", "--json").out]
    assert "SECRET" not in "".join(texts)
    assert "ok       hub token: there is one" in texts[0].splitlines()
    assert "note     hub: HF_HUB_OFFLINE is set: nothing is fetched" in texts[0].splitlines()
    found = {made["subject"]: made["value"] for made in json.loads(texts[1])["findings"]}
    assert (found["hub"], found["hub token"]) == ("https://mirror.example/hub", True)


def test_kernels_are_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    place = tmp_path / "cache"
    settings = commands.environment(NUMBA_CACHE_DIR=str(place))

    def kept(*options: str) -> tuple[dict[str, bool], dict[str, bytes]]:
        done = commands.run("doctor", "--json", *options, env=settings)
        assert done.err == ""
        found = {made["subject"]: made["value"] for made in json.loads(done.out)["findings"]}
        directory = Path(found["compiled kernels"]["directory"])
        assert os.path.commonpath([directory, place]) == str(place)
        return found["compiled kernels"]["kept"], {path.name: path.read_bytes() for path in directory.iterdir()}

    assert kept() == (dict.fromkeys(SIGNATURES, False), {})
    told, files = kept("--warm")
    assert told == dict.fromkeys(SIGNATURES, True)
    assert len(files) == len(SIGNATURES)
    assert kept("--warm") == (told, files)
    # What is damaged is not taken for kept.
    (damaged,) = place.rglob(min(files))
    damaged.write_bytes(files[damaged.name][:-1])
    assert kept()[0] == {**told, damaged.name.rpartition("-")[0]: False}
