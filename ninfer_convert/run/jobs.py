"""Conversions as they are asked for: the arguments of `run`, or a YAML file of many.

Owns the language of that file; its syntax and limits are those of recipes. Refuses to know how a job is done.

Source: cli.md, `run` and `batch`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.errors import WRONG_PATH, OutputError, RecipeError, printable
from ninfer_convert.recipe.expression import Mark
from ninfer_convert.recipe.files import SUFFIXES
from ninfer_convert.recipe.problems import PlacedError, Problems, quoted
from ninfer_convert.recipe.scalars import (
    read_boolean,
    read_filled_list,
    read_integer,
    read_literal,
    read_map,
    read_members,
    read_named,
    read_text,
)
from ninfer_convert.recipe.yaml_nodes import MAX_FILE_BYTES, MapNode, Node, parse_document
from ninfer_convert.run.journal import journal_path
from ninfer_convert.run.own_files import PART_SUFFIX
from ninfer_convert.source.files import SUFFIX as WEIGHTS_SUFFIX

SCHEMA = 1
FLAGS = ("unpinned", "overwrite", "stream", "verify_source")
HUB = "hf://"
REPORT_SUFFIX = ".conversion.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is converted, and where to: the arguments of `run`, `sources`, `inputs`, `prefixes` spelled as there."""

    recipe: str
    sources: tuple[str, ...]
    inputs: tuple[str, ...]
    prefixes: tuple[str, ...]
    unpinned: bool
    output: Path
    report: Path | None
    overwrite: bool
    stream: bool
    verify_source: bool

    @property
    def report_path(self) -> Path:
        """Where the conversion report goes."""
        return self.report or _default_report(self.output)

    def written(self) -> tuple[Path, ...]:
        """Returns every file that is written for the job, the output first."""
        return _written(self.output, self.report_path)


def _default_report(output: Path) -> Path:
    return output.with_name(output.name + REPORT_SUFFIX)


def _written(output: Path, report: Path) -> tuple[Path, ...]:
    parts = [path.with_name(path.name + PART_SUFFIX) for path in (output, report)]
    return output, report, *parts, journal_path(parts[0])


def _is_of_checkpoint(name: str) -> bool:
    """Tells whether a file of this name, in the directory of a checkpoint, may be a part of it."""
    return name.endswith((WEIGHTS_SUFFIX, ".json")) and not name.endswith(REPORT_SUFFIX)


def read_jobs(path: str, *, with_cluster: bool = False) -> list[Job]:
    """Returns the jobs of a file, in its order; relative paths in it are relative to its directory.

    Args:
        path: of a YAML file of a list of `jobs`.
        with_cluster: the jobs are done by a cluster, which cannot stream.

    Raises:
        WrongRecipeError: one message for each thing that is wrong, sorted by place, each with file, line and column.
        RecipeError: there is no such file.
        OutputError: it cannot be read.
    """
    problems = Problems()
    name = printable(path)
    root = problems.attempt(parse_document, _bytes(path), name, problems)
    nodes = problems.attempt(_job_nodes, root, problems) if root is not None else None
    reader = _Reader(os.path.dirname(path), problems, with_cluster)
    reader.reads(path, "the file of jobs")
    jobs = [job for node in nodes or () if (job := problems.attempt(reader.job, node)) is not None]
    reader.require_kept()
    problems.raise_if_any()
    return jobs


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        kind = RecipeError if isinstance(error, ValueError) or error.errno in WRONG_PATH else OutputError
        raise kind(f"{printable(path)}: the jobs cannot be read: {reason}") from error


def _job_nodes(root: Node, problems: Problems) -> list[Node]:
    members = read_members(root, "a file of jobs", ("schema", "jobs"), (), problems)
    if members is None:
        return []
    schema = problems.attempt(read_integer, members["schema"])
    if schema not in (None, SCHEMA):
        problems.stop(members["schema"].mark, f"schema {schema} is not supported; this version reads schema {SCHEMA}")
    return list(problems.attempt(read_filled_list, members["jobs"], "a list of jobs") or ())


