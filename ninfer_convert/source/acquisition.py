"""From where a user says that a recipe's sources lie to open checkpoints.

Owns what is brought here before a conversion: nothing for a directory, headers for a plan or a stream, into the hub's
cache the files that the recipe needs for everything else. Refuses to know the hub's requests (`hub`).

Source: cli.md, `WHERE`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ninfer_convert.errors import OutputError, SourceError, UsageError, printable
from ninfer_convert.plan.planner import Plan, make_plan
from ninfer_convert.recipe.expression import Shortlist, leaves
from ninfer_convert.recipe.model import Recipe, ResourceSpec, SourceSpec, TensorSpec
from ninfer_convert.source import hub
from ninfer_convert.source.checkpoint import Checkpoint, FileInfo, Origin, open_checkpoint
from ninfer_convert.source.files import CONFIG, INDEX
from ninfer_convert.source.remote import RemoteCheckpoint, open_remote
from ninfer_convert.workers import for_each

Access = Literal["headers", "values", "stream"]
"""What is wanted of a source: a plan without values, values at hand, or values that come shard by shard."""

HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where one source lies, and the prefix rules to open it with."""

    where: str
    prefixes: Mapping[str, str]


@contextmanager
def open_sources(
    recipe: Recipe,
    places: Mapping[str, Place | str | os.PathLike[str]],
    inputs: Mapping[str, Path] | None = None,
    *,
    access: Access = "values",
    unpinned: bool = False,
    tell: Callable[[str], object] = lambda text: None,
) -> Iterator[dict[str, Checkpoint]]:
    """Yields the open checkpoint of every source of a recipe.

    A directory or a file is opened where it lies; of an `hf://` location the files that the recipe needs are fetched
    into the hub's cache, when what headers can tell has been checked. They are closed at the end of the block.

    Args:
        recipe: the loaded recipe.
        places: where every source lies, as `--source` has it; a plain one is read with the recipe's own prefix rules.
        inputs: the auxiliary files, by the recipe's names.
        access: what is wanted: `headers` for a plan, `values` for a conversion, `stream` to fetch shard by shard
            meanwhile; a source that is here already always has its values.
        unpinned: like `make_plan`.
        tell: is given a line before something large is fetched.

    Raises:
        UsageError: a source of the recipe has no place, or a place is of no source.
        ConvertError: like `open_checkpoint`, `hub.connect` and `make_plan`.

    Source: cli.md, `WHERE`.
    """
    inputs = inputs or {}
    wanted = _places(recipe, places)
    with ExitStack() as stack:
        opened: dict[str, Checkpoint] = {}
        for name, place in wanted.items():
            opened[name] = stack.enter_context(_open(recipe.sources[name], place, access))
        remote = {name: source for name, source in opened.items() if isinstance(source, RemoteCheckpoint)}
        if access == "stream" and not remote:
            raise UsageError("--stream: no source is on the hub; it fetches hf:// sources shard by shard")
        if access == "values" and remote:
            plan = make_plan(recipe, opened, inputs, unpinned=unpinned)
            for name, checkpoint in remote.items():
                fetched = _fetch(plan, name, checkpoint, wanted[name].prefixes, tell)
                opened[name] = stack.enter_context(fetched)
        yield opened


def _places(recipe: Recipe, given: Mapping[str, Place | str | os.PathLike[str]]) -> dict[str, Place]:
    known = ", ".join(recipe.sources)
    problems = [f"the recipe has no source {printable(name)}; it has {known}" for name in given.keys() - recipe.sources]
    problems += [f"source {name} of the recipe is not given" for name in recipe.sources if name not in given]
    if problems:
        raise UsageError(*sorted(problems))
    return {
        name: place if isinstance(place, Place) else Place(os.fsdecode(place), recipe.sources[name].prefixes)
        for name, place in given.items()
    }


def needed_files(plan: Plan, name: str) -> list[str]:
    """Returns the files of a source on the hub that a plan needs: weights, index, config, and named small ones."""
    checkpoint = plan.sources[name]
    weights = {checkpoint.tensors[tensor].file for tensor in plan.used[name]}
    small = {CONFIG, INDEX}
    for item in plan.recipe.objects:
        if isinstance(item, ResourceSpec):
            small.update(origin.file for origin in item.origins if origin.file and origin.source == name)
        elif isinstance(item, TensorSpec):
            small.update(
                leaf.special for leaf in leaves(item.value) if isinstance(leaf, Shortlist) and leaf.source == name
            )
    return sorted(weights | {file for file in small if checkpoint.has_file(file)})


