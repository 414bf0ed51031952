"""Where a resource comes from: the first of its origins that exists, byte for byte, or a member of a JSON file.

Source: recipe.md, duty 6.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.errors import PlanError, SourceError, printable
from ninfer_convert.plan.findings import Findings
from ninfer_convert.plan.transform import AbsentError
from ninfer_convert.recipe.model import ResourceOrigin, ResourceSpec
from ninfer_convert.source.checkpoint import Checkpoint
from ninfer_convert.source.files import MAX_RESOURCE_BYTES
from ninfer_convert.source.io import read_small
from ninfer_convert.strict_json import kind_of, load_object

SHOWN_TEMPLATES = 16


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource and the origin it comes from; of one planned without being read, size and digest only."""

    content: bytes
    nbytes: int
    sha256: str | None
    origin: ResourceOrigin


def read_resource(
    spec: ResourceSpec, sources: Mapping[str, Checkpoint], inputs: Mapping[str, Path], findings: Findings
) -> Resource:
    """Returns a resource's bytes, or what is known of them without reading, and their origin.

    Raises:
        AbsentError: no origin exists, and one is an input that is not given.
        PlanError: no origin exists (all are named, with what is wrong with a member), the content is empty, or a
            file is unusable.
    """
    label = f"{spec.mark}: resource {printable(spec.name)}"
    unfit: list[str] = []
    try:
        found = [_found(origin, sources, inputs, findings, unfit) for origin in spec.origins]
    except SourceError as error:
        raise PlanError(*(f"{label}: {message}" for message in error.messages)) from error
    existing = [resource for resource in found if resource is not None]
    if not existing:
        if any(origin.input is not None and origin.input not in inputs for origin in spec.origins):
            raise AbsentError(f"{label} needs an input that is not given")
        looked = ", ".join(map(origin_text, spec.origins))
        why = "".join(f"; {text}" for text in unfit)
        raise PlanError(f"{label} was not found; looked at: {looked}{why}. Name another place with file: or input:")
    findings.notes += (f"resource {spec.name}: {text}" for text in unfit)
    resource = existing[0]
    if not resource.nbytes:
        raise PlanError(f"{label}: {origin_text(resource.origin)} is empty; a resource has at least one byte")
    if len(existing) > 1:
        place, other = origin_text(resource.origin), origin_text(existing[1].origin)
        findings.notes.append(f"resource {spec.name}: {place} wins over {other}")
    if spec.sha256 and resource.sha256 is None:
        findings.notes.append(f"resource {spec.name}: not read, so its SHA-256 is not compared yet")
    elif spec.sha256 and resource.sha256 != spec.sha256:
        place = origin_text(resource.origin)
        findings.pin(f"{label}: SHA-256 {resource.sha256} found in {place}, {spec.sha256} required")
    return resource


def origin_text(origin: ResourceOrigin) -> str:
    """Returns an origin as messages name it."""
    place = f"input {origin.input}" if origin.input else f"{origin.source}:{printable(origin.file or '')}"
    return f"{place}, member {origin.member}" if origin.member else place


def _found(
    origin: ResourceOrigin,
    sources: Mapping[str, Checkpoint],
    inputs: Mapping[str, Path],
    findings: Findings,
    unfit: list[str],
) -> Resource | None:
    if origin.input is None and origin.member is None:
        listed = sources[origin.source].listed_resource(origin.file or "")
        if listed is not None:
            return Resource(b"", *listed, origin)
    content = _content(origin, sources, inputs)
    if content is not None and origin.member is not None:
        content = _member(content, origin, findings, unfit)
    if content is None:
        return None
    return Resource(content, len(content), hashlib.sha256(content).hexdigest(), origin)


def _content(
    origin: ResourceOrigin, sources: Mapping[str, Checkpoint], inputs: Mapping[str, Path]
) -> bytes | None:
    if origin.input is not None:
        path = inputs.get(origin.input)
        return None if path is None else read_small(os.fspath(path), MAX_RESOURCE_BYTES)
    checkpoint, name = sources[origin.source], origin.file or ""
    return checkpoint.resource(name) if checkpoint.has_file(name) else None


def _member(content: bytes, origin: ResourceOrigin, findings: Findings, unfit: list[str]) -> bytes | None:
    """Returns a text member as UTF-8; of a list of {name, template} members the one called default.

    None where there is no such member or it is null; where it is anything else, `unfit` is given what it is.
    """
    member = load_object(content, origin.file or origin.input or "", lenient=True).get(origin.member or "")
    found, described = member, kind_of(member)
    if isinstance(member, list):
        entries = [entry for entry in member if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        named = {entry["name"]: entry.get("template") for entry in entries}
        others = ", ".join(printable(name[:80]) for name in list(named)[:SHOWN_TEMPLATES] if name != "default")
        if others and isinstance(named.get("default"), str):
            findings.notes.append(f"{origin_text(origin)}: default taken, {others} left out")
        found = named.get("default")
        if "default" in named:
            described = f"a list whose default has {kind_of(found)} as its template"
        else:
            described = f"a list without a default ({others or 'it names nothing'})"
    if isinstance(found, str):
        try:
            return found.encode()
        except UnicodeEncodeError as error:
            raise SourceError(f"{origin_text(origin)} holds a lone surrogate and has no UTF-8 form") from error
    if member is not None:
        required = "a text, or a list of {name, template} with one called default"
        unfit.append(f"{origin_text(origin)} is {described}; required is {required}")
    return None
