"""An artifact against the rules of the container and of its formats, and against a conversion report.

Owns the passes over the file and how their findings are put together. Refuses to know the rules themselves:
structure is `container`'s, values are `rules`'. Every byte of the payload is read, in bounded memory.

Source: container.md; layouts.md; tensor-formats.md section 8.3; cli.md, "JSON".
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.container import PREFIX_BYTES, ObjectRecord, TensorRecord
from ninfer_convert.artifact.reader import READ_BYTES, Artifact
from ninfer_convert.artifact.rules import Finding, Rules, rules_of, runs
from ninfer_convert.errors import ArtifactError, printable
from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import Geometry, align_up, geometry

Bytes = NDArray[np.uint8]
Progress = Callable[[int], object]

RUN_BYTES = 2 * READ_BYTES
"""Bytes of one run of a check; small enough to stay in a core's cache between reading and checking."""
_CACHE_LINE = 64
_SPARE_BYTES = 4096
"""Room for the row scales of a run that begins and ends inside rows, and for the alignment of planes."""

STRUCTURE = "structure"
HEAD_PADDING = "head-padding"
GAP = "gap"
PLANE_GAP = "plane-gap"
CHANGED = "changed"
REPORT = "report"
SIZE = "size"
DIGEST = "digest"


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule: of an object, or of the file as a whole (object is None)."""

    object: str | None
    check: str
    detail: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification found. Problems are in the order of the objects they belong to."""

    objects: int
    """Objects whose bytes were checked."""
    nbytes: int
    """Bytes of those objects."""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    """What breaks no rule but is unusual: gaps wider than needed, trailing bytes."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Returns the document that `verify --json` prints. Source: cli.md, "JSON"."""
        return {
            "ok": self.ok,
            "checked": {"objects": self.objects, "bytes": self.nbytes},
            "problems": [
                {"object": problem.object, "check": problem.check, "detail": problem.detail}
                for problem in self.problems
            ],
            "notes": list(self.notes),
        }


def verify_artifact(
    path: str | os.PathLike[str], progress: Progress | None = None, *, threads: int = 2
) -> Verification:
    """Checks an artifact's structure and every value rule over every byte.

    A broken structure is one problem and ends the verification, since nothing behind it can be located; so is a
    file that is not there.

    Args:
        progress: called with the number of payload bytes checked since the last call, by one thread at a time.
        threads: how many threads read and check.

    Raises:
        OutputError: the file cannot be opened or read.

    Source: tensor-formats.md section 8.3; layouts.md; container.md.
    """
    try:
        artifact = Artifact.open(path)
    except ArtifactError as error:
        return Verification(0, 0, tuple(Problem(None, STRUCTURE, message) for message in error.messages))
    with artifact:
        return verify_open(artifact, progress, threads=threads)


def verify_open(artifact: Artifact, progress: Progress | None = None, *, threads: int = 2) -> Verification:
    """Checks every value rule over every byte of an artifact that is already open; as `verify_artifact`."""
    records = list(artifact.objects.values())
    problems: list[Problem] = []
    try:
        problems += _zero_problems(artifact)
        problems += _value_problems(artifact, records, progress, threads)
    except ArtifactError as error:
        problems += [Problem(None, CHANGED, message) for message in error.messages]
    if not any(problem.check == CHANGED for problem in problems) and not artifact.is_unchanged():
        problems.append(Problem(None, CHANGED, f"{artifact.path}: the file was changed while it was read"))
    order = {record.name: index for index, record in enumerate(records)}
    problems.sort(key=lambda problem: (order.get(problem.object or "", -1), problem.check, problem.detail))
    nbytes = sum(record.nbytes for record in records)
    return Verification(len(records), nbytes, tuple(problems), tuple(artifact.head.notes()))


