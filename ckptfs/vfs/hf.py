"""The folder `hf/`: a checkpoint as `AutoModel.from_pretrained` wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ckptfs.formats.extents import ExtentFile, json_file
from ckptfs.formats.huggingface import hf_files
from ckptfs.tensors.tensor import Tensor
from ckptfs.vfs.tree import Entry, Folder, Leaf

DEFAULT_SHARD_BYTES = 10 * 10**9
"""Tensor bytes of one weight file, as in the Cerebras converter."""

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
TOKENS_OF: dict[str, tuple[int | None, ...]] = {
    "bloom": (1, 2),
    "codegen": (50256, 50256),
    "falcon": (11, 11),
    "gemma2": (2, 1, 0),
    "gpt2": (50256, 50256),
    "gpt_bigcode": (50256, 50256),
    "gpt_neox": (0, 2),
    "gptj": (50256, 50256),
    "llama": (1, 2),
    "mistral": (1, 2),
    "mixtral": (1, 2),
    "t5": (None, 1, 0),
}
"""Model type to the first, last and padding token that transformers assumes where a config does not name them.

Needed because transformers 4 no longer derives them once there is a ``generation_config.json``."""
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


class View(Protocol):
    """A checkpoint seen as another format."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tgt(self) -> str:
        """``hf`` or ``cs-X.Y``."""
        ...

    @property
    def model(self) -> str: ...
    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """JSON files beside the config, by path."""
        ...

    @property
    def components(self) -> tuple[str, ...]:
        """The folders of a view of several models; see `ckptfs.vfs.components`."""
        ...

    @property
    def paths(self) -> tuple[str, ...]:
        """Fields of the configs (``folder/field``) that say where another component lies."""
        ...


def hf_folder(
    view: View, *, shard_bytes: int = DEFAULT_SHARD_BYTES, extra: Mapping[str, Entry] | None = None
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
    assumed = dict(zip(_TOKENS, TOKENS_OF.get(str(config.get("model_type")), ()), strict=False))
    tokens = {name: config.get(name, assumed.get(name)) for name in _TOKENS}
    tokens = {name: token for name, token in tokens.items() if token is not None}
    others = {
        k: config[k] for k, default in _GENERATION_DEFAULTS.items() if config.get(k, default) not in (default, None)
    }
    return {"_from_model_config": True, **tokens, **others}


def _missing(extra: Mapping[str, Entry], files: Mapping[str, ExtentFile]) -> dict[str, Entry]:
    return {name: entry for name, entry in extra.items() if name not in files}
