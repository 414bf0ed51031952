"""Every tensor of every source becomes part of one object, or is left out: several sources are one model.

Owns who supplies what two sources have, and output heads that may be tied. Refuses to know how a recipe is written.

Source: recipe.md, duty 6.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_convert.draft.choices import Placed, Unplaced, choose
from ninfer_convert.errors import PlanError, printable
from ninfer_convert.formats import NumericFormat
from ninfer_convert.source.checkpoint import Checkpoint

HEADS = {"whisper": "proj_out.weight"}
"""What the output head is called, by model_type."""

HEAD = "lm_head.weight"

_OTHER_HEADS = ("output.weight", "embed_out.weight", "language_model.lm_head.weight")

_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|tok_embeddings|word_embeddings|wte|shared)\.weight")
_GENERATES = re.compile(".*(?:ForCausalLM|LMHeadModel|ForConditionalGeneration)")
_WRITABLE = re.compile("[^<>]{1,900}")


@dataclass(frozen=True, slots=True)
class Placement:
    """What a draft says of every tensor.

    `unplaced` maps each source to its tensors that become nothing, with the reasons; `notes` are sentences for the
    reader of the draft.
    """

    placed: tuple[Placed, ...]
    unplaced: Mapping[str, tuple[Unplaced, ...]]
    notes: tuple[str, ...]


def place(sources: Mapping[str, Checkpoint], matrix: NumericFormat) -> Placement:
    """Returns what becomes of every tensor of the sources, sorted by name.

    Of what two sources have, encoded words come first, then the source that stands first.

    Args:
        sources: the open checkpoints by their names in the recipe, the default one first.
        matrix: the format of matrices.

    Raises:
        PlanError: nothing is left to be placed.
    """
    winners: dict[str, Placed] = {}
    unplaced: dict[str, list[Unplaced]] = {source: [] for source in sources}
    for source, checkpoint in sources.items():
        for found in choose(checkpoint, source, matrix):
            if isinstance(found, Unplaced):
                unplaced[source].append(found)
                continue
            if reason := _unwritable(found.name):
                unplaced[source] += (Unplaced(name, reason) for name in found.tensors)
                continue
            key = _key(found)
            held = winners.get(key)
            is_better = held is not None and held.made.source != source and found.made.is_copy and not held.made.is_copy
            if held is None or is_better:
                winners[key] = found
            loser = held if is_better else found if held is not None else None
            if loser is not None:
                reason = _other_source(loser, winners[key])
                unplaced[loser.made.source] += (Unplaced(name, reason, is_elsewhere=True) for name in loser.tensors)
    if not winners:
        reasons = {entry.reason for entries in unplaced.values() for entry in entries}
        raise PlanError(f"no tensor can be placed: {'; '.join(sorted(map(printable, reasons))) or 'there is none'}")
    notes = tuple(_tie(winners, next(iter(sources.values()))))
    return Placement(
        tuple(sorted(winners.values(), key=lambda item: (item.name, item.made.role))),
        {source: tuple(sorted(entries, key=lambda entry: entry.name)) for source, entries in unplaced.items()},
        notes,
    )


def _key(found: Placed) -> str:
    """Returns what an object is of: a module and its `.weight` are one."""
    if found.made.role == "module":
        return f"{found.name}.weight"
    return found.name


def _other_source(loser: Placed, winner: Placed) -> str:
    what = "the words come" if winner.made.is_copy and not loser.made.is_copy else "taken"
    return f"{what} from source {winner.made.source}"


def _unwritable(name: str) -> str:
    if not name.isprintable() or not _WRITABLE.fullmatch(name):
        return "no recipe can write this name (it has < or >, is not printable, or too long)"
    return ""


def _tie(winners: dict[str, Placed], checkpoint: Checkpoint) -> Iterator[str]:
    """Gives the output head of a model that ties it to the embedding; yields what the reader should know."""
    config: Mapping[str, Any] = checkpoint.config or {}
    text = config.get("text_config")
    said = [scope.get("tie_word_embeddings") for scope in (config, text) if isinstance(scope, Mapping)]
    ties = {value for value in said if isinstance(value, bool)}
    architectures = config.get("architectures")
    generates = isinstance(architectures, list) and any(_GENERATES.fullmatch(str(name)) for name in architectures)
    name = HEADS.get(str(config.get("model_type")), HEAD)
    if ties != {True} or not generates:
        if ties == {True, False}:
            yield "config.json contradicts itself about tie_word_embeddings: see to the output head."
        elif generates and not winners.keys() & {name, *_OTHER_HEADS}:
            yield f"No {name} is here, and config.json does not say that the output head is tied: see to it."
        return
    embeddings = [item for item in winners.values() if _EMBEDDING.fullmatch(item.name)]
    head = winners.get(name)
    if len(embeddings) != 1 or embeddings[0].made.is_copy or (head and head.made.is_copy):
        yield "config.json says that the output head is tied to the embedding; the draft has no object for it."
        return
    embedding = embeddings[0]
    if head is not None and not _is_alike(checkpoint, head, embedding):
        yield "config.json says that the output head is tied to the embedding, which has another shape or dtype."
        return
    made = dataclasses.replace(
        embedding.made,
        before="{tied: {head: ",
        after=f", embedding: {embedding.name}" + "}}",
        comment="tied to the embedding, as config.json says; drop it if the engine reads the embedding instead",
    )
    winners[name] = Placed(name, made, (name, *embedding.tensors))


def _is_alike(checkpoint: Checkpoint, head: Placed, embedding: Placed) -> bool:
    found = [checkpoint.tensors.get(item.name) for item in (head, embedding)]
    shapes = {(info.shape, info.dtype) for info in found if info is not None}
    return len(shapes) == 1
