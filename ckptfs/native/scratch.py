"""Scratch buffers of a thread: bounded, reused, because fresh memory is slower than copying."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]


class _Scratch(threading.local):
    """Buffers of one thread, by slot; a slot grows to the largest request it has seen."""

    def __init__(self) -> None:
        self.slots: dict[str, _Array] = {}
        self.free: list[_Array] = []


_scratch = _Scratch()


def scratch(slot: str, nbytes: int) -> _Array:
    """A uint8 array of *nbytes* that this thread may use until it asks for the same *slot* again.

    Fresh memory costs three times as much as reused memory (page faults), so readers never allocate per request.
    Callers keep their requests bounded (a few MiB); nested users take different slots.
    """
    buffer = _scratch.slots.get(slot)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = _scratch.slots[slot] = np.empty(max(nbytes, 1 << 16), np.uint8)
    return buffer[:nbytes]


class borrow:  # noqa: N801 - reads as a function: ``with borrow(n) as buffer``
    """A uint8 array of *nbytes* for the length of a ``with`` block, from this thread's pool.

    For evaluators that may call themselves (a reordered tensor over a joined one): each level gets its own buffer.
    The pool keeps one buffer a nesting level, so it grows with the depth of an expression, not with the model.
    """

    __slots__ = ("_buffer", "_nbytes")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __enter__(self) -> _Array:
        free = _scratch.free
        buffer = free.pop() if free else np.empty(max(self._nbytes, 1 << 16), np.uint8)
        if buffer.nbytes < self._nbytes:
            buffer = np.empty(self._nbytes, np.uint8)
        self._buffer = buffer
        return buffer[: self._nbytes]

    def __exit__(self, *exc: object) -> None:
        _scratch.free.append(self._buffer)


def keep_freed_memory() -> None:
    """Ask the C library to use freed memory again instead of giving it back to the system.

    By default each large tile is mapped, cleared by the kernel page by page, and unmapped: that takes a third of the
    time of a transposed view. Memory stays bounded by what is in use at one time. Does nothing without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 1 << 30), (_ARENA_MAX, 1)):
        mallopt(parameter, value)


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Numbers of <malloc.h>; 32 MiB is the most that all versions take for the first."""
