"""What a conversion report tells of errors: the relative error and the size of every object it measured.

Owns what of a report is believed. Refuses to know which formats are wanted (`what_if`).

Source: container.md, "The conversion report".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_convert.errors import PlanError, printable
from ninfer_convert.formats import FORMATS, NumericFormat
from ninfer_convert.plan.planner import Plan
from ninfer_convert.recipe.model import TensorSpec

BEYOND_FLOAT = 1e39
"""Above every binary32 value, and every statistic of such values."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One tensor as an earlier conversion stored it.

    `relative_error` is |x - x'|_2 / |x|_2, 0 where all values are zero; `rms` is the root mean square of x, None
    where the report does not tell. `dtypes` are those of the source tensors.
    """

    name: str
    shape: tuple[int, ...]
    numeric: NumericFormat
    transform: str
    relative_error: float
    rms: float | None
    dtypes: frozenset[str]

    @property
    def signal(self) -> float | None:
        """The squared norm of the values."""
        return None if self.rms is None else self.rms**2 * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Measurements:
    """What is known of an earlier conversion."""

    where: str
    """The report's name, printable."""
    artifact: str
    """The artifact's identity, printable."""
    tensors: Mapping[str, Measured]
    sizes: Mapping[str, int]
    """Bytes of every object, resources among them."""
    sources: Mapping[str, Any]

    def of(self, spec: TensorSpec) -> Measured | None:
        """Returns what was measured of an object; None if nothing, or if the object was another one."""
        found = self.tensors.get(spec.name)
        is_same = found is not None and (found.shape, found.transform) == (spec.shape, str(spec.value))
        return found if is_same else None

    def require_source(self, plan: Plan) -> None:
        """Raises unless the report may be one of the plan's checkpoints, as far as both tell.

        Raises:
            PlanError: a weight file has another size or another digest.
        """
        for name, checkpoint in plan.sources.items():
            files = _mappings(_mapping(self.sources.get(name)).get("files"))
            told = {str(file.get("name")): file for file in files}
            for file in checkpoint.files.values():
                known = {"bytes": file.size, "sha256": file.sha256, "header_sha256": file.header_sha256}
                for member, value in known.items():
                    reported = told.get(printable(file.name), {}).get(member)
                    if None not in (reported, value) and reported != value:
                        raise PlanError(
                            f"report {self.where} is of another checkpoint: source {name}: {printable(file.name)}: "
                            f"its {member} is {printable(str(reported)[:80])}; the file's is {value}"
                        )


def read_measurements(report: Mapping[str, Any], where: str) -> Measurements:
    """Returns what a conversion report measured.

    Args:
        report: the report, of which nothing is believed yet.
        where: its name, printable.

    Raises:
        PlanError: it has no statistics, or they are none.
    """
    tensors, sizes = {}, {}
    for item in _mappings(report.get("objects")):
        name, nbytes = item.get("name"), item.get("bytes")
        if isinstance(name, str):
            if type(nbytes) is int and nbytes > 0:
                sizes[name] = nbytes
            if (found := _measured(item, name, where)) is not None:
                tensors[name] = found
    if not tensors:
        raise PlanError(
            f"report {where} has no `stats` of any object; they are in the report of a conversion by `run` "
            "that was not told to leave them out"
        )
    about = _mapping(report.get("artifact"))
    artifact = printable(f"{about.get('model_id')}/{about.get('weights_id')}"[:200])
    return Measurements(where, artifact, tensors, sizes, _mapping(report.get("sources")))


def _measured(item: Mapping[str, Any], name: str, where: str) -> Measured | None:
    stats, shape = item.get("stats"), item.get("shape")
    if not isinstance(stats, Mapping):
        return None
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise PlanError(f"report {where}: object {printable(name)} has `stats` and no `shape`")
    if str(item.get("format")) not in FORMATS:
        raise PlanError(f"report {where}: object {printable(name)} has `stats` and no known `format`")
    error, rms = (_number(stats, member, f"report {where}: object {printable(name)}") for member in _MEMBERS)
    # The error of values that are all zero has no measure; nothing is lost of them.
    if error is None and rms != 0:
        return None
    dtypes = frozenset(str(origin["dtype"]) for origin in _mappings(item.get("sources")) if "dtype" in origin)
    return Measured(
        name, tuple(shape), FORMATS[item["format"]], str(item.get("transform")), error or 0.0, rms, dtypes
    )


_MEMBERS = ("relative_l2", "rms")


def _number(stats: Mapping[str, Any], member: str, about: str) -> float | None:
    value = stats.get(member)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < BEYOND_FLOAT:
        raise PlanError(f"{about}: `{member}` is {printable(str(value)[:80])}; required: a number that is not negative")
    return float(value)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    yield from (item for item in (value if isinstance(value, list) else ()) if isinstance(item, Mapping))
