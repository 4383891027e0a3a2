"""Processor time in units of a loop timed in the same process: the same number on a slow or a loaded machine."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

N = 200_000
"""Steps of the loop: about 25 ms on a processor of 2020."""
MAX_EFFORT = 300
"""Of one small file, whatever it asks for: about 7 s on such a processor, four times what the worst one takes."""


def unit() -> float:
    """Processor seconds of the loop, here and now."""
    begin = processor_seconds()
    made = {}
    for i in range(N):
        made[str(i & 1023)] = [i]
    return max(processor_seconds() - begin, 1e-3)


@contextmanager
def measured() -> Iterator[Callable[[], float]]:
    """A function that says, after the block, how many units the block took."""
    before, begin = unit(), processor_seconds()
    found: list[float] = []
    yield lambda: found[0]
    spent = processor_seconds() - begin
    found.append(spent / max(before, unit()))


def processor_seconds() -> float:
    """Of this process and of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
