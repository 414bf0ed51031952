"""Where compiled kernels are kept, and that nothing found there can end a run or be trusted by mistake."""

import os
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ninfer_convert import __version__
from ninfer_convert.encode import compiled, kernel_cache
from ninfer_convert.encode.compiled import Kernel

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
    names = {leaf()}
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "kernel_cache.py"))
    for name in ("kernels.py", "interface.py"):
        (tmp_path / name).write_text("changed")
        names.add(leaf())
    assert len(names) == 3
    # Imported from an archive.
    (tmp_path / "kernels.py").unlink()
    (tmp_path / "interface.py").unlink()
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


def test_names_that_start_at_a_working_directory_that_is_gone_are_passed_over(places, monkeypatch):
    gone = places / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", "relative")
    assert chosen() == places / "user" / "ninfer-convert" / leaf()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "relative")
    assert chosen() == places / "temporary" / f"ninfer-convert-{os.geteuid()}" / leaf()
    monkeypatch.setenv("TMPDIR", "relative")
    assert chosen() is None


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


@pytest.fixture
def compilations(monkeypatch):
    """Counts how often numba compiles."""
    made = []
    compile_anew = Kernel._compile
    monkeypatch.setattr(Kernel, "_compile", lambda kernel: made.append(kernel.name) or compile_anew(kernel))
    return made


def call():
    """Uses a kernel as a new process would have it."""
    out = np.zeros((2, 4), np.uint8), np.zeros((2, 2), np.uint8)
    assert Kernel("copy_fp8_rows")(np.full((2, 4), 56, np.uint8), np.full(2, 0x3F80, np.uint16), *out) == -1
    assert (out[0].tolist(), out[1].tolist()) == ([[56] * 4] * 2, [[0x80, 0x3F]] * 2)


def test_a_kept_kernel_is_loaded_by_the_next_process(entries, compilations):
    call()
    (entry,) = entries.iterdir()
    assert entry.name.startswith("copy_fp8_rows-")
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    call()
    assert compilations == ["copy_fp8_rows"]


@pytest.mark.parametrize("name", ["_target", "_settings", "_numba_version"])
def test_another_processor_setting_or_version_has_an_entry_of_its_own(entries, compilations, monkeypatch, name):
    call()
    with monkeypatch.context() as other:
        other.setattr(compiled, name, lambda: "another")
        call()
    assert len(list(entries.iterdir())) == 2
    call()
    assert compilations == ["copy_fp8_rows"] * 2


