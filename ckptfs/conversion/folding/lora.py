"""LoRA folding: a checkpoint trained with low-rank adapters, seen as the plain model.

``<module>.lora_A`` (r, in) and ``<module>.lora_B`` (out, r) stand beside ``<module>.weight``; the weight becomes
``W + (B @ A) * (alpha / r)``, with the transposed product for embeddings and ``fan_in_fan_out``. One way only. The
trainer picks modules by the names of their classes (``target_modules``), which a checkpoint does not have: what its
keys, the ranks and the config leave open is refused rather than guessed. Source of the formulas: release 2.10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.errors import ConfigError, MissingField, MissingKeys, ShapeError, UnsupportedValue
from ckptfs.tensors.low_rank import low_rank
from ckptfs.tensors.tensor import Tensor

A, B, WEIGHT = ".lora_A", ".lora_B", ".weight"
FIELD = "lora_params"
INPUT_EMBEDDING = "embedding_layer.word_embeddings"
HEAD = "lm_head.weight"

_EMBEDDING_LEAF = re.compile(r"embed|embeddings?|\w+_embeddings?")
_PLACES = {
    "EmbeddingLayer": re.compile(r"embedding_layer\."),
    "TransformerEncoder": re.compile(r"(\w+_)?encoder\.layers\."),
    "TransformerEncoderLayer": re.compile(r"(\w+_)?encoder\.layers\."),
    "TransformerDecoder": re.compile(r"(\w+_)?decoder\.layers\."),
    "TransformerDecoderLayer": re.compile(r"(\w+_)?decoder\.layers\."),
    "FeedForwardNetwork": re.compile(r"ffn\."),
    "SingleFeedForwardLayer": re.compile(r"ffn\.\d+\.linear_layer"),
}
"""Class to the place in a key (at the beginning of a part) that its modules have in the writer's models."""
_ATTENTION = re.compile(r"\w*attn\.proj_\w+_dense_layer")
_ATTENTION_CLASSES = {
    "aiayn_attention": "MultiheadAttention",
    "multiquery_attention": "MultiQueryAttention",
}
"""``attention_module`` in the config to the class of a model's attention."""


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """One entry of ``lora_params``. *targets* None means every module."""

    rank: int
    alpha: float
    fan_in_fan_out: bool
    targets: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Folded:
    """A state and its ``model`` section without adapters."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    warnings: tuple[str, ...] = ()


def has_lora(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether the ``model`` section or the keys speak of adapters."""
    return config.get(FIELD) is not None or any(key.endswith((A, B)) for key in tensors)


def callback_params(config: Mapping[str, Any]) -> Any:
    """The ``lora_params`` that a whole trainer config gives to its callback ``Lora``; None where it has none."""
    return next((c["Lora"].get(FIELD) for c in _callbacks(config) if _is_lora(c)), None)


