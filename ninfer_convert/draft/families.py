"""Drafts that extend a shipped recipe: what a checkpoint of a known family has that the recipe does not expect.

Owns which shipped recipe a checkpoint is like, and the differences that an extension can state. Refuses to know
whether the extension holds: it is tried like every draft.

Source: recipe.md, duty 7.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ninfer_convert.draft.folding import fold, order, split
from ninfer_convert.draft.frame import member_lines, model_name
from ninfer_convert.draft.naming import Names
from ninfer_convert.draft.prefixes import prefix_rules, renamed
from ninfer_convert.draft.sets import Sets
from ninfer_convert.draft.text import Writer, comment, glob_parts, scalar
from ninfer_convert.draft.trial import needs
from ninfer_convert.errors import PlanError, printable
from ninfer_convert.plan.findings import Findings
from ninfer_convert.plan.resources import read_resource
from ninfer_convert.plan.transform import Binder
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.expression import Module, Tensor, leaves
from ninfer_convert.recipe.files import shipped_recipes
from ninfer_convert.recipe.globs import Globs
from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import Recipe, ResourceSpec, SourceSpec, TensorSpec
from ninfer_convert.source.checkpoint import Checkpoint
from ninfer_convert.source.io import file_digest

MIN_SHARE = 0.5
"""Of a recipe's tensors, what a checkpoint must have to be of its family."""

MAX_TRIED = 3
MAX_DROPS = 40
"""Entries of `change` that leave objects out; a recipe that needs more is another one."""

_WHOLE = "Not in this checkpoint."
_PART = "Missing, though others of the kind are there: see whether the checkpoint is complete."
_FILE = "No such file here."

_FIELDS = ("weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_scale_2")
"""The tensors that the words of a module may be made of."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A small recipe that extends a shipped one; `wanted` are its inputs that are not at hand."""

    base: str
    text: str
    sources: Mapping[str, Checkpoint]
    """The checkpoints under the names that the extension gives their tensors."""
    wanted: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Match:
    """A shipped recipe held against checkpoints."""

    name: str
    recipe: Recipe
    sources: Mapping[str, Checkpoint]
    missing: list[TensorSpec] = field(default_factory=list)
    unused: dict[str, list[str]] = field(default_factory=dict)
    """Tensors by source that nothing uses and nothing ignores."""
    digests: dict[str, str | None] = field(default_factory=dict)
    """SHA-256 of every resource that is there; None where it is not known."""
    is_same: bool = False
    """Whether the sources are the repositories of the recipe."""

    def rank(self) -> tuple[int, bool, int, str]:
        """Returns what the best match has the least of."""
        pinned = {spec.name: spec.sha256 for spec in self.recipe.objects if isinstance(spec, ResourceSpec)}
        equal = sum(1 for name, digest in self.digests.items() if digest and digest == pinned[name])
        return len(self.missing) + sum(map(len, self.unused.values())), not self.is_same, -equal, self.name


def extensions(sources: Mapping[str, Checkpoint], inputs: Mapping[str, Path]) -> Iterator[Extension]:
    """Yields drafts that extend shipped recipes of the same family, the most alike first.

    Raises:
        PlanError: a small file beside the weights cannot be used.
        OutputError: an input or a source cannot be read.
    """
    matches = [match for name, recipe in _shipped().items() if (match := _match(name, recipe, sources))]
    ranked = sorted(matches, key=_Match.rank)[:MAX_TRIED]
    for place, match in enumerate(ranked):
        if sum(map(len, (drops := _drops(match)).values())) <= MAX_DROPS:
            others = [other.name for other in ranked[place + 1 :] if other.rank()[:3] == match.rank()[:3]]
            yield _extension(match, inputs, drops, others)


def relatives(sources: Mapping[str, Checkpoint]) -> list[str]:
    """Returns a sentence on the shipped recipes of the same model that take more sources than are given, if any.

    Demonstrations, which have no evidence, are none of them.
    """
    found = [
        f"{name} ({', '.join(recipe.sources)})"
        for name, recipe in _shipped().items()
        if recipe.evidence
        and len(recipe.sources) > len(sources)
        and all(any(_is_like(spec, checkpoint) for spec in recipe.sources.values()) for checkpoint in sources.values())
    ]
    return [f"Shipped recipes for this model that take more sources: {', '.join(found)}."] if found else []


