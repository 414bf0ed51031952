"""What a source must agree on with the recipe: pins, config members, dtypes, and a use for every tensor.

Source: recipe.md, duties 2 and 6.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ninfer_convert.errors import SourceError, printable
from ninfer_convert.plan.findings import Findings
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.globs import Globs, too_many
from ninfer_convert.recipe.model import Recipe, SourceSpec
from ninfer_convert.source.checkpoint import Checkpoint
from ninfer_convert.source.io import Stamp, file_digest, require_unchanged
from ninfer_convert.source.names import unwrapped

SHOWN_NAMES = 5


def check_usable(sources: Mapping[str, Checkpoint], findings: Findings) -> None:
    """Raises for sources of a kind no recipe can read; of their missing names nothing needs saying."""
    for name, checkpoint in sources.items():
        for reason in (checkpoint.foreign_quantization(), checkpoint.unmerged_adapter()):
            if reason:
                findings.problem(f"source {name}: {reason}")
    findings.raise_problems()


def check_source(spec: SourceSpec, checkpoint: Checkpoint, findings: Findings) -> None:
    """Compares revision and config members; notes what could not be compared and which prefixes were applied."""
    if spec.revision and checkpoint.revision and spec.revision != checkpoint.revision:
        findings.pin(f"source {spec.name}: revision {checkpoint.revision} found, {spec.revision} required")
    if spec.revision and not checkpoint.revision:
        findings.notes.append(f"source {spec.name}: a plain directory; revision {spec.revision} could not be checked")
    for begin, to in checkpoint.applied_prefixes.items():
        findings.notes.append(f"source {spec.name}: names beginning with {begin!r} were read as {to!r}")
    if not spec.config:
        return
    if checkpoint.config is None:
        place = printable(checkpoint.location)
        findings.problem(f"source {spec.name}: no config.json in {place}; the recipe needs one")
        return
    for path, found, required in _config_differences(spec.config, checkpoint.config, ""):
        findings.problem(f"source {spec.name}: config.json {path}: {found} found, {required} required")


def check_inputs(
    recipe: Recipe, inputs: Mapping[str, Path], findings: Findings
) -> tuple[dict[str, str], dict[str, Stamp]]:
    """Returns the SHA-256 of every auxiliary input, compared with the recipe's pins, and the states they are of."""
    for name in inputs.keys() - recipe.inputs.keys():
        known = ", ".join(recipe.inputs) or "none"
        findings.problem(f"input {printable(name)} is not one of the recipe's inputs ({known})")
    digests: dict[str, str] = {}
    states: dict[str, Stamp] = {}
    for name, spec in recipe.inputs.items():
        path = inputs.get(name)
        if path is None:
            findings.problem(f"{spec.mark}: input {name} is not given; add --input {name}=PATH")
            continue
        try:
            found, states[name] = file_digest(os.fspath(path))
        except SourceError as error:
            findings.problem(*(f"input {name}: {message}" for message in error.messages))
            continue
        digests[name] = found
        if spec.sha256 and found != spec.sha256:
            place = printable(str(path))
            findings.pin(f"input {name} ({place}): SHA-256 {found} found, {spec.sha256} required")
    return digests, states


def require_inputs_unchanged(inputs: Mapping[str, Path], states: Mapping[str, Stamp]) -> None:
    """Raises SourceError when an input is no longer the file that was hashed, so that something else was used."""
    for name, state in states.items():
        require_unchanged(os.fspath(inputs[name]), state)


def check_coverage(
    spec: SourceSpec, checkpoint: Checkpoint, used: set[str], findings: Findings, spoken_of: Set[str] | None
) -> None:
    """Checks that every tensor is used or ignored by name, and that used ones have the stated dtypes.

    Args:
        used: names that objects and conditions read.
        spoken_of: names that may be used once what is wrong is mended, so that they do not count as unused; None
            if so much is wrong that nothing is said about unused tensors.
    """
    findings.warnings += checkpoint.warnings
    names = dict.fromkeys([*checkpoint.tensors, *checkpoint.absent])
    ignored: set[str] = set()
    globs = Globs()
    for glob, mark in spec.ignore:
        matches = globs.matching(glob, names)
        if matches is None:
            findings.problem(f"{mark}: ignore: {too_many()}")
            return
        if not matches:
            findings.problem(f"{mark}: ignore {printable(glob)} matches no tensor of source {spec.name}")
        if overlap := sorted(used.intersection(matches)):
            taken = printable(overlap[0])
            findings.problem(f"{mark}: ignore {printable(glob)} matches {taken}, which an object uses")
        ignored.update(matches)
    accounted = used.union(ignored, spoken_of or ())
    unused = [name for name in names if name not in accounted]
    if unused and spoken_of is not None:
        findings.problem(_unused_text(spec.name, unused, used))
    for name in sorted(used) if spec.dtypes else ():
        if (found := checkpoint.tensors[name].dtype) not in spec.dtypes:
            stated = " or ".join(spec.dtypes)
            findings.problem(f"source {spec.name}: tensor {printable(name)} is {found}; the recipe states {stated}")
    if checkpoint.origin is not None:
        # What no object needs was left on the hub on purpose.
        return
    for shard in sorted({checkpoint.absent[name] for name in checkpoint.absent if name in ignored}):
        findings.warnings.append(f"{printable(shard)} of source {spec.name} is absent; no object needs it")


def _unused_text(source: str, unused: Sequence[str], used: set[str]) -> str:
    tails = {unwrapped(name): name for name in used}
    twins = [(name, tails[unwrapped(name)]) for name in unused if unwrapped(name) in tails]
    if twins:
        both = " and ".join(map(printable, twins[0]))
        more = f" (and {counted(len(twins) - 1, 'more pair')})" if len(twins) > 1 else ""
        return f"source {source}: {both} are ambiguous: one name under two prefixes{more}"
    shown = ", ".join(map(printable, unused[:SHOWN_NAMES]))
    more = f" and {len(unused) - SHOWN_NAMES} more" if len(unused) > SHOWN_NAMES else ""
    count = "1 tensor is" if len(unused) == 1 else f"{len(unused)} tensors are"
    return f"source {source}: {count} neither used nor ignored: {shown}{more}; use them or list them under ignore"


def _config_differences(
    required: Mapping[str, Any], found: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, str, str]]:
    for key, expected in required.items():
        path = f"{prefix}{key}"
        if key not in found:
            yield path, "nothing", json.dumps(expected)
        elif isinstance(expected, Mapping) and isinstance(found[key], Mapping):
            yield from _config_differences(expected, found[key], path + ".")
        elif not _is_equal(expected, found[key]):
            yield path, printable(json.dumps(found[key], ensure_ascii=False)), json.dumps(expected)


def _is_equal(expected: Any, found: Any) -> bool:
    # True equals 1 in Python, and must not here.
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    return bool(expected == found)

