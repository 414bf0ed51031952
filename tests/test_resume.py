"""A run that ends at any moment leaves a part file and a journal at most, and the same command completes it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from case_tools import Case, filled, once, run_cli
from commands import start
from forking import Ended, ForkServer
from many_objects import ManyObjects, write_many_objects
from pipeline import converted

from ninfer_convert.encode.block_maker import BlockMaker
from ninfer_convert.encode.loss import Loss
from ninfer_convert.plan import provenance
from ninfer_convert.plan.block import Block
from ninfer_convert.plan.planner import PlannedTensor
from ninfer_convert.run import own_files, writer
from ninfer_convert.run.journal import Journal, Kept, differences, read_journal

KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
BUSY = {"FLUSH_BYTES": 20_000}
"""A setting with which the journal is written often."""

Undisturbed = tuple[bytes, Ended]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


@pytest.fixture(scope="module")
def hundreds(tmp_path_factory: pytest.TempPathFactory) -> ManyObjects:
    return write_many_objects(tmp_path_factory.mktemp("hundreds"))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> ManyObjects:
    return write_many_objects(tmp_path_factory.mktemp("many"), rounds=12)


@pytest.fixture(scope="module")
def undisturbed(many: ManyObjects, server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return complete(many, server, tmp_path_factory.mktemp("undisturbed") / "out")


@pytest.fixture(scope="module")
def undisturbed_hundreds(
    hundreds: ManyObjects, server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    return complete(hundreds, server, tmp_path_factory.mktemp("hundreds") / "out")


def complete(many: ManyObjects, server: ForkServer, output: Path) -> Undisturbed:
    """Returns the artifact of a run that nothing happened to, and how it ended."""
    ended = server.run(*many.arguments(output))
    assert ended.code == 0, ended.err
    return output.read_bytes(), ended


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def claims(directory: Path, objects: int = 1000) -> Kept:
    found = read_journal(directory / "out.part.journal", objects)
    assert found is not None
    return found


def require_untorn_death(ended: Ended, number: signal.Signals, directory: Path) -> None:
    """Requires that a kill left nothing but what may be left, or came too late."""
    left = set(names(directory))
    if "out" in left:
        assert left <= {"out", "out.conversion.json", "out.part"}
        return
    assert ended.code == (-number if number == signal.SIGKILL else 75), ended.err
    if number == signal.SIGKILL:
        assert left <= {"out.part", "out.part.journal", "out.conversion.json", "out.conversion.json.part"}
    else:
        assert ended.err.splitlines()[-1] == "interrupted; give the same command again"
        assert left <= {"out.part", "out.part.journal", "out.conversion.json"}


def kill_and_resume(
    seed: int, many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, directory: Path
) -> None:
    """Kills a run up to three times at seeded calls, then lets it end."""
    draw = random.Random(seed)
    content, plain = undisturbed
    output = directory / "out"
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        number = draw.choice(KILLS)
        fate = {"at": plain.number(draw.randrange(plain.calls)), "signal": number, "settings": BUSY}
        require_untorn_death(server.run(*many.arguments(output), fate=fate), number, directory)
        if output.exists():
            break
    ended = server.run(*many.arguments(output))
    if ended.code == 0:
        assert "wrote" in ended.err
    else:
        # The last kill came when the output had its name already.
        assert (ended.code, "exists; --overwrite" in ended.err) == (2, True)
    assert output.read_bytes() == content
    assert names(directory) == ["out", "out.conversion.json"]
    report = json.loads((directory / "out.conversion.json").read_bytes())
    assert (report["artifact"]["bytes"], len(report["objects"])) == (len(content), many.objects)


@pytest.mark.parametrize("seed", range(8))
def test_killed_at_a_seeded_call_and_resumed_the_artifact_is_the_same(
    seed: int, hundreds: ManyObjects, server: ForkServer, undisturbed_hundreds: Undisturbed, tmp_path: Path
) -> None:
    assert hundreds.objects == 402
    kill_and_resume(seed, hundreds, server, undisturbed_hundreds, tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(100, 150))
def test_fifty_killed_runs_give_fifty_identical_artifacts(
    seed: int, hundreds: ManyObjects, server: ForkServer, undisturbed_hundreds: Undisturbed, tmp_path: Path
) -> None:
    assert hundreds.objects == 402
    kill_and_resume(seed, hundreds, server, undisturbed_hundreds, tmp_path)


@pytest.mark.parametrize(
    ("at", "number"),
    [
        (["open", 1], signal.SIGKILL),
        (["posix_fallocate", 1], signal.SIGKILL),
        (["fsync", 2], signal.SIGKILL),
        (["replace", 1], signal.SIGKILL),
        (["replace", 1], signal.SIGTERM),
        (["link", 1], signal.SIGTERM),
        (["link", 1], signal.SIGKILL),
    ],
)
def test_a_kill_at_each_step_of_beginning_and_publishing_is_survived(
    at: list[object],
    number: signal.Signals,
    many: ManyObjects,
    server: ForkServer,
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": at, "signal": number})
    require_untorn_death(ended, number, tmp_path)
    assert server.run(*many.arguments(tmp_path / "out")).code in (0, 2)
    assert (tmp_path / "out").read_bytes() == undisturbed[0]
    assert names(tmp_path) == ["out", "out.conversion.json"]


def test_a_kill_between_report_and_publication_is_resumed(
    many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": ["link", 1], "signal": signal.SIGKILL})
    assert ended.code == -signal.SIGKILL
    assert names(tmp_path) == ["out.conversion.json", "out.part"]
    assert server.run(*many.arguments(tmp_path / "out")).code == 0
    assert (tmp_path / "out").read_bytes() == undisturbed[0]


def test_a_kill_between_the_two_names_of_a_complete_output_leaves_it_complete(
    many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    # The last file that is removed is the part file's name, when the output has its own.
    last = undisturbed[1].log.count("unlink")
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": ["unlink", last], "signal": signal.SIGKILL})
    assert ended.code == -signal.SIGKILL
    assert names(tmp_path) == ["out", "out.conversion.json", "out.part"]
    again = server.run(*many.arguments(tmp_path / "out"))
    assert again.code == 2
    assert again.err == f"error: {tmp_path}/out exists; --overwrite replaces it when the new one is complete\n"
    assert names(tmp_path) == ["out", "out.conversion.json"]
    # And where the name is left for a run that may overwrite, the old output stays whole until the new one is.
    os.link(tmp_path / "out", tmp_path / "out.part")
    fate = {"at": ["pwrite", 100], "signal": signal.SIGKILL}
    killed = server.run(*many.arguments(tmp_path / "out", "--overwrite"), fate=fate)
    assert killed.code == -signal.SIGKILL
    assert (tmp_path / "out").read_bytes() == undisturbed[0]


def large_case(root: Path, n: int) -> Case:
    """Writes a source of one tensor, 16 KiB for each of n rows, all of it a hole in the file, and its recipe."""
    case, k = Case(root), 8192
    header = json.dumps({"big": {"dtype": "BF16", "shape": [n, k], "data_offsets": [0, 2 * n * k]}}).encode()
    case.sources["base"] = root / "base"
    case.sources["base"].mkdir()
    with open(root / "base" / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * n * k)
    case.recipe(f"{{name: big, shape: [{n}, {k}], format: Q4G64_F16S, encoder: MAXABS_F16_RECIP_RNE_V1, value: big}}")
    return case


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_of_a_large_run_is_answered_within_two_seconds(number: signal.Signals, tmp_path: Path) -> None:
    """Eight gigabytes to read; the signal comes a second after the beginning. Prints the seconds with -s."""
    case = large_case(tmp_path, 524288)
    part = tmp_path / "out.ninfer.part"
    with start(*map(str, case.arguments("run"))) as process:
        while not (part.with_name(part.name + ".journal").exists() and process.poll() is None):
            time.sleep(0.05)
        time.sleep(1)
        began = time.monotonic()
        process.send_signal(number)
        err = process.communicate()[1]
    seconds = time.monotonic() - began
    print(f"{number.name}: {seconds:.2f} s")
    assert (process.returncode, err) == (75, "interrupted; give the same command again\n")
    assert seconds < 2
    assert part.exists()


def test_an_interrupt_stops_after_the_blocks_in_flight_and_keeps_the_state(server: ForkServer, tmp_path: Path) -> None:
    """A gigabyte to convert: what is still written after the signal are the planes of one block for each thread."""
    case = large_case(tmp_path, 65536)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        fate = {"at": ["pwrite", 21], "signal": number}
        ended = server.run(*case.arguments("run", "--threads", "2"), fate=fate)
        assert (ended.code, ended.err) == (75, "interrupted; give the same command again\n")
        # Head, ten blocks of two planes, then at most two planes of each of two blocks.
        assert ended.log.count("pwrite") <= 21 + 4
        assert names(tmp_path) == ["base", "out.ninfer.part", "out.ninfer.part.journal", "recipe.yaml"]


def test_an_interrupt_does_not_wait_for_a_worker_that_only_computes(
    many: ManyObjects, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that compiles a kernel, for seconds; what it comes up with afterwards is written nowhere."""
    make, begun, release = BlockMaker.make, threading.Event(), threading.Event()
    compiling: list[threading.Thread] = []

    def slow(self: BlockMaker, item: PlannedTensor, block: Block) -> Any:
        if item.name == "text/3/2":
            compiling.append(threading.current_thread())
            begun.set()
            release.wait(60)
        return make(self, item, block)

    def interrupt(*_: object) -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr(BlockMaker, "make", slow)
    with pytest.raises(KeyboardInterrupt):
        converted(many.recipe, tmp_path / "out", {"base": many.source}, progress=interrupt)
    assert compiling[0].is_alive()
    left = (tmp_path / "out.part").read_bytes(), (tmp_path / "out.part.journal").read_bytes()
    release.set()
    compiling[0].join()
    assert left == ((tmp_path / "out.part").read_bytes(), (tmp_path / "out.part.journal").read_bytes())
    converted(many.recipe, tmp_path / "out", {"base": many.source})
    assert (tmp_path / "out").read_bytes() == undisturbed[0]


