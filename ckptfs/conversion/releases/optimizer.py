"""Release 2.1 gave fields of optimizers and learning rate schedulers the names of the classes' own arguments.

A field is renamed only where the class takes the new name, and only while that is not set. Which class takes what:
the signatures of cerebras_pytorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfs.conversion.releases.draft import Draft, Section


@dataclass(frozen=True, slots=True)
class Taken:
    """Which classes take an argument: those of *names*, or with *but* all others. Names are as `plain` gives them."""

    names: frozenset[str]
    but: bool = False

    def by(self, name: str) -> bool:
        return (name in self.names) != self.but


def _by(*names: str) -> Taken:
    return Taken(frozenset(names))


def _by_all_but(*names: str) -> Taken:
    return Taken(frozenset(names), but=True)


_BETAS = _by("adam", "adamw", "adamax", "adambase", "lamb", "lion", "nadam", "radam")
_EPS = _by_all_but("asgd", "lion", "rprop", "sgd")
_RPROP = _by("rprop")

OPTIMIZER: tuple[tuple[tuple[str, ...], str, Taken], ...] = (
    (("beta1", "beta2"), "betas", _BETAS),
    (("eps1", "eps2"), "eps", _EPS),
    (("eta1", "eta2"), "etas", _RPROP),
    (("step_size_min", "step_size_max"), "step_sizes", _RPROP),
    (("weight_decay_rate",), "weight_decay", _by_all_but("rprop")),
)
"""Old fields, the new one (a list of the old ones' values where they are several), and the optimizers that take it."""

_TOTAL = _by("constant", "polynomial", "linear", "exponential", "inverseexponentialtimedecay", "cosinedecay")
_INITIAL = _by_all_but("constant", "piecewiseconstant", "sequential", "cyclic", "chained", "scaleperparam")
_WARM = _by("cosineannealingwarmrestarts")

SCHEDULER: tuple[tuple[str, str, Taken], ...] = (
    ("learning_rate", "initial_learning_rate", _INITIAL),
    ("base_lr", "initial_learning_rate", _INITIAL),
    ("steps", "total_iters", _TOTAL),
    ("decay_steps", "total_iters", _TOTAL),
    ("values", "learning_rates", _by("piecewiseconstant")),
    ("boundaries", "milestones", _by("sequential", "piecewiseconstant", "multistep")),
    ("t_max", "T_max", _by("cosineannealing")),
    ("t_0", "T_0", _WARM),
    ("t_mult", "T_mult", _WARM),
    ("learning_rate", "base_lr", _by("cyclic")),
    ("initial_learning_rate", "base_lr", _by("cyclic")),
)


def rename_optimizer(draft: Draft) -> None:
    """The ``optimizer`` section with the names of 2.1, its learning rate schedulers included."""
    optimizer = draft.section("optimizer")
    if optimizer is None:
        return
    kind = plain(optimizer.get("optimizer_type"))
    for olds, new, taken in OPTIMIZER if kind else ():
        if taken.by(kind) and new not in optimizer and all(old in optimizer for old in olds):
            values = [optimizer.pop(old) for old in olds]
            optimizer[new] = values if len(values) > 1 else values[0]
    rate = optimizer.get("learning_rate")
    if isinstance(rate, Mapping):
        optimizer["learning_rate"] = _scheduler(rate)
    elif isinstance(rate, Sequence) and not isinstance(rate, str):
        optimizer["learning_rate"] = [_scheduler(one) if isinstance(one, Mapping) else one for one in rate]


def _scheduler(entry: Mapping[str, Any]) -> Section:
    result = dict(entry)
    kind = plain(result.get("scheduler"))
    for old, new, taken in SCHEDULER if kind else ():
        if old in result and new not in result and taken.by(kind):
            result[new] = result.pop(old)
    return result


def plain(name: object) -> str:
    """A class name as configs may spell it, in lower case and without LR or Scheduler at the end."""
    return str(name or "").lower().removesuffix("scheduler").removesuffix("lr")
