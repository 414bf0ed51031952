"""A plan as a file: what a conversion is made of and where it goes, so that every process makes the same one.

The file does not hold the plan, but what leads to it again, and its identity, which tells whether it did.

Source: cli.md, `plan -o`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_convert.errors import WRONG_PATH, OutputError, PlanError, SourceError, UsageError, printable
from ninfer_convert.plan.planner import Plan
from ninfer_convert.plan.provenance import plan_identity, totals
from ninfer_convert.run.journal import differences
from ninfer_convert.run.own_files import write_file
from ninfer_convert.source.checkpoint import Checkpoint
from ninfer_convert.strict_json import load_object

SCHEMA = 1
KIND = "ninfer-convert plan"
MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file says. All places are absolute; `prefixes` are spelled as on the command line."""

    path: str
    recipe: str
    sources: Mapping[str, str]
    inputs: Mapping[str, str]
    prefixes: tuple[str, ...]
    unpinned: bool
    output: Path
    report: Path
    identity: Mapping[str, Any]

    def require_same(self, plan: Plan) -> None:
        """Raises PlanError, naming what differs, if a plan is not the one the file was made of."""
        if changed := differences(self.identity, plan_identity(plan)):
            raise PlanError(
                f"{printable(self.path)}: the conversion has changed since it was planned, in {', '.join(changed)}"
            )


def plan_file(
    path: Path, plan: Plan, recipe_name: str, prefixes: tuple[str, ...], output: Path, *, unpinned: bool
) -> PlanFile:
    """Returns what the plan file of an accepted plan says."""
    recipe = recipe_name if plan.recipe.path != recipe_name else os.path.abspath(recipe_name)
    output = Path(os.path.abspath(output))
    return PlanFile(
        os.fspath(path),
        recipe,
        {name: _place(checkpoint) for name, checkpoint in plan.sources.items()},
        {name: os.path.abspath(place) for name, place in plan.inputs.items()},
        prefixes,
        unpinned,
        output,
        output.with_name(output.name + ".conversion.json"),
        plan_identity(plan),
    )


def _place(checkpoint: Checkpoint) -> str:
    """Returns where every machine finds a checkpoint: on the hub at its commit, else by its absolute path."""
    return checkpoint.origin.location if checkpoint.origin else os.path.abspath(checkpoint.location)


def write_plan_file(file: PlanFile, plan: Plan) -> None:
    """Writes a plan file; another one may be replaced.

    Raises:
        UsageError: there is a file of this name which is no plan.
        OutputError: a call failed.
    """
    path = Path(file.path)
    if os.path.lexists(path):
        try:
            read_plan_file(file.path)
        except PlanError as error:
            raise UsageError(f"{printable(file.path)} exists and is no plan; it is not replaced") from error
    document = {
        "kind": KIND,
        "schema": SCHEMA,
        "recipe": file.recipe,
        "sources": dict(file.sources),
        "inputs": dict(file.inputs),
        "prefixes": list(file.prefixes),
        "unpinned": file.unpinned,
        "output": os.fspath(file.output),
        "report": os.fspath(file.report),
        "identity": dict(file.identity),
        "totals": totals(plan),
    }
    write_file(path, (json.dumps(document, ensure_ascii=True, indent=1) + "\n").encode())


def read_plan_file(path: str) -> PlanFile:
    """Returns what a plan file says.

    Raises:
        PlanError: there is no such file, or it is not one that `plan -o` has written.
        OutputError: it cannot be read.
    """
    name = printable(path)
    try:
        with open(path, "rb") as file:
            # A read takes memory for all it might return.
            raw = file.read(min(MAX_FILE_BYTES, os.fstat(file.fileno()).st_size) + 1)
    except OSError as error:
        if error.errno not in WRONG_PATH:
            raise OutputError(f"{name}: cannot be read: {error.strerror}") from error
        raise PlanError(f"{name}: {error.strerror}; make it with `plan RECIPE -o PLAN.json --output OUT`") from error
    with contextlib.suppress(SourceError, TypeError, KeyError):
        document = load_object(raw, name)
        if document["kind"] == KIND and document["schema"] == SCHEMA and document["unpinned"] in (False, True):
            return PlanFile(
                path,
                _text(document["recipe"]),
                _texts(document["sources"]),
                _texts(document["inputs"]),
                tuple(map(_text, _list(document["prefixes"]))),
                document["unpinned"],
                Path(_text(document["output"])),
                Path(_text(document["report"])),
                {**document["identity"]},
            )
    raise PlanError(f"{name} is no plan of schema {SCHEMA}; make it with `plan RECIPE -o PLAN.json --output OUT`")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _texts(value: Mapping[str, object]) -> dict[str, str]:
    return {name: _text(place) for name, place in {**value}.items()}
