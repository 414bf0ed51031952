"""The command line where machines are not like ours: no rights, no home, no memory, no locale, nobody reading."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import unprivileged
from case_tools import HEAD, Q4, entry
from checkpoints import bf16, write_directory
from many_objects import ManyObjects, write_many_objects

MODULE = (sys.executable, "-m", "ninfer_convert")
ADDRESS_SPACE = 2 << 30
FILES = 40


@dataclass(frozen=True)
class Done:
    """What a command left, as bytes."""

    code: int
    out: bytes
    err: bytes


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that everybody may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="ninfer-environment-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def many(place: Path) -> ManyObjects:
    """A conversion whose source nobody may write to."""
    made = write_many_objects(place / "many", rounds=4)
    for path in (*made.source.iterdir(), made.recipe):
        path.chmod(0o444)
    made.source.chmod(0o555)
    made.source.parent.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def digest(many: ManyObjects, place: Path) -> str:
    """The SHA-256 of the artifact that an ordinary run makes."""
    done = command(many.arguments(place / "ordinary.ninfer"), os.environ)
    assert done.code == 0, done.err
    return hashlib.sha256((place / "ordinary.ninfer").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def artifact(place: Path, digest: str) -> Path:
    return place / "ordinary.ninfer"


@pytest.fixture(scope="module")
def warm(place: Path) -> Path:
    """A directory of the unprivileged user for temporary files, where compiled kernels stay from test to test."""
    directory = place / "warm"
    directory.mkdir()
    os.chown(directory, unprivileged.user(), -1)
    return directory


@pytest.fixture
def mine(place: Path) -> Iterator[Path]:
    """A directory of the unprivileged user."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        os.chown(name, unprivileged.user(), -1)
        yield Path(name)


def command(words: list[object], environment: Any, prefix: tuple[str, ...] = (), **options: Any) -> Done:
    texts = [word if isinstance(word, bytes) else str(word) for word in (*prefix, *MODULE, *words)]
    done = subprocess.run(texts, env=dict(environment), capture_output=True, check=False, timeout=300, **options)
    return Done(done.returncode, done.stdout, done.stderr)


def bare(**changes: str) -> dict[str, str]:
    """Returns an environment without home, locale, terminal and caches."""
    kept = {name: text for name, text in os.environ.items() if name in ("PATH", "VIRTUAL_ENV", "PYTHONPATH")}
    return {**kept, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **changes}


def require_same(output: Path, digest: str) -> None:
    assert hashlib.sha256(output.read_bytes()).hexdigest() == digest
    assert not list(output.parent.glob("*.part*"))


# --- rights ------------------------------------------------------------------------------------------------------


def test_an_unprivileged_user_with_a_read_only_home_converts_verifies_and_inspects(
    many: ManyObjects, digest: str, warm: Path, mine: Path
) -> None:
    """The installed package, the recipe and the source are read-only for this user as well."""
    home = mine / "home"
    home.mkdir(mode=0o555)
    environment = bare(HOME=str(home), TMPDIR=str(warm))
    output = mine / "out.ninfer"
    for words in (
        ["plan", many.recipe, "--source", many.source],
        many.arguments(output),
        ["verify", output],
        ["inspect", output, "--objects"],
        ["recipe", "list"],
        ["formats"],
    ):
        done = command(words, environment, unprivileged.prefix(), cwd=mine)
        assert done.code == 0, (words, done.err)
    require_same(output, digest)
    assert output.stat().st_uid == unprivileged.user()
    assert list(home.iterdir()) == []


