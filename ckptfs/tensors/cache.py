"""The tile cache that all readers share: bounded by a budget in bytes, whatever the model's size."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy.typing as npt

DEFAULT_CACHE_BYTES = 128 << 20
ALL_USED = 1 - 1e-6
"""Sum of shares from which on a tile counts as used up."""

_Array = npt.NDArray[Any]


class TileCache:
    """Decoded tiles (numpy arrays), least recently used out first, at most *budget* bytes in all.

    Holds what is expensive to make again: decompressed HDF5 chunks, transposed tiles. The unit is one array under one
    hashable key; an entry leaves when the budget is short. Tiles are made outside the lock; of two threads that need
    the same tile the second waits for the first. A tile larger than the budget is made, returned and not kept.
    """

    def __init__(self, budget: int = DEFAULT_CACHE_BYTES) -> None:
        self.budget = budget
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.seconds = 0.0
        """Time spent in making tiles; a tile made of other tiles includes their time."""
        self._tiles: OrderedDict[Hashable, _Array] = OrderedDict()
        self._used: dict[Hashable, float] = {}
        self._making: dict[Hashable, threading.Event] = {}
        self._lock = threading.Lock()
        self._lent = 0

    def get(self, key: Hashable, make: Callable[[], _Array], share: float = 0.0) -> _Array:
        """The tile under *key*, made by *make* when it is not kept. The caller must not write to it.

        *share* is the part of the tile that the caller is going to use. A tile whose parts have all been used leaves:
        a sequential reader does not come back, and its memory, still in the processor's cache, serves the next tile.
        """
        while True:
            with self._lock:
                tile = self._tiles.get(key)
                if tile is not None:
                    self.hits += 1
                    self._use(key, share)
                    return tile
                event = self._making.get(key)
                if event is None:
                    event = self._making[key] = threading.Event()
                    self.misses += 1
                    break
            event.wait()
        start = time.perf_counter()
        try:
            tile = make()
            self._keep(key, tile, share)
            return tile
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - start
                del self._making[key]
            event.set()

    def holds(self, key: Hashable) -> bool:
        """Whether that tile is kept or being made at this moment."""
        return key in self._tiles or key in self._making

    def forget_threads(self) -> None:
        """Empty the cache in a child process, where the threads that used it do not exist."""
        self._lock = threading.Lock()
        self._making = {}
        self._tiles.clear()
        self._used.clear()
        self.nbytes = 0

    def lend(self, share: float) -> int:
        """Give that part of the budget to another cache, after taking back the part lent before; its bytes."""
        whole = self.budget + self._lent
        self._lent = int(whole * share)
        self.budget = whole - self._lent
        return self._lent

    def _keep(self, key: Hashable, tile: _Array, share: float) -> None:
        if tile.nbytes > self.budget:
            return
        with self._lock:
            self._tiles[key] = tile
            self.nbytes += tile.nbytes
            self._use(key, share)
            while self.nbytes > self.budget:
                self._drop(next(iter(self._tiles)))
                self.evictions += 1

    def _use(self, key: Hashable, share: float) -> None:
        used = self._used[key] = self._used.get(key, 0.0) + share
        if used > ALL_USED:
            self._drop(key)
        else:
            self._tiles.move_to_end(key)

    def _drop(self, key: Hashable) -> None:
        self.nbytes -= self._tiles.pop(key).nbytes
        self._used.pop(key, None)


_shared = TileCache()
os.register_at_fork(after_in_child=_shared.forget_threads)


def shared() -> TileCache:
    """The cache of this process: one budget for everything that decodes or transposes."""
    return _shared
