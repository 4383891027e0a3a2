"""The tile cache keeps its budget and makes a tile once, also for many threads; scratch memory is reused."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ckptfs.native.scratch import borrow, scratch
from ckptfs.tensors.cache import TileCache, shared
from tests.waiting import MAX_SECONDS, exit_code


def tile(n: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(n, np.uint8)


def test_least_recently_used_goes_first() -> None:
    cache = TileCache(300)
    for name in "abc":
        cache.get(name, lambda: tile(100))
    cache.get("a", lambda: pytest.fail("a is there"))
    cache.get("d", lambda: tile(100))
    assert cache.nbytes == 300
    made = []
    cache.get("b", lambda: made.append(1) or tile(100))
    assert made == [1]


def test_a_tile_over_budget_is_made_and_not_kept() -> None:
    cache = TileCache(50)
    assert cache.get("a", lambda: tile(51)).nbytes == 51
    assert cache.nbytes == 0


def test_a_tile_leaves_when_all_of_it_was_used() -> None:
    cache = TileCache(1000)
    for share in (0.5, 0.25, 0.25):
        cache.get("a", lambda: tile(100), share)
    assert (cache.misses, cache.nbytes) == (1, 0)
    cache.get("a", lambda: tile(100), 0.5)
    assert (cache.misses, cache.nbytes) == (2, 100)


def test_many_threads_make_a_tile_once() -> None:
    cache = TileCache(1000)
    made = []
    start = threading.Barrier(8)

    def make() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        made.append(1)
        time.sleep(0.05)
        return tile(10)

    def get(_: int) -> int:
        start.wait()
        return id(cache.get("a", make))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(get, range(8)))) == 1
    assert made == [1]


def test_a_failure_is_raised_to_its_caller_and_the_next_one_tries_again() -> None:
    cache = TileCache(100)

    def fail() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        cache.get("a", fail)
    assert cache.get("a", lambda: tile(5)).nbytes == 5


def test_scratch_is_reused_and_borrow_nests() -> None:
    assert scratch("x", 1000).base is scratch("x", 500).base
    with borrow(100) as outer, borrow(100) as inner:
        assert not np.may_share_memory(outer, inner)
        kept = inner.base
    with borrow(100) as again:
        assert again.base is kept or again.base is outer.base


def test_freed_memory_is_used_again() -> None:
    """Pages of fresh memory cost a fault each; those of memory that was kept do not."""
    code = """
import resource, numpy
from ckptfs.native.scratch import keep_freed_memory
keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    numpy.empty(1 << 21, numpy.uint8)[:] = 1
use()
before = faults()
for _ in range(20):
    use()
print(faults() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if platform.libc_ver()[0] == "glibc":
        assert int(done.stdout) < 20 * (1 << 21) // 4096 // 10


def test_a_child_does_not_wait_for_threads_of_its_parent() -> None:
    """A tile that another thread was making at the fork is made by the child itself."""
    begun, go = threading.Event(), threading.Event()

    def slowly() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        begun.set()
        go.wait(2 * MAX_SECONDS)
        return tile(3)

    cache = shared()
    thread = threading.Thread(target=cache.get, args=(("fork", 1), slowly))
    thread.start()
    begun.wait(MAX_SECONDS)
    pid = os.fork()
    if pid == 0:
        found = cache.get(("fork", 1), lambda: np.ones(3, np.uint8))
        os._exit(0 if found.tolist() == [1, 1, 1] and cache.nbytes == 3 else 1)
    code = exit_code(pid)
    go.set()
    thread.join()
    assert code == 0
    assert cache.get(("fork", 1), lambda: np.ones(3, np.uint8)).tolist() == [0, 0, 0]