def test_a_signal_that_was_ignored_when_the_process_began_stays_ignored(
    many: ManyObjects, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """As `nohup` leaves SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ForkServer() as server:
            ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": ["pwrite", 100], "signal": signal.SIGHUP})
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.code == 0, ended.err
    assert (tmp_path / "out").read_bytes() == undisturbed[0]


def test_an_interrupt_that_comes_too_late_is_no_failure(
    many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    # The last call but none is the sync of the directory that holds the new name.
    plain = server.run(*many.arguments(tmp_path / "out"))
    last = plain.log.count("fsync")
    (tmp_path / "out").unlink()
    ended = server.run(*many.arguments(tmp_path / "out"), fate={"at": ["fsync", last], "signal": signal.SIGTERM})
    assert (ended.code, "wrote" in ended.err) == (0, True)
    assert (tmp_path / "out").read_bytes() == undisturbed[0]
    assert names(tmp_path) == ["out", "out.conversion.json"]


# --- what the journal proves -------------------------------------------------------------------------------------


@pytest.fixture
def half(many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, tmp_path: Path) -> Path:
    """A directory with what a run that was interrupted half-way has left."""
    # Digests are taken before more blocks are made, whatever else the machine does.
    fate = {"at": ["pwrite", 180], "signal": signal.SIGTERM, "settings": {"BEHIND_BYTES": 0}}
    ended = server.run(*many.arguments(tmp_path / "out"), fate=fate)
    assert ended.code == 75
    assert names(tmp_path) == ["out.part", "out.part.journal"]
    assert len(claims(tmp_path).claims) > 20
    return tmp_path


def blocks_made(ended: Ended) -> int:
    return ended.log.count("pwrite")


def require_completed(many: ManyObjects, server: ForkServer, directory: Path, content: bytes) -> Ended:
    ended = server.run(*many.arguments(directory / "out"))
    assert ended.code == 0, ended.err
    assert (directory / "out").read_bytes() == content
    assert names(directory) == ["out", "out.conversion.json"]
    return ended


def test_only_what_the_journal_does_not_prove_is_made_again(
    many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, half: Path
) -> None:
    shutil.copytree(half, half / "copy")
    proven = len(claims(half).claims)
    whole = server.run(*many.arguments(half / "copy" / "out", "--resume", "never"))
    assert whole.code == 0
    shutil.rmtree(half / "copy")
    resumed = require_completed(many, server, half, undisturbed[0])
    # A proven object saves at least its own write; clearing the gaps of the others costs some.
    gaps = sum(1 for _ in range(many.objects))
    assert blocks_made(resumed) <= blocks_made(whole) - proven + 3 * gaps
    assert resumed.log.count("posix_fallocate") == 1


def test_a_torn_line_costs_its_own_claim_only_even_when_the_next_run_is_killed_too(
    many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, half: Path
) -> None:
    journal = half / "out.part.journal"
    before = claims(half).claims
    journal.write_bytes(journal.read_bytes()[:-20])
    torn = claims(half)
    assert len(torn.claims) == len(before) - 1
    fate = {"at": ["pwrite", 60], "signal": signal.SIGINT, "settings": BUSY}
    assert server.run(*many.arguments(half / "out"), fate=fate).code == 75
    after = claims(half)
    assert after.claims.items() >= torn.claims.items()
    assert after.nbytes == journal.stat().st_size
    assert journal.read_bytes().count(b'{"writer"') == 1
    require_completed(many, server, half, undisturbed[0])


def test_bytes_that_do_not_have_the_digest_claimed_for_them_are_made_again(
    many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, half: Path
) -> None:
    """Every byte of the part file is damaged, gaps between objects and planes too; every claim is false."""
    part = half / "out.part"
    part.write_bytes(bytes(byte ^ 0xFF for byte in part.read_bytes()))
    require_completed(many, server, half, undisturbed[0])


@pytest.mark.parametrize("seed", range(3))
def test_damage_in_a_few_places_is_repaired(
    seed: int, many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, half: Path
) -> None:
    draw = random.Random(seed)
    with open(half / "out.part", "r+b") as file:
        for _ in range(200):
            file.seek(draw.randrange(len(undisturbed[0])))
            file.write(bytes([draw.randrange(256)]))
    require_completed(many, server, half, undisturbed[0])


def test_a_part_file_without_a_journal_starts_over_and_a_journal_without_one_is_ignored(
    many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, half: Path
) -> None:
    (half / "other").mkdir()
    shutil.move(half / "out.part.journal", half / "other" / "out.part.journal")
    part = half / "out.part"
    part.write_bytes(b"\xff" * part.stat().st_size)
    require_completed(many, server, half / "other", undisturbed[0])
    shutil.rmtree(half / "other")
    require_completed(many, server, half, undisturbed[0])


def test_a_part_file_of_another_size_starts_over(
    many: ManyObjects, server: ForkServer, undisturbed: Undisturbed, half: Path
) -> None:
    with open(half / "out.part", "r+b") as file:
        file.truncate(5000)
    require_completed(many, server, half, undisturbed[0])


# --- another conversion ------------------------------------------------------------------------------------------


@pytest.fixture
def left(tmp_path: Path) -> Case:
    """A small conversion that was interrupted when all was written but nothing was published."""
    case = Case(tmp_path)
    case.source({"model.a": filled("BF16", [4], 0x3F80), "b": filled("BF16", [4], 0x3F80)}, files={"t.json": b"{}"})
    case.input("extra", b"one")
    case.recipe(*left_objects(), sources="{base: {prefix: {model.: m.}}}", more="inputs: {extra: {}}\n")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with once(writer.PartFile, "require_free_name", lambda: None):
        with once(provenance, "peak_memory", interrupt):
            assert case.run().code == 75
    assert (tmp_path / "out.ninfer.part.journal").exists()
    return case


def left_objects(last: str = "b") -> list[str]:
    return [
        "{name: a, shape: [4], format: BF16, value: m.a}",
        f"{{name: {last}, shape: [4], format: BF16, value: b}}",
        "{resource: t, file: t.json}",
        "{resource: e, input: extra}",
    ]


def require_refused_then_over(case: Case, *named: str) -> None:
    """Requires a refusal that names what differs and keeps what is there, and that --resume never starts over."""
    before = (case.root / "out.ninfer.part").read_bytes(), (case.root / "out.ninfer.part.journal").read_bytes()
    ran = case.run()
    assert ran.code == 1, ran.err
    start = f"error: {case.root}/out.ninfer.part was left by an interrupted conversion that differs in "
    assert ran.errors[0].startswith(start)
    assert ran.errors[0].endswith("; --resume never starts over")
    for text in named:
        assert text in ran.errors[0]
    assert before == (
        (case.root / "out.ninfer.part").read_bytes(), (case.root / "out.ninfer.part.journal").read_bytes()
    )  # fmt: skip
    assert case.run("--resume", "never").code == 0
    assert not (case.root / "out.ninfer.part").exists()


def test_the_same_conversion_goes_on(left: Case) -> None:
    with once(own_files, "make_own", lambda: None):
        assert left.run().code == 0
    assert sorted(left.objects()) == ["a", "b", "e", "t"]


def test_a_changed_recipe_is_named(left: Case) -> None:
    text = left.recipe_path.read_text()
    left.recipe_path.write_text(text + "# a comment is a change too\n")
    require_refused_then_over(left, "recipe (\"")


def test_a_changed_recipe_is_named_even_if_the_size_differs(left: Case) -> None:
    left.recipe(*left_objects(last="b" * 1000), sources="{base: {prefix: {model.: m.}}}", more="inputs: {extra: {}}\n")
    require_refused_then_over(left, "recipe (\"", "directory (\"")


def test_a_changed_source_is_named_with_its_file(left: Case) -> None:
    left.source({"model.a": filled("BF16", [4], 0x4000), "b": filled("BF16", [4], 0x3F80)}, files={"t.json": b"{}"})
    require_refused_then_over(left, "sources (base: model.safetensors)")


def test_a_changed_resource_is_named(left: Case) -> None:
    (left.sources["base"] / "t.json").write_bytes(b"[]")
    require_refused_then_over(left, "resources (t)")


def test_a_changed_input_is_named(left: Case) -> None:
    left.input("extra", b"two")
    require_refused_then_over(left, "resources (e)")


def test_a_changed_prefix_is_named(left: Case) -> None:
    objects = [text.replace("m.a", "model.a") for text in left_objects()]
    left.recipe(*objects, more="inputs: {extra: {}}\n")
    require_refused_then_over(left, "prefixes", "recipe (\"")


def test_another_version_of_the_converter_is_named(left: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "__version__", "99.0")
    require_refused_then_over(left, 'converter ("', ' then, "99.0" now)')


def test_other_kernels_are_named(left: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "kernel_digest", lambda: "other")
    require_refused_then_over(left, "kernels (\"")


def test_what_cannot_change_a_byte_does_not_hinder_a_resume(left: Case) -> None:
    assert left.run("--threads", "1", "--max-memory", "256MiB", "--report", left.root / "r.json", "-v").code == 0


def test_differences_name_members_that_only_a_stranger_has_and_never_print_raw() -> None:
    wanted: dict[str, Any] = {"recipe": "a" * 64, "sources": {"base": [["f", 1, 2, "x"]]}}
    assert differences(wanted, wanted) == []
    assert differences({**wanted, "more": 1}, wanted) == ["unknown members"]
    hostile = {"recipe": "\x1b[31m", "sources": {"\x1b]0;": [["\x1bf\n", 1]]}}
    text = "; ".join(differences(hostile, wanted))
    assert text.isprintable()
    listed = differences({"recipe": wanted["recipe"], "sources": [1]}, wanted)
    assert listed == ['sources ([1] then, {"base": [["f", 1, 2, "x"]]} now)']
    many_files = {"base": [[f"file-{number}" * 20, number] for number in range(1000)]}
    assert len(differences({**wanted, "sources": many_files}, wanted)[0]) < 500


# --- a failure leaves nothing ------------------------------------------------------------------------------------


def test_a_failure_of_the_input_removes_part_file_and_journal_also_of_a_resumed_run(
    many: ManyObjects, server: ForkServer, half: Path
) -> None:
    shard = many.source / "model-00003-of-00003.safetensors"
    status, content = shard.stat(), shard.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    place = data + json.loads(content[8:data])["layers.11.0"]["data_offsets"][0]
    try:
        # One word is infinite now; nothing else tells one state of the file from the other.
        shard.write_bytes(content[:place] + b"\x80\x7f" + content[place + 2 :])
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
        ended = server.run(*many.arguments(half / "out"))
    finally:
        shard.write_bytes(content)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert ended.code == 1
    assert "layers.11.0, row 0, column 0" in ended.err
    assert names(half) == []


# --- files that are not ours -------------------------------------------------------------------------------------


def journal_line(case: Case) -> bytes:
    return (case.root / "out.ninfer.part.journal").read_bytes().splitlines()[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_neither_part_file_nor_journal_of_another_user_is_trusted(left: Case) -> None:
    for stranger in ("out.ninfer.part", "out.ninfer.part.journal"):
        shutil.copytree(left.root, left.root.parent / stranger)
        case = Case(left.root.parent / stranger)
        case.sources["base"], case.inputs["extra"] = case.root / "base", case.root / "extra.bin"
        os.chown(case.root / stranger, 65534, 65534)
        assert read_journal(case.root / "out.ninfer.part.journal", 4) is None or stranger == "out.ninfer.part"
        ran = case.run()
        assert ran.code == 0, ran.err
        assert case.output.stat().st_uid == 0


def test_a_part_file_with_another_name_loses_only_its_own(left: Case) -> None:
    os.link(left.root / "out.ninfer.part", left.root / "dear")
    os.link(left.root / "out.ninfer.part.journal", left.root / "dear journal")
    dear = (left.root / "dear").read_bytes(), (left.root / "dear journal").read_bytes()
    assert left.run().code == 0
    assert ((left.root / "dear").read_bytes(), (left.root / "dear journal").read_bytes()) == dear
    assert left.output.stat().st_nlink == 1


def test_links_and_pipes_in_the_place_of_the_journal_are_neither_followed_nor_waited_for(left: Case) -> None:
    journal = left.root / "out.ninfer.part.journal"
    (left.root / "dear").write_bytes(journal.read_bytes())
    for make in (lambda: journal.symlink_to("dear"), lambda: os.mkfifo(journal), lambda: journal.symlink_to("nothing")):
        journal.unlink(missing_ok=True)
        make()
        before = (left.root / "dear").read_bytes()
        with once(own_files, "make_own", lambda: None):
            assert left.run("--overwrite").code == 0
        assert (left.root / "dear").read_bytes() == before
        assert not journal.is_symlink()


def test_a_directory_in_the_place_of_the_journal_is_an_output_failure(left: Case) -> None:
    journal = left.root / "out.ninfer.part.journal"
    journal.unlink()
    journal.mkdir()
    ran = left.run()
    assert ran.code == 74
    assert "cannot write" in ran.err
    assert "out.ninfer.part.journal" in ran.err


# --- the journal as a file ---------------------------------------------------------------------------------------


LOSS = Loss(8192, 1 << 300, 1 << 310, 1, 2, 0x3F800000, 17)


def test_a_journal_reads_back_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "j"
    digests = [character * 64 for character in "0123456789abcdef"]
    with Journal(path, {"what": [1, "é\udcff"]}) as journal:
        journal.record([(3, digests[0], None), (0, digests[1], LOSS)])
        journal.record([(3, digests[2], None)])
    found = read_journal(path, 4)
    claims = {3: digests[2], 0: digests[1]}
    assert found == Kept({"what": [1, "é\udcff"]}, claims, {0: LOSS}, path.stat().st_size)
    with Journal(path, {}, found) as journal:
        journal.record([(1, digests[3], LOSS)])
    again = read_journal(path, 4)
    assert again is not None
    assert again.claims == {3: digests[2], 0: digests[1], 1: digests[3]}
    assert again.losses == {0: LOSS, 1: LOSS}


@pytest.mark.parametrize(
    ("line", "claimed"),
    [
        (b'{"object":1,"sha256":"' + b"a" * 64 + b'"}\n', 2),
        (b'{"object":1,"sha256":"' + b"a" * 64 + b'"}', 1),
        (b'{"object":4,"sha256":"' + b"a" * 64 + b'"}\n', 1),
        (b'{"object":-1,"sha256":"' + b"a" * 64 + b'"}\n', 1),
        (b'{"object":true,"sha256":"' + b"a" * 64 + b'"}\n', 1),
        (b'{"object":1,"sha256":"' + b"A" * 64 + b'"}\n', 1),
        (b'{"object":1,"sha256":"' + b"a" * 63 + b'"}\n', 1),
        (b'{"object":1,"sha256":' + b"[" * 5000 + b"]" * 5000 + b"}\n", 1),
        (b"{" + b" " * (2 << 20) + b"}\n", 1),
        (b"\xff\xfe\n", 1),
        (b"\0" * 4096, 1),
        (b"[]\n", 1),
    ],
)
def test_a_journal_ends_where_it_stops_making_sense(tmp_path: Path, line: bytes, claimed: int) -> None:
    path = tmp_path / "j"
    with Journal(path, {}) as journal:
        journal.record([(0, "0" * 64, None)])
    sound = path.stat().st_size
    path.write_bytes(path.read_bytes() + line + b'{"object":2,"sha256":"' + b"2" * 64 + b'"}\n' * (claimed == 1))
    found = read_journal(path, 4)
    assert found is not None
    assert len(found.claims) == claimed
    assert (found.nbytes == sound) == (claimed == 1)


@pytest.mark.parametrize(
    "header", [b"", b"\n", b"{}\n", b'{"schema":2,"identity":{}}\n', b'{"schema":1,"identity":[]}\n']
)
def test_a_journal_with_another_header_is_none(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "j").write_bytes(header)
    assert read_journal(tmp_path / "j", 4) is None
    assert read_journal(tmp_path / "absent", 4) is None


def test_the_plan_alone_is_not_disturbed_by_what_a_run_has_left(left: Case) -> None:
    assert run_cli(*left.arguments("plan")).code == 0


def test_a_report_path_with_more_bytes_than_a_report_is_not_replaced(left: Case) -> None:
    with open(left.root / "dear.bin", "wb") as file:
        file.truncate((256 << 20) + 1)
    ran = left.run("--overwrite", "--report", left.root / "dear.bin")
    assert (ran.code, "dear.bin has more bytes than any report has; it is not replaced" in ran.err) == (2, True)
    assert (left.root / "dear.bin").stat().st_size == (256 << 20) + 1


def test_nothing_is_reached_through_links_in_the_places_of_reports(left: Case) -> None:
    dear, report = left.root / "dear", left.root / "r.json"
    dear.write_bytes(b"dear")
    report.symlink_to("dear")
    (left.root / "other").write_bytes(b"other")
    for plant in (lambda path: path.symlink_to("other"), lambda path: os.link(dear, path)):
        plant(left.root / "r.json.part")
        assert left.run("--overwrite", "--report", report).code == 0
        assert (dear.read_bytes(), (left.root / "other").read_bytes()) == (b"dear", b"other")
        assert not report.is_symlink()
        assert json.loads(report.read_bytes())["artifact"]["model_id"] == "case-model"
        assert not (left.root / "r.json.part").exists()
        report.unlink()
        report.symlink_to("dear")
