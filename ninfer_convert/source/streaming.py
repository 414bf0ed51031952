"""Which shards of remote sources are here when, for a run that fetches them as it goes and keeps few of them.

Owns the order of work by shards, and their coming and going. Refuses to know what is made of them (`convert`) and
how they come (`remote_source`). The disk holds at most two shards of a source, or those that one object needs.

Source: cli.md, `--stream`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.errors import OutputError, printable
from ninfer_convert.plan.planner import Plan, PlannedResource
from ninfer_convert.plan.transform import Words
from ninfer_convert.plan.value import Value, source_tensors
from ninfer_convert.source.remote import RemoteCheckpoint, Stopped

SHARDS_HELD = 2
"""Of one source at a time, unless one object needs more: one is worked on while the next one comes."""

SHARDS_SUFFIX = ".shards"
"""The directory of fetched shards: the part file's name and this."""

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A weight file of a remote source."""

    source: str
    file: str


@dataclass(frozen=True, slots=True)
class Step:
    """Units that need the same shards, and the shards that may be here from their first block to their last."""

    units: tuple[int, ...]
    needs: frozenset[Shard]
    held: frozenset[Shard]


def schedule(needs: Mapping[int, frozenset[Shard]]) -> list[Step]:
    """Returns an order of work that fetches every shard once, if that can be done with so few of them at a time.

    Args:
        needs: the shards of every unit.
    """
    groups: dict[frozenset[Shard], list[int]] = {}
    for unit, shards in needs.items():
        groups.setdefault(shards, []).append(unit)
    users = Counter(shard for shards in groups for shard in shards)
    here: frozenset[Shard] = frozenset()
    steps: list[Step] = []
    while groups:

        def cost(shards: frozenset[Shard], here: frozenset[Shard] = here) -> tuple[int, int, list[Shard]]:
            fetched, lost = shards - here, here - _held(shards, here, users)
            return len(fetched) + len(lost), -len(shards & here), sorted(shards)

        chosen = min(groups, key=cost)
        held = _held(chosen, here, users)
        steps.append(Step(tuple(groups.pop(chosen)), chosen, held))
        users.subtract(chosen)
        here = frozenset(shard for shard in held if users[shard])
    return steps


def _held(needed: frozenset[Shard], here: frozenset[Shard], users: Mapping[Shard, int]) -> frozenset[Shard]:
    """Returns the needed shards and those of the others here that there is room for, the nearly finished first."""
    count = Counter(shard.source for shard in needed)
    held = set(needed)
    for shard in sorted(here - needed, key=lambda shard: (users[shard], shard)):
        if count[shard.source] < SHARDS_HELD:
            count[shard.source] += 1
            held.add(shard)
    return frozenset(held)


class Supply:
    """Brings the shards of a run's units, step by step; `order` is the order to work in.

    Units are indexes of objects, and -1 - n for condition n.
    """

    def __init__(self, plan: Plan, blocks: Mapping[int, int]) -> None:
        """Schedules the units that have blocks to be made; `blocks` counts them."""
        self._sources = {
            name: source for name, source in plan.sources.items() if isinstance(source, RemoteCheckpoint)
        }
        self._blocks = {unit: count for unit, count in blocks.items() if count}
        self.steps = schedule({unit: self._needs(plan, unit) for unit in self._blocks})
        self.order = [unit for step in self.steps for unit in step.units]
        self._step_of = {unit: number for number, step in enumerate(self.steps) for unit in step.units}
        self._left = [sum(self._blocks[unit] for unit in step.units) for step in self.steps]
        self._here: set[Shard] = set()
        self._ready = 0
        self._changed = threading.Condition()

    def is_there(self, unit: int) -> bool:
        """Tells whether all shards of a unit are here; they stay until its last block is made."""
        return self._step_of[unit] < self._ready

    def made(self, unit: int) -> None:
        """Takes note of one more block of a unit, and drops the shards that nothing needs any more."""
        with self._changed:
            number = self._step_of[unit]
            self._left[number] -= 1
            if self._left[number]:
                return
            for shard in self.steps[number].needs:
                if shard in self._here and not self._is_used_before(len(self.steps), shard):
                    self._drop(shard)
            self._changed.notify_all()

    def drop_all(self) -> None:
        """Drops every shard that is here; nothing may be reading any more."""
        with self._changed:
            for shard in list(self._here):
                self._drop(shard)

    def bring(self, directory: Path, is_stopped: Callable[[], bool], notify: Callable[[], None]) -> None:
        """Fetches what every step needs as soon as there is room, until all are here or the run stops.

        Args:
            directory: a directory of ours for the shards.
            is_stopped: tells whether the run has ended.
            notify: called when more units can be worked on.

        Raises:
            NetworkError, OutputError, SourceError: like `RemoteCheckpoint.bring`.
        """
        with contextlib.suppress(Stopped):
            for number, step in enumerate(self.steps):
                for shard in sorted(step.needs):
                    if shard not in self._here:
                        self._make_room(number, shard, is_stopped)
                        self._sources[shard.source].bring(shard.file, directory, is_stopped)
                        with self._changed:
                            self._here.add(shard)
                self._ready = number + 1
                notify()

    def _make_room(self, number: int, shard: Shard, is_stopped: Callable[[], bool]) -> None:
        step, source = self.steps[number], shard.source
        limit = max(SHARDS_HELD, sum(other.source == source for other in step.needs))
        with self._changed:
            while True:
                for other in sorted(self._here - step.held):
                    if other.source == source and not self._is_used_before(number, other):
                        self._drop(other)
                if sum(other.source == source for other in self._here) < limit:
                    return
                if is_stopped():
                    raise Stopped
                self._changed.wait(POLL_SECONDS)

    def _is_used_before(self, number: int, shard: Shard) -> bool:
        return any(self._left[before] and shard in self.steps[before].needs for before in range(number))

    def _drop(self, shard: Shard) -> None:
        self._here.discard(shard)
        self._sources[shard.source].drop(shard.file)

    def _needs(self, plan: Plan, unit: int) -> frozenset[Shard]:
        values: list[Value] = []
        if unit < 0:
            values.append(plan.conditions[-1 - unit])
        else:
            item = plan.objects[unit]
            if isinstance(item, PlannedResource):
                return frozenset()
            values += [item.value.codes, item.value.scales] if isinstance(item.value, Words) else [item.value]
        leaves = (leaf for value in values for leaf in source_tensors(value))
        return frozenset(Shard(leaf.source, leaf.info.file) for leaf in leaves if leaf.source in self._sources)


def stream_bytes(plan: Plan) -> int:
    """Returns the most bytes of shards that a whole run of a plan can have on the disk at a time."""
    units = [*range(len(plan.objects)), *(-1 - number for number in range(len(plan.conditions)))]
    steps = Supply(plan, dict.fromkeys(units, 1)).steps
    total = 0
    for name, source in plan.sources.items():
        needs = [[shard.file for shard in step.needs if shard.source == name] for step in steps]
        sizes = {file: source.files[file].size for files in needs for file in files}
        largest = sorted(sizes.values(), reverse=True)[:SHARDS_HELD]
        total += max(sum(largest), *(sum(sizes[file] for file in files) for files in needs))
    return total


@contextlib.contextmanager
def shard_directory(path: Path) -> Iterator[Path]:
    """Makes an empty directory that only we can use, and removes it afterwards; one that a dead run left is emptied.

    Raises:
        OutputError: there is something else of that name, or the directory cannot be made.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise OutputError(f"{printable(str(path))} is in the way: it is no directory of ours")
        os.chmod(path, 0o700)
        _empty(path)
    except OSError as error:
        raise OutputError(f"cannot make {printable(str(path))} for fetched shards: {error.strerror}") from error
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            _empty(path)
            os.rmdir(path)


def _empty(path: Path) -> None:
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
