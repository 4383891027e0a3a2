"""From one Cerebras release to another, by the steps between them: configs, and whole checkpoints.

Reads no tensor data. What the steps do to a model's keys stands in `families`, to its config in `config`, to the rest
of the checkpoint in `state`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.conversion import hf
from ckptfs.conversion.apply import log
from ckptfs.conversion.family import Family
from ckptfs.conversion.format_names import ModelFormat
from ckptfs.conversion.releases import config as configs
from ckptfs.conversion.releases import state as states
from ckptfs.conversion.releases.draft import About
from ckptfs.conversion.releases.paths import steps_of
from ckptfs.conversion.releases.steps import Move, Setting, find_path, formats_of
from ckptfs.conversion.sections import model_section
from ckptfs.errors import MappingError, NoPath
from ckptfs.formats.source import Source


@dataclass(frozen=True, slots=True)
class Converted:
    """A checkpoint as another release has it."""

    source: Source
    config: Mapping[str, Any]
    warnings: tuple[str, ...]


def upgraded(
    source: Source,
    family: Family,
    config: Mapping[str, Any],
    src: ModelFormat,
    tgt: ModelFormat,
    *,
    dataloader: Mapping[str, Any] | None = None,
    note: bool = True,
    drop_unmatched: bool = False,
) -> Converted:
    """*source* with all its states in release *tgt*, newer or older than *src*; *config* is its whole config.

    *dataloader* is the state of the input pipeline where it stood outside of the checkpoint; one inside wins. With
    *note*, ``__metadata__`` gets an entry for the conversion. Raises `NoPath`, and what the config or the keys make
    impossible.
    """
    state = states.opened(source)
    warnings: list[str] = []
    path = find_path(family.name, steps_of(family), src, tgt)
    for move in path:
        _apply(state, family, config, move, warnings, drop_unmatched)
        config = _config(family, config, move, warnings)
    if src.release is not None and src.release < (2, 0):
        states.catch_up_scheduler(state)
    states.move_sparsity(state)
    if dataloader is not None and "dataloader" not in state.top:
        states.put(state, "dataloader", dataloader)
    if note and path and not path[-1].step.model_only:
        assert tgt.release is not None
        states.note(state, "{}.{}.0".format(*tgt.release), family.name, config)
    _log_keys(source, state)
    result = states.closed(state, source)
    return Converted(_without_refused(result, family, drop_unmatched), config, tuple(warnings))


def config_as(
    family: Family, config: Mapping[str, Any], src: ModelFormat, tgt: ModelFormat, warnings: list[str]
) -> dict[str, Any]:
    """The whole *config* of release *src* as release *tgt* wants it; adds to *warnings*, errors as `upgraded`'s."""
    for move in find_path(family.name, steps_of(family), src, tgt):
        config = _config(family, config, move, warnings)
    return dict(config)


def connected(family: Family, src: ModelFormat, tgt: ModelFormat) -> bool:
    """Whether steps lead from one format to the other."""
    try:
        return find_path(family.name, steps_of(family), src, tgt) is not None
    except NoPath:
        return False


def known(family: Family) -> str:
    """The Cerebras formats that are connected among each other, for messages."""
    return formats_of(steps_of(family))


def _config(family: Family, config: Mapping[str, Any], move: Move, warnings: list[str]) -> dict[str, Any]:
    about = _about(family, move)
    if move.step.config is not None:
        return move.step.config(config, about)
    done = configs.upgraded(config, about)
    warnings.extend(done.warnings)
    return done.config


def _about(family: Family, move: Move) -> About:
    assert move.frm.release is not None and move.to.release is not None
    variants = (move.frm.variant, move.to.variant)
    return About(family.name, family.cs_name, move.frm.release, move.to.release, variants)


def _apply(
    state: states.State, family: Family, config: Mapping[str, Any], move: Move, warnings: list[str], drop: bool
) -> None:
    if move.step.model_only:
        if state.top.keys() - {states.MODEL}:
            warnings.append(
                f"{family.name} has other parameters in {move.frm.name} and {move.to.name}: only the model is kept, "
                "without optimizer, step and the like"
            )
        states.keep_model_only(state)
    section = model_section(config) if move.changes else {}
    setting = Setting(_about(family, move), move.up, section, warnings, drop)
    for change in move.changes:
        state.model = change.apply(state.model, setting)


def _log_keys(source: Source, state: states.State) -> None:
    """What each key of the model becomes; the leaves that stay are the same ones."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    before = {id(item.tensor or item): key for key, item in hf.model_items(source).items()}
    for key, item in state.model.items():
        old = before.pop(id(item.tensor or item), None)
        log.debug("%s -> %s", old, key) if old is not None else log.debug("made: %s", key)
    for key in before.values():
        log.debug("%s -> nothing", key)


def _without_refused(source: Source, family: Family, drop: bool) -> Source:
    """*source*, all of whose leaves can be written; `MappingError` names those that cannot."""
    bad = {k: i.reason or f"it is a {i.kind}" for k, i in source.items.items() if i.kind in ("object", "link")}
    if bad and not drop:
        key, why = next(iter(bad.items()))
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        message = f"{family.name}: {key} cannot be carried over: {why}{more}"
        raise MappingError(message, option="drop_unmatched_keys")
    return states.without(source, bad) if bad else source
