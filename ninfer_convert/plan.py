"""A recipe and its sources become a plan: every object with its bound value, size and offset.

Owns the checks that need no tensor data: pins, config, coverage, dtypes, shapes, small values. Refuses to
know how bytes are made (`convert`) and how checkpoints were found (`source`).

Source: recipe.md, every duty; container.md, "Geometry".
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ninfer_convert import container
from ninfer_convert.casts import CASTS, WORD_BYTES
from ninfer_convert.errors import ConvertError, PlanError, SourceError, printable
from ninfer_convert.expression import Expression, Module, Tensor, leaves
from ninfer_convert.formats import FORMATS, BlockScaledFormat, DirectFormat, NumericFormat, RowScaledFormat
from ninfer_convert.layout import Geometry, geometry
from ninfer_convert.recipe import Recipe, ResourceOrigin, ResourceSpec, SourceSpec, TensorSpec
from ninfer_convert.requirements import require
from ninfer_convert.source import Checkpoint
from ninfer_convert.source_names import unwrapped
from ninfer_convert.transform import AbsentError, Binder, MissingError, Words
from ninfer_convert.value import Identical, SourceTensor, Value, elements, load, source_tensors, where

FLOAT_DTYPES = ("BF16", "F16", "F32")
"""Source dtypes every encoder takes."""

SMALL_VALUE_BYTES = 1024
"""Values up to this size are read and checked while planning."""

MAX_INPUT_BYTES = 1 << 30
SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor with all that is needed to produce any rows of it.

    `offset` is relative to the payload; `value` holds bound words for a word copy.
    """

    name: str
    shape: tuple[int, ...]
    numeric: NumericFormat
    geometry: Geometry
    encoder: str | None
    offset: int
    value: Value | Words
    spec: TensorSpec

    @property
    def nbytes(self) -> int:
        return self.geometry.nbytes

    def leaves(self) -> Iterator[SourceTensor]:
        """Yields the source tensors the object is made of, left to right, repeats included."""
        if isinstance(self.value, Words):
            yield from self.value.leaves
        else:
            yield from source_tensors(self.value)


@dataclass(frozen=True, slots=True)
class PlannedResource:
    """One resource with its bytes."""

    name: str
    offset: int
    content: bytes = field(repr=False)
    origin: ResourceOrigin

    @property
    def nbytes(self) -> int:
        return len(self.content)


