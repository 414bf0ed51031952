"""Where the files of a checkpoint lie: directory, index, single file, hub cache entry.

Owns paths and the index. Refuses to know what a weight file holds (`safetensors_header`); never opens one.
File names from JSON or a recipe are UTF-8 on disk, whatever the locale.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer_convert.errors import SourceError, printable
from ninfer_convert.source.header import is_lfs_pointer, lfs_message, shown
from ninfer_convert.source.io import dangling_link, failure, read_small
from ninfer_convert.strict_json import kind_of, load_object

SUFFIX = ".safetensors"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
CONFIG = "config.json"

MAX_INDEX_BYTES = 100_000_000
MAX_CONFIG_BYTES = 1 << 24
MAX_RESOURCE_BYTES = 1 << 28
MAX_PROBLEMS = 20
"""Messages that one error shows; the rest is counted."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"/models--[^/]+/blobs/(?:[0-9a-f]{40}|[0-9a-f]{64})$")
"""Where older clients of the hub put the files of a download directory, leaving links to them there."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"-\d+-of-0*(\d+)\.safetensors")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class HubEntry:
    """The place of a directory inside the hub's cache."""

    repo: str
    revision: str
    blob_directories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """A parsed `model.safetensors.index.json`; `shards` maps each file to the tensors it should hold."""

    path: str
    shards: Mapping[str, tuple[str, ...]]
    total_size: Any


@dataclass(frozen=True, slots=True)
class Location:
    """The files of one checkpoint: `weights` are file names inside `directory`; absent shards are among them."""

    directory: str
    weights: tuple[str, ...]
    index: Index | None
    hub: HubEntry | None
    warnings: tuple[str, ...] = field(default=())

    def path(self, file: str) -> str:
        """Returns the path of a file of the checkpoint."""
        return os.path.join(self.directory, file)


def locate(location: str) -> Location:
    """Returns the files that a location stands for; nothing but the index is read.

    A location is a directory with an index, with `model.safetensors` or with exactly one `*.safetensors`
    file, or such a file itself, or an entry `models--owner--name` of the hub's cache.

    Raises:
        SourceError: the location is none of these, its index is malformed, or a link leads out of the directory
            and not to a blob of the hub's cache.
    """
    if not location:
        raise SourceError("a source location is empty; required: a path")
    try:
        is_directory = stat.S_ISDIR(os.stat(location).st_mode)
    except OSError as error:
        raise failure(location, error) from error
    except ValueError as error:
        raise SourceError(f"{printable(location)}: no path is spelled like this: {error}") from error
    if not is_directory:
        return _single_file(location)
    directory, warnings = _snapshot(location)
    hub = _hub_entry(directory)
    if os.path.lexists(os.path.join(directory, INDEX)):
        path = os.path.join(directory, INDEX)
        _require_inside(directory, hub, [INDEX])
        index = _parse_index(read_small(path, MAX_INDEX_BYTES), path)
        weights = tuple(sorted(index.shards))
    else:
        listing = _listing(directory)
        index, weights = None, (_only_file(directory, weight_names(directory), listing),)
    _require_inside(directory, hub, weights)
    warnings += _unread(directory, weight_names(directory), weights, index)
    return Location(directory, weights, index, hub, tuple(warnings))


def locate_listed(where: str, names: Sequence[str], read: Callable[[str], bytes], entry: HubEntry) -> Location:
    """Returns the files of a repository by the same rules, from its list of files; only the index is read.

    Args:
        where: what stands for the directory in paths and messages.
        names: every file of the repository.
        read: returns a file whole.
        entry: what the repository is.

    Raises:
        SourceError: there are no weights, no telling which, or the index is malformed.
    """
    beside_index = [name for name in sorted(names) if "/" not in name]
    weight_files = [name for name in beside_index if name.endswith(SUFFIX) and not name.startswith(".")]
    if INDEX in beside_index:
        index = _parse_index(read(INDEX), os.path.join(where, INDEX))
        weights = tuple(sorted(index.shards))
    else:
        index, weights = None, (_only_file(where, weight_files, beside_index),)
    return Location(where, weights, index, entry, tuple(_unread(where, weight_files, weights, index)))


def blob_digest(path: str) -> str | None:
    """Returns the SHA-256 that the hub's cache names the file behind one of its links by; None where it does not."""
    try:
        name = os.path.basename(os.readlink(path))
    except OSError:
        return None
    return name if _SHA256.fullmatch(name) else None


