"""What the workers of a cluster of our own load first: an interrupt from the terminal is for the client alone.

The client lets the workers finish their block and keeps what they have done.
"""

from __future__ import annotations

import signal


def dask_setup(worker: object) -> None:
    """Is called by Dask in the main thread of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
