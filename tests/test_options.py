"""What several commands share: how progress is shown, and what is said of pins that are waived."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from case_tools import Case, entry, run_cli, words_of

from ninfer_convert.cli import options


class Bar:
    """Stands for a bar of tqdm and remembers where it was."""

    made: list[Bar]

    def __init__(self, **settings: Any) -> None:
        self.n = 0
        self.total: int | None = None
        self.seen: list[tuple[int, int | None]] = []
        self.is_closed = False
        self.made.append(self)

    def update(self, count: int) -> None:
        self.n += count
        self.seen.append((self.n, self.total))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    Bar.made = []
    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    return Bar.made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The present second, in a list; standard error is a log."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    return now


@pytest.mark.parametrize("last", [90, 100])
def test_a_bar_ends_at_its_total(bars: list[Bar], last: int) -> None:
    with options.progress("converting", quiet=False) as show:
        assert show is not None
        show(40, 100)
        show(last, 100)
    (bar,) = bars
    assert bar.seen == [(40, 100), (last, 100), (100, 100)][: 3 if last < 100 else 2]
    assert bar.is_closed


def test_a_bar_of_what_fails_stays_where_it_was(bars: list[Bar]) -> None:
    with pytest.raises(KeyError), options.progress("converting", quiet=False) as show:
        assert show is not None
        show(40, 100)
        raise KeyError
    (bar,) = bars
    assert (bar.seen, bar.is_closed) == ([(40, 100)], True)


def test_what_does_nothing_has_a_bar_at_nothing(bars: list[Bar]) -> None:
    with options.progress("converting", quiet=False):
        pass
    (bar,) = bars
    assert (bar.seen, bar.is_closed) == ([], True)


def test_a_log_has_a_line_every_ten_seconds_and_ends_at_the_total(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with options.progress("converting", quiet=False) as show:
        assert show is not None
        for second, done in ((0, 0), (5, 20 << 20), (10, 40 << 20), (15, 60 << 20), (19.5, 79 << 20)):
            clock[0] = 100 + second
            show(done, 80 << 20)
        clock[0] = 120
    assert capsys.readouterr().err.splitlines() == [
        "converting: 50%, 4 MiB/s, 10 s left",
        "converting: 100%, 4 MiB/s, 0 s left",
    ]


def test_the_last_line_of_a_log_does_not_come_before_its_time(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with options.progress("converting", quiet=False) as show:
        assert show is not None
        clock[0] += 10
        show(90, 100)
        clock[0] += 9
    assert capsys.readouterr().err.splitlines() == ["converting: 90%"]


def test_what_is_quiet_shows_nothing(bars: list[Bar]) -> None:
    with options.progress("converting", quiet=True) as show:
        assert show is None
    assert bars == []


@pytest.fixture
def unpinned(tmp_path: Path) -> Case:
    """A case of one resource and one input whose digests are not those that its recipe pins."""
    case = Case(tmp_path)
    case.source({"w": words_of("BF16", 0x3F80)}, files={"tokenizer.json": b"{}"})
    case.input("counts", b"12345678")
    case.recipe(
        f"{{resource: tokenizer, file: tokenizer.json, sha256: '{'0' * 64}'}}",
        entry("w", [1], "BF16", "w"),
        more=f"inputs: {{counts: {{sha256: '{'1' * 64}'}}}}\n",
    )
    return case


@pytest.mark.parametrize("command", ["plan", "run"])
def test_waived_pins_are_counted_and_with_v_listed(unpinned: Case, command: str) -> None:
    ran = run_cli(*unpinned.arguments(command, "--unpinned"))
    counted = "warning: 2 pins do not match; accepted by --unpinned"
    assert (ran.code, ran.warnings) == (0, [f"{counted}, listed by plan -v, plan --json and in the report"])
    assert "waived:" not in ran.err
    listed = run_cli(*unpinned.arguments(command, "--unpinned", "-v", *(["--overwrite"] if command == "run" else [])))
    assert (listed.code, listed.warnings) == (0, [counted])
    waived = [line for line in listed.err.splitlines() if line.startswith("waived: ")]
    assert waived == [f"waived: {text}" for text in unpinned_pins(unpinned)]


def unpinned_pins(case: Case) -> list[str]:
    """Returns what each of the two pins of the case must say, from the digests of the bytes."""
    input_sha256 = "ef797c8118f02dfb649607dd5d3f8c7623048c9c063d532cc95c5ed7a898a64f"
    resource_sha256 = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    return [
        f"input counts ({case.inputs['counts']}): SHA-256 {input_sha256} found, {'1' * 64} required",
        f"{case.recipe_path}:8:5: resource tokenizer: SHA-256 {resource_sha256} found in base:tokenizer.json, "
        f"{'0' * 64} required",
    ]


def test_one_waived_pin_is_one(unpinned: Case) -> None:
    text = unpinned.recipe_path.read_text(encoding="utf-8")
    unpinned.recipe_path.write_text(text.replace(f"{{sha256: '{'1' * 64}'}}", "{}"), encoding="utf-8")
    ran = unpinned.plan("--unpinned")
    assert (ran.code, len(ran.warnings)) == (0, 1)
    assert ran.warnings[0].startswith("warning: 1 pin does not match; accepted by --unpinned, ")


def test_a_share_lists_what_its_plan_waives(unpinned: Case) -> None:
    plan = unpinned.root / "plan.json"
    assert unpinned.plan("--unpinned", "-o", plan, "--output", unpinned.output).code == 0
    assert run_cli("prepare", "--plan", plan).code == 0
    ran = run_cli("run", "--plan", plan, "--shard", "0/1", "-v")
    assert ran.code == 0, ran.err
    assert [line for line in ran.err.splitlines() if line.startswith("waived: ")] == [
        f"waived: {text}" for text in unpinned_pins(unpinned)
    ]
