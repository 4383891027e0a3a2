"""What all measures share: the options, the result, and the checkpoints that are made at their first use."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from benchmarks import files, models
from benchmarks.models import Model
from benchmarks.mounting import Mounted, ckptfs_mount, forget

MIB = 1 << 20
GB = 10**9


@dataclass(frozen=True, slots=True)
class Bench:
    """What was asked for on the command line."""

    work: str
    size: int
    runs: int
    checkpoint: str | None = None
    keep: bool = False
    view: tuple[str, ...] = ()
    """Options of ``ckptfs mount`` for *checkpoint*, such as ``--model llama``."""
    converter: str | None = None
    """Python of an environment with the public converter."""
    cstorch: str | None = None
    """Python of an environment with cerebras_pytorch."""
    enough: int | None = None
    """Repeats that do where the others would take too long; None: all are wanted."""

    def path(self, name: str) -> str:
        return os.path.join(self.work, name)

    def repeats(self, seconds: float) -> Iterator[int]:
        """The numbers of the repeats of a comparison: `enough`, and as many more as begin within *seconds*."""
        end = time.monotonic() + seconds
        for i in range(self.runs):
            if self.enough is not None and i >= self.enough and time.monotonic() > end:
                return
            yield i

    def mount(self, source: str, *options: str) -> AbstractContextManager[Mounted]:
        """*source* mounted in the work folder."""
        view = self.view if source == self.checkpoint else ()
        return ckptfs_mount(source, self.path("mnt"), *view, *options)


class Skipped(Exception):
    """A measure that this machine or this checkpoint does not allow, and why."""


@dataclass(frozen=True, slots=True)
class Result:
    """A figure, what it should be, and what it is made of."""

    value: float
    unit: str
    target: float
    runs: list[float]
    at_most: bool = False
    """Whether less is better."""
    unmet: str | None = None
    """What else was missed, although *value* is within the target."""
    more: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What a reader of the table has to know: what was left out, and why."""

    @property
    def met(self) -> bool:
        reached = self.value <= self.target if self.at_most else self.value >= self.target
        return reached and self.unmet is None

    def as_json(self) -> dict[str, Any]:
        about = {"value": self.value, "unit": self.unit, "target": self.target, "met": self.met, "runs": self.runs}
        about |= {"unmet": self.unmet} if self.unmet else {}
        about |= {"notes": list(self.notes)} if self.notes else {}
        return {name: finite(part) for name, part in (about | self.more).items()}


def finite(value: Any) -> Any:
    """*value* with None for numbers that JSON has not: what could not be measured."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def checkpoint(bench: Bench, name: str, make: Callable[[], Model]) -> str:
    """The checkpoint given by the user, or one made in the work folder at its first use, which is on the disk only."""
    if bench.checkpoint:
        return bench.checkpoint
    path = bench.path(f"{name}.mdl")
    if not os.path.exists(path):
        files.write_checkpoint(path, make())
        forget(path)
    return path


def renamed(bench: Bench) -> str:
    return checkpoint(bench, "gptj", lambda: models.usual_gptj(bench.size))


def llama(bench: Bench) -> str:
    return checkpoint(bench, "llama", lambda: models.usual_llama(bench.size))


def median(values: Iterable[float]) -> float:
    """The median; NaN of nothing."""
    kept = list(values)
    return statistics.median(kept) if kept else math.nan


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and largest; of nothing, NaN."""
    kept = list(values)
    return {"median": median(kept), "min": min(kept, default=math.nan), "max": max(kept, default=math.nan)}


def remove(bench: Bench, path: str) -> None:
    """Remove what a measure made, unless it is to be kept."""
    if not bench.keep:
        os.unlink(path)
