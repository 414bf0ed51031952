"""What several commands share: how progress is shown, and what is said of pins that are waived."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

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
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Bar]]:
    Bar.made = []
    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    yield Bar.made


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
    assert capsys.readouterr().err.splitlines() == ["converting: 90%, 0 MiB/s, 1 s left"]


def test_what_is_quiet_shows_nothing(bars: list[Bar]) -> None:
    with options.progress("converting", quiet=True) as show:
        assert show is None
    assert bars == []
