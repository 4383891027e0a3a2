"""A whole Cerebras config from one release to the next: `upgraded_config`.

Which changes a step makes, in which order, is the table `CHANGES`. What stands outside of the ``model`` section is
changed by the release that the config comes from, also on the way down: so does the public converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.conversion.config import WRONG_TYPES
from ckptfs.conversion.format_names import ModelFormat, Release
from ckptfs.conversion.releases.draft import About, Draft
from ckptfs.conversion.releases.model_config import change_model, name_model
from ckptfs.conversion.releases.mup import renew_mup
from ckptfs.conversion.releases.optimizer import rename_optimizer
from ckptfs.conversion.releases.runconfig import (
    clean_runconfig,
    drop_saved_iterators,
    move_precision_level,
    set_micro_batches,
)
from ckptfs.conversion.releases.schedulers import rename_schedulers
from ckptfs.conversion.releases.sparsity import rewrite_sparsity
from ckptfs.conversion.releases.trainer_layout import nest_under_trainer
from ckptfs.errors import ConfigError

When = Callable[[About], bool]


@dataclass(frozen=True, slots=True)
class Converted:
    """A config after one step, and what a user should know about it, one line each."""

    config: dict[str, Any]
    warnings: tuple[str, ...] = ()


def upgraded_config(config: Mapping[str, Any], about: About) -> dict[str, Any]:
    """*config* after one step. Errors as `upgraded`'s."""
    return upgraded(config, about).config


def upgraded(config: Mapping[str, Any], about: About) -> Converted:
    """*config* after one step, which is not written to; parts that the step leaves alone are shared with it.

    Raises `UnsupportedValue` or `MissingField` for what the target release cannot express, and `ConfigError` where
    sections or values are of a kind that makes no sense.
    """
    draft = Draft(about, dict(config))
    draft.model()
    for when, change in CHANGES:
        if when(about):
            try:
                change(draft)
            except WRONG_TYPES as e:
                step = f"{ModelFormat(about.frm).name} to {ModelFormat(about.to).name}"
                what = f"{type(e).__name__}: {e}"
                raise ConfigError(f"{about.family}: the config makes no sense on the way from {step}: {what}") from e
    if not draft.nested:  # as the public converter leaves it, which the order inside ``__metadata__`` shows
        draft.whole["model"] = draft.whole.pop("model")
    return Converted(draft.whole, tuple(draft.warnings))


def _always(about: About) -> bool:
    return True


def _from(*releases: Release) -> When:
    return lambda about: about.frm in releases


def _exactly(frm: Release, to: Release) -> When:
    return lambda about: (about.frm, about.to) == (frm, to)


def _up_to_trainer(about: About) -> bool:
    """Whether the step leads up to a release whose trainer knows schedulers by the names of their classes only."""
    return about.up and about.to >= (2, 3)


CHANGES: tuple[tuple[When, Callable[[Draft], None]], ...] = (
    (_always, change_model),
    (_always, drop_saved_iterators),
    (_from((1, 9), (2, 0)), clean_runconfig),
    (_exactly((2, 0), (2, 1)), move_precision_level),
    (_exactly((2, 0), (2, 1)), rename_optimizer),
    (_from((2, 1)), set_micro_batches),
    (_from((2, 1)), rewrite_sparsity),
    (_exactly((2, 2), (2, 3)), renew_mup),
    (_exactly((2, 2), (2, 3)), nest_under_trainer),
    (_up_to_trainer, rename_schedulers),
    (_exactly((2, 3), (2, 4)), name_model),
)
"""When a change is made, and the change, in order."""
