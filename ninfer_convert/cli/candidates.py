"""What may stand where the cursor is: recipes, objects, sources, formats, files.

Answers come from the words before the cursor, from headers alone and without a word of complaint: what cannot be read
gives no candidates.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ninfer_convert.errors import ConvertError

if TYPE_CHECKING:
    # at run time these load when there is a recipe or an artifact on the line
    from ninfer_convert.artifact.directory import ObjectRecord
    from ninfer_convert.recipe.model import Recipe, TensorSpec

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

YAML = (".yaml", ".yml")
CHECKPOINT = (".safetensors",)
HUB = "hf://"


def recipe_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes RECIPE: shipped names, a part at a time, and YAML files."""
    from ninfer_convert.recipe.files import shipped_recipes

    shipped = _parts(dict.fromkeys(shipped_recipes(), "shipped"), incomplete)
    # A directory may be called like the first part of a name.
    names = {item.value for item in shipped}
    found = [item for item in _paths(incomplete, YAML) if item.value not in names]
    return shipped + [item for item in found if not item.value.endswith("/") or _leads_to(item.value, YAML)]


def yaml_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the path of a YAML file."""
    return _paths(incomplete, YAML)


def json_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the path of a JSON file, such as a plan or a report."""
    return _paths(incomplete, (".json",))