@cache
def _shipped() -> Mapping[str, Recipe]:
    return {name: load_recipe(name) for name in shipped_recipes()}


def _is_of(spec: SourceSpec, checkpoint: Checkpoint) -> bool:
    expected = spec.config.get("model_type")
    return expected is not None and (checkpoint.config or {}).get("model_type") == expected


def _is_like(spec: SourceSpec, checkpoint: Checkpoint) -> bool:
    return _is_of(spec, checkpoint) and not _differing(spec.config, checkpoint.config or {})


def _match(name: str, recipe: Recipe, given: Mapping[str, Checkpoint]) -> _Match | None:
    """Returns how a recipe compares with checkpoints; None if they are of another family."""
    if recipe.sources.keys() != given.keys():
        return None
    sources: Mapping[str, Checkpoint] = {source: given[source] for source in recipe.sources}
    if not all(_is_of(recipe.sources[source], checkpoint) for source, checkpoint in sources.items()):
        return None
    match = _under_prefixes(_Match(name, recipe, sources))
    sources = match.sources
    tensors = sum(1 for spec in recipe.objects if isinstance(spec, TensorSpec))
    match.missing = _missing(recipe, sources)
    if tensors - len(match.missing) < MIN_SHARE * tensors:
        return None
    match.unused = _unused(match)
    match.is_same = all(checkpoint.repo == recipe.sources[source].repo for source, checkpoint in sources.items())
    for item in recipe.objects:
        if isinstance(item, ResourceSpec) and not needs(item):
            files = [origin for origin in item.origins if origin.file and sources[origin.source].has_file(origin.file)]
            try:
                match.digests[item.name] = read_resource(item, sources, {}, Findings(unpinned=True)).sha256
            except PlanError:
                # A member of a file may be missing; a file that is there and cannot be used is no difference to state.
                if any(origin.member is None for origin in files):
                    raise
    return match


def _missing(recipe: Recipe, sources: Mapping[str, Checkpoint]) -> list[TensorSpec]:
    """Returns the objects that are made of a tensor which is not there."""
    has = Binder(sources, {}).has
    tensors = [spec for spec in recipe.objects if isinstance(spec, TensorSpec)]
    return [spec for spec in tensors if not all(map(has, leaves(spec.value)))]


def _under_prefixes(match: _Match) -> _Match:
    """Returns the match with the names of its sources changed, where prefix rules make more of them the recipe's."""
    wanted: dict[str, dict[str, None]] = {source: {} for source in match.sources}
    for spec in match.recipe.objects:
        for leaf in leaves(spec.value) if isinstance(spec, TensorSpec) else ():
            if isinstance(leaf, Tensor):
                wanted[leaf.source].setdefault(leaf.name)
            elif isinstance(leaf, Module):
                wanted[leaf.source].update((f"{leaf.name}.{part}", None) for part in _FIELDS)
    changed = dict(match.sources)
    for source, checkpoint in match.sources.items():
        if rules := prefix_rules(wanted[source], checkpoint.tensors):
            changed[source] = renamed(checkpoint, rules) or checkpoint
    fewer = len(_missing(match.recipe, changed)) < len(_missing(match.recipe, match.sources))
    return _Match(match.name, match.recipe, changed) if fewer else match


def _unused(match: _Match) -> dict[str, list[str]]:
    """Returns the tensors of every source that no object can use and that nothing ignores."""
    sources = match.sources
    used: dict[str, set[str]] = {source: set() for source in sources}
    left = {id(spec) for spec in match.missing}
    values = [spec.value for spec in match.recipe.objects if isinstance(spec, TensorSpec) and id(spec) not in left]
    values += [condition.value for condition in match.recipe.conditions]
    for leaf in (leaf for value in values for leaf in leaves(value)):
        if isinstance(leaf, Tensor):
            used[leaf.source].add(leaf.name)
        elif isinstance(leaf, Module):
            used[leaf.source].update(f"{leaf.name}.{part}" for part in _FIELDS)
    unused = {}
    for source, checkpoint in sources.items():
        globs = Globs()
        ignored = used[source]
        for glob, _ in match.recipe.sources[source].ignore:
            ignored.update(globs.matching(glob, checkpoint.tensors) or ())
        unused[source] = [name for name in checkpoint.tensors if name not in ignored]
    return unused