def verify_digests(plan: Plan, threads: int) -> None:
    """Hashes every weight file that a plan uses and compares it with the hub's SHA-256.

    What is streamed is left out: it is compared while it comes.

    Raises:
        SourceError: one message for each file that differs or has no known digest.
        OutputError: a file cannot be read.
    """
    tasks: list[tuple[Checkpoint, FileInfo]] = []
    problems: list[str] = []
    for name, checkpoint in plan.sources.items():
        if isinstance(checkpoint, RemoteCheckpoint):
            continue
        used = {checkpoint.tensors[tensor].file for tensor in plan.used[name]}
        for info in (checkpoint.files[file] for file in sorted(used)):
            if info.sha256 is None:
                problems.append(f"{printable(info.path)}: no SHA-256 of the hub is known, so nothing can be verified")
            else:
                tasks.append((checkpoint, info))

    def take(task: tuple[Checkpoint, FileInfo], found: str) -> None:
        checkpoint, info = task
        if found == info.sha256:
            checkpoint.verified.add(info.name)
        else:
            problems.append(
                f"{printable(info.path)}: SHA-256 {found} found, {info.sha256} required by the hub; the download is "
                "damaged: remove the file that the link leads to and fetch it again"
            )

    if not problems:
        for_each(tasks, lambda: lambda task: _file_digest(task[1].path), take, threads=min(threads, len(tasks) or 1))
    if problems:
        raise SourceError(*sorted(problems))


def _file_digest(path: str) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(HASH_BYTES):
                digest.update(piece)
    except OSError as error:
        raise OutputError(f"{printable(path)}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _open(spec: SourceSpec, place: Place, access: Access) -> Checkpoint:
    if not hub.is_hub(place.where):
        try:
            return open_checkpoint(place.where, name=spec.name, prefixes=place.prefixes)
        except SourceError as error:
            meant = None if os.path.lexists(place.where) else hub.likely_meant(place.where)
            if meant is None:
                raise
            raise SourceError(f"{error}; if the hub is meant, write {meant}") from error
    location = hub.parse_location(place.where)
    if location.revision is None and spec.revision and spec.repo in (None, location.repo):
        location = hub.HubLocation(location.repo, spec.revision)
    if not hub.is_offline():
        repository = hub.connect(location)
        return open_remote(repository, name=spec.name, prefixes=place.prefixes, has_values=access == "stream")
    if access == "stream":
        raise UsageError(f"{location}: --stream fetches from the hub, and HF_HUB_OFFLINE is set")
    directory, commit = hub.cached_snapshot(location)
    origin = Origin(
        f"{hub.SCHEME}{location.repo}@{commit}",
        location.revision or hub.MAIN,
        "hub cache",
        "it is not in the hub cache, and HF_HUB_OFFLINE is set",
    )
    try:
        return open_checkpoint(directory, name=spec.name, prefixes=place.prefixes, origin=origin)
    except SourceError as error:
        note = f"{origin.location}: HF_HUB_OFFLINE is set, so nothing but the hub cache was looked at"
        raise SourceError(*error.messages, note) from error


def _fetch(
    plan: Plan, name: str, checkpoint: RemoteCheckpoint, prefixes: Mapping[str, str], tell: Callable[[str], object]
) -> Checkpoint:
    repository, files = checkpoint.repository, needed_files(plan, name)
    missing = [file for file in files if not repository.is_cached(file)]
    if missing:
        nbytes = checkpoint.pending_bytes(missing)
        tell(f"source {name}: fetching {len(missing)} files, {nbytes:,} bytes, of {repository} into the hub cache")
    directory = repository.fetch(files)
    digests = {file: listed.sha256 for file, listed in repository.files.items() if listed.sha256}
    origin = Origin(str(repository), repository.requested, "hub", "the repository has no such file", digests)
    return open_checkpoint(directory, name=name, prefixes=prefixes, origin=origin)
