"""Where compiled kernels are kept, and that nothing found there can end a run or be trusted by mistake."""

import os
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest

from ninfer_convert import __version__
from ninfer_convert.encode import kernel_cache
from ninfer_convert.encode.kernel_cache import KernelCache

ROOT = Path(__file__).parents[1]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Three candidate directories that exist and can be used; the environment names them."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    for name in ("named", "user", "temporary"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path


def chosen():
    return kernel_cache.cache_directory.__wrapped__()


def leaf():
    return f"kernels-{__version__}-{kernel_cache._source_digest()}"


# The directory


def test_the_named_directory_comes_first_then_the_users_then_the_temporary_one(places, monkeypatch):
    assert chosen() == places / "named" / leaf()
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert chosen() == places / "user" / "ninfer-convert" / leaf()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(places / "home"))
    assert chosen() == places / "home" / ".cache" / "ninfer-convert" / leaf()
    (places / "home").rename(places / "was home")
    (places / "home").write_text("not a directory")
    assert chosen() == places / "temporary" / f"ninfer-convert-{os.geteuid()}" / leaf()


def test_directories_that_are_made_are_private(places):
    directory = chosen()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.iterdir()) == []


def test_a_relative_user_cache_directory_is_not_followed(places, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(places))
    assert chosen() == places / ".cache" / "ninfer-convert" / leaf()


def test_the_name_of_the_directory_follows_the_source_of_the_kernels(monkeypatch, tmp_path):
    before = leaf()
    (tmp_path / "kernels.py").write_text("changed")
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "kernel_cache.py"))
    assert leaf() != before
    (tmp_path / "kernels.py").unlink()
    assert leaf().startswith(f"kernels-{__version__}-")


def test_a_user_without_an_account_and_a_home_has_the_temporary_directory(places, monkeypatch):
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1234567)
    assert chosen() == places / "temporary" / f"ninfer-convert-{os.geteuid()}" / leaf()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_directory_that_others_can_write_to_is_passed_over(places, mode):
    chosen().chmod(mode)
    assert chosen() == places / "user" / "ninfer-convert" / leaf()


def test_a_symbolic_link_is_passed_over(places):
    elsewhere = places / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (places / "named" / leaf()).symlink_to(elsewhere)
    assert chosen() == places / "user" / "ninfer-convert" / leaf()


def test_a_directory_below_one_that_anybody_can_rename_in_is_passed_over(places):
    (places / "named").chmod(0o777)
    assert chosen() == places / "user" / "ninfer-convert" / leaf()
    (places / "named").chmod(0o1777)
    assert chosen() == places / "named" / leaf()


def test_nothing_is_kept_where_every_directory_is_somebody_elses(places, monkeypatch):
    assert chosen() is not None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert chosen() is None


def test_nothing_is_kept_where_no_directory_can_be_made(places):
    for name in ("named", "user", "temporary"):
        (places / name).rmdir()
        (places / name).write_text("in the way")
    assert chosen() is None


# Entries


@pytest.fixture
def entries(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, "cache_directory", lambda: tmp_path)
    return tmp_path


def add_one(words):
    for i in range(words.size):
        words[i] += np.uint8(1)


def compiled(function=add_one):
    """Returns a dispatcher as a new process would have it."""
    dispatcher = numba.njit(function)
    dispatcher._cache = KernelCache(function)
    return dispatcher


def call(dispatcher):
    words = np.arange(100, dtype=np.uint8)
    dispatcher(words)
    assert words.tolist() == list(range(1, 101))
    return sum(dispatcher.stats.cache_hits.values())


def test_a_kept_kernel_is_loaded_by_the_next_process(entries):
    assert call(compiled()) == 0
    (entry,) = entries.iterdir()
    assert entry.name.startswith("add_one-")
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert call(compiled()) == 1


