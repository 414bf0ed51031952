"""`plan --set`: the recipe with other formats, and what that would change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ninfer_convert.cli.artifact import load_report
from ninfer_convert.cli.options import size_text
from ninfer_convert.cli.output import say
from ninfer_convert.errors import UsageError, printable
from ninfer_convert.plan.error_model import TOLERANCE
from ninfer_convert.plan.measured import Measurements, read_measurements
from ninfer_convert.plan.planner import Plan
from ninfer_convert.plan.what_if import (
    Expected,
    expected_errors,
    file_bytes,
    is_guess,
    parse_setting,
    stored_objects,
    total_error,
    with_settings,
)
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.model import Recipe, TensorSpec

WITHIN = f"within about {TOLERANCE:.0%} for values without very heavy tails"


class WhatIf:
    """Settings over one recipe, and what an earlier conversion's report lets expect of them."""

    def __init__(self, settings: Sequence[str], report_path: Path | None) -> None:
        self._settings = [parse_setting(text) for text in settings]
        self._measurements: Measurements | None = None
        if report_path is not None:
            self._measurements = read_measurements(load_report(report_path), printable(str(report_path)))
        self._before: dict[str, TensorSpec] = {}

    def change(self, recipe: Recipe) -> Recipe:
        """Returns the recipe with the settings made."""
        self._before = {spec.name: spec for spec in recipe.objects if isinstance(spec, TensorSpec)}
        return with_settings(recipe, self._settings)

    def document(self, plan: Plan) -> dict[str, Any]:
        """Returns the member `what_if` of `plan --json`; a `change` must have been made before."""
        touched = self._touched(plan)
        recipe_bytes = file_bytes(plan.recipe, stored_objects(plan), touched)
        found: dict[str, Any] = {
            "set": [{"objects": setting.glob, "format": setting.format} for setting in self._settings],
            "changed": len(touched),
            "file_bytes": plan.file_bytes,
            "recipe_file_bytes": recipe_bytes,
            "difference_bytes": plan.file_bytes - recipe_bytes,
        }
        if self._measurements is not None:
            self._measurements.require_source(plan)
            found["expected_error"] = self._expected_error(plan, touched, self._measurements)
        return found

    def _touched(self, plan: Plan) -> dict[str, str]:
        """Returns the formats that the recipe alone gives to the objects that the settings change."""
        return {
            item.name: self._before[item.name].format
            for item in stored_objects(plan)
            if item.format is not None and item.format != self._before[item.name].format
        }

    def _expected_error(self, plan: Plan, touched: dict[str, str], measurements: Measurements) -> dict[str, Any]:
        wanted = {item.name: item.format for item in stored_objects(plan) if item.format is not None}
        specs = [self._before[name] for name in wanted]
        measured = [found for spec in specs if (found := measurements.of(spec)) is not None]
        by_elements = any(found.rms is None for found in measured)
        errors = expected_errors(specs, measurements, wanted, by_elements=by_elements)
        changed = [entry for entry in errors if entry.name in touched]
        told = {entry.name for entry in changed}
        return {
            "report": measurements.where,
            "model": f"an estimate: quantization noise scaled from the measured error, {WITHIN}",
            "weight": "elements" if by_elements else "squared norm",
            "objects": [_entry_json(entry) for entry in changed],
            "unmeasured": [name for name in touched if name not in told],
            "changed": _together(changed),
            "measured": _together(errors),
        }


def require_what_if(settings: Sequence[str], report_path: Path | None, plan_path: Path | None) -> WhatIf | None:
    """Returns what `--set` asks for; None without it.

    Raises:
        UsageError: the options do not go together, or a setting is none.
    """
    if not settings:
        if report_path is not None:
            raise UsageError("--report goes with --set: it lets expect the errors of other formats")
        return None
    if plan_path is not None:
        raise UsageError("--set is for a look, and -o PLAN.json is for a recipe; write the change into a recipe")
    return WhatIf(settings, report_path)


def print_what_if(found: dict[str, Any], settings: Sequence[str]) -> None:
    """Prints what the settings change, behind the summary of the plan."""
    say(f"what if {', '.join(settings)}: {counted(found['changed'], 'object')} in another format")
    more, alone = found["difference_bytes"], size_text(found["recipe_file_bytes"])
    say(f"  the recipe alone writes {alone}: {'no' if not more else f'{abs(more):,}'} bytes {_sign(more)}")
    if "expected_error" in found:
        _print_errors(found["expected_error"])


def _together(errors: Sequence[Expected]) -> dict[str, Any]:
    return {
        "objects": len(errors),
        "before": total_error((entry.before, entry.weight) for entry in errors),
        "after": total_error((entry.after, entry.weight) for entry in errors),
    }


def _entry_json(entry: Expected) -> dict[str, Any]:
    return {
        "name": entry.name,
        "format_before": entry.present,
        "format_after": entry.wanted,
        "before": entry.before,
        "after": entry.after,
        "assumes_normal_values": any(is_guess(entry.measured, name) for name in (entry.present, entry.wanted)),
    }


def _print_errors(found: dict[str, Any]) -> None:
    say(f"expected relative L2 error from {found['report']}; an estimate, {WITHIN}")
    for entry in found["objects"]:
        formats = f"{entry['format_before']} {entry['before']:.5f} -> {entry['format_after']} {entry['after']:.5f}"
        guess = ", if its values are normal" if entry["assumes_normal_values"] else ""
        say(f"  {formats}  {entry['name']}{guess}")
    for key, text in (("changed", "changed"), ("measured", "measured")):
        total = found[key]
        if total["objects"]:
            errors = f"{total['before']:.5f} -> {total['after']:.5f}"
            say(f"  {errors}  together, {counted(total['objects'], 'object')} {text}, by {found['weight']}")
    if found["unmeasured"]:
        say(f"  not in the report: {counted(len(found['unmeasured']), 'object')}, {found['unmeasured'][0]} first")


def _sign(more: int) -> str:
    return "are saved" if more < 0 else "are added" if more else "are added or saved"
