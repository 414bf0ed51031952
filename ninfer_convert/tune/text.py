"""A proposal written down: a recipe that extends the tuned one and says why, or JSON values.

Owns the wording and which objects share an entry. Refuses to know how formats were chosen (`proposal`).

Source: recipe.md, duty 7; cli.md, `recipe tune`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ninfer_convert.errors import UsageError, printable
from ninfer_convert.formats import FORMATS
from ninfer_convert.plan.error_model import TOLERANCE
from ninfer_convert.plan.measured import Measurements
from ninfer_convert.plan.what_if import is_guess, total_error
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.files import SUFFIXES, locate
from ninfer_convert.recipe.globs import MAX_MATCHES
from ninfer_convert.recipe.loader import is_lossy
from ninfer_convert.recipe.model import Recipe, TensorSpec
from ninfer_convert.tune.folding import by_role, fold, role
from ninfer_convert.tune.proposal import Change, Proposal

MIB = 2**20


def proposal_json(proposal: Proposal, measurements: Measurements) -> dict[str, Any]:
    """Returns the document of `recipe tune --json`, without the recipe's text."""
    before, after = _together(proposal.tuned)
    return {
        "target_bytes": proposal.wish.target_bytes,
        "file_bytes": proposal.nbytes_after,
        "recipe_file_bytes": proposal.nbytes_before,
        "report": measurements.where,
        "model": f"an estimate: quantization noise scaled from the measured error, within about {TOLERANCE:.0%}",
        "weight": _weight(proposal),
        "expected_error": {
            "objects": len(proposal.tuned), "before": before, "after": after, "least": proposal.least
        },
        "squared_error_saved_by_another_mib": proposal.slope,
        "unmeasured": list(proposal.unmeasured),
        "objects": [
            {
                "name": change.expected.name,
                "format_before": change.expected.present,
                "format_after": change.expected.wanted,
                "bytes_before": change.nbytes_before,
                "bytes_after": change.nbytes_after,
                "before": change.expected.before,
                "after": change.expected.after,
            }
            for change in proposal.tuned
        ],
    }


def recipe_text(proposal: Proposal, recipe: Recipe, recipe_name: str, measurements: Measurements) -> str:
    """Returns a recipe that extends the tuned one, ends with a newline, and whose comments say why.

    Args:
        recipe: the tuned recipe.
        recipe_name: how it was named: a shipped name, or a path, which stands in `extends` as it is.

    Raises:
        UsageError: the recipe cannot be extended by this name, or it would take too many globs.
    """
    if locate(recipe_name) == recipe_name and not recipe_name.endswith(SUFFIXES):
        raise UsageError(f"{printable(recipe_name)}: a recipe that is extended is named by a path that ends in .yaml")
    entries = _entries(proposal, recipe)
    lines = [
        *_comments(proposal, recipe, recipe_name, measurements),
        "schema: 1",
        f"id: {_quoted(recipe.id + '-tuned')}",
        f"extends: {_quoted(recipe_name)}",
    ]
    if entries and _needs_evidence(recipe):
        text = (
            f"The formats under 'change' were proposed from weight errors that the report of {measurements.artifact} "
            "tells, measured and estimated. Nobody has evaluated them."
        )
        lines.append(f"evidence: [{{text: {json.dumps(text)}}}]")
    if entries:
        lines += ["change:", *entries]
    return "\n".join(lines) + "\n"


def _comments(proposal: Proposal, recipe: Recipe, recipe_name: str, measurements: Measurements) -> list[str]:
    before, after = _together(proposal.tuned)
    count = f"{counted(len(proposal.tuned), 'tuned object')}, weighed by {_weight(proposal)}"
    lines = [
        f"Proposed by `recipe tune`: the least expected squared error in at most {proposal.wish.target_bytes:,} bytes.",
        f"Errors are relative L2 errors of weights, measured ({measurements.where})",
        f"or, in another format, estimated from that within about {TOLERANCE:.0%}. Nobody has evaluated this choice.",
        f"  artifact        {proposal.nbytes_before:,} -> {proposal.nbytes_after:,} bytes",
        f"  expected error  {before:.5f} -> {after:.5f}, {count}",
        f"  no choice of these formats is below {proposal.least:.5f} in that size",
    ]
    if proposal.slope:
        saved = _part(proposal.slope * _step_bytes(proposal) / MIB)
        lines.append(f"  1 % more bytes would save {saved} of the squared error")
        lines.append("  (changes that take bytes save about that or more for each 1 %, the others cost that or less)")
    if proposal.unmeasured:
        count, first = counted(len(proposal.unmeasured), "object"), proposal.unmeasured[0]
        lines.append(f"  not in the report, and left as they are: {count}, {first} first")
    if not proposal.changes:
        lines.append("The recipe's own formats are the best ones for this size: nothing is changed.")
    if locate(recipe_name) == recipe_name and not recipe_name.startswith("/"):
        lines.append("The path behind `extends` is seen from where this file lies.")
    lines.append("The artifact keeps the name of the recipe's weights. To tell them apart, give them another:")
    lines.append(f"artifact: {{weights_id: {_quoted(recipe.weights_id + '-tuned')}}}")
    return [f"# {printable(line)}" for line in lines]


