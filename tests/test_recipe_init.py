"""`recipe init` as people use it: the draft plans, converts and verifies without an edit, whatever the checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from case_tools import run_cli, spawn
from hollow import write_hollow
from hub_server import Repo, client_environment, serving
from miniatures import Miniatures

from ninfer_convert.recipe.loader import load_recipe
from ninfer_convert.recipe.model import TensorSpec
from ninfer_convert.stand_in.checkpoints import MODELS, StandIn, write_stand_in
from ninfer_convert.stand_in.resources import model_config
from ninfer_convert.stand_in.weights import (
    FULL,
    MINIATURE,
    Scale,
    Weight,
    base_weights,
    module_kind,
    quantized_weights,
    text_linears,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TENSORS = {"model.layers.0.up.weight": ("BF16", (128, 128)), "model.layers.1.up.weight": ("BF16", (128, 128))}
CONFIG = {"architectures": ["Tiny"], "model_type": "tiny"}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def init(tmp_path: Path, *arguments: object) -> str:
    """Drafts a recipe into `draft.yaml`, where nothing is in the way; returns its text."""
    path = tmp_path / "draft.yaml"
    path.unlink(missing_ok=True)
    ran = run_cli("recipe", "init", *arguments, "-o", path)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"wrote {path}: ")
    return path.read_text(encoding="utf-8")


def require_good(tmp_path: Path, sources: Sequence[object], inputs: Sequence[object] = ()) -> dict[str, Any]:
    """Requires that the draft is checked without a warning, converts and verifies as it is; returns the report."""
    recipe, output = tmp_path / "draft.yaml", tmp_path / "out.ninfer"
    checked = run_cli("recipe", "check", recipe, "--strict")
    assert (checked.code, checked.err) == (0, ""), checked.out
    places = [word for source in sources for word in ("--source", source)]
    places += [word for path in inputs for word in ("--input", path)]
    ran = run_cli("run", recipe, *places, "-o", output, "--overwrite", "-q")
    assert ran.code == 0, ran.err
    verified = run_cli("verify", output, "--recipe", recipe, *places, "--json")
    assert verified.code == 0, verified.err
    document = json.loads(verified.out)
    report: dict[str, Any] = json.loads((tmp_path / "out.ninfer.conversion.json").read_bytes())
    assert document["ok"]
    assert document["checked"]["objects"] == len(report["objects"])
    return report


def formats_of(report: Mapping[str, Any]) -> dict[str, int]:
    return dict(Counter(entry["format"] for entry in report["objects"] if entry["kind"] == "tensor"))


# --- miniatures: conversions of drafts that tell everything themselves ---------------------------------------------


def word_copies(model: str, scale: Scale) -> dict[str, int]:
    """Returns how many modules of the quantized checkpoint of a model are words that can be stored on their own."""
    kinds = Counter(
        kind for _, full_size, module, n, k in text_linears(scale)
        if (kind := module_kind(model, full_size, module)) != "NVFP4" or (n % 128, k % 64) == (0, 0)
    )  # fmt: skip
    head = {"FP8_E4M3FN_ROW_BF16S": kinds["FP8"] + 1} if model == "qwen3.8-27b" else {}
    return {"NVFP4": kinds["NVFP4"], "FP32": kinds["NVFP4"], **head}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("qwen3.6-27b", ["base"]),
        ("qwen3.6-27b", ["base", "quantized"]),
        ("qwen3.8-27b", ["quantized"]),
    ],
)
def test_a_draft_of_miniatures_converts_and_verifies_with_no_edit(
    miniatures: Miniatures, tmp_path: Path, model: str, names: list[str]
) -> None:
    made = miniatures.models[model]
    places = {"base": made.base, "quantized": made.quantized}
    sources = [places[names[0]]] if len(names) == 1 else [f"{name}={places[name]}" for name in names]
    text = init(tmp_path, *sources, "--matrix", "Q5G64_F16S")
    assert "extends" not in text
    formats = formats_of(require_good(tmp_path, sources))
    assert formats.pop("Q5G64_F16S") > 0
    assert formats.pop("BF16") > 0
    assert formats == (word_copies(model, MINIATURE) if "quantized" in names else {})


@pytest.mark.parametrize("matrix", ["Q4G64_F16S", "Q6G64_F16S", "W8G32_F16S", "FP8_E4M3FN_ROW_BF16S"])
def test_matrices_get_the_format_that_is_chosen(demo: StandIn, tmp_path: Path, matrix: str) -> None:
    init(tmp_path, demo.base, "--matrix", matrix)
    found = formats_of(require_good(tmp_path, [demo.base]))
    assert set(found) == {"BF16", matrix}


# --- a real checkpoint ---------------------------------------------------------------------------------------------


def test_the_draft_of_a_known_model_extends_its_recipe(minilm: Path, tmp_path: Path) -> None:
    text = init(tmp_path, minilm)
    assert "extends: minilm-l6-v2\n" in text
    assert "# Every tensor that it wants is here, and no other.\n" in text
    report = require_good(tmp_path, [minilm])
    shipped = load_recipe("minilm-l6-v2")
    assert [entry["name"] for entry in report["objects"]] == [spec.name for spec in shipped.objects]
    found = load_recipe(tmp_path / "draft.yaml")
    assert {spec.name: spec.sha256 for spec in found.objects if not isinstance(spec, TensorSpec)} == {
        entry["name"]: entry["sha256"] for entry in report["objects"] if entry["kind"] == "resource"
    }


def test_the_draft_of_an_unknown_model_uses_every_tensor(minilm: Path, tmp_path: Path) -> None:
    text = init(tmp_path, f"base={minilm}", "--matrix", "Q4G64_F16S")
    assert text.count("- for:") == 1
    assert "layers: {from: 0, through: 5}" in text
    report = require_good(tmp_path, [minilm])
    assert report["sources"]["base"]["tensors"] == report["sources"]["base"]["tensors_used"] == 104
    assert formats_of(report) == {"FP32": 65, "I32": 1, "Q4G64_F16S": 38}
    assert len([entry for entry in report["objects"] if entry["kind"] == "resource"]) == 9


# --- full shapes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StandIn]:
    directory = tmp_path_factory.mktemp("full")
    return {model: write_stand_in(model, directory / model) for model in MODELS}


def plan_of(recipe: object, *arguments: object) -> list[dict[str, Any]]:
    ran = run_cli("plan", recipe, *arguments, "--json")
    assert ran.code == 0, ran.err
    objects: list[dict[str, Any]] = json.loads(ran.out)["objects"]
    return objects


@pytest.mark.parametrize(
    ("model", "names", "base"),
    [
        ("qwen3.6-27b", ["base"], "qwen3.6-27b/groupwise-int"),
        ("qwen3.6-27b", ["base", "quantized"], "qwen3.6-27b/nvfp4"),
        ("qwen3.8-27b", ["base", "quantized"], "qwen3.8-27b/nvfp4"),
    ],
)
def test_a_draft_of_a_shipped_model_plans_what_the_shipped_recipe_plans(
    stand_ins: dict[str, StandIn], tmp_path: Path, model: str, names: list[str], base: str
) -> None:
    made = stand_ins[model]
    places = [{"base": made.base, "quantized": made.quantized}[name] for name in names]
    ranking = f"ranking={made.ranking}"
    text = init(tmp_path, *places, "--input", ranking)
    assert f"extends: {base}\n" in text
    assert "evidence: none\n" in text
    options = [
        *(word for name, place in zip(names, places, strict=True) for word in ("--source", f"{name}={place}")),
        *("--input", ranking),
    ]
    shipped = plan_of(base, *options, "--unpinned")
    # No pin is waived for the draft.
    assert plan_of(tmp_path / "draft.yaml", *options) == shipped


def test_sources_with_names_may_come_in_any_order(stand_ins: dict[str, StandIn], tmp_path: Path) -> None:
    made = stand_ins["qwen3.8-27b"]
    places = [f"base={made.base}", f"quantized={made.quantized}"]
    assert init(tmp_path, *places) == init(tmp_path, *reversed(places))


def test_an_input_that_is_not_given_is_asked_for_later(stand_ins: dict[str, StandIn], tmp_path: Path) -> None:
    made = stand_ins["qwen3.8-27b"]
    path = tmp_path / "draft.yaml"
    ran = run_cli("recipe", "init", made.base, made.quantized, "-o", path)
    assert (ran.code, ran.err) == (
        0,
        "note: plan and run need --input ranking=PATH, as qwen3.8-27b/nvfp4 does\n",
    )
    assert "# It needs --input ranking=PATH, as that does.\n" in path.read_text(encoding="utf-8")
    assert load_recipe(path).inputs == load_recipe("qwen3.8-27b/nvfp4").inputs


@pytest.mark.parametrize(("model", "matrix"), [("qwen3.6-27b", None), ("qwen3.8-27b", "Q4G64_F16S")])
def test_a_quantized_checkpoint_alone_is_drafted_in_full(
    stand_ins: dict[str, StandIn], tmp_path: Path, model: str, matrix: str | None
) -> None:
    made = stand_ins[model]
    text = init(tmp_path, made.quantized, *(["--matrix", matrix] if matrix else []))
    assert "extends" not in text
    assert "\nignore:" not in text
    family = (
        "Shipped recipes for this model that take more sources: "
        "qwen3.6-27b/nvfp4 (base, quantized), qwen3.8-27b/nvfp4 (base, quantized)."
    )
    assert (family in text.replace("\n# ", " ")) == (matrix is None)
    objects = plan_of(tmp_path / "draft.yaml", "--source", made.quantized)
    found = Counter(entry["format"] for entry in objects if entry["kind"] == "tensor")
    values = [weight for weight in quantized_weights(model, FULL, "", "") if weight.kind in ("values", "cache-scale")]
    matrices = [
        weight for weight in values
        if len(weight.shape) == 2 and min(weight.shape) >= 64 and "pos_embed" not in weight.name
    ]  # fmt: skip
    expected = {matrix or "W8G32_F16S": len(matrices), "BF16": len(values) - len(matrices)}
    assert found == expected | word_copies(model, FULL)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("model", "names", "matrix"),
    [
        ("qwen3.6-27b", ["base"], None),
        ("qwen3.6-27b", ["base"], "Q4G64_F16S"),
        ("qwen3.6-27b", ["quantized"], None),
        ("qwen3.8-27b", ["base", "quantized"], None),
    ],
)
def test_a_draft_at_full_scale_converts_and_verifies_with_no_edit(
    stand_ins: dict[str, StandIn], tmp_path: Path, model: str, names: list[str], matrix: str | None
) -> None:
    made = stand_ins[model]
    places = {"base": made.base, "quantized": made.quantized}
    sources = [f"{name}={places[name]}" for name in names]
    inputs = [] if matrix or names == ["quantized"] else [f"ranking={made.ranking}"]
    options = ["--matrix", matrix] if matrix else [word for path in inputs for word in ("--input", path)]
    try:
        init(tmp_path, *sources, *options)
        require_good(tmp_path, sources, inputs)
    finally:
        (tmp_path / "out.ninfer").unlink(missing_ok=True)


# --- fine-tunes of a shipped model ---------------------------------------------------------------------------------

BASE = "qwen3.6-27b/groupwise-int"
TOKENIZER = {"added_tokens_decoder": {str(token): {"special": True} for token in range(248044, 248077)}}
FILES = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": json.dumps({**TOKENIZER, "chat_template": "in the config"}).encode(),
    "generation_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "video_preprocessor_config.json": b"{}",
}
TUNE_CONFIG = model_config(FULL)


def write_tune(
    place: Path,
    change: Callable[[Weight], Weight | None] = lambda weight: weight,
    *,
    more: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    config: Mapping[str, Any] = TUNE_CONFIG,
    files: Mapping[str, bytes] = FILES,
) -> Path:
    """Writes the hollow checkpoint of a fine-tune: that of the model, each tensor changed or left out."""
    weights = [changed for weight in base_weights(FULL, "") if (changed := change(weight)) is not None]
    tensors = {weight.name: (weight.dtype, weight.shape) for weight in weights}
    return write_hollow(place, {**tensors, **(more or {})}, config=config, files=files)


def without(*beginnings: str) -> Callable[[Weight], Weight | None]:
    return lambda weight: None if weight.name.startswith(beginnings) else weight


def test_a_fine_tune_without_parts_drops_them(tmp_path: Path, stand_ins: dict[str, StandIn]) -> None:
    place = write_tune(tmp_path / "text-only", without("mtp.", "model.visual."))
    (place / "preprocessor_config.json").unlink()
    ranking = f"ranking={stand_ins['qwen3.6-27b'].ranking}"
    text = init(tmp_path, place, "--input", ranking)
    assert (
        '  # Not in this checkpoint.\n  - drop: "mtp/*"\n  - drop: "vision/*"\n'
        "  # No such file here.\n  - drop: frontend/preprocessor_config.json\n"
    ) in text
    shipped = [spec.name for spec in load_recipe(BASE).objects]
    planned = [entry["name"] for entry in plan_of(tmp_path / "draft.yaml", "--source", place, "--input", ranking)]
    assert planned == [
        name for name in shipped
        if not name.startswith(("mtp/", "vision/")) and name != "frontend/preprocessor_config.json"
    ]  # fmt: skip


def test_a_digest_that_differs_is_pinned_anew_wherever_the_file_is(tmp_path: Path) -> None:
    init(tmp_path, write_tune(tmp_path / "tune"))
    recipe = load_recipe(tmp_path / "draft.yaml")
    pins = {spec.name: spec.sha256 for spec in recipe.objects if not isinstance(spec, TensorSpec)}
    template = "frontend/chat_template.jinja"
    assert pins == {f"frontend/{name}": digest(content) for name, content in FILES.items()} | {
        template: digest(b"in the config")
    }


def test_what_is_missing_in_part_is_told(tmp_path: Path) -> None:
    place = write_tune(tmp_path / "tune", without("mtp.norm.", "model.language_model.layers.9.mlp.up_proj."))
    path = tmp_path / "draft.yaml"
    ran = run_cli("recipe", "init", place, "-o", path)
    assert ran.code == 0
    assert f"note: 2 objects of {BASE} cannot be made; text/layers/9/mlp/gate_up first\n" in ran.err
    text = path.read_text(encoding="utf-8")
    assert (
        "  # Missing, though others of the kind are there: see whether the checkpoint is complete.\n"
        "  - drop: text/layers/9/mlp/gate_up\n  - drop: mtp/final_norm\n"
    ) in text
    # The half of a fused matrix that is there is not lost without a word.
    assert "ignore:\n  - model.language_model.layers.9.mlp.gate_proj.weight\n" in text


def test_a_vocabulary_that_was_resized_changes_shapes_and_config(tmp_path: Path) -> None:
    def resized(weight: Weight) -> Weight:
        return dataclasses.replace(weight, shape=(248400, 5120)) if weight.shape == (248320, 5120) else weight

    config = {**TUNE_CONFIG, "text_config": {**TUNE_CONFIG["text_config"], "vocab_size": 248400}}
    text = init(tmp_path, write_tune(tmp_path / "tune", resized, config=config))
    assert "    config:\n      text_config:\n        vocab_size: 248400\n" in text
    assert text.count("shape: [248400, 5120]}") == 2
    shapes = {spec.name: spec.shape for spec in load_recipe(tmp_path / "draft.yaml").objects
              if isinstance(spec, TensorSpec)}
    assert shapes["text/token_embedding"] == shapes["text/output_head"] == (248400, 5120)


def test_tensors_that_the_shipped_recipe_does_not_know_are_ignored_in_loops_of_their_own(tmp_path: Path) -> None:
    more = {f"model.language_model.layers.{layer}.extra.scale": ("BF16", (5120,)) for layer in range(64)}
    text = init(tmp_path, write_tune(tmp_path / "tune", more={**more, "score.weight": ("BF16", (2, 5120))}))
    assert text.endswith(
        "\nsets:\n  unused_layers: {from: 0, through: 63}\n\n"
        "# 65 tensors that no object of the shipped recipe is made of; add objects if the engine wants them.\n"
        "ignore:\n  - for: {l: unused_layers}\n    names:\n      - model.language_model.layers.<l>.extra.scale\n"
        "  - score.weight\n"
    )


def test_other_prefixes_become_rules(tmp_path: Path) -> None:
    def renamed(weight: Weight) -> Weight:
        name = weight.name.replace("model.language_model.", "language_model.model.")
        return dataclasses.replace(weight, name=name)

    place = write_tune(tmp_path / "tune", renamed)
    text = init(tmp_path, place)
    assert f"extends: {BASE}\n" in text
    assert "    prefix:\n      language_model.model.: model.language_model.\n" in text
    assert "drop: text" not in text
    checked = run_cli("recipe", "check", tmp_path / "draft.yaml", "--source", place)
    assert "language_model" not in checked.out + checked.err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda weight: dataclasses.replace(weight, shape=tuple(2 * side for side in weight.shape)),
            "object text/layers/0/gdn/a_log: cast(base:model.language_model.layers.0.linear_attn.A_log, FP32, exact) "
            "has shape [96], expected [48] (and 47 more like it).",
        ),
        (
            lambda weight: dataclasses.replace(weight, kind="weight-divisor"),
            "object text/layers/0/input_norm: base:model.language_model.layers.0.input_layernorm.weight is F32; "
            "format BF16 takes BF16; name the conversion: cast to BF16, rule nearest-even (and 63 more like it).",
        ),
    ],
)
def test_where_no_extension_fits_the_draft_is_full_and_says_why(
    tmp_path: Path, change: Callable[[Weight], Weight], reason: str
) -> None:
    text = init(tmp_path, write_tune(tmp_path / "tune", change))
    head = " ".join(line.removeprefix("# ") for line in text.partition("schema: 1")[0].split("\n"))
    assert f"It is not drafted from the shipped recipe {BASE}, which does not fit: {reason}" in head
    assert "extends" not in text


def test_a_checkpoint_of_another_repository_brings_its_pins(tmp_path: Path) -> None:
    place = write_tune(tmp_path / "models--me--Tune" / "snapshots" / COMMIT)
    text = init(tmp_path, place)
    assert "id: tune-draft\n" in text
    assert f"sources:\n  base:\n    repo: me/Tune\n    revision: {COMMIT}\n" in text
    assert "plain directory" not in text
    spec = load_recipe(tmp_path / "draft.yaml").sources["base"]
    assert (spec.repo, spec.revision) == ("me/Tune", COMMIT)


def test_the_very_checkpoint_of_a_shipped_recipe_needs_no_draft(tmp_path: Path) -> None:
    spec = load_recipe(BASE).sources["base"]
    assert spec.repo is not None
    assert spec.revision is not None
    owner, name = spec.repo.split("/")
    entry = tmp_path / f"models--{owner}--{name}" / "snapshots"
    told = "# These are the very sources of the shipped recipe, which can be used as it is.\n"
    assert told in init(tmp_path, write_tune(entry / spec.revision))
    assert told not in init(tmp_path, write_tune(entry / COMMIT))


# --- the command ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_on_the_hub_is_pinned_and_only_its_headers_are_fetched(tmp_path: Path) -> None:
    place = write_hollow(tmp_path / "model", TENSORS, config=CONFIG, files={"tokenizer.json": b" " * 100_000})
    with serving(n=Repo(place, COMMIT)) as hub:
        environment = client_environment(hub, tmp_path / "home")
        ran = spawn("recipe", "init", "hf://o/n", environment=environment)
        assert ran.code == 0, ran.err
        assert f"    repo: o/n\n    revision: {COMMIT}\n    dtype: BF16\n" in ran.out
        assert f"    sha256: {digest(b' ' * 100_000)}\n" in ran.out
        assert "id: n-draft\n" in ran.out
        (tmp_path / "draft.yaml").write_text(ran.out, encoding="utf-8")
        ran = spawn("plan", tmp_path / "draft.yaml", "--source", "hf://o/n", environment=environment)
        assert ran.code == 0, ran.err
    assert not (tmp_path / "home" / "hub" / "models--o--n" / "snapshots").exists()


def test_standard_output_gets_the_recipe_and_nothing_else(tmp_path: Path) -> None:
    place = write_hollow(tmp_path / "model", {**TENSORS, "mask": ("BOOL", (4,))}, config=CONFIG)
    ran = run_cli("recipe", "init", place)
    assert (ran.code, ran.err) == (0, "note: 1 tensor in no object; see `ignore` in the draft for the reasons\n")
    assert ran.out == init(tmp_path, place)


def test_a_single_file_is_called_after_itself(tmp_path: Path) -> None:
    place = write_hollow(tmp_path / "My Model.v2", TENSORS)
    assert "id: my-model.v2-draft\n" in init(tmp_path, place / "model.safetensors")
    (place / "model.safetensors").rename(place / "7 Layers.safetensors")
    assert "id: model-7-layers-draft\n" in init(tmp_path, place / "7 Layers.safetensors")


@pytest.mark.parametrize("name", ["no", "null", "y", "a-b", "_"])
def test_sources_may_have_any_name(tmp_path: Path, name: str) -> None:
    first = write_hollow(tmp_path / "first", {**TENSORS, "a": ("BOOL", (2,))}, files={"vocab.txt": b"a"})
    second = write_hollow(tmp_path / "second", {"b": ("F32", (2,)), "c": ("BOOL", (2,))}, files={"merges.txt": b"a"})
    for sources in ([f"{name}={first}", f"other={second}"], [f"other={first}", f"{name}={second}"]):
        init(tmp_path, *sources)
        report = require_good(tmp_path, sources)
        assert set(report["sources"]) == {name, "other"}
        assert len(report["objects"]) == 5


def test_a_path_may_hold_an_equals_sign(tmp_path: Path) -> None:
    place = write_hollow(tmp_path / "a=b", TENSORS)
    assert "sources:\n  base:\n" in init(tmp_path, place)
    assert "sources:\n  mine:\n" in init(tmp_path, f"mine={place}")


def test_an_existing_file_stays_unless_told_otherwise(tmp_path: Path) -> None:
    place = write_hollow(tmp_path / "model", TENSORS, config=CONFIG)
    path = tmp_path / "draft.yaml"
    path.write_text("mine", encoding="utf-8")
    ran = run_cli("recipe", "init", place, "-o", path)
    assert (ran.code, ran.out) == (2, "")
    assert "draft.yaml exists; --overwrite replaces it" in ran.err
    assert path.read_text(encoding="utf-8") == "mine"
    assert run_cli("recipe", "init", place, "-o", path, "--overwrite").code == 0
    assert path.read_text(encoding="utf-8").startswith("# A draft for model,")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["draft.yaml", "model"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_source_is_never_overwritten(tmp_path: Path, file: str) -> None:
    place = write_hollow(tmp_path / "model", TENSORS, config=CONFIG)
    before = (place / file).read_bytes()
    ran = run_cli("recipe", "init", place, "-o", place / file, "--overwrite")
    assert ran.code == 2
    assert "a source is never overwritten" in ran.err
    assert (place / file).read_bytes() == before


def test_a_missing_directory_is_an_input_output_failure(tmp_path: Path) -> None:
    place = write_hollow(tmp_path / "model", TENSORS)
    ran = run_cli("recipe", "init", place, "-o", tmp_path / "nowhere" / "draft.yaml")
    assert (ran.code, ran.out) == (74, "")
    assert "nowhere is not a directory; " in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing argument"),
        (["{model}", "--matrix", "Q7"], 2, "'Q7' is not one of"),
        (["{model}", "--matrix", "BF16"], 2, "'BF16' is not one of"),
        (["base={model}", "base={model}"], 2, "source base is given twice; write NAME=SOURCE to tell them apart"),
        (["{model}", "base={model}"], 2, "source base is given twice"),
        (["mine="], 2, "source mine has no place"),
        (["{model}", "--input", "ranking"], 2, "--input ranking: write NAME=PATH"),
        (["{model}", "--input", "a=b", "--input", "a=c"], 2, "--input a is given twice"),
        (["{model}", "--input", "ranking={model}/config.json"], 2, "--input ranking: no shipped recipe that takes it"),
        (["{model}/nothing"], 1, "nothing: no such file or directory"),
        (["{model}/config.json"], 1, "is neither a directory nor a .safetensors file"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, arguments: Sequence[str], code: int, message: str
) -> None:
    place = write_hollow(tmp_path / "model", TENSORS, config=CONFIG)
    ran = run_cli("recipe", "init", *(argument.format(model=place) for argument in arguments))
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert message in ran.err


def test_a_file_that_cannot_be_used_is_told_and_not_dropped(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    for files in (FILES | {"tokenizer.json": pointer}, {"tokenizer.json": pointer}):
        place = write_tune(tmp_path / str(len(files)), files=files)
        ran = run_cli("recipe", "init", place)
        assert (ran.code, ran.out) == (1, "")
        assert "tokenizer.json: is a Git LFS pointer, not the file itself; run `git lfs pull`" in ran.err