def verify_report(
    artifact: Artifact, report: Mapping[str, Any], progress: Progress | None = None
) -> tuple[Problem, ...]:
    """Compares sizes and SHA-256 digests of the file and of every object with a conversion report.

    Reads `artifact.bytes`, `artifact.sha256` and of each of `objects` `name`, `bytes` and `sha256`; other
    members are not looked at. An object that only one side has is a problem.

    Args:
        progress: called with the number of bytes hashed since the last call.

    Raises:
        ArtifactError: the file was cut while it was read.
        OutputError: a read fails.

    Source: container.md, "The conversion report".
    """
    stated_file, stated_objects, problems = _stated(report)
    for name in artifact.objects:
        if name not in stated_objects:
            problems.append(Problem(name, REPORT, "the report does not list this object"))
    for name in stated_objects:
        if name not in artifact.objects:
            problems.append(Problem(name, REPORT, "the report lists this object; the artifact does not hold it"))
    found_file, found_objects = _digests(artifact, progress)
    problems += _compared(None, stated_file, found_file)
    for name, found in found_objects.items():
        if name in stated_objects:
            problems += _compared(name, stated_objects[name], found)
    return tuple(problems)


@dataclass(slots=True)
class _Tally:
    """Findings of all runs of all objects, put together per object and rule."""

    first: dict[tuple[str, str], Finding] = field(default_factory=dict)
    count: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, name: str, findings: Iterable[Finding]) -> None:
        for finding in findings:
            key = (name, finding.check)
            if key not in self.first or finding.position < self.first[key].position:
                self.first[key] = finding
            self.count[key] = self.count.get(key, 0) + finding.count

    def problems(self) -> Iterator[Problem]:
        for (name, check), finding in self.first.items():
            count = self.count[name, check]
            total = f" (the first of {count})" if count > 1 else ""
            yield Problem(name, check, finding.detail + total)


@dataclass(frozen=True, slots=True)
class _Run:
    """Units `[begin, end)` of one tensor, or bytes `[begin, end)` of one resource, to be read and checked."""

    record: ObjectRecord
    rules: Rules | None
    planes: Mapping[str, int]
    """Offset of each plane in the file."""
    begin: int
    end: int


def _value_problems(
    artifact: Artifact, records: Sequence[ObjectRecord], progress: Progress | None, threads: int
) -> list[Problem]:
    pending = (run for record in records for run in _runs(artifact, record))
    tally, lock, stop = _Tally(), threading.Lock(), threading.Event()

    def work() -> None:
        buffer = np.empty(RUN_BYTES + _SPARE_BYTES, np.uint8)
        try:
            while not stop.is_set():
                with lock:
                    run = next(pending, None)
                if run is None:
                    return
                findings, nbytes = _check(artifact, run, buffer)
                with lock:
                    tally.add(run.record.name, findings)
                    if progress is not None:
                        progress(nbytes)
        finally:
            # nothing is left to do, or something failed and nothing more should be done
            stop.set()

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work) for _ in range(threads)]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()
    return list(tally.problems())


def _runs(artifact: Artifact, record: ObjectRecord) -> Iterator[_Run]:
    start = artifact.payload_offset + record.offset
    if not isinstance(record, TensorRecord):
        for begin in range(0, record.nbytes, RUN_BYTES):
            yield _Run(record, None, {"bytes": start}, begin, min(begin + RUN_BYTES, record.nbytes))
        return
    numeric = FORMATS[record.format]
    rules = rules_of(numeric, record.shape)
    planes = {plane.name: start + plane.offset for plane in geometry(numeric, record.shape).planes}
    for begin, end in runs(rules, RUN_BYTES):
        yield _Run(record, rules, planes, begin, end)


def _check(artifact: Artifact, run: _Run, buffer: Bytes) -> tuple[list[Finding], int]:
    rules, what = run.rules, f"object '{printable(run.record.name)}'"
    spans = {"bytes": (run.begin, run.end)} if rules is None else rules.spans(run.begin, run.end)
    planes: dict[str, Bytes] = {}
    cursor = nbytes = 0
    for plane, (begin, end) in spans.items():
        planes[plane] = buffer[cursor : cursor + end - begin]
        artifact.read_into(run.planes[plane] + begin, planes[plane], what)
        cursor += align_up(end - begin, _CACHE_LINE)
        nbytes += end - begin
    return ([] if rules is None else rules.check(run.begin, run.end, planes)), nbytes


