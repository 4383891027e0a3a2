"""muP folding: a checkpoint trained with the maximal update parameterisation, seen as a standard one.

Hugging Face models know no muP, so on the way there its multipliers go into the weights. One way only: the factors
cannot be read back from the weights. A family states its `Rules`: which keys take which steps. Two generations of
config fields exist: from release 2.3 on those with ``mup_base_…``, before that ``output_logits_scale`` and friends.
Source of the formulas: the converter of release 2.10, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from ckptfs.conversion.components import within
from ckptfs.conversion.config import WRONG_TYPES, Fields
from ckptfs.errors import ConfigError, MissingField, UnsupportedValue
from ckptfs.tensors.elementwise import Step, elementwise
from ckptfs.tensors.tensor import Tensor

Steps: TypeAlias = tuple[Step, ...]
Style: TypeAlias = Literal["new", "old"]


@dataclass(frozen=True, slots=True)
class Fold:
    """What happens to the tensors whose keys fit one of the patterns (``*`` stands for anything, dots too)."""

    keys: tuple[str, ...]
    steps: Callable[[Fields], Steps]


@dataclass(frozen=True, slots=True)
class Generation:
    """The fields of one generation of muP, which vanish from the config, and what they do; the first fit counts."""

    fields: tuple[str, ...]
    folds: tuple[Fold, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """What muP means in a kind of model; *old* is None where there has been none before release 2.3."""

    new: Generation
    old: Generation | None = None


def under(prefix: str, rules: Rules, section: str = "") -> Rules:
    """*rules* for a model whose keys stand behind *prefix*, and its fields behind *section*."""
    return Rules(_under(prefix, rules.new, section), _under(prefix, rules.old, section) if rules.old else None)


def _under(prefix: str, part: Generation, section: str) -> Generation:
    folds = tuple(Fold(tuple(prefix + key for key in f.keys), _inside(f.steps, section)) for f in part.folds)
    return Generation(tuple(section + name for name in part.fields), folds)


def _inside(steps: Callable[[Fields], Steps], section: str) -> Callable[[Fields], Steps]:
    return lambda fields: steps(Fields(fields.model, within(fields, section)))


def style(model: str, config: Mapping[str, Any]) -> Style | None:
    """ "new", "old" or None; an incomplete set of old fields is refused."""
    if any(str(name).startswith("mup_base_") and value is not None for name, value in config.items()):
        return "new"
    if all(config.get(name) for name in OLD_FIELDS):
        return "old"
    for name in ("scale_qk_dot_by_d", "output_logits_scale"):
        if config.get(name):
            raise UnsupportedValue(model, name, config[name], f"muP needs all of {', '.join(OLD_FIELDS)} or none")
    return None


def fold_config(model: str, rules: Rules, config: Mapping[str, Any], how: Style) -> dict[str, Any]:
    """*config* (the model section) without muP; a tie of head and embedding is dissolved, if the config has one."""
    gone = _generation(model, rules, how).fields
    kept = {name: value for name, value in config.items() if name not in gone}
    return kept | {name: False for name in kept if name.rpartition("/")[2] == "share_embedding_weights"}


def fold_tensors(
    model: str, rules: Rules, config: Mapping[str, Any], how: Style, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """*tensors* (Cerebras keys without a ``model.`` prefix) with the multipliers of *config* folded in."""
    fields = Fields(model, config)
    try:
        folds = [(fold.keys, fold.steps(fields)) for fold in _generation(model, rules, how).folds]
    except WRONG_TYPES as e:
        raise ConfigError(f"{model}: the config's muP fields make no sense: {type(e).__name__}: {e}") from e
    return {key: elementwise(tensor, *_steps_of(key, folds)) for key, tensor in tensors.items()}


def number(fields: Fields, name: str, default: float) -> float:
    """The value of *name*, *default* where it is missing or null; anything else but a number is refused."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float):
        fields.refuse(name, "muP folding needs a number")
    return value


