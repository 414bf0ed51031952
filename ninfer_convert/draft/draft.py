"""A draft from beginning to end: of a model that a shipped recipe knows, or of any other.

Owns the order of work and the last check: a draft that does not load, or does not plan, is never handed out.

Source: recipe.md; cli.md, `recipe`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.draft.choices import Unplaced
from ninfer_convert.draft.families import Extension, extensions, relatives
from ninfer_convert.draft.folding import Node, fold, order, split
from ninfer_convert.draft.frame import model_name, resource_lines, source_lines
from ninfer_convert.draft.naming import Names
from ninfer_convert.draft.placement import Placement, place
from ninfer_convert.draft.sets import Sets
from ninfer_convert.draft.text import Writer, comment, glob_parts, scalar
from ninfer_convert.draft.trial import tried
from ninfer_convert.errors import PlanError, SourceError, UsageError, printable
from ninfer_convert.formats import W8G32_F16S, NumericFormat
from ninfer_convert.recipe.counting import counted
from ninfer_convert.source.checkpoint import Checkpoint

DEFAULT_MATRIX = W8G32_F16S
"""Of matrices when no format is chosen: nobody has measured the model, so the one that loses least."""

_PLACE = re.compile(r"^.*?\.yaml:[0-9]+:[0-9]+: ")
"""Where in a recipe something is wrong, at the beginning of a message."""

_Group = tuple[str, tuple[Node, ...]]
"""Why tensors are left out, and their names."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A recipe as text; `extends` is the shipped recipe it starts from, `notes` are lines for the user."""

    text: str
    extends: str | None
    objects: int
    notes: tuple[str, ...]


def draft_recipe(
    sources: Mapping[str, Checkpoint], inputs: Mapping[str, Path], matrix: NumericFormat | None = None
) -> Draft:
    """Returns a recipe that converts checkpoints as they are: it loads, and it plans, without an edit.

    Args:
        sources: the open checkpoints by their names in the recipe, the default one first.
        inputs: auxiliary files by name; only a shipped recipe that is started from can ask for them.
        matrix: the format of matrices in a draft of our own; None starts from a shipped recipe where one fits.

    Raises:
        SourceError: a checkpoint is incomplete, or quantized in a way that no recipe can read.
        UsageError: an input is given that no recipe asks for.
        PlanError: no tensor can be placed, or what was drafted cannot be planned.
        OutputError: a medium did not answer.
    """
    _require_usable(sources)
    reasons: list[str] = []
    if matrix is None:
        for extension in extensions(sources, inputs):
            try:
                objects = tried(extension.text, extension.sources, inputs, without=extension.wanted)
            except PlanError as error:
                reasons.append(_reason(extension, error))
                continue
            return Draft(extension.text, extension.base, objects, extension.notes)
    if inputs:
        named = ", ".join(f"--input {printable(name)}" for name in inputs)
        raise UsageError(f"{named}: no shipped recipe that takes it fits", *reasons)
    placement = place(sources, matrix or DEFAULT_MATRIX)
    reasons = reasons[:1] or (relatives(sources) if matrix is None else [])
    text = full_text(sources, placement, matrix or DEFAULT_MATRIX, reasons)
    objects = tried(text, sources, {})
    lost = sum(1 for entries in placement.unplaced.values() for entry in entries if not entry.is_elsewhere)
    notes = (f"{counted(lost, 'tensor')} in no object; see `ignore` in the draft for the reasons",) if lost else ()
    return Draft(text, None, objects, notes)


def full_text(
    sources: Mapping[str, Checkpoint], placement: Placement, matrix: NumericFormat, reasons: list[str]
) -> str:
    """Returns a recipe that tells everything itself; `reasons` are sentences on why it extends no shipped one."""
    default = next(iter(sources))
    name = model_name(sources[default])
    objects = fold(
        (split(item.name), item.made)
        for item in sorted(placement.placed, key=lambda item: (order(split(item.name)), item.made.role))
    )
    ignored = {source: _groups(entries) for source, entries in placement.unplaced.items() if entries}
    sets = Sets([objects, *(tree for groups in ignored.values() for _, tree in groups)])
    names = Names(placement.placed)
    body = ["objects:"]
    if files := resource_lines(sources):
        body += [*files, ""]
    body += Writer(names, sets, default).lines(objects)
    if ignored:
        body += ["", "ignore:", *_ignore_lines(ignored, Writer(names, sets, default, "names"), len(sources) > 1)]
    lines = [
        *comment(
            f"A draft for {printable(name)}, made from the headers of its checkpoint. Nothing in it has been measured: "
            f"look at it before you use it.\n{counted(len(placement.placed), 'tensor')}, in stored order.",
            0,
        ),
        *(line for note in (*reasons, *placement.notes) for line in comment(note, 0)),
        "schema: 1",
        f"id: {scalar(f'{name}-draft')}",
        "# What an engine will know the artifact by.",
        f"artifact: {{model_id: {scalar(name)}, weights_id: draft}}",
        f"# Nobody has measured what {matrix.name} costs this model; say here why it is good enough once you know.",
        "evidence: none",
        "",
        "sources:",
    ]
    for source, checkpoint in sources.items():
        lines += source_lines(source, checkpoint, _dtypes(source, checkpoint, placement))
    if definitions := sets.lines():
        lines += ["", "sets:", *definitions]
    return "\n".join([*lines, "", *body]) + "\n"


def _require_usable(sources: Mapping[str, Checkpoint]) -> None:
    problems = []
    for name, checkpoint in sources.items():
        problems += [
            f"source {name}: {reason}"
            for reason in (checkpoint.foreign_quantization(), checkpoint.unmerged_adapter())
            if reason
        ]
        for file in sorted(set(checkpoint.absent.values())):
            problems.append(
                f"source {name}: {printable(file)} is absent from {printable(checkpoint.location)}: "
                f"{checkpoint.absence}; a draft needs the header of every file that the index names"
            )
    if problems:
        raise SourceError(*problems)


def _groups(entries: Sequence[Unplaced]) -> list[_Group]:
    """Returns what becomes nothing, folded into loops, by reason."""
    names: dict[str, list[str]] = {}
    for entry in sorted(entries, key=lambda entry: order(split(entry.name))):
        names.setdefault(entry.reason, []).append(entry.name)
    return [(reason, fold((glob_parts(name), None) for name in found)) for reason, found in names.items()]


def _ignore_lines(ignored: Mapping[str, Sequence[_Group]], writer: Writer, by_source: bool) -> list[str]:
    lines: list[str] = []
    for source, groups in ignored.items():
        if by_source:
            lines.append(f"  {scalar(source)}:")
        indent = 4 if by_source else 2
        for reason, tree in groups:
            lines += comment(f"{reason[0].upper()}{reason[1:]}.", indent)
            lines += writer.lines(tree, indent=indent)
    return lines


def _dtypes(source: str, checkpoint: Checkpoint, placement: Placement) -> set[str]:
    """Returns the dtypes of the tensors that are taken from a source."""
    tensors = checkpoint.tensors
    used = (name for item in placement.placed if item.made.source == source for name in item.tensors)
    return {tensors[name].dtype for name in used if name in tensors}


def _reason(extension: Extension, error: PlanError) -> str:
    """Returns the first thing that is wrong with an extension, without the paths of this machine."""
    message = _PLACE.sub("", error.messages[0])
    for checkpoint in extension.sources.values():
        message = message.replace(f" ({printable(checkpoint.location)})", "")
    return f"It is not drafted from the shipped recipe {extension.base}, which does not fit: {message}."
