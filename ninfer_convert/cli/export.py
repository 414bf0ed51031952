"""`export`."""

from __future__ import annotations

from pathlib import Path

import click

from ninfer_convert.allowance import MAX_THREADS, parse_size
from ninfer_convert.cli import candidates
from ninfer_convert.cli.options import chosen_threads, progress, size_text
from ninfer_convert.cli.output import say
from ninfer_convert.errors import printable


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path), shell_complete=candidates.artifacts)
@click.option("-o", "--output", required=True, metavar="OUT.safetensors", type=click.Path(path_type=Path),
              help="Where the values go.")
@click.option("--objects", "patterns", multiple=True, metavar="GLOB", shell_complete=candidates.artifact_tensors,
              help="Only tensors whose name matches; may be repeated.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="fp32", show_default=True,
              help="What values are written as; bf16 rounds to nearest even. I32 tensors stay what they are.")
@click.option("--max-shard-size", metavar="SIZE", help="Begin another file beyond this size  [default: 5GB]")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), metavar="N",
              help="Worker threads  [default: the processors this process may use]")
@click.option("--overwrite", is_flag=True, help="Replace existing files when the new ones are complete.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def export(
    artifact: Path,
    output: Path,
    patterns: tuple[str, ...],
    dtype: str,
    max_shard_size: str | None,
    threads: int | None,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Write the values that ARTIFACT represents to a .safetensors file.

    fp32 is exact: the reference's reconstruction, bit for bit. FP32 tensors cannot be exported as bf16. What exceeds
    --max-shard-size is written as several files with an index, as the hub's checkpoints are.

    \b
    Examples:
      ninfer-convert export out.ninfer -o values.safetensors
      ninfer-convert export out.ninfer -o layer.safetensors --objects 'layers/0/*'
    """
    # the help of the command does not wait for numpy
    from ninfer_convert.artifact.export import SHARD_BYTES, export_artifact
    from ninfer_convert.artifact.reader import Artifact

    shard_bytes = SHARD_BYTES if max_shard_size is None else parse_size(max_shard_size)
    workers = chosen_threads(threads)
    with Artifact.open(artifact) as opened, progress("exporting", quiet=quiet) as show:
        written = export_artifact(
            opened,
            output,
            objects=patterns,
            dtype=dtype,
            shard_bytes=shard_bytes,
            overwrite=overwrite,
            protected=[artifact],
            threads=workers,
            progress=show,
        )
    for path in written:
        say(f"wrote {printable(str(path))}: {size_text(path.stat().st_size)}")
