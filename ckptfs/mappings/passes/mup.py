"""muP folding: a checkpoint trained with the maximal update parameterisation, seen as a standard one.

Hugging Face models know no muP, so on the way there its multipliers go into the weights: into the key projections
(attention logits), the head (output logits) and the embeddings. One way only: the factors cannot be read back from
the weights. Two generations of config fields exist: from release 2.3 on those with ``mup_base_…``, before that
``output_logits_scale`` and friends. Source of the formulas: the converter of release 2.10, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptfs.errors import MissingField, UnsupportedValue
from ckptfs.formats.source import Tensor
from ckptfs.tensors.elementwise import Step, elementwise

NEW_FIELDS = (
    "mup_base_hidden_size",
    "mup_base_filter_size",
    "attention_logits_alpha",
    "output_logits_alpha",
    "scale_output_logits_by_d",
    "embeddings_scale",
    "scale_qk_dot_by_d",
)
OLD_FIELDS = ("output_logits_scale", "embeddings_scale", "scale_qk_dot_by_d")

_EMBEDDINGS = frozenset(
    f"embedding_layer.{name}.weight" for name in ("word_embeddings", "position_embeddings", "position_embeddings.embed")
)
_EMBEDDING_NORM = frozenset({"embedding_ln_f.weight", "embedding_ln_f.bias"})
_HEADS_OLD = frozenset({"lm_head.weight"})
_HEADS_NEW = frozenset({"lm_head.weight", "mlm_head.weight", "cls_head.weight"})


def style(model: str, config: Mapping[str, Any]) -> str | None:
    """ "new", "old" or None; an incomplete set of old fields is refused."""
    if any(name.startswith("mup_base_") and value is not None for name, value in config.items()):
        return "new"
    if all(config.get(name) for name in OLD_FIELDS):
        return "old"
    for name in ("scale_qk_dot_by_d", "output_logits_scale"):
        if config.get(name):
            raise UnsupportedValue(model, name, config[name], f"muP needs all of {', '.join(OLD_FIELDS)} or none")
    return None


def fold_config(config: Mapping[str, Any], how: str) -> dict[str, Any]:
    """*config* (the model section) without muP; a tie of head and embedding is dissolved, if the config has one."""
    gone = NEW_FIELDS if how == "new" else OLD_FIELDS
    kept = {name: value for name, value in config.items() if name not in gone}
    if "share_embedding_weights" in kept:
        kept["share_embedding_weights"] = False
    return kept


def fold_tensors(model: str, config: Mapping[str, Any], how: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """*tensors* (Cerebras keys without a ``model.`` prefix) with the multipliers of *config* folded in."""
    keys, heads, embeddings = _steps(model, config, how)
    head_names = _HEADS_NEW if how == "new" else _HEADS_OLD
    embedding_names = _EMBEDDING_NORM if config.get("embedding_layer_norm") else _EMBEDDINGS
    folded = {}
    for key, tensor in tensors.items():
        steps: tuple[Step, ...] = ()
        if ".proj_k_dense_layer" in key:
            steps = keys
        elif key in head_names:
            steps = heads
        elif key in embedding_names:
            steps = embeddings
        folded[key] = elementwise(tensor, *steps)
    return folded


def _steps(
    model: str, config: Mapping[str, Any], how: str
) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[Step, ...]]:
    """Steps for key projections, heads and embeddings."""
    hidden, n_heads = _number(model, config, "hidden_size"), _number(model, config, "num_heads")
    by_d: Step = ("divide", math.sqrt(hidden // n_heads))
    scale = config.get("embeddings_scale")
    embeddings: tuple[Step, ...] = (("multiply", scale),) if scale is not None else ()
    if how == "old":
        return (by_d,), (("multiply", config["output_logits_scale"]),), embeddings
    keys: tuple[Step, ...] = (("multiply", _or(config, "attention_logits_alpha", 1)),)
    if _or(config, "scale_qk_dot_by_d", True):
        keys += (by_d,)
    base = config.get("mup_base_hidden_size")
    if base is None:
        return keys, (), embeddings
    width = hidden / base
    root = width if _or(config, "scale_output_logits_by_d", True) else math.sqrt(width)
    return keys, (("multiply", _or(config, "output_logits_alpha", 1) / root),), embeddings


def _or(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    return default if value is None else value


def _number(model: str, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise MissingField(model, name, "muP folding needs it")
    return value
