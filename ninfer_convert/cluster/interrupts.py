"""Interrupts while Dask runs: none is lost, none comes while processes are being started or ended.

Python drops an exception that a signal raises inside a finalizer or a callback of the garbage collector, and Dask
has many of both.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object]


class Interrupts:
    """Remembers the signals that this process would raise an exception for; use as a context manager.

    Does nothing in another thread than the main one, which is the one that signals interrupt.
    """

    def __init__(self) -> None:
        self._came = False
        self._is_put_off = False
        self._handlers: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                # What is ignored, or ends the process without asking Python, stays as it is.
                if callable(handler) and not isinstance(handler, signal.Handlers):
                    self._handlers[number] = handler
                    signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if not self._is_put_off:
            self._handlers[signal.Signals(number)](number, frame)

    def require_none(self) -> None:
        """Raises KeyboardInterrupt if a signal has come, whatever has become of it."""
        if self._came:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Remembers what comes in the block, and raises nothing for it."""
        self._is_put_off = True
        try:
            yield
        finally:
            self._is_put_off = False


@contextlib.contextmanager
def for_this_process_alone() -> Iterator[None]:
    """Lets threads that are started in the block, and processes that these start, never see an interrupt.

    A terminal sends it to all of them. This process is the one to answer: it lets the others finish their blocks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        # Started later, it would unblock SIGINT in the thread that starts it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
