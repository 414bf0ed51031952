"""Starts a command as a user whom permissions stop, when the tests run as root, whom they do not.

As a program: gives up privileges in the way that its first argument names, and becomes the rest of its arguments.
`nobody` is the ordinary way. Where nobody cannot reach the interpreter, because it lies in the home of root,
`reading` keeps the right to read everything, and no right to write. Where that right is not ours to keep, `bound`
stays root without the rights that let root pass permissions.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys

NOBODY = 65534
WAYS = ("nobody", "reading", "bound")

_DAC_OVERRIDE, _DAC_READ_SEARCH, _FOWNER = 1, 2, 3
_PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 24, 47, 2
_CAPABILITY_VERSION = 0x20080522


@functools.cache
def prefix() -> tuple[str, ...]:
    """Returns the words to put before a command; none when we are not root."""
    if os.geteuid() != 0:
        return ()
    for way in WAYS:
        words = (sys.executable, __file__, way)
        probe = [*words, sys.executable, "-c", "import ninfer_convert.errors"]
        if subprocess.run(probe, capture_output=True, check=False, cwd="/").returncode == 0:
            return words
    raise RuntimeError("no way to give up the privileges of root")


def user() -> int:
    """Returns the user that the command runs as."""
    return NOBODY if prefix()[2:] and prefix()[2] != "bound" else os.geteuid()


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _prctl(*arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:5])) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {arguments}")


def _keep_only(capability: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    head = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)(*([1 << capability] * 3), 0, 0, 0)
    if libc.capset(head, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)


def main() -> None:
    way, *command = sys.argv[1:]
    if way == "reading":
        _prctl(_PR_SET_KEEPCAPS, 1)
    if way == "bound":
        for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH, _FOWNER):
            _prctl(_PR_CAPBSET_DROP, capability)
    else:
        _become_nobody()
    if way == "reading":
        _keep_only(_DAC_READ_SEARCH)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