def artifacts(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the path of an artifact."""
    return _paths(incomplete, (".ninfer",))


def places(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes `[NAME=]SOURCE` of checkpoints without a recipe."""
    name, equals, where = incomplete.rpartition("=")
    return _place(f"{name}{equals}", where)


def sources(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes `[NAME=]WHERE`: the sources of the recipe on the line, then a checkpoint."""
    recipe = _recipe(context)
    name, equals, where = incomplete.partition("=")
    if equals:
        return _place(f"{name}=", where)
    known = {} if recipe is None else {spec.name: spec.repo or "" for spec in recipe.sources.values()}
    if len(known) > 1:
        return _names(known, context.params.get("sources"), incomplete)
    return _place("", incomplete)


def inputs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes `NAME=PATH`: the inputs of the recipe on the line, then a file."""
    name, equals, path = incomplete.partition("=")
    if equals:
        return [CompletionItem(path, type="file", before=f"{name}=")]
    recipe = _recipe(context)
    known = {} if recipe is None else dict.fromkeys(recipe.inputs, "")
    return _names(known, context.params.get("inputs"), incomplete)


def artifact_objects(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the name of an object of the artifact on the line, a part at a time."""
    records = _records(_given(context, "artifact"))
    return _parts({record.name: getattr(record, "format", record.kind) for record in records}, incomplete)


def artifact_tensors(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the name of a tensor of the artifact on the line, a part at a time."""
    records = _records(_given(context, "artifact"))
    tensors = {record.name: record.format for record in records if hasattr(record, "format")}
    return _parts(tensors, incomplete)


def recipe_objects(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the name of an object of the recipe on the line, a part at a time."""
    recipe = _recipe(context)
    if recipe is None:
        return []
    return _parts({spec.name: getattr(spec, "format", "resource") for spec in recipe.objects}, incomplete)


def settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes `GLOB=FORMAT`: a tensor of the recipe on the line, then the formats that it can have."""
    tensors = _tensors(_recipe(context))
    glob, equals, begun = incomplete.rpartition("=")
    if not equals:
        return _parts({f"{name}=": f"now {spec.format}" for name, spec in tensors.items()}, incomplete)
    return [
        CompletionItem(f"{glob}={name}", help=text)
        for name, text in _possible(glob, tensors).items()
        if name.startswith(begun)
    ]


def format_list(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes `A,B,...`, formats that have an encoder."""
    from ninfer_convert.formats import FORMATS

    *chosen, begun = incomplete.split(",")
    before = "".join(f"{name}," for name in chosen)
    left = [name for name, numeric in FORMATS.items() if numeric.kind == "grouped" and name not in chosen]
    return [CompletionItem(before + name) for name in left if name.startswith(begun)]


def words(*known: str) -> Completer:
    """Returns what completes one of a few words."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in known if word.startswith(incomplete)]

    return complete


# -- what is on the line --------------------------------------------------------------------------------------


def _given(context: click.Context, name: str) -> Any:
    """Returns what stands before the cursor for a parameter, None if nothing does."""
    value = context.params.get(name)
    if value is None:
        # click gives up on arguments when the value of the last option is missing, as it is while it is typed.
        arguments = [parameter.name for parameter in context.command.params if isinstance(parameter, click.Argument)]
        value = dict(zip(arguments, context.args, strict=False)).get(name)
    return value


def _recipe(context: click.Context) -> Recipe | None:
    """Returns the recipe that stands before the cursor, if it can be loaded."""
    from ninfer_convert.recipe.loader import load_recipe

    name = _given(context, "recipe_name")
    if name:
        with contextlib.suppress(ConvertError, OSError):
            return load_recipe(os.path.expanduser(name))
    return None


def _records(path: Any) -> Sequence[ObjectRecord]:
    """Returns what the directory of an artifact holds; nothing if it has none."""
    from ninfer_convert.artifact.container import parse_head

    if path is None:
        return ()
    with contextlib.suppress(ConvertError, OSError, ValueError), contextlib.ExitStack() as stack:
        # without O_NONBLOCK, opening a pipe would wait for its writer
        descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            head = parse_head(lambda begin, end: os.pread(descriptor, end - begin, begin), status.st_size)
            return head.directory.objects
    return ()


def _tensors(recipe: Recipe | None) -> dict[str, TensorSpec]:
    from ninfer_convert.recipe.model import TensorSpec

    specs = () if recipe is None else recipe.objects
    return {spec.name: spec for spec in specs if isinstance(spec, TensorSpec) and not spec.words}


def _possible(glob: str, tensors: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Returns the formats that every tensor that a glob matches can have, with what is said of them."""
    from ninfer_convert.formats import FORMATS
    from ninfer_convert.layout import LayoutError, geometry
    from ninfer_convert.recipe.globs import Globs

    matched = [tensors[name] for name in Globs().matching(glob, tensors) or ()]
    found: dict[str, str] = {}
    for name, numeric in FORMATS.items() if matched else ():
        with contextlib.suppress(LayoutError):
            for spec in matched:
                geometry(numeric, spec.shape)
            if numeric.kind != "block-scaled":
                present = {spec.format for spec in matched} == {name}
                found[name] = "as it is now" if present else ""
    return found


# -- how it is offered ----------------------------------------------------------------------------------------


def _names(known: Mapping[str, str], given: Iterable[str] | None, incomplete: str) -> list[CompletionItem]:
    """Returns `NAME=` for the names that are not given yet."""
    taken = {text.partition("=")[0] for text in given or ()}
    return [
        CompletionItem(f"{name}=", help=text)
        for name, text in known.items()
        if name not in taken and name.startswith(incomplete)
    ]


def _place(before: str, incomplete: str) -> list[CompletionItem]:
    """Returns directories and checkpoint files, and the beginning of a place on the hub."""
    found = _paths(incomplete, CHECKPOINT)
    if incomplete and HUB.startswith(incomplete):
        found.append(CompletionItem(HUB, help="a repository on the hub: hf://owner/name"))
    return [CompletionItem(before + item.value, help=item.help) for item in found]


def _parts(names: Mapping[str, str], incomplete: str) -> list[CompletionItem]:
    """Returns the names that go on from what is typed, each to the end of the first part where they differ."""
    left = {name: text for name, text in names.items() if name.startswith(incomplete) and name.isprintable()}
    first, last = min(left, default=""), max(left, default="")
    # What the first and the last one share, all of them share.
    shared = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    begin = max(len(incomplete), first.rfind("/", 0, shared) + 1)
    found: dict[str, str] = {}
    for name, text in left.items():
        slash = name.find("/", begin)
        found.setdefault(name if slash < 0 else name[: slash + 1], text if slash < 0 else "")
    return [CompletionItem(name, help=text) for name, text in found.items()]


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> list[CompletionItem]:
    """Returns directories, with a slash, and files with these suffixes that begin with what is typed."""
    directory, begun = os.path.split(incomplete)
    before = incomplete[: len(incomplete) - len(begun)]
    found = []
    with contextlib.suppress(OSError, ValueError):
        for entry in sorted(_entries(os.path.expanduser(directory) or "."), key=lambda entry: entry.name):
            is_meant = entry.name.startswith(begun) and (begun.startswith(".") or not entry.name.startswith("."))
            if not is_meant or not entry.name.isprintable():
                continue
            if entry.is_dir():
                found.append(CompletionItem(f"{before}{entry.name}/"))
            elif entry.name.endswith(suffixes):
                found.append(CompletionItem(before + entry.name))
    return found


def _leads_to(directory: str, suffixes: tuple[str, ...]) -> bool:
    """Tells whether a directory holds a file with one of these suffixes, or another directory."""
    with contextlib.suppress(OSError, ValueError):
        entries = _entries(os.path.expanduser(directory))
        return any(entry.name.endswith(suffixes) or entry.is_dir() for entry in entries)
    return False


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        yield from entries