def size(fields: Fields, name: str) -> int:
    """A size of the model, which must be there."""
    value = fields.get(name)
    if not isinstance(value, int):
        raise MissingField(fields.model, name, "muP folding needs it")
    return value


def switch(fields: Fields, name: str, default: bool) -> bool:
    """Whether *name* is on; *default* where it is missing or null."""
    value = fields.get(name)
    return default if value is None else bool(value)


def _generation(model: str, rules: Rules, how: Style) -> Generation:
    found = rules.new if how == "new" else rules.old
    if found is None:
        raise ConfigError(
            f"{model}: the config has the muP fields of releases before 2.3, which this model never had; "
            f"remove {', '.join(OLD_FIELDS)}"
        )
    return found


def _steps_of(key: str, folds: list[tuple[tuple[str, ...], Steps]]) -> Steps:
    return next((steps for keys, steps in folds if any(fnmatchcase(key, pattern) for pattern in keys)), ())


# ------------------------------------------------------------------------------------------------ decoders, BERT

OLD_FIELDS = ("output_logits_scale", "embeddings_scale", "scale_qk_dot_by_d")
NEW_FIELDS = (
    "mup_base_hidden_size",
    "mup_base_filter_size",
    "attention_logits_alpha",
    "output_logits_alpha",
    "scale_output_logits_by_d",
    "embeddings_scale",
    "scale_qk_dot_by_d",
)


def keys_old(fields: Fields) -> Steps:
    """Attention logits divided by the head size are divided by its root once more."""
    inner = "hidden_size" if fields.get("attention_inner_dim") is None else "attention_inner_dim"
    return (("divide", math.sqrt(size(fields, inner) // size(fields, "num_heads"))),)


def keys_new(fields: Fields) -> Steps:
    alpha: Step = ("multiply", number(fields, "attention_logits_alpha", 1))
    return (alpha, *keys_old(fields)) if switch(fields, "scale_qk_dot_by_d", True) else (alpha,)


def head_old(fields: Fields) -> Steps:
    return (("multiply", number(fields, "output_logits_scale", 1)),)


def head_new(fields: Fields) -> Steps:
    """alpha / width, or its root; nothing where only the feed-forward size has a base."""
    base = number(fields, "mup_base_hidden_size", 0)
    if fields.get("mup_base_hidden_size") is None:
        return ()
    width = size(fields, "hidden_size") / base
    root = width if switch(fields, "scale_output_logits_by_d", True) else math.sqrt(width)
    return (("multiply", number(fields, "output_logits_alpha", 1) / root),)


def embeddings(fields: Fields) -> Steps:
    """Embeddings are scaled where they are added, unless a norm follows; then the norm is."""
    return () if fields.get("embedding_layer_norm") else _scale(fields)


def embedding_norm(fields: Fields) -> Steps:
    return _scale(fields) if fields.get("embedding_layer_norm") else ()


def _scale(fields: Fields) -> Steps:
    return (("multiply", number(fields, "embeddings_scale", 1)),)


KEYS = ("*.proj_k_dense_layer*",)
EMBEDDINGS = (
    Fold(tuple(f"embedding_layer.{n}.weight" for n in ("word_embeddings", "position_embeddings*")), embeddings),
    Fold(("embedding_ln_f.weight", "embedding_ln_f.bias"), embedding_norm),
)
HEADS = ("lm_head.weight", "mlm_head.weight", "cls_head.weight")
DECODER = Rules(
    new=Generation(NEW_FIELDS, (Fold(KEYS, keys_new), Fold(HEADS, head_new), *EMBEDDINGS)),
    old=Generation(OLD_FIELDS, (Fold(KEYS, keys_old), Fold(HEADS[:1], head_old), *EMBEDDINGS)),
)
KEYS_ONLY = Rules(
    new=Generation(NEW_FIELDS, (Fold(KEYS, keys_new),)),
    old=Generation(OLD_FIELDS, (Fold(KEYS, keys_old),)),
)
"""BERT: the converter's patterns for heads and embeddings do not fit its keys, so these stay unscaled."""
