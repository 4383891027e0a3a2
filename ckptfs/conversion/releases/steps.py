"""Which releases are one step apart, and what a step does to the keys of the model: values and the path between them.

A `Step` is written once and taken in both directions; what happens to a config stands in `config`, by release.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ckptfs.conversion.format_names import CURRENT, RELEASES, ModelFormat, Release
from ckptfs.conversion.releases.draft import About
from ckptfs.errors import NoPath
from ckptfs.formats.source import Item

Model: TypeAlias = dict[str, Item]
"""Key inside the ``model`` state to what it holds, in order."""
ConfigStep: TypeAlias = Callable[[Mapping[str, Any], About], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a change may know: the step, the ``model`` section it starts from, and where warnings go."""

    about: About
    up: bool
    """Whether the step is taken from its old to its new format."""
    section: Mapping[str, Any]
    warnings: list[str]
    drop_unmatched: bool = False


class Change(Protocol):
    """What one step does to the model's keys, in the direction that the setting says; frozen data."""

    def apply(self, model: Model, setting: Setting) -> Model: ...


@dataclass(frozen=True, slots=True)
class Step:
    """Two formats that are one step apart.

    *changes* are listed in the direction from *old* to *new* and taken in the other order on the way back. *alone*: the
    step is taken when it is the whole way, but not as a part of a longer one, where it would skip what the steps
    between do. *model_only*: optimizer and everything else beside the model cannot be carried over. *config* stands in
    for the config change that is registered by release.
    """

    old: ModelFormat
    new: ModelFormat
    changes: tuple[Change, ...] = ()
    alone: bool = False
    model_only: bool = False
    config: ConfigStep | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """A step in one direction."""

    step: Step
    frm: ModelFormat
    to: ModelFormat

    @property
    def up(self) -> bool:
        """Whether it is taken from the old to the new format."""
        return self.frm == self.step.old

    @property
    def changes(self) -> tuple[Change, ...]:
        """Its changes in the order in which they are made."""
        return self.step.changes if self.up else self.step.changes[::-1]


def step(
    old: Release, new: Release, *changes: Change, variant: str = "", alone: bool = False, model_only: bool = False
) -> Step:
    """A step between two releases of the same layout."""
    return Step(ModelFormat(old, variant), ModelFormat(new, variant), changes, alone, model_only)


def unchanged(since: Release, until: Release = CURRENT, *, variant: str = "") -> tuple[Step, ...]:
    """Steps from each release to the next that leave all keys as they are.

    The public converter lists such steps up to 2.5; the releases after it did not change checkpoints either.
    """
    between = [release for release in RELEASES if since <= release <= until]
    return tuple(step(a, b, variant=variant) for a, b in itertools.pairwise(between))


def find_path(model: str, steps: Collection[Step], src: ModelFormat, tgt: ModelFormat) -> list[Move]:
    """The fewest steps from *src* to *tgt*; `NoPath` when there is no way."""
    moves = [Move(s, a, b) for s in steps for a, b in ((s.old, s.new), (s.new, s.old))]
    direct = [move for move in moves if (move.frm, move.to) == (src, tgt)]
    if direct or src == tgt:
        return direct[:1]
    reached: dict[ModelFormat, list[Move]] = {src: []}
    todo = deque([src])
    while todo:
        here = todo.popleft()
        for move in moves:
            if move.frm == here and move.to not in reached and not move.step.alone:
                reached[move.to] = [*reached[here], move]
                todo.append(move.to)
    if tgt not in reached:
        raise NoPath(model, src.name, tgt.name, formats_of(steps))
    return reached[tgt]


def formats_of(steps: Collection[Step]) -> str:
    """The formats that *steps* connect, for messages."""
    formats = sorted({f for s in steps for f in (s.old, s.new)}, key=lambda f: (f.variant, f.release or CURRENT))
    spans = [[f for f in formats if f.variant == v] for v in dict.fromkeys(f.variant for f in formats)]
    return ", ".join(f"{span[0].name} … {span[-1].name}" for span in spans)