def test_the_settings_are_those_of_numba_but_not_its_directory(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NUMBA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("NUMBA_OPT", "2")
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert compiled._settings() == [("NUMBA_CPU_NAME", "generic"), ("NUMBA_OPT", "2")]


def test_the_settings_of_a_file_in_the_working_directory_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    without = compiled._settings()
    (tmp_path / compiled.SETTINGS_FILE).write_bytes(b"cpu_name: generic\n")
    assert compiled._settings() == sorted([*without, (".numba_config.yaml", b"cpu_name: generic\n".hex())])
    (tmp_path / compiled.SETTINGS_FILE).unlink()
    (tmp_path / compiled.SETTINGS_FILE).mkdir()
    assert compiled._settings() == without


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "shorter than a digest": lambda content: content[:7],
    "garbage": lambda content: bytes(range(256)) * 40,
    "one bit in the machine code": lambda content: content[:-200] + bytes([content[-200] ^ 1]) + content[-199:],
    "one bit in the digest": lambda content: bytes([content[0] ^ 1]) + content[1:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_compiled_again_and_mended(entries, compilations, damage):
    call()
    (entry,) = entries.iterdir()
    entry.write_bytes(DAMAGE[damage](entry.read_bytes()))
    call()
    assert list(entries.iterdir()) == [entry]
    call()
    assert len(compilations) == 2


def test_an_entry_that_is_a_directory_or_a_link_is_left_alone(entries, compilations):
    call()
    (entry,) = entries.iterdir()
    kept = entry.rename(entries / "kept")
    entry.symlink_to(kept)
    call()
    entry.unlink()
    entry.mkdir()
    call()
    assert entry.is_dir()
    assert len(compilations) == 3


def test_an_entry_of_another_user_is_not_loaded(entries, compilations, monkeypatch):
    call()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    call()
    assert len(compilations) == 2


def test_a_full_disk_ends_nothing_and_leaves_nothing(entries, compilations, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    call()
    assert list(entries.iterdir()) == []
    assert len(compilations) == 1


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """The directory in use, with room beside it."""
    directory = tmp_path / "room" / leaf()
    directory.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(kernel_cache, "cache_directory", lambda: directory)
    return directory


def other_version(directory, name, age, *files):
    """Makes a directory beside the one in use, last used `age` seconds before it."""
    made = directory.parent / name
    made.mkdir(mode=0o700)
    for file in files:
        (made / file).write_bytes(b"kept")
    used = directory.stat().st_mtime - age
    os.utime(made, (used, used))
    return made


OLD = f"kernels-0.0.1-{'0' * 16}"
MONTH = kernel_cache.UNUSED_SECONDS


def test_entries_of_versions_that_are_not_used_any_more_are_removed(beside):
    gone = other_version(beside, OLD, MONTH + 60, "a.kernel", "a.kernel.tmp123")
    used = other_version(beside, f"kernels-0.0.2-{'1' * 16}", MONTH // 2, "a.kernel")
    kernel_cache.save_entry("b", b"content")
    assert not gone.exists()
    assert (used / "a.kernel").read_bytes() == b"kept"
    assert kernel_cache.load_entry("b") == b"content"


def test_looking_for_entries_tells_other_versions_that_they_are_used(places):
    directory = chosen()
    os.utime(directory, (1000, 1000))
    assert chosen() == directory
    assert directory.stat().st_mtime > 1000


@pytest.mark.parametrize("name", ["kernels-mine", f"kernel-0.0.1-{'0' * 16}", f"kernels-0.0.1-{'0' * 15}", "numba"])
def test_what_is_no_directory_of_kernels_is_never_removed(beside, name):
    other = other_version(beside, name, MONTH + 60, "a.kernel")
    kernel_cache.save_entry("b", b"content")
    assert (other / "a.kernel").read_bytes() == b"kept"


def test_other_files_links_and_what_others_can_write_to_are_never_removed(beside):
    mixed = other_version(beside, OLD, MONTH + 60, "a.kernel", "mine.txt")
    shared = other_version(beside, f"kernels-0.0.2-{'1' * 16}", MONTH + 60, "a.kernel")
    shared.chmod(0o777)
    elsewhere = beside.parent.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.kernel").write_bytes(b"kept")
    os.utime(elsewhere, (1000, 1000))
    link = beside.parent / f"kernels-0.0.3-{'2' * 16}"
    link.symlink_to(elsewhere)
    kernel_cache.save_entry("b", b"content")
    assert [path.name for path in mixed.iterdir()] == ["mine.txt"]
    assert (shared / "a.kernel").read_bytes() == b"kept"
    assert link.is_symlink()
    assert (elsewhere / "a.kernel").read_bytes() == b"kept"


def test_a_directory_that_vanishes_ends_nothing(entries, compilations):
    entries.rmdir()
    call()
    assert len(compilations) == 1


def test_compiling_is_announced_once(entries):
    told = []
    compiled.announce(lambda: told.append("compiling"))
    for _ in range(2):
        call()
        (entry,) = entries.iterdir()
        entry.unlink()
    assert told == ["compiling"]


def test_without_a_directory_kernels_are_compiled_and_nothing_is_kept(compilations, monkeypatch):
    monkeypatch.setattr(kernel_cache, "cache_directory", lambda: None)
    call()
    call()
    assert len(compilations) == 2


# The interface

MODULE = """
define i32 @kernel({arguments}) {{
  ret i32 0
}}
declare void @llvm.assume(i1)
declare ptr @{external}(ptr, i32, i64)
"""
ARRAY = ["ptr", "ptr", "i64", "i64", "ptr", "i64", "i64"]


def require(arguments, external="memset", parameters=("int64", "float32", "uint8[::1]")):
    module = compiled.llvm.parse_assembly(MODULE.format(arguments=", ".join(arguments), external=external))
    compiled._require_interface(module, "kernel", parameters)


def test_a_function_is_called_only_as_numba_has_compiled_it():
    require(["ptr", "ptr", "i64", "float", *ARRAY])
    require(["ptr", "ptr", "i64", "float", *ARRAY, "i64", "i64"], parameters=("int64", "float32", "uint8[:, ::1]"))
    with pytest.raises(RuntimeError, match=r"numba \S+ passes arguments in another way: ptr, ptr, i64, double, ptr"):
        require(["ptr", "ptr", "i64", "double", *ARRAY])
    with pytest.raises(RuntimeError, match="passes arguments in another way"):
        require(["ptr", "ptr", "i64", "float", *ARRAY, "i64"])


def test_a_function_that_needs_more_than_memory_calls_is_refused():
    with pytest.raises(RuntimeError, match=r"numba \S+ needs NRT_Allocate at run time"):
        require(["ptr", "ptr", "i64", "float", *ARRAY], external="NRT_Allocate")


def test_a_status_other_than_zero_ends_the_call(entries):
    kernel = Kernel("copy_fp8_rows")
    kernel._function = lambda *_: 1
    with pytest.raises(RuntimeError, match="kernel copy_fp8_rows ended with status 1"):
        kernel(np.zeros((2, 4), np.uint8))


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
        assert entry.suffix == ".kernel"
        content = entry.read_bytes()
        entry.write_bytes(content[: len(content) - 1000] + b"\0" * 1000)
    assert run(PACK, NUMBA_CACHE_DIR=str(tmp_path)).returncode == 0
    assert len(entry.read_bytes()) == len(content)


def test_a_user_without_home_and_without_a_writable_directory_compiles_and_keeps_nothing(tmp_path):
    # Everything is imported first: the next user may not even be able to read the installation.
    script = f"""
        import os
        import numba, numpy as np
        from ninfer_convert.encode import compiled, kernel_cache, kernels
        from ninfer_convert.encode import words as pack
        compiled._numba_version()
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
