"""``generation_config.json``: which tokens begin and end a text, as far as something beside the weights says so.

Each id comes from the first of these that names it: ``generation_config.json`` beside the tokenizer, the tokenizer's
own files, the model's config. Class defaults of transformers are no source: text would stop at a wrong token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.formats.extents import ExtentFile, json_file
from ckptfs.vfs.token_ids import file_beside, json_of, tokenizer_ids
from ckptfs.vfs.tree import Entry

NAME = "generation_config.json"
_END = "eos_token_id"
_TOKENS = ("bos_token_id", _END, "pad_token_id", "decoder_start_token_id")
_SETTINGS: dict[str, object] = {
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


def generation_file(config: Mapping[str, Any], beside: Mapping[str, Entry]) -> ExtentFile | None:
    """The file for a model with this ``config.json``; None where nothing is known, or the model generates no text.

    *beside* are the files of the tokenizer's folder by name; a ``generation_config.json`` there that names the end of
    a text is taken as it is. Raises `UsageError` for files of it that are damaged.
    """
    if not generates(config):
        return None
    given = json_of(beside, NAME)
    if given.get(_END) is not None:
        return file_beside(beside, NAME)
    from_tokenizer = tokenizer_ids(beside)
    from_config = {name: config[name] for name in _TOKENS if config.get(name) is not None}
    settings = {k: config[k] for k, unset in _SETTINGS.items() if config.get(k, unset) not in (unset, None)}
    stated = {name: value for name, value in given.items() if value is not None}
    found = {**settings, **from_config, **from_tokenizer, **stated}
    if not found.keys() & {*_TOKENS}:
        return file_beside(beside, NAME)
    # transformers derives a file with this mark again, from the config alone
    derived = {} if from_tokenizer or given else {"_from_model_config": True}
    return json_file({**derived, **found}, sort_keys=True)


def lacks_end(config: Mapping[str, Any], beside: Mapping[str, Entry]) -> bool:
    """Whether the model generates text, and nothing says which token ends it."""
    if not generates(config) or config.get(_END) is not None:
        return False
    return json_of(beside, NAME).get(_END) is None and _END not in tokenizer_ids(beside)


def generates(config: Mapping[str, Any]) -> bool:
    """Whether the model has a head for text. A config without ``architectures`` counts as one that has."""
    names = config.get("architectures") or ()
    return not names or any(str(name).endswith(_GENERATES) for name in names)