def weight_names(directory: str) -> list[str]:
    """Returns the names of all safetensors files of a directory, sorted; directories and hidden files left out."""
    names = [name for name in _listing(directory) if name.endswith(SUFFIX) and not name.startswith(".")]
    return [name for name in names if not os.path.isdir(os.path.join(directory, name))]


def read_beside(location: Location, file: str, limit: int = MAX_RESOURCE_BYTES) -> bytes:
    """Returns a small file of the checkpoint's directory, byte for byte.

    Args:
        location: the checkpoint.
        file: a relative path inside the directory, as a recipe or this package spells it.
        limit: the largest size that is read.

    Raises:
        SourceError: absent, a Git LFS pointer, too large, or a path or link that leaves the directory for
            anywhere but the hub cache's own blobs.
    """
    path = beside(location, file)
    if message := dangling_link(path):
        raise SourceError(message)
    _require_inside(location.directory, location.hub, [os.path.relpath(path, location.directory)])
    raw = read_small(path, limit)
    if is_lfs_pointer(raw):
        raise SourceError(lfs_message(printable(path)))
    return raw


def beside(location: Location, file: str) -> str:
    """Returns the path of a file named by a recipe.

    Raises:
        SourceError: the name is not a relative path that stays inside the directory.
    """
    parts = file.split("/")
    try:
        name = on_disk(file)
    except UnicodeEncodeError:
        name = ""
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise SourceError(f'file "{printable(file)}": required: a relative path inside the checkpoint\'s directory')
    return location.path(name)


def on_disk(name: str) -> str:
    """Returns the file name whose bytes are the UTF-8 text `name`, in the spelling of `os`."""
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))


def summarize(groups: Sequence[Sequence[str]]) -> list[str]:
    """Returns the messages of all groups in order, cut to a readable number, no group silenced by a longer one."""
    shares = [0] * len(groups)
    left = MAX_PROBLEMS
    while left and any(share < len(group) for share, group in zip(shares, groups, strict=True)):
        for place, group in enumerate(groups):
            if left and shares[place] < len(group):
                shares[place] += 1
                left -= 1
    messages = [message for share, group in zip(shares, groups, strict=True) for message in group[:share]]
    more = sum(map(len, groups)) - len(messages)
    return [*messages, f"and {more} more problems"] if more else messages


def _single_file(location: str) -> Location:
    directory, file = os.path.split(location)
    if not file.endswith(SUFFIX):
        raise SourceError(f"{printable(location)}: is neither a directory nor a {SUFFIX} file")
    directory = directory or os.curdir
    warnings = []
    if os.path.lexists(os.path.join(directory, INDEX)):
        warnings.append(f"{printable(location)}: only this file is read, although {INDEX} lies beside it")
    return Location(directory, (file,), None, _hub_entry(directory), tuple(warnings))


