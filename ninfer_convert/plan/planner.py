"""A recipe and its sources become a plan: every object with its bound value, size and offset.

Owns the checks that need no tensor data: pins, config, coverage, dtypes, shapes, small values. Refuses to
know how bytes are made (`convert`) and how checkpoints were found (`source`).

Source: recipe.md, every duty; container.md, "Geometry".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ninfer_convert.artifact import container
from ninfer_convert.errors import ConvertError, OutputError, PlanError, SourceError, printable
from ninfer_convert.formats import FORMATS, BlockScaledFormat, DirectFormat, NumericFormat, RowScaledFormat
from ninfer_convert.layout import Geometry, geometry
from ninfer_convert.plan.agreement import (
    check_coverage,
    check_inputs,
    check_source,
    check_usable,
    require_inputs_unchanged,
)
from ninfer_convert.plan.casts import CASTS, WORD_BYTES
from ninfer_convert.plan.components import component_leaves, left_out, missing_text
from ninfer_convert.plan.findings import Findings
from ninfer_convert.plan.requirements import require
from ninfer_convert.plan.resources import read_resource
from ninfer_convert.plan.transform import AbsentError, Binder, MissingError, Words
from ninfer_convert.plan.value import Identical, SourceTensor, Value, elements, load, source_tensors, where
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.expression import Tensor
from ninfer_convert.recipe.model import Recipe, ResourceOrigin, ResourceSpec, TensorSpec
from ninfer_convert.source.checkpoint import Checkpoint

FLOAT_DTYPES = ("BF16", "F16", "F32")
"""Source dtypes every encoder takes."""

SMALL_VALUE_BYTES = 1024
"""Values up to this size are read and checked while planning."""

HEADERS_ALONE = "planned from headers alone; no value of it was read"
"""How the note about such a source ends."""



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
    """One resource with its bytes, which a plan from headers alone may not have read."""

    name: str
    offset: int
    content: bytes = field(repr=False)
    nbytes: int
    origin: ResourceOrigin


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
    used: Mapping[str, frozenset[str]]
    """Per source, the tensors that something reads, be it only for a plan."""

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

    @property
    def is_complete(self) -> bool:
        """Whether every source has its values at hand; a plan from headers alone cannot be carried out."""
        return all(checkpoint.has_values for checkpoint in self.sources.values())

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
        OutputError: one of them cannot be read.
    """
    return _Planner(recipe, sources, inputs or {}, unpinned).plan()


