"""Whether a checkpoint's index and the headers of its shards say the same.

Owns what is a contradiction and what only a warning. Refuses to read files: index and headers are parsed already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ninfer_convert.errors import SourceError, printable
from ninfer_convert.source.files import Index, Location, summarize
from ninfer_convert.source.header import Header, shown
from ninfer_convert.strict_json import kind_of


def check_listed(place: Location, headers: Mapping[str, Header], groups: list[Sequence[str]]) -> list[str]:
    """Compares headers with the index; returns warnings.

    Raises:
        SourceError: everything that is wrong, the problems in `groups` first.
    """
    warnings = list(place.warnings)
    if place.index:
        groups = [*groups, _disagreements(place, place.index, headers)]
        warnings.extend(_size_warnings(place.index, headers))
    if problems := summarize(groups):
        raise SourceError(*problems)
    return warnings


def _disagreements(place: Location, index: Index, headers: Mapping[str, Header]) -> list[str]:
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for entry in header.entries:
            holders.setdefault(entry.name, file)
    where, problems = printable(index.path), []
    for file, header in headers.items():
        held, listed = {entry.name for entry in header.entries}, set(index.shards[file])
        for name in index.shards[file]:
            if name not in held:
                instead = f"; it is in {printable(holders[name])}" if name in holders else ""
                problems.append(
                    f"{where}: lists tensor {shown(name)} in shard {printable(file)}, whose header lacks it{instead}"
                )
        problems.extend(
            f"{printable(place.path(file))}: shard holds tensor {shown(entry.name)},"
            f" which {where} does not list for it"
            for entry in header.entries
            if entry.name not in listed
        )
    return problems


def _size_warnings(index: Index, headers: Mapping[str, Header]) -> Iterable[str]:
    if index.total_size is None or len(headers) < len(index.shards):
        return
    held = sum(entry.nbytes for header in headers.values() for entry in header.entries)
    if isinstance(index.total_size, bool) or not isinstance(index.total_size, (int, float)):
        yield f"{printable(index.path)}: total_size is {kind_of(index.total_size)}; the shards hold {held} bytes"
    elif index.total_size != held:
        yield f"{printable(index.path)}: total_size is {index.total_size}; the shards hold {held} bytes"
