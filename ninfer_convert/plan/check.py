"""A recipe looked at as a compiler looks at a program: errors and warnings with their places, with or without sources.

Owns what is told of a recipe and where. Refuses to know how it is printed, and how sources are found.

Source: recipe.md, duties; cli.md, `recipe check`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.errors import PlanError
from ninfer_convert.plan.foresight import contradictions, entries
from ninfer_convert.plan.planner import make_plan
from ninfer_convert.recipe.change_log import ChangeLog
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.lint import warnings
from ninfer_convert.recipe.loader import Reading, is_lossy, read_recipe
from ninfer_convert.recipe.model import TensorSpec
from ninfer_convert.recipe.problems import Problems, WrongRecipeError, told_nearest
from ninfer_convert.recipe.yaml_nodes import MapNode, Node, ScalarNode
from ninfer_convert.source.checkpoint import Checkpoint

_SUBJECT = re.compile(r"(source|input) ([A-Za-z_][A-Za-z0-9_-]*)(?::| \()")
_CONFIG = re.compile(r"source \S+: config\.json ([^:]+): ")
_TAKES = re.compile(r"; (?:format \S+|the (?:row )?encoder)(?: \(set at (?P<change>.*?)\))? takes ")
_MEMBERS = (("revision", ": revision "), ("dtype", "; the recipe states "), ("sha256", ": SHA-256 "))
"""Members of a source or an input with a part of each message that compares them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is told of a recipe.

    `severity` is `error`, `warning`, or `note` for a pin that does not match and was accepted.
    """

    mark: Mark
    severity: str
    text: str

    @property
    def suggestion(self) -> str | None:
        """What was most likely meant, where the message says so."""
        return told_nearest(self.text)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a look at a recipe found; `reading` is None if it cannot be read as one.

    `files` holds the bytes of the recipe and of those it extends, by the names that places give.
    """

    problems: tuple[Problem, ...]
    reading: Reading | None
    files: Mapping[str, bytes]

    def count(self, severity: str) -> int:
        """Returns how many problems are of one severity."""
        return sum(problem.severity == severity for problem in self.problems)

    @property
    def lossy(self) -> int:
        """Returns how many objects may lose precision."""
        specs = self.reading.recipe.objects if self.reading is not None else ()
        return sum(isinstance(spec, TensorSpec) and is_lossy(spec) for spec in specs)


def check(path: str) -> Checked:
    """Returns all that can be told of a recipe without a checkpoint, in the order of the places.

    Raises:
        RecipeError: there is no such recipe, or its file cannot be read.
    """
    problems, changes = Problems(), ChangeLog()
    try:
        reading = read_recipe(path, problems, changes.note)
    except WrongRecipeError as error:
        return Checked(tuple(Problem(mark, "error", text) for mark, text in error.problems), None, error.files)
    found = [Problem(mark, "error", text) for mark, text in contradictions(reading)]
    found += [Problem(mark, "warning", text) for mark, text in warnings(reading, changes.steps)]
    return Checked(_ordered(found), reading, problems.files)


def check_with_sources(
    checked: Checked, sources: Mapping[str, Checkpoint], inputs: Mapping[str, Path], *, unpinned: bool
) -> Checked:
    """Returns what is told of a recipe that could be read, with all that the headers of its sources tell.

    What the recipe alone contradicts is left to the headers, which contradict it, too.

    Raises:
        SourceError: a source cannot be read as one.
    """
    reading = checked.reading
    if reading is None:
        return checked
    found = [problem for problem in checked.problems if problem.severity != "error"]
    places = _Places(reading)
    try:
        plan = make_plan(reading.recipe, sources, inputs, unpinned=unpinned)
    except PlanError as error:
        found += [places.problem("error", message) for message in error.messages]
    else:
        found += [places.problem("warning", message) for message in plan.warnings]
        found += [places.problem("note", message) for message in plan.waived]
    return dataclasses.replace(checked, problems=_ordered(found))


def _ordered(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted(problems, key=lambda problem: problem.mark))


class _Places:
    """Finds the place that a message of the planner is about."""

    def __init__(self, reading: Reading) -> None:
        self._chain = reading.chain
        self._entries = entries(reading)
        self._marks = {
            str(mark): mark
            for document in reading.chain
            for section in document.sections.values()
            for mark in _marks(section)
        }

    def problem(self, severity: str, message: str) -> Problem:
        """Returns a message as a problem; one without a place is told at the section it speaks of."""
        for document in self._chain:
            file = document.mark.file
            found = re.match(rf"{re.escape(file)}:([0-9]+):([0-9]+): ", message)
            if found is not None:
                mark, text = Mark(file, int(found[1]), int(found[2])), message[found.end() :]
                return Problem(self._member(mark, text) or self._marks.get(str(mark), mark), severity, text)
        return Problem(self._subject(message), severity, message)

    def _member(self, mark: Mark, text: str) -> Mark | None:
        """Returns the member of an object's entry that a message about shape or dtype is about."""
        entry = self._entries.get(mark)
        if entry is None or not text.startswith("object "):
            return None
        takes = _TAKES.search(text)
        if takes is not None and takes["change"] in self._marks:
            entry = self._entries.get(self._marks[takes["change"]], entry)
        keys = ("value", "words") if " has shape " in text else ("format",) if takes else ()
        return next((entry.members[key].mark for key in keys if key in entry.members), None)

    def _subject(self, message: str) -> Mark:
        subject = _SUBJECT.match(message)
        if subject is None:
            return self._chain[-1].mark
        path = [f"{subject[1]}s", subject[2]]
        if "neither used nor ignored" in message and (ignore := self._deepest(["ignore"])) is not None:
            return ignore
        if (config := _CONFIG.match(message)) is not None:
            path += ["config", *config[1].split(".")]
        else:
            path += [member for member, part in _MEMBERS if part in message][:1]
        return self._deepest(path) or self._chain[-1].mark

    def _deepest(self, path: Sequence[str]) -> Mark | None:
        """Returns the key that a path of keys leads to, as far as it does; the last file that has most of it counts."""
        best: tuple[int, Mark] | None = None
        for document in self._chain:
            node = document.sections.get(path[0])
            if node is None:
                continue
            depth, mark = 1, node.mark
            for key in path[1:]:
                if not isinstance(node, MapNode) or key not in node.members:
                    break
                depth, mark, node = depth + 1, node.keys[key].mark, node.members[key]
            if best is None or depth >= best[0]:
                best = depth, mark
        return None if best is None else best[1]


def _marks(node: Node) -> Iterator[Mark]:
    """Yields every place below a node; where a key and its mapping begin together, the key's."""
    if isinstance(node, ScalarNode):
        yield node.mark
    elif isinstance(node, MapNode):
        yield node.mark
        for key, member in node.members.items():
            yield from _marks(member)
            yield node.keys[key].mark
    else:
        yield node.mark
        for item in node.items:
            yield from _marks(item)