def _listing(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise failure(directory, error) from error


def _unread(where: str, names: Sequence[str], weights: Sequence[str], index: Index | None) -> list[str]:
    others = [name for name in names if name not in weights]
    if not others:
        return []
    decider = INDEX if index else weights[0]
    named = ", ".join(printable(name) for name in others)
    return [f"{printable(where)}: not read, because {printable(decider)} decides: {named}"]


def _only_file(directory: str, names: Sequence[str], listing: Sequence[str]) -> str:
    if WEIGHTS in names:
        return WEIGHTS
    candidates = [name for name in names if name != ADAPTER]
    where = printable(directory)
    if len(candidates) > 1:
        raise SourceError(
            f"{where}: {len(candidates)} {SUFFIX} files ({_listed(candidates)}) and neither {INDEX} nor {WEIGHTS}"
            " to say which belong together; give one file, or complete the download"
        )
    if not candidates:
        raise SourceError(f"{where}: {_why_nothing(listing, bool(names))}")
    shard = _SHARD.search(candidates[0])
    if shard and int(shard.group(1)) > 1:
        raise SourceError(
            f"{where}: {printable(candidates[0])} is one shard of {int(shard.group(1))} and {INDEX} is missing:"
            " download incomplete; give the file itself to read it alone"
        )
    return candidates[0]


def _why_nothing(listing: Sequence[str], has_adapter: bool) -> str:
    if has_adapter:
        return f"holds only {ADAPTER}, which is no model; merge it into its base model first"
    others = [name for name in listing if name.endswith(_OTHER_WEIGHTS)]
    found = f"; found {_listed(others)}, which are other kinds of files" if others else ""
    return f"no {SUFFIX} file in this directory{found}"


def _listed(names: Sequence[str]) -> str:
    shown_names = ", ".join(printable(name) for name in names[:5])
    return shown_names if len(names) <= 5 else f"{shown_names} and {len(names) - 5} more"


def _parse_index(raw: bytes, path: str) -> Index:
    where = printable(path)
    if is_lfs_pointer(raw):
        raise SourceError(lfs_message(where))
    document = load_object(raw, where, lenient=True)
    if "weight_map" not in document:
        raise SourceError(f"{where}: member weight_map is missing")
    weight_map = document["weight_map"]
    if not isinstance(weight_map, dict):
        raise SourceError(f"{where}: weight_map is {kind_of(weight_map)}; required: an object, tensor to file")
    if not weight_map:
        raise SourceError(f"{where}: weight_map is empty: the index lists no tensor")
    problems = [
        f"{where}: weight_map member {shown(name)}: {reason}"
        for name, file in weight_map.items()
        if (reason := _file_problem(file))
    ]
    if problems:
        raise SourceError(*summarize([problems]))
    shards: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        shards.setdefault(on_disk(file), []).append(name)
    metadata = document.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(path, {file: tuple(names) for file, names in shards.items()}, total_size)


def _file_problem(file: object) -> str | None:
    if not isinstance(file, str):
        return f"the file is {kind_of(file)}; required: a string"
    if "/" in file or "\\" in file or "\0" in file or file in ("", ".", ".."):
        return f'file "{shown(file)}" is not a plain file name; a shard lies beside its index'
    if not file.endswith(SUFFIX):
        return f"file {shown(file)} does not end with {SUFFIX}"
    return None


def _snapshot(location: str) -> tuple[str, list[str]]:
    """Returns the directory to read, and how it was found when that is not the location itself."""
    entry = os.path.realpath(location)
    if os.path.basename(entry) == "snapshots":
        entry = os.path.dirname(entry)
    snapshots = os.path.join(entry, "snapshots")
    if not os.path.basename(entry).startswith("models--") or not os.path.isdir(snapshots):
        return location, []
    where = printable(location)
    commits = [name for name in _listing(snapshots) if os.path.isdir(os.path.join(snapshots, name))]
    commit = _main_commit(entry)
    if commit not in commits:
        advice = f"give one of its snapshots: {_listed(commits)}" if commits else "it has no snapshot"
        state = f"refs/main names {commit}, which is not there" if commit else "refs/main is missing"
        raise SourceError(f"{where}: is a hub cache entry and {state}: download incomplete; {advice}")
    note = f"{where}: is a hub cache entry; refs/main points to snapshot {commit}, which is read"
    return os.path.join(snapshots, commit), [note]


def _main_commit(entry: str) -> str:
    path = os.path.join(entry, "refs", "main")
    if not os.path.exists(path):
        return ""
    text = read_small(path, 1024).decode("ascii", "replace").strip()
    if not _COMMIT.fullmatch(text):
        raise SourceError(f"{printable(path)}: holds {shown(text)}; required: a commit of 40 hexadecimal digits")
    return text


def _hub_entry(directory: str) -> HubEntry | None:
    parts = os.path.realpath(directory).split(os.sep)
    for place in range(len(parts) - 2):
        entry, middle, commit = parts[place : place + 3]
        if entry.startswith("models--") and middle == "snapshots" and _COMMIT.fullmatch(commit):
            cache = os.sep.join(parts[:place]) or os.sep
            blobs = (os.path.join(cache, entry, "blobs"), os.path.join(cache, "blobs"))
            return HubEntry("/".join(entry.split("--")[1:]), commit, blobs)
    return None


def _require_inside(directory: str, hub: HubEntry | None, files: Sequence[str]) -> None:
    """Raises SourceError for links that lead out of the directory; those to nothing are told where they are read."""
    roots = [os.path.realpath(root) for root in (directory, *(hub.blob_directories if hub else ()))]
    problems = []
    for file in files:
        path = os.path.join(directory, file)
        if "/" not in file and not os.path.islink(path):
            continue
        target = os.path.realpath(path)
        is_inside = any(os.path.commonpath([root, target]) == root for root in roots)
        if not is_inside and not _BLOB.search(target) and os.path.exists(path):
            problems.append(
                f"{printable(path)}: is a link to {printable(target)}, outside the checkpoint's directory;"
                " put the file itself, a copy or a hard link in its place"
            )
    if problems:
        raise SourceError(*summarize([problems]))