def _zero_problems(artifact: Artifact) -> list[Problem]:
    """Checks the bytes that belong to no object and to no plane."""
    problems: list[Problem] = []
    for begin, end, name, check in _zero_spans(artifact):
        done = begin
        for block in artifact.blocks(begin, end):
            if block.any():
                at = int(np.argmax(block != 0))
                found = f"byte {done + at} of the file is 0x{int(block[at]):02x}"
                problems.append(Problem(name, check, f"{found}; zero is required outside of objects and planes"))
                break
            done += len(block)
    return problems


def _zero_spans(artifact: Artifact) -> Iterator[tuple[int, int, str | None, str]]:
    yield PREFIX_BYTES + artifact.head.json_bytes, artifact.payload_offset, None, HEAD_PADDING
    for gap in artifact.gaps():
        if gap.before is not None:
            yield gap.begin, gap.end, gap.before, GAP
    for record in artifact.objects.values():
        if isinstance(record, TensorRecord):
            start = artifact.payload_offset + record.offset
            for begin, end in _plane_gaps(geometry(FORMATS[record.format], record.shape)):
                yield start + begin, start + end, record.name, PLANE_GAP


def _plane_gaps(where: Geometry) -> Iterator[tuple[int, int]]:
    cursor = 0
    for plane in where.planes:
        if plane.offset > cursor:
            yield cursor, plane.offset
        cursor = plane.offset + plane.nbytes


@dataclass(frozen=True, slots=True)
class _Content:
    """Size and digest, as found or as stated; a report may state anything."""

    nbytes: Any
    sha256: Any


def _stated(report: Mapping[str, Any]) -> tuple[_Content, dict[str, _Content], list[Problem]]:
    """Returns what a report states of the file and of each object, and what is wrong with the report itself."""
    problems: list[Problem] = []
    whole, entries = report.get("artifact"), report.get("objects")
    if not isinstance(whole, Mapping):
        problems.append(Problem(None, REPORT, "the report's artifact is no object with sha256 and bytes"))
        whole = {}
    if not isinstance(entries, list):
        problems.append(Problem(None, REPORT, "the report's objects is no array"))
        entries = []
    objects: dict[str, _Content] = {}
    for index, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or name in objects:
            problems.append(Problem(None, REPORT, f"the report's object {index} has no name of its own"))
            continue
        objects[name] = _Content(entry.get("bytes"), entry.get("sha256"))
    return _Content(whole.get("bytes"), whole.get("sha256")), objects, problems


def _digests(artifact: Artifact, progress: Progress | None) -> tuple[_Content, dict[str, _Content]]:
    """Hashes the whole file and every object in one pass, the two in parallel."""
    whole = hashlib.sha256()
    objects: dict[str, _Content] = {}
    cursor = 0
    with ThreadPoolExecutor(1) as pool:

        def feed(begin: int, end: int, part: Any) -> None:
            for block in artifact.blocks(begin, end):
                pending = pool.submit(whole.update, block.data)
                if part is not None:
                    part.update(block.data)
                pending.result()
                if progress is not None:
                    progress(len(block))

        for record in artifact.objects.values():
            begin = artifact.payload_offset + record.offset
            feed(cursor, begin, None)
            part = hashlib.sha256()
            cursor = begin + record.nbytes
            feed(begin, cursor, part)
            objects[record.name] = _Content(record.nbytes, part.hexdigest())
        feed(cursor, artifact.file_bytes, None)
    return _Content(artifact.file_bytes, whole.hexdigest()), objects


def _compared(name: str | None, stated: _Content, found: _Content) -> Iterator[Problem]:
    if stated.nbytes != found.nbytes:
        yield Problem(name, SIZE, f"{found.nbytes} bytes; the report states {_short(stated.nbytes)}")
    if stated.sha256 != found.sha256:
        yield Problem(name, DIGEST, f"SHA-256 is {found.sha256}; the report states {_short(stated.sha256)}")


def _short(value: object) -> str:
    return printable(str(value))[:80]
