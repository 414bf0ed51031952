"""What stands around the objects of a draft: what it is called, its sources, and the files beside them.

Source: recipe.md, duties 1 and 2.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ninfer_convert.draft.text import comment, scalar
from ninfer_convert.recipe.scope import MAX_TEXT
from ninfer_convert.source.checkpoint import Checkpoint
from ninfer_convert.source.files import SUFFIX, WEIGHTS
from ninfer_convert.source.quantization import quantization_methods

FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "normalizer.json", "chat_template.jinja", "chat_template.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"),
)
"""The small files beside weights that a model cannot be run without."""

PINNED = (
    *("architectures", "model_type", "tie_word_embeddings", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("depth", "num_heads", "patch_size", "num_experts", "num_local_experts", "num_experts_per_tok"),
    *("d_model", "encoder_layers", "decoder_layers", "n_embd", "n_layer", "n_head"),
)
"""Members of `config.json` that say which model it is."""

_SECTIONS = ("text_config", "vision_config", "audio_config")
_IDENTIFIER = re.compile("[^a-z0-9._]+")


def model_name(checkpoint: Checkpoint) -> str:
    """Returns what a checkpoint may be called: by its repository, else its directory."""
    path = os.path.abspath(checkpoint.location)
    if os.path.basename(path) == WEIGHTS:
        path = os.path.dirname(path)
    name = checkpoint.repo or os.path.basename(path).removesuffix(SUFFIX)
    word = _IDENTIFIER.sub("-", name.rpartition("/")[2].lower()).strip("-.")
    return word if word and word[0].isalpha() else f"model-{word}".rstrip("-")


def source_lines(name: str, checkpoint: Checkpoint, dtypes: Iterable[str]) -> list[str]:
    """Returns the entry of a source: repository and commit where they are known, dtypes, members of the config."""
    lines = [f"  {scalar(name)}:"]
    if checkpoint.repo and checkpoint.revision:
        lines += [f"    repo: {scalar(checkpoint.repo)}", f"    revision: {scalar(checkpoint.revision)}"]
    else:
        lines += comment("A plain directory: add repo and revision, so that others find the same weights.", 4)
    if listed := sorted(dtypes):
        lines.append(f"    dtype: {scalar(listed[0] if len(listed) == 1 else listed)}")
    if pins := pinned_config(checkpoint.config or {}):
        lines.append("    config:")
        lines += member_lines(pins, 6)
    return lines if any(not line.lstrip().startswith("#") for line in lines[1:]) else [f"  {scalar(name)}: {{}}"]


def pinned_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members of a config that a draft asks for."""
    pins: dict[str, Any] = {key: config[key] for key in PINNED if key in config and _is_simple(config[key])}
    for section in _SECTIONS:
        nested = config.get(section)
        found = pinned_config(nested) if isinstance(nested, dict) else {}
        if found:
            pins[section] = found
    for path, _ in quantization_methods(config):
        section, _, _ = path.partition(".")
        if path == f"{section}.quant_method":
            pins[section] = {"quant_method": config[section]["quant_method"]}
    return pins


def resources(sources: Mapping[str, Checkpoint]) -> Iterator[tuple[str, str, str | None, int]]:
    """Yields source, file name, SHA-256 and size of every small file that belongs into an artifact.

    A file that several sources have comes from the first of them.

    Raises:
        SourceError: one of them cannot be read.
    """
    for file in FILES:
        source = next((name for name, checkpoint in sources.items() if checkpoint.has_file(file)), None)
        if source is not None:
            checkpoint = sources[source]
            listed = checkpoint.listed_resource(file)
            if listed is not None and listed[1] is not None:
                yield source, file, listed[1], listed[0]
            else:
                content = checkpoint.resource(file)
                yield source, file, hashlib.sha256(content).hexdigest(), len(content)


def resource_lines(sources: Mapping[str, Checkpoint]) -> list[str]:
    """Returns the entries of the small files, each pinned by its SHA-256."""
    default, lines = next(iter(sources)), []
    for source, file, sha256, nbytes in resources(sources):
        if not nbytes:
            lines += comment(f"{file} is empty; a resource has at least one byte.", 2)
            continue
        lines.append(f"  - resource: {scalar(f'frontend/{file}')}")
        if source != default:
            lines.append(f"    source: {scalar(source)}")
        lines += [f"    file: {scalar(file)}", f"    sha256: {scalar(sha256)}"]
    return lines


def member_lines(members: Mapping[str, Any], indent: int) -> list[str]:
    """Returns nested members of a config, one on a line."""
    lines = []
    for key, value in members.items():
        if isinstance(value, dict):
            lines += [f"{' ' * indent}{scalar(key)}:", *member_lines(value, indent + 2)]
        else:
            lines.append(f"{' ' * indent}{scalar(key)}: {scalar(value)}")
    return lines


def _is_simple(value: object) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= 8 and all(map(_is_simple, value))
    if isinstance(value, str):
        # A placeholder would be filled in.
        return value.isprintable() and "<" not in value and len(value) <= MAX_TEXT
    return isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**63)
