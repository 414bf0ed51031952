"""What every test module shares: the hypothesis profile, the markers, checkpoints built once per session."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings
from miniatures import ROOT, Miniatures, write_miniatures

from ninfer_convert.stand_in.checkpoints import StandIn, write_demo_checkpoint

# A test that fails must fail again, on every machine, however slow.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    # Full-scale runs take minutes and tens of gigabytes; a browser and other shells are no Python packages. Only -m
    # asks for them.
    if not config.option.markexpr:
        config.option.markexpr = "not heavy and not browser and not shells and not slurm"
    # What a shell runs in the background inherits that these are ignored, and would hand it on to what tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real checkpoint that scripts/fetch_minilm.py fetches."""
    model = ROOT / ".cache" / "minilm" / "model"
    if not (model / "model.safetensors").is_file():
        pytest.fail(f"{model} is not there; run: python scripts/fetch_minilm.py", pytrace=False)
    return model


@pytest.fixture(scope="session")
def miniatures(tmp_path_factory: pytest.TempPathFactory) -> Miniatures:
    """Miniature stand-ins of both models, and the recipes for Qwen at their size."""
    return write_miniatures(tmp_path_factory.mktemp("miniatures"))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """The pair of checkpoints that the recipe `demo` converts."""
    return write_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")