PlannedObject = PlannedTensor | PlannedResource


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a run needs; nothing of it depends on threads, memory or machine."""

    recipe: Recipe
    sources: Mapping[str, Checkpoint]
    inputs: Mapping[str, Path]
    input_digests: Mapping[str, str]
    """SHA-256 of every auxiliary input the recipe names."""
    objects: tuple[PlannedObject, ...]
    conditions: tuple[Value, ...]
    head: bytes = field(repr=False)
    notes: tuple[str, ...]
    """Facts for the report: tied heads, left-out components, prefixes, chosen resource origins."""
    warnings: tuple[str, ...]
    waived: tuple[str, ...]
    """Pins that did not match and were accepted by `--unpinned`."""

    @property
    def payload_offset(self) -> int:
        return len(self.head)

    @property
    def payload_bytes(self) -> int:
        return self.objects[-1].offset + self.objects[-1].nbytes

    @property
    def file_bytes(self) -> int:
        return self.payload_offset + self.payload_bytes

    @property
    def source_bytes(self) -> int:
        """Bytes of all source tensors that some object or condition reads, each counted once."""
        tensors = {(leaf.source, leaf.info.name): leaf.info.nbytes for leaf in self.leaves()}
        return sum(tensors.values())

    def leaves(self) -> Iterator[SourceTensor]:
        """Yields the source tensors of every object and condition, repeats included."""
        for item in self.objects:
            if isinstance(item, PlannedTensor):
                yield from item.leaves()
        for value in self.conditions:
            yield from source_tensors(value)


def make_plan(
    recipe: Recipe,
    sources: Mapping[str, Checkpoint],
    inputs: Mapping[str, Path] | None = None,
    *,
    unpinned: bool = False,
) -> Plan:
    """Returns the plan of one conversion.

    Args:
        recipe: the loaded recipe.
        sources: one open checkpoint for every source of the recipe.
        inputs: the auxiliary files, by the recipe's names.
        unpinned: accept resource digests, input digests and revisions that do not match, and record them.

    Raises:
        PlanError: everything that headers, configs, divisors and small files can tell is wrong, all at once.
    """
    return _Planner(recipe, sources, inputs or {}, unpinned).plan()


class _Planner:
    def __init__(
        self, recipe: Recipe, sources: Mapping[str, Checkpoint], inputs: Mapping[str, Path], unpinned: bool
    ) -> None:
        self.recipe, self.sources, self.inputs, self.unpinned = recipe, sources, inputs, unpinned
        self.binder = Binder(sources, inputs)
        self.problems: dict[str, None] = {}
        self.notes: list[str] = []
        self.waived: list[str] = []
        self.input_digests: dict[str, str] = {}
        self.is_bound = True
        self.partial: set[str] = set()
        """Components that are absent in part, or whole without being optional."""

    def plan(self) -> Plan:
        self._check_usable()
        for spec in self.recipe.sources.values():
            self._check_source(spec, self.sources[spec.name])
        self._check_inputs()
        absent = self._absent_components()
        planned: list[PlannedObject] = []
        cursor = 0
        for item in self.recipe.objects:
            if item.component in absent:
                continue
            try:
                placed = self._place(item, cursor)
            except ConvertError as error:
                self._unbound(item, error)
                continue
            planned.append(placed)
            cursor = placed.offset + placed.nbytes
        conditions = self._bind_conditions()
        self._report_absent_files()
        warnings = self._check_coverage()
        if self.problems:
            raise PlanError(*self.problems)
        if not planned:
            raise PlanError(f"{self.recipe.path}: every object belongs to a component that is absent from the source")
        head = container.encode_head(
            container.Identity(self.recipe.model_id, self.recipe.weights_id), [_record(item) for item in planned]
        )
        notes = (*self.notes, *dict.fromkeys(self.binder.notes))
        return Plan(
            self.recipe,
            self.sources,
            self.inputs,
            self.input_digests,
            tuple(planned),
            conditions,
            head,
            notes,
            tuple(warnings),
            tuple(self.waived),
        )

    def _add(self, *messages: str) -> None:
        self.problems.update(dict.fromkeys(messages))

    def _unbound(self, item: TensorSpec | ResourceSpec, error: ConvertError) -> None:
        """Takes note of an object that cannot be made, unless its component or its file was named already."""
        if isinstance(item, TensorSpec):
            self.is_bound = False
        is_named = item.component in self.partial and isinstance(error, MissingError)
        if not is_named and not isinstance(error, AbsentError):
            self._add(*error.messages)

    def _pin(self, message: str) -> None:
        """Takes note of a pin that does not match: a problem, unless `--unpinned` waives it."""
        if self.unpinned:
            self.waived.append(message)
        else:
            self._add(message + "; --unpinned accepts it and records that")

    # -- sources --------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        """A source of another kind lacks most names of the recipe; its kind alone is worth a message."""
        for name in self.recipe.sources:
            checkpoint = self.sources[name]
            for reason in (checkpoint.foreign_quantization(), checkpoint.unmerged_adapter()):
                if reason:
                    self._add(f"source {name}: {reason}")
        if self.problems:
            raise PlanError(*self.problems)

    def _check_source(self, spec: SourceSpec, checkpoint: Checkpoint) -> None:
        if spec.revision and checkpoint.revision and spec.revision != checkpoint.revision:
            self._pin(f"source {spec.name}: revision {checkpoint.revision} found, {spec.revision} required")
        if spec.revision and not checkpoint.revision:
            self.notes.append(f"source {spec.name}: a plain directory; revision {spec.revision} could not be checked")
        self.notes += [
            f"source {spec.name}: names beginning with {begin!r} were read as {to!r}"
            for begin, to in checkpoint.applied_prefixes.items()
        ]
        if not spec.config:
            return
        if checkpoint.config is None:
            self._add(f"source {spec.name}: no config.json in {printable(checkpoint.location)}; the recipe needs one")
            return
        for path, found, required in _config_differences(spec.config, checkpoint.config, ""):
            self._add(f"source {spec.name}: config.json {path}: {found} found, {required} required")

    def _check_inputs(self) -> None:
        for name in self.inputs.keys() - self.recipe.inputs.keys():
            known = ", ".join(self.recipe.inputs) or "none"
            self._add(f"input {printable(name)} is not one of the recipe's inputs ({known})")
        for name, spec in self.recipe.inputs.items():
            path = self.inputs.get(name)
            if path is None:
                self._add(f"{spec.mark}: input {name} is not given; add --input {name}=PATH")
                continue
            try:
                found = _file_sha256(path)
            except OSError as error:
                self._add(f"input {name}: {printable(str(path))}: {error.strerror}")
                continue
            self.input_digests[name] = found
            if spec.sha256 and found != spec.sha256:
                self._pin(f"input {name} ({printable(str(path))}): SHA-256 {found} found, {spec.sha256} required")

    def _absent_components(self) -> set[str]:
        """Returns the optional components that are absent whole; reports those that are absent in part."""
        members: dict[str, dict[str, Expression]] = {}
        for item in self.recipe.objects:
            if item.component is not None and isinstance(item, TensorSpec):
                named: dict[str, Expression] = {
                    str(leaf): leaf for leaf in leaves(item.value) if isinstance(leaf, (Tensor, Module))
                }
                members.setdefault(item.component, {}).update(named)
        absent = set()
        for component, named in members.items():
            missing = [leaf for leaf in named.values() if not self.binder.has(leaf)]
            if missing and len(missing) == len(named) and component in self.recipe.optional_components:
                absent.add(component)
                self.notes.append(f"component {component} is absent from the source and was left out")
            elif missing:
                self.partial.add(component)
                self._add(
                    f"{missing[0].mark}: component {component}: {printable(str(missing[0]))} is missing, "
                    f"{len(missing)} of {len(named)} missing; a component that is absent whole may be declared "
                    f"optional: true, or be left out with `change: [drop: {component}/*]`"
                )
        return absent

    def _check_coverage(self) -> list[str]:
        """Every tensor is used or ignored by name; returns warnings."""
        warnings: list[str] = []
        for spec in self.recipe.sources.values():
            checkpoint, used = self.sources[spec.name], self.binder.used[spec.name]
            warnings += checkpoint.warnings
            names = [*checkpoint.tensors, *checkpoint.absent]
            ignored: set[str] = set()
            for glob, mark in spec.ignore:
                matches = _matching(glob, names)
                if not matches:
                    self._add(f"{mark}: ignore {printable(glob)} matches no tensor of source {spec.name}")
                if overlap := sorted(used.intersection(matches)):
                    self._add(f"{mark}: ignore {printable(glob)} matches {printable(overlap[0])}, which an object uses")
                ignored.update(matches)
            self._check_unused(spec.name, [name for name in names if name not in used and name not in ignored], used)
            self._check_dtypes(spec, checkpoint, used)
            lost = sorted({checkpoint.absent[name] for name in checkpoint.absent if name in ignored})
            warnings += [f"{printable(shard)} of source {spec.name} is absent; no object needs it" for shard in lost]
        return warnings

    def _check_unused(self, source: str, unused: Sequence[str], used: set[str]) -> None:
        # What an object that could not be bound would have used is not known.
        if not unused or not self.is_bound:
            return
        tails = {unwrapped(name): name for name in used}
        twins = [(name, tails[unwrapped(name)]) for name in unused if unwrapped(name) in tails]
        if twins:
            both = " and ".join(map(printable, twins[0]))
            more = f" (and {len(twins) - 1} more pairs)" if len(twins) > 1 else ""
            self._add(f"source {source}: {both} are ambiguous: one name under two prefixes{more}")
            return
        shown = ", ".join(map(printable, unused[:SHOWN_NAMES]))
        more = f" and {len(unused) - SHOWN_NAMES} more" if len(unused) > SHOWN_NAMES else ""
        count = "1 tensor is" if len(unused) == 1 else f"{len(unused)} tensors are"
        self._add(
            f"source {source}: {count} neither used nor ignored: {shown}{more}; use them or list them under ignore"
        )

    def _check_dtypes(self, spec: SourceSpec, checkpoint: Checkpoint, used: Iterable[str]) -> None:
        for name in sorted(used) if spec.dtypes else ():
            if (found := checkpoint.tensors[name].dtype) not in spec.dtypes:
                required = " or ".join(spec.dtypes)
                self._add(f"source {spec.name}: tensor {printable(name)} is {found}; the recipe states {required}")

    # -- objects --------------------------------------------------------------------------------------------

    def _place(self, item: TensorSpec | ResourceSpec, cursor: int) -> PlannedObject:
        offset = container.next_offset(cursor, "resource" if isinstance(item, ResourceSpec) else "tensor")
        if isinstance(item, ResourceSpec):
            content, origin = self._resource(item)
            return PlannedResource(item.name, offset, content, origin)
        numeric = FORMATS[item.format]
        try:
            value = self._bind_tensor(item, numeric)
        except SourceError as error:
            raise PlanError(*(f"{item.mark}: object {item.name}: {message}" for message in error.messages)) from error
        return PlannedTensor(
            item.name, item.shape, numeric, geometry(numeric, item.shape), item.encoder, offset, value, item
        )

    def _bind_tensor(self, item: TensorSpec, numeric: NumericFormat) -> Value | Words:
        label = f"{item.mark}: object {printable(item.name)}"
        if item.words:
            words = self.binder.words(item.value)
            if words.format != item.format:
                raise PlanError(f"{label}: {printable(str(item.value))} holds {words.format} words, not {item.format}")
            _require_shape(label, item, words.shape)
            return words
        value = self.binder.value(item.value)
        _require_shape(label, item, value.shape)
        _require_dtype(label, item, numeric, value)
        nbytes = elements(value.shape) * WORD_BYTES[value.dtype]
        if isinstance(numeric, DirectFormat) and nbytes <= SMALL_VALUE_BYTES:
            require(item.requirements, item.format, load(value), lambda index: f"{label}: {where(value, index)}")
        elif isinstance(value, Identical) and nbytes <= SMALL_VALUE_BYTES:
            load(value)
        return value

    def _resource(self, item: ResourceSpec) -> tuple[bytes, ResourceOrigin]:
        label = f"{item.mark}: resource {printable(item.name)}"
        for index, origin in enumerate(item.origins):
            try:
                content = self._resource_bytes(origin)
            except SourceError as error:
                raise PlanError(*(f"{label}: {message}" for message in error.messages)) from error
            if content is None:
                continue
            if not content:
                raise PlanError(f"{label}: {_origin_text(origin)} is empty; a resource has at least one byte")
            others = [other for other in item.origins[index + 1 :] if self._resource_bytes(other) is not None]
            if others:
                self.notes.append(f"resource {item.name}: {_origin_text(origin)} wins over {_origin_text(others[0])}")
            found = hashlib.sha256(content).hexdigest()
            if item.sha256 and found != item.sha256:
                self._pin(f"{label}: SHA-256 {found} found in {_origin_text(origin)}, {item.sha256} required")
            return content, origin
        looked = ", ".join(_origin_text(origin) for origin in item.origins)
        raise PlanError(f"{label} was not found; looked at: {looked}. Name another place with file: or input:")

    def _resource_bytes(self, origin: ResourceOrigin) -> bytes | None:
        if origin.input is not None:
            path = self.inputs.get(origin.input)
            if path is None:
                return None
            try:
                content = path.read_bytes()
            except OSError as error:
                raise SourceError(f"{printable(str(path))}: {error.strerror}") from error
        else:
            checkpoint, name = self.sources[origin.source], origin.file or ""
            if not checkpoint.has_file(name):
                return None
            content = checkpoint.resource(name)
        return content if origin.member is None else self._member(content, origin)

    def _member(self, content: bytes, origin: ResourceOrigin) -> bytes | None:
        try:
            document = json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{origin.file or origin.input} is not valid JSON: {error}") from error
        found = document.get(origin.member) if isinstance(document, dict) else None
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            others = ", ".join(printable(str(name)) for name in named if name != "default")
            if others and "default" in named:
                self.notes.append(f"{_origin_text(origin)}: default taken, {others} left out")
            found = named.get("default")
        if not isinstance(found, str):
            return None
        try:
            return found.encode()
        except UnicodeEncodeError as error:
            raise SourceError(f"{_origin_text(origin)} holds a lone surrogate and has no UTF-8 form") from error

    def _bind_conditions(self) -> tuple[Value, ...]:
        bound = []
        for condition in self.recipe.conditions:
            try:
                value = self.binder.value(condition.value)
                if elements(value.shape) * WORD_BYTES[value.dtype] <= SMALL_VALUE_BYTES:
                    load(value)
                else:
                    bound.append(value)
            except AbsentError:
                self.is_bound = False
            except ConvertError as error:
                self.is_bound = False
                self._add(*(f"{condition.mark}: condition: {message}" for message in error.messages))
        return tuple(bound)

    def _report_absent_files(self) -> None:
        for (source, file), needed in self.binder.absent.items():
            checkpoint = self.sources[source]
            held = [name for name in checkpoint.absent if checkpoint.absent[name] == file]
            self._add(
                f"source {source}: {printable(file)} is absent from {printable(checkpoint.location)}: download "
                f"incomplete; the index places {len(held)} tensors there, {printable(held[0])} first, and the recipe "
                f"needs {len(needed)} of them, {printable(next(iter(needed)))} first"
            )


def _record(item: PlannedObject) -> container.ObjectRecord:
    if isinstance(item, PlannedResource):
        return container.ResourceRecord(item.name, item.offset, item.nbytes)
    return container.TensorRecord(
        item.name, item.shape, item.numeric.name, item.geometry.layout, item.offset, item.nbytes
    )


def _require_shape(label: str, item: TensorSpec, found: tuple[int, ...]) -> None:
    if found != item.shape:
        raise PlanError(
            f"{label}: {printable(str(item.value))} has shape {list(found)}, expected {list(item.shape)}"
        )


def _require_dtype(label: str, item: TensorSpec, numeric: NumericFormat, value: Value) -> None:
    named = printable(str(item.value))
    if isinstance(numeric, BlockScaledFormat):
        raise PlanError(f"{label}: NVFP4 is copied from a source module; no encoder of ours makes it from {named}")
    if isinstance(numeric, DirectFormat):
        if value.dtype != numeric.source_dtype:
            rule = CASTS.get((value.dtype, numeric.source_dtype))
            advice = f"name the conversion: cast to {numeric.name}, rule {rule}" if rule else "no cast leads there"
            raise PlanError(
                f"{label}: {named} is {value.dtype}; format {numeric.name} takes {numeric.source_dtype}; {advice}"
            )
        return
    if value.dtype not in FLOAT_DTYPES:
        hint = ""
        if value.dtype == "F8_E4M3" and isinstance(item.value, Tensor) and item.value.name.endswith(".weight"):
            hint = f"; its scale {printable(item.value.name)}_scale is missing"
        kind = "row encoder" if isinstance(numeric, RowScaledFormat) else "encoder"
        raise PlanError(
            f"{label}: {named} is {value.dtype}, not a float source{hint}; the {kind} takes {', '.join(FLOAT_DTYPES)}"
        )


def _config_differences(
    required: Mapping[str, Any], found: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, str, str]]:
    for key, expected in required.items():
        path = f"{prefix}{key}"
        if key not in found:
            yield path, "nothing", json.dumps(expected)
        elif isinstance(expected, Mapping) and isinstance(found[key], Mapping):
            yield from _config_differences(expected, found[key], path + ".")
        elif not _equal(expected, found[key]):
            yield path, printable(json.dumps(found[key], ensure_ascii=False)), json.dumps(expected)


def _equal(expected: Any, found: Any) -> bool:
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, (int, float)) and isinstance(found, (int, float)):
        return math.isclose(expected, found, rel_tol=0, abs_tol=0)
    return bool(expected == found)


def _matching(glob: str, names: Iterable[str]) -> list[str]:
    pattern = re.compile(fnmatch.translate(glob))
    return [name for name in names if pattern.match(name)]


def _origin_text(origin: ResourceOrigin) -> str:
    base = f"input {origin.input}" if origin.input else f"{origin.source}:{printable(origin.file or '')}"
    return f"{base}, member {origin.member}" if origin.member else base


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