def without_callback(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A whole config without the callback ``Lora``."""
    callbacks = _callbacks(config)
    if not any(map(_is_lora, callbacks)):
        return config
    trainer = config["trainer"]
    kept = {**trainer["init"], "callbacks": [c for c in callbacks if not _is_lora(c)]}
    return {**config, "trainer": {**trainer, "init": kept}}


def _callbacks(config: Mapping[str, Any]) -> list[Any]:
    where: Any = config
    for name in ("trainer", "init", "callbacks"):
        where = where.get(name) if isinstance(where, Mapping) else None
    return where if isinstance(where, list) else []


def _is_lora(callback: object) -> bool:
    return isinstance(callback, Mapping) and isinstance(callback.get("Lora"), Mapping)


def fold(model: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Folded:
    """*tensors* (keys of the ``model`` state) and *config* (its ``model`` section) with all adapters folded in.

    Raises `MissingField` without ``lora_params``, `UnsupportedValue` for a broken one, `MissingKeys` where parts of
    adapters are absent, `ShapeError` where they do not fit, and `ConfigError` where it stays open which group of the
    config a module belongs to.
    """
    groups = _groups(model, config)
    modules = _modules(model, tensors)
    if not modules and any(group.rank for group in groups):
        why = f"the config has {FIELD}; is this the config of another checkpoint, or is it folded already?"
        raise MissingKeys(model, [f"*{A}", f"*{B}"], why)
    folded = {key: tensor for key, tensor in tensors.items() if not key.endswith((A, B))}
    for module in modules:
        folded[module + WEIGHT] = _fold_module(model, config, groups, module, tensors)
    kept = {name: value for name, value in config.items() if name != FIELD}
    tied = [m for m in modules if _tail(m) == INPUT_EMBEDDING] if kept.get("share_embedding_weights") else []
    if not tied:
        return Folded(folded, kept)
    kept["share_embedding_weights"] = False
    key = tied[0] + WEIGHT
    folded.setdefault(key.removesuffix(INPUT_EMBEDDING + WEIGHT) + HEAD, tensors[key])
    warning = f"{key} had an adapter, so {HEAD}, which was tied to it, is now a weight of its own, without the adapter"
    return Folded(folded, kept, (warning,))


def _groups(model: str, config: Mapping[str, Any]) -> list[AdapterGroup]:
    """The groups of ``lora_params``, in their order."""
    if FIELD not in config:
        raise MissingField(model, FIELD, f"the keys {A[1:]} and {B[1:]} cannot be folded without it")
    value = config[FIELD]
    entries = value if isinstance(value, list) else [value]
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise UnsupportedValue(model, FIELD, value, "it must be a mapping or a list of mappings")
    return [_group(model, entry) for entry in entries]


def _group(model: str, entry: Mapping[str, Any]) -> AdapterGroup:
    rank, alpha = entry.get("r", 0), entry.get("alpha", 1)
    fan, targets = entry.get("fan_in_fan_out", False), entry.get("target_modules")
    if type(rank) is not int or rank < 0:
        raise UnsupportedValue(model, f"{FIELD}.r", rank, "it must be a whole number")
    if type(alpha) not in (int, float) or not abs(alpha) < 1e300:
        raise UnsupportedValue(model, f"{FIELD}.alpha", alpha, "it must be a number")
    if not isinstance(fan, bool):
        raise UnsupportedValue(model, f"{FIELD}.fan_in_fan_out", fan, "it must be true or false")
    if targets is not None and not (isinstance(targets, list) and all(isinstance(name, str) for name in targets)):
        raise UnsupportedValue(model, f"{FIELD}.target_modules", targets, "it must be a list of class names")
    return AdapterGroup(rank, alpha, fan, None if targets is None else tuple(targets))


def _modules(model: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """The modules with adapters, in the order of the state; `MissingKeys` where one is not whole."""
    found = dict.fromkeys(key[: -len(A)] for key in tensors if key.endswith((A, B)))
    gaps = [module + part for module in found for part in (WEIGHT, A, B) if module + part not in tensors]
    if gaps:
        raise MissingKeys(model, gaps, "an adapter needs its weight and both factors")
    return list(found)


def _fold_module(
    model: str, config: Mapping[str, Any], groups: list[AdapterGroup], module: str, tensors: Mapping[str, Tensor]
) -> Tensor:
    weight, a, b = (tensors[module + part] for part in (WEIGHT, A, B))
    if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0]:
        raise ShapeError(module + A, a.shape, f"an adapter is two matrices, but its other one is {b.shape}")
    group = _group_of(model, config, groups, module, a.shape[0])
    swapped = _is_swapped(group, module, weight, b, a)
    return low_rank(module + WEIGHT, weight, b, a, group.alpha / group.rank, swapped=swapped)


def _group_of(
    model: str, config: Mapping[str, Any], groups: list[AdapterGroup], module: str, rank: int
) -> AdapterGroup:
    """The first group that has this rank and this module, as far as can be told."""
    likely = [group for group in groups if group.rank == rank]
    if not likely:
        ranks = ", ".join(str(group.rank) for group in groups)
        raise ConfigError(f"{model}: {module} has an adapter of rank {rank}, but {FIELD} has r = {ranks}")
    fits = [(group, _fits(group, module, config)) for group in likely]
    open_ = [group for group, fit in fits if fit is not False] or likely
    sure = next((i for i, group in enumerate(open_) if _fits(group, module, config)), len(open_) - 1)
    chosen = {(group.alpha, group.fan_in_fan_out) for group in open_[: sure + 1]}
    if len(chosen) > 1:
        raise ConfigError(
            f"{model}: {module}: several groups of {FIELD} with r = {rank} may be its own, and they differ; "
            "leave only that group in the config for it, or give all of them the same alpha"
        )
    return open_[0]


def _fits(group: AdapterGroup, module: str, config: Mapping[str, Any]) -> bool | None:
    """Whether the chain of classes down to *module* has all that *group* names; None when the key does not tell."""
    answers = [_inside(name, module, config) for name in group.targets or ()]
    if False in answers:
        return False
    return None if None in answers else True


def _inside(name: str, module: str, config: Mapping[str, Any]) -> bool | None:
    """Whether *module* is, or is inside of, a module of class *name*."""
    if name in ("Linear", "Embedding"):
        kind = _kind(module)
        return None if kind is None else kind == name
    if name in _ATTENTION_CLASSES.values():
        own = _ATTENTION_CLASSES.get(str(config.get("attention_module", "aiayn_attention")))
        if not _at(_ATTENTION, module):
            return False
        return None if own is None else own == name
    place = _PLACES.get(name)
    return None if place is None else _at(place, module)


def _kind(module: str) -> str | None:
    """``Embedding`` or ``Linear``, None where the name could be either's."""
    if _EMBEDDING_LEAF.fullmatch(module.rpartition(".")[2]):
        return "Embedding"
    return None if "embed" in module else "Linear"


def _is_swapped(group: AdapterGroup, module: str, weight: Tensor, b: Tensor, a: Tensor) -> bool:
    """Whether the product goes in transposed. The shapes tell, but for square weights."""
    if len(weight.shape) != 2 or weight.shape[0] != weight.shape[1]:
        return (a.shape[1], b.shape[0]) == weight.shape
    if group.fan_in_fan_out:
        return True
    kind = _kind(module)
    if kind is None:
        named = {"Linear", "Embedding"} & set(group.targets or ())
        if len(named) != 1:
            raise ConfigError(
                f"{module} is square, so its shape does not tell a Linear from an Embedding; "
                f"name the class in target_modules of {FIELD}"
            )
        (kind,) = named
    return kind == "Embedding"


def _at(place: re.Pattern[str], module: str) -> bool:
    """Whether *place* occurs at the beginning of a part of *module*."""
    return any(place.match(module, at) for at in (0, *(m.end() for m in re.finditer(r"\.", module))))


def _tail(module: str) -> str:
    return ".".join(module.split(".")[-2:])