def test_another_signature_has_an_entry_of_its_own(entries):
    call(compiled())
    compiled()(np.zeros(3, np.uint16))
    assert len(list(entries.iterdir())) == 2
    assert call(compiled()) == 1


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "shorter than a digest": lambda content: content[:7],
    "garbage": lambda content: bytes(range(256)) * 40,
    "one bit in the machine code": lambda content: content[:-200] + bytes([content[-200] ^ 1]) + content[-199:],
    "one bit in the digest": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "no pickle, but a right digest": lambda content: kernel_cache.hashlib.sha256(b"no pickle").digest() + b"no pickle",
    "another pickle with a right digest": lambda content: kernel_cache.hashlib.sha256(b"N.").digest() + b"N.",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_compiled_again_and_mended(entries, damage):
    call(compiled())
    (entry,) = entries.iterdir()
    entry.write_bytes(DAMAGE[damage](entry.read_bytes()))
    assert call(compiled()) == 0
    assert list(entries.iterdir()) == [entry]
    assert call(compiled()) == 1


def test_an_entry_that_is_a_directory_or_a_link_is_left_alone(entries):
    call(compiled())
    (entry,) = entries.iterdir()
    kept = entry.rename(entries / "kept")
    entry.symlink_to(kept)
    assert call(compiled()) == 0
    entry.unlink()
    entry.mkdir()
    assert call(compiled()) == 0
    assert entry.is_dir()


def test_an_entry_of_another_user_is_not_loaded(entries, monkeypatch):
    call(compiled())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert call(compiled()) == 0


def test_a_full_disk_ends_nothing_and_leaves_nothing(entries, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert call(compiled()) == 0
    assert list(entries.iterdir()) == []


def test_a_directory_that_vanishes_ends_nothing(entries):
    entries.rmdir()
    assert call(compiled()) == 0


def test_without_a_directory_kernels_are_compiled_and_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(kernel_cache, "cache_directory", lambda: None)
    dispatcher = compiled()
    assert call(dispatcher) == 0
    assert dispatcher.stats.cache_path is None
    assert call(compiled()) == 0


# Processes

PACK = """
    import numpy as np
    from ninfer_convert.encode.words import pack_fp8_rows
    planes = {"code": np.zeros((2, 4), np.uint8), "scale": np.zeros((2, 2), np.uint8)}
    pack_fp8_rows(np.full((2, 4), 56, np.uint8), np.full(2, 0x3F80, np.uint16), planes)
    assert planes["code"].tolist() == [[56] * 4] * 2, planes
    assert planes["scale"].tolist() == [[0x80, 0x3F]] * 2, planes
"""


def run(script, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_processes_that_start_together_share_one_empty_directory_and_survive_its_damage(tmp_path):
    def start(_):
        return run(PACK, NUMBA_CACHE_DIR=str(tmp_path))

    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            for finished in pool.map(start, range(4)):
                assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
        (entry,) = (tmp_path / leaf()).iterdir()
        assert entry.suffix == ".nbc"
        content = entry.read_bytes()
        entry.write_bytes(content[: len(content) - 1000] + b"\0" * 1000)
    assert run(PACK, NUMBA_CACHE_DIR=str(tmp_path)).returncode == 0
    assert len(entry.read_bytes()) == len(content)


def test_a_user_without_home_and_without_a_writable_directory_compiles_and_keeps_nothing(tmp_path):
    # Everything is imported first: the next user may not even be able to read the installation.
    script = f"""
        import os
        import numba, numpy as np
        from ninfer_convert.encode import kernel_cache
        from ninfer_convert.encode import words as pack
        numba.njit(lambda words: words[0])(np.zeros(1))
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        assert kernel_cache.cache_directory() is None
        {textwrap.indent(textwrap.dedent(PACK), " " * 8).strip()}
    """
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    places = {"NUMBA_CACHE_DIR": closed, "XDG_CACHE_HOME": closed / "cache", "TMPDIR": closed}
    finished = run(script, HOME="/nonexistent", **{name: str(place) for name, place in places.items()})
    assert (finished.returncode, finished.stderr) == (0, "")
    assert list(closed.iterdir()) == []
