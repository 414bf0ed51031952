"""Names that a fine-tune has under other prefixes than the recipe: rules that lead from the ones to the others.

Source: recipe.md, duty 7.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from ninfer_convert.errors import SourceError, printable
from ninfer_convert.source.checkpoint import Checkpoint
from ninfer_convert.source.names import rename, unwrapped

MAX_RULES = 8


def prefix_rules(wanted: Iterable[str], stored: Collection[str]) -> dict[str, str]:
    """Returns rules, beginning in the file to beginning in the recipe, that lead to wanted names that are not there.

    Only wrappers such as `model.` and `language_model.` are exchanged. A rule is as short as the other names of the
    file allow; none are returned where names would be lost or remain in doubt.

    Args:
        wanted: names of the recipe.
        stored: names of the file.
    """
    here = frozenset(stored)
    owners: dict[str, list[str]] = {}
    for name in stored:
        owners.setdefault(unwrapped(name), []).append(name)
    rules: dict[tuple[str, str], dict[str, None]] = {}
    for name in wanted:
        bare = unwrapped(name)
        found = owners.get(bare, [])
        if name not in here and len(found) == 1 and bare:
            wrappers = found[0].removesuffix(bare), name.removesuffix(bare)
            rules.setdefault(wrappers, {}).setdefault(bare.partition(".")[0] + ".")
    short: dict[str, str] = {}
    for (begins, becomes), parts in rules.items():
        longer = {f"{begins}{part}": f"{becomes}{part}" for part in parts}
        others = [name for name in stored if name.startswith(begins) and not name.startswith(tuple(longer))]
        alone = begins and becomes and not others and sum(1 for other, _ in rules if other == begins) == 1
        short |= {begins: becomes} if alone else longer
    return short if len(short) <= MAX_RULES else {}


def renamed(checkpoint: Checkpoint, rules: Mapping[str, str]) -> Checkpoint | None:
    """Returns a checkpoint as if it had been opened under prefix rules; None where they lead to no names.

    It shares the open files of the first one.
    """
    stored = [info.stored_name for info in checkpoint.tensors.values()]
    try:
        names = rename(stored, rules, printable(checkpoint.location)).names
    except SourceError:
        return None
    made = copy.copy(checkpoint)
    infos = (dataclasses.replace(info, name=names[info.stored_name]) for info in checkpoint.tensors.values())
    made.tensors = MappingProxyType({info.name: info for info in infos})
    made.applied_prefixes = MappingProxyType(dict(rules))
    return made
