"""The arrows between modules: who may import whom, and what stays out of a bare command line."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ninfer_convert"
ORACLE = ROOT / "tests" / "oracle"

# Each module imports only from rows above its own; a row need not have been written yet.
ROWS = [
    "__init__",
    "errors",
    "workers",
    "strict_json",
    "formats",
    "layout",
    "artifact.rules",
    "allowance",
    "run.cluster_env",
    "recipe.counting",
    "recipe.expression",
    "recipe.model",
    "recipe.problems",
    "recipe.globs",
    "recipe.yaml_nodes",
    "recipe.scalars",
    "recipe.scope",
    "recipe.files",
    "recipe.blocks",
    "recipe.sections",
    "recipe.expressions",
    "recipe.objects",
    "recipe.changes",
    "recipe.change_log",
    "recipe.schema",
    "recipe.loader",
    "recipe.render",
    "recipe.origins",
    "recipe.folding",
    "recipe.diff",
    "recipe.lint",
    "source.header",
    "source.io",
    "source.names",
    "source.quantization",
    "source.files",
    "source.index_check",
    "source.hub_failures",
    "source.hub",
    "source.checkpoint",
    "source.remote",
    "plan.casts",
    "plan.value",
    "plan.arrangement",
    "plan.requirements",
    "plan.moves",
    "plan.shortlist",
    "plan.divisors",
    "plan.transform",
    "plan.components",
    "artifact.directory",
    "artifact.container",
    "plan.findings",
    "plan.agreement",
    "plan.resources",
    "plan.planner",
    "plan.foresight",
    "plan.check",
    "plan.implied",
    "plan.explain",
    "plan.explain_text",
    "plan.error_model",
    "plan.measured",
    "plan.what_if",
    "tune.fill",
    "tune.folding",
    "tune.proposal",
    "tune.text",
    "source.acquisition",
    "source.streaming",
    "draft.choices",
    "draft.folding",
    "draft.naming",
    "draft.placement",
    "draft.sets",
    "draft.text",
    "draft.frame",
    "draft.trial",
    "draft.prefixes",
    "draft.families",
    "draft.draft",
    "draft.opening",
    "encode.interface",
    "encode.kernel_cache",
    "encode.kernels",
    "encode.compiled",
    "encode.loss",
    "row_error",
    "encode.rows",
    "encode.words",
    "run.own_files",
    "run.writer",
    "run.journal",
    "plan.provenance",
    "plan.block",
    "encode.block_maker",
    "run.tasks",
    "plan.budget",
    "run.pipeline",
    "run.convert",
    "run.intervals",
    "run.digests",
    "run.plan_file",
    "run.jobs",
    "run.cuts",
    "run.share_file",
    "run.share_journal",
    "run.shares",
    "run.finalize",
    "run.published",
    "cluster.interrupts",
    "cluster.connection",
    "cluster.order",
    "cluster.share_task",
    "cluster.workers",
    "cluster.convert",
    "artifact.reader",
    "artifact.decode",
    "artifact.scales",
    "artifact.inspection",
    "artifact.inspection_text",
    "artifact.recompute",
    "artifact.verify",
    "artifact.inventory",
    "artifact.recast",
    "artifact.differences",
    "artifact.recheck",
    "artifact.pieces",
    "artifact.stats",
    "artifact.source_values",
    "artifact.compare",
    "artifact.contrast",
    "artifact.compare_text",
    "page.report",
    "page.data",
    "page.html",
    "artifact.export",
    "stand_in.weights",
    "stand_in.resources",
    "stand_in.checkpoints",
    "stand_in.llama",
    "demo",
    "doctor",
    "cli",
    "__main__",
]
READ_SIDE = {
    "artifact.rules",
    "artifact.reader",
    "artifact.decode",
    "artifact.scales",
    "artifact.inspection",
    "artifact.inspection_text",
    "artifact.recompute",
    "artifact.verify",
    "artifact.inventory",
    "artifact.recast",
    "artifact.differences",
    "artifact.recheck",
    "artifact.pieces",
    "artifact.stats",
    "artifact.source_values",
    "artifact.compare",
    "artifact.contrast",
    "artifact.compare_text",
    "page.report",
    "page.data",
    "page.html",
}
WRITE_SIDE = {
    "encode.interface",
    "encode.kernel_cache",
    "encode.kernels",
    "encode.compiled",
    "encode.loss",
    "encode.rows",
    "encode.words",
    "run.own_files",
    "run.writer",
    "run.journal",
    "encode.block_maker",
    "run.tasks",
    "run.pipeline",
    "run.convert",
    "run.share_file",
    "run.share_journal",
    "run.shares",
    "run.finalize",
    "run.published",
    "cluster.share_task",
    "cluster.convert",
}
ONLY_IN = {
    "numba": {"encode.kernels", "encode.compiled"},
    "llvmlite": {"encode.compiled"},
    "huggingface_hub": {"source.hub", "source.hub_failures"},
    "click": {"cli"},
    "tqdm": {"cli"},
    "distributed": {"cluster.connection", "cluster.share_task", "cluster.workers"},
}


def imported_names(source: str) -> Iterator[str]:
    """Yields the dotted name of everything a module imports, function bodies included.

    `from a import b` gives `a.b`, which is a module or an attribute of a; relative imports begin with a dot.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def own_modules(source: str) -> set[str]:
    """Returns the rows of the package that a module imports."""
    found = set()
    for name in imported_names(source):
        head, _, rest = name.partition(".")
        if head == "ninfer_convert":
            parts = rest.split(".")
            pair, part = ".".join(parts[:2]), parts[0]
            found.add(pair if pair in ROWS else part if part in ROWS or len(parts) > 1 else "__init__")
        elif name.startswith("."):
            found.add("a relative import")
    return found


