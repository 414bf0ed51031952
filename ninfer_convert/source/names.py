"""Tensor names: prefix rules between file and recipe, and the names most like a missing one.

Owns the mapping from what a file calls a tensor to what the recipe calls it. Refuses to know files and data.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ninfer_convert.errors import SourceError
from ninfer_convert.source.header import shown

MAX_NEAREST = 3
_CANDIDATES = 64

WRAPPERS = frozenset(
    {"model", "language_model", "module", "_orig_mod", "_fsdp_wrapped_module", "base_model"}
)
"""Name parts that exporters and training wrappers put in front; what follows them is the same tensor."""

_ADAPTER_PARTS = ("base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


@dataclass(frozen=True, slots=True)
class Renaming:
    """Every stored name with its recipe-side name, and the rules that changed at least one."""

    names: Mapping[str, str]
    applied: Mapping[str, str]


def rename(stored: Sequence[str], prefixes: Mapping[str, str], where: str) -> Renaming:
    """Returns the recipe-side name of every stored name.

    A name takes the longest rule FROM -> TO it begins with, once: FROM gives way to TO. A name that already
    begins with TO stays, when TO itself begins with FROM (`model.` -> `model.language_model.`). A rule whose
    TO is empty strips FROM, which every stored name must carry.

    Raises:
        SourceError: a rule that no name begins with, a strip rule that not all names follow, two names that
            become equal; all of them at once.
    """
    rules = sorted(prefixes.items(), key=lambda rule: -len(rule[0]))
    problems = [problem for rule in prefixes.items() if (problem := _rule_problem(rule, stored, where))]
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    applied: set[str] = set()
    for name in stored:
        rule = next((rule for rule in rules if name.startswith(rule[0])), None)
        renamed = name if rule is None else _apply(name, *rule)
        if rule is not None and renamed != name:
            applied.add(rule[0])
        names[name] = renamed
        first = owners.setdefault(renamed, name)
        if first != name:
            problems.append(
                f"{where}: tensors {shown(first)} and {shown(name)} are ambiguous:"
                f" by the prefix rules both are {shown(renamed)}"
            )
    if problems:
        raise SourceError(*problems)
    return Renaming(names, {rule: to for rule, to in prefixes.items() if rule in applied})


def nearest(wanted: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns up to three of `names` that are most like `wanted`, the best one first.

    A name that ends alike, component by component, is taken before one that is merely spelled alike.
    """
    components = wanted.split(".")
    distinct = set(components)
    candidates = []
    for name in names:
        parts = name.split(".")
        tail = _common_tail(components, parts)
        shared = len(distinct.intersection(parts)) / len(distinct.union(parts))
        candidates.append((tail if tail > 1 else 0, shared, -abs(len(name) - len(wanted)), name))
    best = heapq.nlargest(_CANDIDATES, candidates)
    alike = [name for tail, _, _, name in best if tail]
    rest = [name for tail, _, _, name in best if not tail]
    spelled = difflib.get_close_matches(wanted, rest, n=MAX_NEAREST, cutoff=0.6) if len(alike) < MAX_NEAREST else []
    return tuple((alike + spelled)[:MAX_NEAREST])


def unwrapped(name: str) -> str:
    """Returns a name without the wrapper parts at its beginning."""
    parts = name.split(".")
    first = next((place for place, part in enumerate(parts) if part not in WRAPPERS), len(parts))
    return ".".join(parts[first:])


def unmerged_adapter(names: Iterable[str]) -> str | None:
    """Returns why the names are those of a model with a LoRA adapter beside its weights; None if they are not."""
    for name in names:
        part = next((part for part in name.split(".") if part in _ADAPTER_PARTS), None)
        if part is not None:
            return (
                f"tensor {shown(name)} ({part}) belongs to a LoRA adapter that has not been merged;"
                " required: one weight for each module; merge the adapter into its base model first"
            )
    return None


def _rule_problem(rule: tuple[str, str], stored: Sequence[str], where: str) -> str | None:
    beginning, to = rule
    text = f"{where}: prefix rule {shown(beginning)}={shown(to)}"
    carrier = next((name for name in stored if name.startswith(beginning)), None)
    if carrier is None:
        existing = ", ".join(shown(name) for name in stored[:MAX_NEAREST]) or "none"
        return f"{text}: no tensor name begins with {shown(beginning)}; names that exist: {existing}"
    other = next((name for name in stored if not name.startswith(beginning)), None)
    if not to and other is not None:
        return f"{text} strips a prefix that every name must carry: {shown(carrier)} does, {shown(other)} does not"
    return None


def _apply(name: str, beginning: str, to: str) -> str:
    if to.startswith(beginning) and name.startswith(to):
        return name
    return to + name[len(beginning) :]


def _common_tail(left: Sequence[str], right: Sequence[str]) -> int:
    count = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b:
            break
        count += 1
    return count