def test_without_home_cache_and_temporary_directory_it_converts_all_the_same(mine: Path) -> None:
    """As in a container with a read-only root: the output's directory is the only one that can be written.

    Python itself goes on to /tmp when TMPDIR is of no use, so that it is told to find none.
    """
    sealed = mine / "sealed"
    sealed.mkdir(mode=0o555)
    values = np.arange(4 * 130, dtype=np.float32).reshape(4, 130)
    source = write_directory(mine / "one", {"model.safetensors": {"a": bf16(values)}})
    recipe = mine / "recipe.yaml"
    recipe.write_text(f"{HEAD}sources: {{base: {{}}}}\nobjects:\n  - {entry('a', [4, 130], Q4, 'a')}\n")
    script = (
        "import sys, tempfile; tempfile._candidate_tempdir_list = lambda: [tempfile._os.getcwd()];"
        "from ninfer_convert import cli; cli.main()"
    )
    outputs = []
    poor = bare(TMPDIR=str(sealed), HOME="/nonexistent")
    for prefix, environment in ((unprivileged.prefix(), poor), ((), os.environ)):
        outputs.append(mine / f"out{len(outputs)}.ninfer")
        words = [*prefix, sys.executable, "-c", script, "run", recipe, "--source", source, "-o", outputs[-1]]
        done = subprocess.run([*map(str, words)], env=environment, cwd=sealed, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_a_directory_that_may_not_be_written_is_an_output_failure_with_path_and_bytes(
    many: ManyObjects, artifact: Path, warm: Path, mine: Path
) -> None:
    sealed = mine / "sealed"
    sealed.mkdir(mode=0o555)
    nbytes = artifact.stat().st_size
    done = command(many.arguments(sealed / "out"), bare(TMPDIR=str(warm)), unprivileged.prefix(), cwd=mine)
    assert done.code == 74
    assert done.err.decode() == f"error: cannot create {sealed}/out.part ({nbytes} bytes): Permission denied\n"
    assert list(sealed.iterdir()) == []


def test_a_report_that_may_not_be_written_leaves_neither_it_nor_the_artifact(
    many: ManyObjects, warm: Path, mine: Path
) -> None:
    sealed = mine / "sealed"
    sealed.mkdir(mode=0o555)
    words = many.arguments(mine / "out", "--report", sealed / "report.json")
    done = command(words, bare(TMPDIR=str(warm)), unprivileged.prefix(), cwd=mine)
    assert done.code == 74
    assert f"cannot write {sealed}/report.json (" in done.err.decode()
    assert done.err.decode().endswith(" bytes): Permission denied\n")
    assert not list(mine.glob("out*"))


def test_modes_respect_the_umask(many: ManyObjects, mine: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        output = mine / f"out{umask}"
        done = command(many.arguments(output), bare(TMPDIR=str(mine)), umask=umask)
        assert done.code == 0, done.err
        for path in (output, output.with_name(output.name + ".conversion.json")):
            assert path.stat().st_mode & 0o777 == mode


# --- little of everything ----------------------------------------------------------------------------------------


def limited(kind: int, most: int) -> dict[str, Any]:
    return {"preexec_fn": lambda: resource.setrlimit(kind, (most, most))}


def test_it_converts_verifies_and_inspects_in_two_gigabytes_of_address_space(
    many: ManyObjects, digest: str, mine: Path
) -> None:
    output = mine / "out.ninfer"
    for words in (
        many.arguments(output),
        ["verify", output, "--recipe", many.recipe, "--source", many.source],
        ["inspect", output, "--json"],
        ["plan", many.recipe, "--source", many.source, "--deep"],
    ):
        done = command(words, bare(TMPDIR=str(mine)), **limited(resource.RLIMIT_AS, ADDRESS_SPACE))
        assert done.code == 0, (words, done.err)
    require_same(output, digest)


def test_no_thread_is_started_for_a_library_that_is_not_used(artifact: Path) -> None:
    """Each would take address space, on a machine with many processors more than a limit leaves."""
    script = (
        "import sys, os; from ninfer_convert import cli\n"
        f"sys.argv = ['ninfer-convert', 'inspect', {str(artifact)!r}]\n"
        "try: cli.main()\n"
        "except SystemExit: print('threads', len(os.listdir('/proc/self/task')), 'numpy' in sys.modules)"
    )
    environment = {name: text for name, text in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "threads 1 True"


def test_it_converts_with_forty_open_files(many: ManyObjects, digest: str, mine: Path) -> None:
    done = command(many.arguments(mine / "out"), bare(TMPDIR=str(mine)), **limited(resource.RLIMIT_NOFILE, FILES))
    assert done.code == 0, done.err
    require_same(mine / "out", digest)


# --- locale and names --------------------------------------------------------------------------------------------


def test_paths_that_are_not_utf_8_work_and_are_shown_escaped(
    many: ManyObjects, digest: str, place: Path, mine: Path
) -> None:
    odd = os.fsencode(mine) + b"/\xff\x1b[31m-model"
    os.mkdir(odd)
    shutil.copytree(os.fsencode(many.source), odd + b"/source")
    shutil.copy(many.recipe, odd + b"/r\xe9cipe.yaml")
    words = ["run", odd + b"/r\xe9cipe.yaml", "--source", odd + b"/source", "-o", odd + b"/out", "--threads", "2"]
    for environment in (bare(TMPDIR=str(mine)), {**os.environ, "LC_ALL": "C.UTF-8"}):
        done = command([*words, "--overwrite"], environment)
        assert done.code == 0, done.err
        assert b"\\xff" in done.out or b"\\udcff" in done.out
        for raw in (b"\x1b", b"\xff"):
            assert raw not in done.out + done.err
        require_same(Path(os.fsdecode(odd + b"/out")), digest)
        report = json.loads(Path(os.fsdecode(odd + b"/out.conversion.json")).read_bytes())
        assert report["sources"]["base"]["location"].endswith("[31m-model/source")
    for words in (["verify", odd + b"/out"], ["inspect", odd + b"/out"], ["inspect", odd + b"/none"]):
        done = command(words, bare(TMPDIR=str(mine)))
        assert b"Traceback" not in done.err
        assert b"\x1b" not in done.out + done.err


# --- the other end of the line -----------------------------------------------------------------------------------


def piped(many: ManyObjects, words: str, mine: Path, **changes: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a line of shell in which `$C` is the command."""
    environment = bare(TMPDIR=str(mine), C=" ".join(MODULE), R=str(many.recipe), S=str(many.source), **changes)
    line = f"set -o pipefail; {words}"
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, check=False)


def test_a_reader_that_has_seen_enough_is_no_failure(many: ManyObjects, artifact: Path, mine: Path) -> None:
    for words in (
        "$C plan $R --source $S --objects | head -1",
        "$C plan $R --source $S --json | head -1",
        f"$C inspect {artifact} --objects | true",
        "$C --help | true",
        f"$C run $R --source $S -o {mine}/out | true",
    ):
        done = piped(many, words, mine)
        assert (done.returncode, b"Traceback" in done.stderr, b"rror" in done.stderr) == (0, False, False), done.stderr
    assert (mine / "out").exists()


def test_a_log_that_nobody_reads_does_not_end_a_conversion(
    many: ManyObjects, digest: str, mine: Path
) -> None:
    done = piped(many, f"$C run $R --source $S -o {mine}/out -v 2> >(true) > /dev/null", mine)
    assert done.returncode == 0
    require_same(mine / "out", digest)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_end_a_conversion(closed: str, many: ManyObjects, digest: str, mine: Path) -> None:
    done = piped(many, f"$C run $R --source $S -o {mine}/out {closed}", mine)
    assert done.returncode == 0, done.stderr
    require_same(mine / "out", digest)


def test_an_output_stream_on_a_full_disk_is_an_output_failure(many: ManyObjects, mine: Path) -> None:
    done = piped(many, "$C plan $R --source $S --json > /dev/full", mine)
    assert (done.returncode, b"Traceback" in done.stderr) == (74, False)
    assert b"No space left on device" in done.stderr


@pytest.mark.parametrize(("term", "has_bar"), [("dumb", False), ("xterm", True)])
def test_a_dumb_terminal_gets_lines_and_another_one_a_bar(
    term: str, has_bar: bool, many: ManyObjects, mine: Path
) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    words = [str(word) for word in (*MODULE, *many.arguments(mine / "out"))]
    environment = bare(TMPDIR=str(mine), TERM=term)
    with subprocess.Popen(words, env=environment, stderr=follower, stdout=follower) as process:
        os.close(follower)
        seen = b""
        while True:
            try:
                piece = os.read(leader, 4096)
            except OSError:
                break
            if not piece:
                break
            seen += piece
    os.close(leader)
    assert process.returncode == 0
    assert b"wrote" in seen
    assert (b"\r" in seen.replace(b"\r\n", b"\n")) == has_bar
    if not has_bar:
        assert b"\x1b" not in seen