def _entries(proposal: Proposal, recipe: Recipe) -> list[str]:
    """Returns the lines under `change`, comments among them."""
    names = [spec.name for spec in recipe.objects if isinstance(spec, TensorSpec)]
    changes = {change.expected.name: change for change in proposal.changes}
    noise = sum(change.expected.after**2 * change.expected.weight for change in proposal.tuned)
    lines: list[str] = []
    globs = 0
    for same_role in by_role(changes):
        for wanted in dict.fromkeys(changes[name].expected.wanted for name in same_role):
            group = [changes[name] for name in same_role if changes[name].expected.wanted == wanted]
            members = [change.expected.name for change in group]
            lines += [f"  # {printable(line)}" for line in _reason(group, noise, _step_bytes(proposal))]
            for glob in fold(members, names):
                encoder = "".join(f", encoder: {encoder}" for encoder in FORMATS[wanted].encoders[:1])
                lines.append(f"  - {{objects: {_quoted(glob)}, format: {wanted}{encoder}}}")
                globs += 1
            if globs * len(names) > MAX_MATCHES:
                raise UsageError(
                    f"the choice takes {globs} or more globs over {counted(len(names), 'object')}, and a recipe "
                    f"may look at {MAX_MATCHES} names; tune fewer objects (--objects, --keep) "
                    "or allow fewer formats (--formats)"
                )
    return lines


def _reason(group: Sequence[Change], noise: float, step_bytes: float) -> list[str]:
    """Returns what a change of objects of one role to one format costs and saves."""
    before, after = _together(group)
    present = "/".join(dict.fromkeys(change.expected.present for change in group))
    size_before, size_after = (sum(sizes) for sizes in zip(*_sizes(group), strict=True))
    named = role([change.expected.name for change in group])
    lines = [f"{named}: {present} -> {group[0].expected.wanted}"]
    text = f"  {size_before:,} -> {size_after:,} bytes, expected error {before:.5f} -> {after:.5f}"
    moved = sum(change.expected.weight * (change.expected.before**2 - change.expected.after**2) for change in group)
    if noise and size_after != size_before:
        price = moved / noise / (size_after - size_before) * step_bytes
        text += f", {_part(price)} of the squared error for each 1 % of the artifact"
    if any(is_guess(change.expected.measured, change.expected.wanted) for change in group):
        text += ", if the values are normal"
    return [*lines, text]


def _step_bytes(proposal: Proposal) -> float:
    """Returns the bytes by which prices are told: 1 % of the artifact, since a MiB may be most of a small one."""
    return proposal.nbytes_after / 100


def _sizes(group: Sequence[Change]) -> list[tuple[int, int]]:
    return [(change.nbytes_before, change.nbytes_after) for change in group]


def _part(value: float) -> str:
    return f"{value * 100:.3g} %"


def _together(group: Sequence[Change]) -> tuple[float, float]:
    """Returns the relative error of some objects together, before and after."""
    before = total_error((change.expected.before, change.expected.weight) for change in group)
    return before, total_error((change.expected.after, change.expected.weight) for change in group)


def _weight(proposal: Proposal) -> str:
    return "elements" if proposal.wish.by_elements else "squared norm"


def _needs_evidence(recipe: Recipe) -> bool:
    """Tells whether the recipe cites evidence at all; one that loses precision and cites none is a demonstration."""
    return bool(recipe.evidence) or not any(isinstance(spec, TensorSpec) and is_lossy(spec) for spec in recipe.objects)


def _quoted(text: str) -> str:
    """Returns text as YAML takes it, quoted where it might be anything but a plain word."""
    plain = text.replace("/", "").replace("-", "").replace("_", "").replace(".", "")
    return text if plain.isalnum() and plain.isascii() and text[0].isalpha() else json.dumps(text)