def _drops(match: _Match) -> dict[str, list[str]]:
    """Returns globs of what cannot be made, by why: whole components, parts of them, files."""
    missing = {spec.name for spec in match.missing}
    drops: dict[str, list[str]] = {_WHOLE: [], _PART: [], _FILE: []}
    for component in dict.fromkeys(spec.component for spec in match.missing if spec.component):
        members = {spec.name for spec in match.recipe.objects if spec.component == component}
        below = {spec.name for spec in match.recipe.objects if spec.name.startswith(f"{component}/")}
        if members == below and members <= missing:
            drops[_WHOLE].append(f"{component}/*")
            missing -= members
    drops[_PART] = [spec.name for spec in match.missing if spec.name in missing]
    files = [spec for spec in match.recipe.objects if isinstance(spec, ResourceSpec) and not needs(spec)]
    drops[_FILE] = [spec.name for spec in files if spec.name not in match.digests]
    return drops


def _extension(
    match: _Match, inputs: Mapping[str, Path], drops: Mapping[str, Sequence[str]], others: Sequence[str]
) -> Extension:
    recipe, sources = match.recipe, match.sources
    default = next(iter(sources))
    name = model_name(sources[default])
    moved = {source for source in sources if _is_moved(recipe.sources[source], sources[source])}
    changes = [*_drop_lines(drops), *_shape_lines(match, sources), *_resource_lines(match, moved)]
    wanted = tuple(name for name in recipe.inputs if name not in inputs)
    sections = [
        _source_lines(recipe, sources),
        _input_lines(recipe, inputs),
        ["change:", *changes] if changes else [],
        _ignore_lines(match),
    ]
    lines = [line for sentence in _sentences(match, name, wanted, others) for line in comment(sentence, 0)]
    lines += [
        "schema: 1",
        f"id: {scalar(f'{name}-draft')}",
        f"extends: {match.name}",
        "# What an engine will know the weights by.",
        f"artifact: {{weights_id: {scalar(f'{recipe.weights_id}-draft')}}}",
        "# What the shipped recipe cites was measured on other weights; say here what is known of these.",
        "evidence: none",
    ]
    for section in filter(None, sections):
        lines += ["", *section]
    notes = [f"plan and run need --input {input_name}=PATH, as {match.name} does" for input_name in wanted]
    if drops[_PART]:
        notes.append(f"{counted(len(drops[_PART]), 'object')} of {match.name} cannot be made; {drops[_PART][0]} first")
    return Extension(match.name, "\n".join(lines) + "\n", sources, wanted, tuple(notes))


