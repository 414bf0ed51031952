"""Runs the command line in forked children of one warm process, each with a fate at a chosen system call.

A child does everything a process of its own does: it takes signals, writes to its own output streams, and ends
with an exit code or by a signal. What is chosen is a number: the n-th call of those that change or sync files,
counted from the opening of the part file. So the moment of a kill depends on a seed, not on a clock or a load.

As a program it is that warm process: a JSON list of requests on each line of standard input, a list of answers
on each line of standard output.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COUNTED = (
    *("pwrite", "write", "fsync", "fdatasync", "ftruncate", "posix_fallocate"),
    *("open", "link", "unlink", "replace", "rename"),
)

LOADED = (
    *("ninfer_convert.cli.convert", "ninfer_convert.cli.recipes", "ninfer_convert.cli.shares"),
    *("ninfer_convert.encode.compiled", "ninfer_convert.plan.budget", "ninfer_convert.recipe.loader"),
    *("ninfer_convert.run.convert", "ninfer_convert.run.finalize", "ninfer_convert.run.shares"),
)


@dataclass(frozen=True)
class Ended:
    """How a child ended: `code` is negative for a signal; `calls` are the counted calls, `log` their names."""

    code: int
    out: str
    err: str
    log: list[str]

    def number(self, place: int) -> list[object]:
        """Returns [name, number] of a call, counted among those of its name; syncs, whose number varies, left out."""
        steady = [name for name in self.log if name != "fdatasync"]
        return [steady[place], steady[: place + 1].count(steady[place])]

    @property
    def calls(self) -> int:
        """How many calls a run makes, every time."""
        return len(self.log) - self.log.count("fdatasync")


class ForkServer:
    """The warm process, seen from a test; use as a context manager."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.communicate()

    def run(self, *arguments: object, fate: Mapping[str, Any] | None = None) -> Ended:
        """Runs `ninfer-convert` with these arguments in a child.

        A fate has `at`, [name, number] of a call, and what happens there: `signal` (a number; a write is half done
        first, and nobody writes on until the main thread has noticed), `errno`, `fill` (a file that takes all the
        space there is), `limit` (no file may grow beyond so many bytes from then on), `remove` (a directory).
        Beside it, `short`: no write moves more than so many bytes; `uncounted` and `unreserved`: the file system
        does not count its space, and reserves none; `settings`: are assigned in `convert`.
        """
        (ended,) = self.race([arguments], fate)
        return ended

    def race(self, runs: Sequence[Sequence[object]], fate: Mapping[str, Any] | None = None) -> list[Ended]:
        """Runs several commands at once; none begins before all are ready."""
        requests = [{"arguments": [*map(str, arguments)], "fate": fate or {}} for arguments in runs]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(requests), file=self._process.stdin, flush=True)
        return [Ended(**answer) for answer in json.loads(self._process.stdout.readline())]


class _Fate:
    """Counts calls in a child and does what is to happen at one of them."""

    def __init__(self, fate: Mapping[str, Any], log: int) -> None:
        self.fate, self.lock, self.is_counting = fate, threading.RLock(), False
        self.noticed = threading.Event()
        self.log = os.fdopen(log, "w")
        self.numbers: dict[str, itertools.count[int]] = {name: itertools.count(1) for name in COUNTED}
        self.real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in COUNTED}
        for name in COUNTED:
            setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and str(arguments[0]).endswith(".part"):
                self.is_counting = True
            if self.is_counting:
                with self.lock:
                    if self._is_due(name):
                        self._happen(name, arguments)
            if (limit := self.fate.get("short")) and name in ("write", "pwrite"):
                arguments = (arguments[0], arguments[1][:limit], *arguments[2:])
            return self.real[name](*arguments, **options)

        return call

    def _is_due(self, name: str) -> bool:
        self.log.write(name + "\n")
        self.log.flush()
        return bool(self.fate.get("at") == [name, next(self.numbers[name])])

    def _happen(self, name: str, arguments: tuple[Any, ...]) -> None:
        if "fill" in self.fate:
            _fill(self.fate["fill"], self.real)
        if "limit" in self.fate:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.fate["limit"], resource.RLIM_INFINITY))
        if "remove" in self.fate:
            shutil.rmtree(self.fate["remove"])
        if "errno" in self.fate:
            raise OSError(self.fate["errno"], os.strerror(self.fate["errno"]))
        if "signal" in self.fate:
            if name in ("write", "pwrite"):
                data = arguments[1]
                self.real[name](arguments[0], data[: len(data) // 2], *arguments[2:])
            os.kill(os.getpid(), self.fate["signal"])
            is_heard = signal.getsignal(self.fate["signal"]) is not signal.SIG_IGN
            if is_heard and threading.current_thread() is not threading.main_thread():
                self.noticed.wait(10)


def _fill(path: str, real: Mapping[str, Callable[..., Any]]) -> None:
    """Takes all the space of a file system, as another writer does: the last byte too."""
    fd = real["open"](path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (1 << 16, 1 << 12, 1):
        while True:
            try:
                real["write"](fd, bytes(size))
            except OSError:
                break
    os.close(fd)


def _child(request: Mapping[str, Any], out: int, err: int, log: int) -> None:
    """Is the command line, its streams and the log of its calls in pipes, which no limit on files concerns."""
    sys.stdout, sys.stderr = os.fdopen(os.dup2(out, 1), "w"), os.fdopen(os.dup2(err, 2), "w")
    from ninfer_convert import cli
    from ninfer_convert.run import pipeline

    for name, value in request["fate"].get("settings", {}).items():
        setattr(pipeline, name, value)
    if "uncounted" in request["fate"]:
        _without_count()
    if "unreserved" in request["fate"]:
        _without_reservation()
    fate, join = _Fate(request["fate"], log), pipeline.Pipeline._quiesce

    def notice(*arguments: Any) -> None:
        fate.noticed.set()
        join(*arguments)

    pipeline.Pipeline._quiesce = notice  # type: ignore[method-assign]
    sys.argv = ["ninfer-convert", *request["arguments"]]
    cli.main()


def _without_count() -> None:
    real = os.fstatvfs

    def uncounted(fd: int) -> os.statvfs_result:
        counted = list(real(fd))
        counted[2] = 0
        return os.statvfs_result(counted)

    os.fstatvfs = uncounted  # type: ignore[assignment]


def _without_reservation() -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "unsupported")

    os.posix_fallocate = unsupported


def _drained(ends: Sequence[int]) -> list[str]:
    """Returns what comes out of pipes until all of them are closed."""
    found = dict.fromkeys(ends, b"")
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                piece = os.read(key.fd, 1 << 16)
                found[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return [content.decode("utf-8", "backslashreplace") for content in found.values()]


def _fork(request: Mapping[str, Any], gate: tuple[int, int]) -> tuple[int, list[int]]:
    """Returns a child, which waits for the gate to be closed, and the ends of its pipes."""
    pipes = [os.pipe() for _ in range(3)]
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.close(gate[1])
            os.read(gate[0], 1)
            _child(request, *(end for _, end in pipes))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    for _, end in pipes:
        os.close(end)
    return child, [end for end, _ in pipes]


def _serve() -> None:
    # Loaded once, before any thread exists.
    for name in LOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        gate = os.pipe()
        children = [_fork(request, gate) for request in json.loads(line)]
        for end in gate:
            os.close(end)
        texts = iter(_drained([end for _, ends in children for end in ends]))
        answers = []
        for child, _ in children:
            out, err, log = next(texts), next(texts), next(texts)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            answers.append({"code": code, "out": out, "err": err, "log": log.split()})
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    _serve()