def module_sources() -> dict[str, list[str]]:
    """Returns the source texts of every row; the command line is one row of several files."""
    rows: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        # The command line is one row; the page of a room that says what it holds is none.
        row = "cli" if parts[0] == "cli" else ".".join(parts)
        if len(parts) == 2 and parts[1] == "__init__" and parts[0] != "cli":
            continue
        rows.setdefault(row, []).append(path.read_text(encoding="utf-8"))
    return rows


def row_imports() -> dict[str, set[str]]:
    return {row: set().union(*map(own_modules, sources)) for row, sources in module_sources().items()}


def upward_arrows(imports: dict[str, set[str]]) -> list[str]:
    wrong = []
    for row, targets in imports.items():
        for target in sorted(targets - ({row} if row == "cli" else set())):
            if target not in ROWS or row not in ROWS or ROWS.index(target) >= ROWS.index(row):
                wrong.append(f"{row} imports {target}")
    return wrong


def reached(imports: dict[str, set[str]], row: str) -> set[str]:
    """Returns every row that importing this one loads, itself included."""
    found: set[str] = set()
    pending = [row]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending += imports.get(current, ())
    return found


def foreign_arrows(sources: dict[str, list[str]], library: str, allowed: set[str]) -> list[str]:
    return [
        f"{row} imports {library}"
        for row, texts in sources.items()
        if row not in allowed and any(name.split(".")[0] == library for text in texts for name in imported_names(text))
    ]


def test_every_module_has_a_row():
    assert sorted(set(module_sources()) - set(ROWS)) == []


def test_modules_import_only_from_rows_above_their_own():
    assert upward_arrows(row_imports()) == []


def test_read_side_never_reaches_the_write_side():
    imports = row_imports()
    meetings = {row: sorted(reached(imports, row) & WRITE_SIDE) for row in READ_SIDE & set(imports)}
    assert {row: found for row, found in meetings.items() if found} == {}


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_library_is_imported_only_by_its_row(library):
    assert foreign_arrows(module_sources(), library, ONLY_IN[library]) == []


def test_one_module_has_the_kernels_compiled_and_kept():
    for row in ("encode.kernels", "encode.kernel_cache"):
        assert [name for name, targets in row_imports().items() if row in targets] == ["encode.compiled"]


def test_oracle_imports_only_the_standard_library_and_itself():
    own = {path.stem for path in ORACLE.glob("*.py")}
    wrong = []
    for path in sorted(ORACLE.rglob("*.py")):
        for name in imported_names(path.read_text(encoding="utf-8")):
            if name.startswith("."):
                known = not name.startswith("..") and name.split(".")[1] in own
            else:
                known = name.split(".")[0] in sys.stdlib_module_names
            if not known:
                wrong.append(f"{path.name} imports {name}")
    assert wrong == []


def test_command_line_starts_without_the_heavy_libraries():
    heavy = ["numba", "numpy", "huggingface_hub", "distributed"]
    script = f"import sys, ninfer_convert.cli; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


# The checks above must be able to fail.


@pytest.mark.parametrize(
    "source",
    [
        "from ninfer_convert.plan.planner import Plan",
        "from ninfer_convert.plan import planner",
        "import ninfer_convert.plan.planner",
        "def late():\n    from ninfer_convert.plan.planner import Plan",
        "if TYPE_CHECKING:\n    import ninfer_convert.plan.planner as p",
    ],
)
def test_every_spelling_of_an_import_is_seen(source):
    assert own_modules(source) == {"plan.planner"}
    assert upward_arrows({"layout": own_modules(source)}) == ["layout imports plan.planner"]
    assert upward_arrows({"run.convert": own_modules(source)}) == []


def test_unlisted_and_relative_targets_are_wrong_arrows():
    imports = {"run.convert": own_modules("from ninfer_convert.utils import x\nfrom . import planner")}
    assert upward_arrows(imports) == ["run.convert imports a relative import", "run.convert imports utils"]


def test_the_version_may_be_imported_anywhere():
    assert own_modules("from ninfer_convert import __version__") == {"__init__"}


def test_indirect_imports_are_followed():
    arrows = {
        "artifact.verify": {"plan.planner"},
        "plan.planner": {"encode.rows"},
        "encode.rows": {"encode.kernels"},
    }
    assert "encode.kernels" in reached(arrows, "artifact.verify")


def test_foreign_imports_are_seen():
    sources = {"plan.planner": ["import numba.core"], "cli": ["import click"]}
    assert foreign_arrows(sources, "numba", {"encode.kernels"}) == ["plan.planner imports numba"]
    assert foreign_arrows(sources, "click", {"cli"}) == []