class _Planner:
    def __init__(
        self, recipe: Recipe, sources: Mapping[str, Checkpoint], inputs: Mapping[str, Path], unpinned: bool
    ) -> None:
        self.recipe, self.sources, self.inputs = recipe, sources, inputs
        self.findings = Findings(unpinned)
        self.binder = Binder(sources, inputs)
        self.partial: set[str] = set()
        """Components that are absent in part, or whole without being optional."""

    def plan(self) -> Plan:
        findings = self.findings
        check_usable(self.sources, findings)
        for spec in self.recipe.sources.values():
            check_source(spec, self.sources[spec.name], findings)
        input_digests, input_states = check_inputs(self.recipe, self.inputs, findings)
        absent = self._absent_components()
        planned: list[PlannedObject] = []
        cursor = 0
        for item in self.recipe.objects:
            if item.component in absent:
                continue
            try:
                placed = self._place(item, cursor)
            except OutputError:
                raise
            except ConvertError as error:
                self._unbound(item, error)
                continue
            planned.append(placed)
            cursor = placed.offset + placed.nbytes
        conditions = self._bind_conditions()
        self._report_absent_files()
        for spec in self.recipe.sources.values():
            used, spoken_of = self.binder.used[spec.name], self.binder.spoken_of[spec.name]
            told = spoken_of if self.binder.names_fit else None
            check_coverage(spec, self.sources[spec.name], used, findings, told)
        findings.raise_problems()
        require_inputs_unchanged(self.inputs, input_states)
        if not planned:
            raise PlanError(f"{self.recipe.path}: every object belongs to a component that is absent from the source")
        head = container.encode_head(
            container.Identity(self.recipe.model_id, self.recipe.weights_id), [_record(item) for item in planned]
        )
        for name, checkpoint in self.sources.items():
            if not checkpoint.has_values:
                findings.notes.append(f"source {name}: {HEADERS_ALONE}")
        notes = (*findings.notes, *dict.fromkeys(self.binder.notes))
        return Plan(
            self.recipe,
            self.sources,
            self.inputs,
            input_digests,
            tuple(planned),
            conditions,
            head,
            notes,
            tuple(findings.warnings),
            tuple(findings.waived),
            {name: frozenset(used) for name, used in self.binder.used.items()},
        )

    def _unbound(self, item: TensorSpec | ResourceSpec, error: ConvertError) -> None:
        """Takes note of an object that cannot be made, unless its component or its file was named already."""
        if isinstance(item, TensorSpec):
            self.binder.give_up(item.value)
        is_named = item.component in self.partial and isinstance(error, MissingError)
        if not is_named and not isinstance(error, AbsentError):
            self.findings.problem(*error.messages)

    def _absent_components(self) -> frozenset[str]:
        """Returns the optional components that are absent whole; reports those that are absent in part."""
        absent = left_out(self.recipe, self.binder)
        for component, named in component_leaves(self.recipe).items():
            if component in absent:
                self.findings.notes.append(f"component {component} is absent from the source and was left out")
                continue
            missing = [leaf for leaf in named if not self.binder.has(leaf)]
            is_optional = component in self.recipe.optional_components
            if not missing:
                continue
            self.partial.add(component)
            first = missing[0]
            near: tuple[str, ...] = ()
            if isinstance(first, Tensor) and len(missing) < len(named):
                near = self.binder.nearest(first.source, first.name)
            text = missing_text(component, missing, len(named), near, is_optional=is_optional)
            self.findings.problem(f"{first.mark}: {text}")
        return absent

    # -- objects --------------------------------------------------------------------------------------------

    def _place(self, item: TensorSpec | ResourceSpec, cursor: int) -> PlannedObject:
        offset = container.next_offset(cursor, "resource" if isinstance(item, ResourceSpec) else "tensor")
        if isinstance(item, ResourceSpec):
            found = read_resource(item, self.sources, self.inputs, self.findings)
            return PlannedResource(item.name, offset, found.content, found.nbytes, found.origin)
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
        if not _is_at_hand(value):
            return value
        if isinstance(numeric, DirectFormat) and nbytes <= SMALL_VALUE_BYTES:
            require(item.requirements, item.format, load(value), lambda index: f"{label}: {where(value, index)}")
        elif isinstance(value, Identical) and nbytes <= SMALL_VALUE_BYTES:
            load(value)
        return value

    def _bind_conditions(self) -> tuple[Value, ...]:
        bound = []
        for condition in self.recipe.conditions:
            try:
                value = self.binder.value(condition.value)
                is_small = elements(value.shape) * WORD_BYTES[value.dtype] <= SMALL_VALUE_BYTES
                if is_small and _is_at_hand(value):
                    load(value)
                else:
                    bound.append(value)
            except OutputError:
                raise
            except AbsentError:
                self.binder.give_up(condition.value)
            except ConvertError as error:
                self.binder.give_up(condition.value)
                self.findings.problem(*(f"{condition.mark}: condition: {message}" for message in error.messages))
        return tuple(bound)

    def _report_absent_files(self) -> None:
        for (source, file), needed in self.binder.absent.items():
            checkpoint = self.sources[source]
            held = [name for name in checkpoint.absent if checkpoint.absent[name] == file]
            self.findings.problem(
                f"source {source}: {printable(file)} is absent from {printable(checkpoint.location)}: "
                f"{checkpoint.absence}; the index places {counted(len(held), 'tensor')} there, "
                f"{printable(held[0])} first, and the recipe needs {len(needed)} of them, "
                f"{printable(next(iter(needed)))} first"
            )


def _is_at_hand(value: Value) -> bool:
    checkpoints = [leaf.checkpoint for leaf in source_tensors(value)]
    if elements(value.shape) == 1:
        return all(checkpoint.has_values for checkpoint in checkpoints)
    return all(checkpoint.is_local for checkpoint in checkpoints)


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
                f"{label}: {named} is {value.dtype}; format {numeric.name}{item.format_origin} takes "
                f"{numeric.source_dtype}; {advice}"
            )
        return
    if value.dtype not in FLOAT_DTYPES:
        hint = ""
        if value.dtype == "F8_E4M3" and isinstance(item.value, Tensor) and item.value.name.endswith(".weight"):
            hint = f"; its scale {printable(item.value.name)}_scale is missing"
        kind = "row encoder" if isinstance(numeric, RowScaledFormat) else "encoder"
        raise PlanError(
            f"{label}: {named} is {value.dtype}, not a float source{hint}; the {kind}{item.format_origin} takes "
            f"{', '.join(FLOAT_DTYPES)}"
        )
