"""Learning rate schedulers as release 2.3 lists them: ``{class name: arguments}``, under ``trainer.init.schedulers``.

Before that, ``optimizer.learning_rate`` names a scheduler in any case and with or without ``LR`` at its end; from 2.3
on only the name of the class counts. Source of the names: the subclasses of ``LRScheduler`` in cerebras_pytorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptfs.conversion.releases.draft import TRAINER, Draft, Section

CLASSES = (
    *("ConstantLR", "PolynomialLR", "LinearLR", "ExponentialLR", "InverseExponentialTimeDecayLR"),
    *("InverseSquareRootDecayLR", "CosineDecayLR", "SequentialLR", "PiecewiseConstantLR", "MultiStepLR", "StepLR"),
    *("CosineAnnealingLR", "LambdaLR", "CosineAnnealingWarmRestarts", "MultiplicativeLR", "ChainedLR"),
    *("ChainedScheduler", "CyclicLR", "OneCycleLR", "ScalePerParamLR"),
)
_BY_NAME = {name.lower(): name for name in CLASSES}
_FIELD = "optimizer.learning_rate"
_CHAINED = ("chained", "chainedlr", "chainedscheduler")


def class_name(name: str) -> str | None:
    """The class that *name* stands for; None for a name that release 2.2 does not know."""
    plain = name.lower()
    return _BY_NAME.get(plain) or _BY_NAME.get(f"{plain}lr")


def schedulers_of(draft: Draft, optimizer: Section) -> list[Section]:
    """The schedulers that ``learning_rate`` of the *optimizer* stands for; a plain number stays there, too."""
    rate = optimizer.get("learning_rate")
    if rate is None:
        return []
    if isinstance(rate, Mapping | list):
        del optimizer["learning_rate"]
    entries = rate if isinstance(rate, list) else [rate]
    if not entries:
        return []
    chained = _is_chained(draft, entries)
    several = [_scheduler(draft, entry) for entry in entries]
    chain = {"ChainedScheduler" if chained else "SequentialLR": {"schedulers": several}}
    one = several[0] if len(several) == 1 and not chained else chain
    return [{"ScalePerParamLR": {"scheduler": one}}] if optimizer.get("adjust_learning_rate") else [one]


def rename_schedulers(draft: Draft) -> None:
    """The same names in a config that has the trainer's layout already. Schedulers of other kinds stay as they are."""
    init = draft.at(*TRAINER) if draft.nested else None
    if init is None or init.get("schedulers") is None:
        return
    found = init["schedulers"]
    init["schedulers"] = [_renamed(one) for one in found] if isinstance(found, list) else _renamed(found)


def _is_chained(draft: Draft, entries: Iterable[Any]) -> bool:
    """Whether ``main_scheduler`` of the *entries* means all at once; one after the other is the default."""
    named = {str(e["main_scheduler"]) for e in entries if isinstance(e, Mapping) and e.get("main_scheduler")}
    kinds = {name.lower() in _CHAINED for name in named}
    if len(kinds) > 1:
        draft.refuse(f"{_FIELD}.main_scheduler", sorted(named), "all schedulers of a list must have the same")
    return kinds == {True}


def _scheduler(draft: Draft, entry: Any) -> Section:
    """One entry of ``learning_rate`` as ``{class name: arguments}``."""
    if not isinstance(entry, Mapping):
        return {"ConstantLR": {"learning_rate": entry}}
    fields = {name: value for name, value in entry.items() if name != "main_scheduler"}
    kind = fields.pop("scheduler", None)
    if kind is None and len(fields) == 1 and class_name(str(next(iter(fields)))):
        return {class_name(str(name)) or name: _inner_renamed(value) for name, value in fields.items()}
    if not isinstance(kind, str):
        draft.lacks(f"{_FIELD}.scheduler", "the trainer's config names schedulers by it")
    name = class_name(kind)
    if name is None:
        draft.refuse(f"{_FIELD}.scheduler", kind, f"only {', '.join(CLASSES)} can be converted")
    if isinstance(fields.get("schedulers"), list):
        fields["schedulers"] = [_scheduler(draft, inner) for inner in fields["schedulers"]]
    return {name: fields}


def _renamed(entry: Any) -> Any:
    """``{name: arguments}`` with the name of the class, and so for the schedulers among the arguments."""
    if not isinstance(entry, Mapping):
        return entry
    return {class_name(str(name)) or name: _inner_renamed(fields) for name, fields in entry.items()}


def _inner_renamed(fields: Any) -> Any:
    if not isinstance(fields, Mapping):
        return fields
    result = dict(fields)
    if isinstance(result.get("schedulers"), list):
        result["schedulers"] = [_renamed(one) for one in result["schedulers"]]
    if isinstance(result.get("scheduler"), Mapping):
        result["scheduler"] = _renamed(result["scheduler"])
    return result