class _Reader:
    def __init__(self, directory: str, problems: Problems, with_cluster: bool) -> None:
        self.directory, self.problems, self.with_cluster = directory, problems, with_cluster
        self.written: dict[str, Mark] = {}
        """The files that the jobs so far write, each with the place that says so."""
        self.read: dict[str, str] = {}
        """The files and directories that they read, each with what it is."""

    def reads(self, path: str, what: str) -> None:
        """Notes a file or directory that no job may write over."""
        self.read.setdefault(os.path.realpath(path), what)

    def require_kept(self) -> None:
        """Notes every file that a job would write and another one, or this command, reads."""
        for place, mark in self.written.items():
            directory, name = os.path.split(place)
            if what := self.read.get(place) or (_is_of_checkpoint(name) and self.read.get(directory)):
                self.problems.add(mark, f"{printable(place)} belongs to {what}, and is never written over")

    def job(self, node: Node) -> Job | None:
        """Returns a job, or None after noting why there is none."""
        optional = ("source", "sources", "inputs", "prefix", "report", *FLAGS)
        members = read_members(node, "a job", ("recipe", "output"), optional, self.problems)
        if members is None:
            return None
        attempt = self.problems.attempt
        recipe = attempt(self._recipe, members["recipe"])
        output = attempt(self._path, members["output"])
        report = attempt(self._path, members["report"]) if "report" in members else None
        if output is not None:
            attempt(self._require_own_files, output, report or _default_report(output), members["output"].mark)
        flags = {name: attempt(read_boolean, members[name]) or False for name in FLAGS if name in members}
        if self.with_cluster and flags.get("stream"):
            self.problems.add(members["stream"].mark, "'stream' does not go with --dask; leave it out")
        sources = attempt(self._sources, node, members)
        inputs = attempt(self._named, members["inputs"], "input") if "inputs" in members else ()
        prefixes = attempt(self._prefixes, members["prefix"]) if "prefix" in members else ()
        if recipe is None or output is None or sources is None or inputs is None or prefixes is None:
            return None
        return Job(
            recipe=recipe,
            sources=sources,
            inputs=inputs,
            prefixes=prefixes,
            output=output,
            report=report,
            **{name: flags.get(name, False) for name in FLAGS},
        )

    def _require_own_files(self, output: Path, report: Path, mark: Mark) -> None:
        """Raises PlacedError if an earlier job writes one of the files of this one."""
        written = _written(output, report)
        own = {os.path.realpath(path): path for path in written}
        if len(own) < len(written):
            name = printable(os.fspath(output))
            raise PlacedError(mark, f"output and report of {name} are the same file; name two")
        for place, path in own.items():
            if place in self.written:
                name = printable(os.fspath(path))
                raise PlacedError(mark, f"{name} is written by the job of line {self.written[place].line} already")
        self.written.update(dict.fromkeys(own, mark))

    def _sources(self, node: Node, members: Mapping[str, Node]) -> tuple[str, ...]:
        if ("source" in members) == ("sources" in members):
            raise PlacedError(node.mark, "a job needs 'source', or 'sources' with names, and not both")
        if "source" in members:
            return (self._place(members["source"]),)
        return self._named(members["sources"], "source")

    def _named(self, node: Node, what: str) -> tuple[str, ...]:
        places = read_named(node, what, self.problems)
        texts = [f"{name}={self._place(place)}" for name, place in places.items()]
        if not texts:
            raise PlacedError(node.mark, f"expected a mapping of {what}s, found an empty one")
        return tuple(texts)

    def _prefixes(self, node: Node) -> tuple[str, ...]:
        return tuple(self._rules(read_map(node, "a mapping of prefixes, FROM: TO")))

    def _rules(self, table: MapNode) -> Iterator[str]:
        for begin, value in table.members.items():
            if "=" in begin or not begin:
                raise PlacedError(table.keys[begin].mark, f"{quoted(begin)} cannot be a prefix")
            yield f"{begin}={read_literal(value)}"

    def _recipe(self, node: Node) -> str:
        """Returns a path, or the name of a shipped recipe, as `run` takes it."""
        text = read_text(node, "a path or the name of a shipped recipe")
        path = os.path.join(self.directory, text)
        if not text.endswith(SUFFIXES) and not os.path.isfile(path):
            return text
        self.reads(path, f"the recipe of line {node.mark.line}")
        return path

    def _place(self, node: Node) -> str:
        text = read_text(node, "a path, or hf://owner/name[@revision]")
        if text.startswith(HUB):
            return text
        path = os.path.join(self.directory, text)
        self.reads(path, f"the source or input of line {node.mark.line}")
        return path

    def _path(self, node: Node) -> Path:
        return Path(os.path.join(self.directory, read_text(node, "a path")))