def _sentences(match: _Match, name: str, wanted: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    """Yields what stands at the top of the draft."""
    yield f"A draft for {printable(name)}: everything that is not said here is as in the shipped recipe {match.name}."
    if all(
        spec.revision and (spec.repo, spec.revision) == (checkpoint.repo, checkpoint.revision)
        for spec, checkpoint in zip(match.recipe.sources.values(), match.sources.values(), strict=True)
    ):
        yield "These are the very sources of the shipped recipe, which can be used as it is."
    for other in others:
        yield f"The shipped recipe {other} fits as well."
    if not match.missing and not any(match.unused.values()):
        yield "Every tensor that it wants is here, and no other."
    for needed in wanted:
        yield f"It needs --input {needed}=PATH, as that does."


def _is_moved(spec: SourceSpec, checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.repo and checkpoint.revision and checkpoint.repo != spec.repo)


def _source_lines(recipe: Recipe, sources: Mapping[str, Checkpoint]) -> list[str]:
    """Returns where the sources lie, and the members of their configs that differ."""
    notes: list[str] = []
    lines: list[str] = []
    for source, checkpoint in sources.items():
        spec, members = recipe.sources[source], []
        if checkpoint.repo and checkpoint.revision:
            members = [f"    repo: {scalar(checkpoint.repo)}", f"    revision: {scalar(checkpoint.revision)}"]
        elif spec.repo:
            text = f"Source {source} is a plain directory: {spec.repo} and its revision are inherited"
            notes += comment(f"{text}; say where it is from.", 0)
        if checkpoint.applied_prefixes:
            members += ["    prefix:", *member_lines(checkpoint.applied_prefixes, 6)]
        if differing := _differing(spec.config, checkpoint.config or {}):
            members += comment("Here config.json differs from what the shipped recipe expects.", 4)
            members += ["    config:", *member_lines(differing, 6)]
        lines += [f"  {scalar(source)}:", *members] if members else []
    return [*notes, *(["sources:", *lines] if lines else [])]


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members of a config that are there and have another value than the expected one."""
    differing: dict[str, Any] = {}
    for key, value in expected.items():
        if key not in found:
            continue
        if isinstance(value, Mapping) and isinstance(found[key], Mapping):
            if nested := _differing(value, found[key]):
                differing[key] = nested
        elif value != found[key] or isinstance(value, bool) != isinstance(found[key], bool):
            differing[key] = found[key]
    return differing


def _input_lines(recipe: Recipe, inputs: Mapping[str, Path]) -> list[str]:
    lines = []
    for name, spec in recipe.inputs.items():
        if name in inputs:
            found, _ = file_digest(os.fspath(inputs[name]))
            if found != spec.sha256:
                lines.append(f"  {name}: {{sha256: {scalar(found)}}}")
    return ["# Another file than the shipped recipe's.", "inputs:", *lines] if lines else []


def _drop_lines(drops: Mapping[str, Sequence[str]]) -> list[str]:
    lines: list[str] = []
    for why, globs in drops.items():
        lines += comment(why, 2) if globs else []
        lines += (f"  - drop: {scalar(glob)}" for glob in globs)
    return lines


def _shape_lines(match: _Match, sources: Mapping[str, Checkpoint]) -> list[str]:
    """Returns the shapes of objects that are one whole tensor, where the tensor has another one."""
    lines: list[str] = []
    for spec in match.recipe.objects:
        if isinstance(spec, TensorSpec) and isinstance(spec.value, Tensor):
            found = sources[spec.value.source].tensors.get(spec.value.name)
            if found is not None and found.shape != spec.shape:
                lines.append(f"  - {{objects: {scalar(spec.name)}, shape: {list(found.shape)}}}")
    return [*comment("Other shapes than the shipped recipe's.", 2), *lines] if lines else []


def _resource_lines(match: _Match, moved: set[str]) -> list[str]:
    """Returns the digests of resources that are not inherited, those that differ from the shipped ones first."""
    differing: list[str] = []
    equal: list[str] = []
    for spec in match.recipe.objects:
        found = match.digests.get(spec.name)
        if not isinstance(spec, ResourceSpec) or found is None:
            continue
        is_moved = any(origin.source in moved and origin.file for origin in spec.origins)
        if found != spec.sha256 or is_moved:
            lines = equal if found == spec.sha256 else differing
            lines += [f"  - resource: {scalar(spec.name)}", f"    sha256: {scalar(found)}"]
    if differing:
        pinned = any(isinstance(spec, ResourceSpec) and spec.sha256 for spec in match.recipe.objects)
        told = "Other files than the shipped recipe's." if pinned else "The files that are here; any would do."
        differing = [*comment(told, 2), *differing]
    if equal:
        equal = [*comment("The same files as the shipped recipe's; digests belong to a repository.", 2), *equal]
    return differing + equal


def _ignore_lines(match: _Match) -> list[str]:
    """Returns the sections `sets` and `ignore` for what the recipe knows nothing of."""
    trees = {
        source: fold((glob_parts(name), None) for name in sorted(unused, key=lambda name: order(split(name))))
        for source, unused in match.unused.items()
        if unused
    }
    if not trees:
        return []
    # Named as no set of a shipped recipe is: one of the same name would take its place.
    sets = Sets(trees.values(), prefix="unused_")
    writer = Writer(Names(()), sets, "", "names")
    total = sum(map(len, match.unused.values()))
    text = f"{counted(total, 'tensor')} that no object of the shipped recipe is made of"
    lines = [*comment(f"{text}; add objects if the engine wants them.", 0), "ignore:"]
    if len(match.unused) > 1:
        for source, tree in trees.items():
            lines += [f"  {scalar(source)}:", *writer.lines(tree, indent=4)]
    else:
        lines += writer.lines(next(iter(trees.values())))
    definitions = sets.lines()
    return ["sets:", *definitions, "", *lines] if definitions else lines
