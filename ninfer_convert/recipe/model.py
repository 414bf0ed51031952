"""A recipe as frozen data: what every stored object of one artifact is made of.

Owns the data model. Refuses to know YAML syntax (`recipe_loader`), tensor data and where checkpoints lie.

Source: recipe.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ninfer_convert.recipe.expression import Expression, Mark


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One checkpoint a recipe reads.

    `dtypes`, when not empty, lists the safetensors dtypes the checkpoint may hold at all. `config` holds the
    members that `config.json` must have with equal values (nested mappings are compared member by member).
    `prefixes` maps the beginning of a name in the file to what the recipe calls it.
    """

    name: str
    repo: str | None
    revision: str | None
    dtypes: tuple[str, ...]
    config: Mapping[str, Any]
    prefixes: Mapping[str, str]
    ignore: tuple[tuple[str, Mark], ...]
    mark: Mark = field(compare=False)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One auxiliary input file."""

    name: str
    sha256: str | None
    mark: Mark = field(compare=False)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a block that an object was declared in: the block's place, the loop variables it set."""

    mark: Mark
    loop: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ResourceOrigin:
    """One place a resource may come from.

    Exactly one of `file` (a path inside the directory of `source`) and `input` (an auxiliary input) is set.
    `member` names a string member of that JSON file, whose decoded UTF-8 text is the resource; a list of
    `{name, template}` members stands for its `default` entry.
    """

    source: str
    file: str | None
    input: str | None
    member: str | None
    mark: Mark = field(compare=False)


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """One stored resource; the first origin that exists is taken."""

    name: str
    origins: tuple[ResourceOrigin, ...]
    sha256: str | None
    component: str | None
    mark: Mark = field(compare=False)
    rounds: tuple[Round, ...] = field(default=(), compare=False)
    """The blocks around the entry, the outermost first."""
    changes: tuple[Mark, ...] = field(default=(), compare=False)
    """The changes that were made to it, and the moves of a source that took its digest, in order."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A rule that the words of an object must keep: `finite`, `positive`, `non-negative`, `unique` or `range`.

    `low` and `high`, both included, are set for `range` only.
    """

    rule: str
    low: float | None
    high: float | None
    mark: Mark = field(compare=False)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor.

    `words` tells a word copy (the expression's leaves are `Module`s) from a value expression. `encoder` is
    set exactly where the format has one to choose and the value is not a word copy.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    layout: str
    encoder: str | None
    value: Expression
    words: bool
    requirements: tuple[Requirement, ...]
    component: str | None
    mark: Mark = field(compare=False)
    rounds: tuple[Round, ...] = field(default=(), compare=False)
    """The blocks around the entry, the outermost first."""
    changes: tuple[Mark, ...] = field(default=(), compare=False)
    """The changes that were made to it, in order."""
    format_change: Mark | None = field(default=None, compare=False)
    """The change that set its format, the last one that did; None for the entry's own format."""

    @property
    def format_origin(self) -> str:
        """Says in a message about the format where it comes from, if not from the entry."""
        return "" if self.format_change is None else f" (set at {self.format_change})"


ObjectSpec = TensorSpec | ResourceSpec


@dataclass(frozen=True, slots=True)
class ConditionSpec:
    """A demand on the sources that belongs to no object: an expression (a `Same`) that must hold."""

    value: Expression
    mark: Mark = field(compare=False)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why the lossy choices for the objects that match one of the globs are believed good enough."""

    objects: tuple[tuple[str, Mark], ...]
    text: str
    mark: Mark = field(compare=False)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole recipe, loops unrolled, in stored order."""

    id: str
    model_id: str
    weights_id: str
    evidence: tuple[Evidence, ...]
    """Empty for a demonstration recipe, which says `evidence: none`."""
    sources: Mapping[str, SourceSpec]
    """The first one is the default source of a tensor named without one."""
    inputs: Mapping[str, InputSpec]
    objects: tuple[ObjectSpec, ...]
    conditions: tuple[ConditionSpec, ...]
    optional_components: frozenset[str]
    sha256: str
    """Digest of the recipe text, and of the texts it extends, as read."""
    path: str
