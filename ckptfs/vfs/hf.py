"""The folder `hf/`: a checkpoint as `AutoModel.from_pretrained` wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.families.tokens import TOKENS, TOKENS_OF
from ckptfs.formats.extents import ExtentFile, json_file
from ckptfs.formats.huggingface import hf_files
from ckptfs.vfs.tree import Entry, Folder, Leaf

DEFAULT_SHARD_BYTES = 10 * 10**9
"""Tensor bytes of one weight file, as in the Cerebras converter."""

_GENERATION_DEFAULTS: dict[str, object] = {
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""Generation settings that configs of transformers 4 carry, with the values that mean "not set"."""
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def hf_folder(
    view: Conversion, *, shard_bytes: int = DEFAULT_SHARD_BYTES, extra: Mapping[str, Entry] | None = None
) -> Folder:
    """Configs, weights and index; entries of *extra* (tokenizer files) where the model has none of that name."""

    def make() -> dict[str, Entry]:
        files = {**json_files(view.files), **config_files(view.config), **hf_files(view.tensors, shard_bytes)}
        return {**{name: Leaf(file) for name, file in files.items()}, **_missing(extra or {}, files)}

    return Folder(make)


def config_files(config: Mapping[str, Any]) -> dict[str, ExtentFile]:
    """``config.json`` as the Cerebras converter spells it; ``generation_config.json`` for models that generate."""
    files = {"config.json": json_file(config, indent=4, newline=False)}
    generation = generation_config(config)
    if generation is not None:
        files["generation_config.json"] = json_file(generation, sort_keys=True)
    return files


def json_files(files: Mapping[str, Mapping[str, Any]]) -> dict[str, ExtentFile]:
    """Files of JSON in the same spelling."""
    return {name: json_file(content, indent=4, newline=False) for name, content in files.items()}


def generation_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The generation settings in a model config, as transformers would derive them; None if the model has no head.

    A config without ``architectures`` counts as one that generates.
    """
    names = config.get("architectures") or ()
    if names and not any(str(name).endswith(_GENERATES) for name in names):
        return None
    assumed = dict(zip(TOKENS, TOKENS_OF.get(str(config.get("model_type")), ()), strict=False))
    tokens = {name: config.get(name, assumed.get(name)) for name in TOKENS}
    tokens = {name: token for name, token in tokens.items() if token is not None}
    others = {
        k: config[k] for k, default in _GENERATION_DEFAULTS.items() if config.get(k, default) not in (default, None)
    }
    return {"_from_model_config": True, **tokens, **others}


def _missing(extra: Mapping[str, Entry], files: Mapping[str, ExtentFile]) -> dict[str, Entry]:
    return {name: entry for name, entry in extra.items() if name not in files}
