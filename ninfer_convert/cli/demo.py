"""`demo`."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import click

from ninfer_convert.cli.options import size_text
from ninfer_convert.cli.output import say
from ninfer_convert.errors import ArtifactError, UsageError
from ninfer_convert.recipe.counting import counted

ARTIFACT = "demo.ninfer"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), default=Path("ninfer-demo"))
def demo(directory: Path) -> None:
    """Make, convert and verify a miniature checkpoint in DIRECTORY  [default: ninfer-demo].

    The checkpoint has the shape of the Qwen3.6 family: BF16 shards with an index, and a sibling with NVFP4 and
    FP8 modules. The artifact holds all nine formats. Nothing is downloaded. Outside of
    DIRECTORY only compiled kernels are written; `ninfer-convert doctor` says where.

    \b
    Examples:
      ninfer-convert demo
      ninfer-convert demo elsewhere
    """
    from ninfer_convert.stand_in.checkpoints import write_demo_checkpoint

    checkpoint = directory / "checkpoint"
    if checkpoint.exists():
        say(f"using {checkpoint}, made by an earlier demo")
    elif directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty and holds no earlier demo; name another directory")
    else:
        with tempfile.TemporaryDirectory(prefix="making-", dir=_made(directory)) as half:
            write_demo_checkpoint(Path(half) / "checkpoint")
            (Path(half) / "checkpoint").rename(checkpoint)
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        size = size_text(sum(path.stat().st_size for path in files))
        say(f"made {checkpoint}: {counted(len(files), 'file')}, {size}")
    _convert(directory, checkpoint)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _convert(directory: Path, checkpoint: Path) -> None:
    from ninfer_convert.artifact.verify import verify_artifact
    from ninfer_convert.cli.convert import run
    from ninfer_convert.stand_in.resources import RANKING_FILE

    artifact = directory / ARTIFACT
    arguments = ["demo", "-o", str(artifact), "--overwrite", "--input", f"ranking={checkpoint / RANKING_FILE}"]
    for name in ("base", "quantized"):
        arguments += ["--source", f"{name}={checkpoint / name}"]
    say(f"$ ninfer-convert run {shlex.join(arguments)}")
    run.main(arguments, standalone_mode=False)
    say(f"$ ninfer-convert verify {artifact}")
    found = verify_artifact(artifact)
    if not found.ok:
        raise ArtifactError(*(f"{problem.object}: {problem.check}: {problem.detail}" for problem in found.problems))
    say(f"{artifact} is valid: {counted(found.objects, 'object')}, {size_text(found.nbytes)} checked")
    say(
        "\nnext:\n"
        f"  ninfer-convert inspect {artifact} --objects\n"
        "  ninfer-convert recipe list\n"
        "  ninfer-convert plan RECIPE --source YOUR_CHECKPOINT"
    )
