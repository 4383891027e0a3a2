"""P7: time and bytes of random reads, and how many of them several processes get a second."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from benchmarks.common import Bench, Result, Skipped, median, renamed, spread
from benchmarks.mounting import warm

DIRECT = {"4 KiB of 1": (4 << 10, 1), "4 KiB of 4": (4 << 10, 4), "64 KiB of 2": (64 << 10, 2)}
"""Bytes of a read and processes that read, with direct I/O: what a shuffled data loader does."""
DIRECT_READS = 4000
SECONDS = 15.0
"""For the repeats."""


def random_reads(bench: Bench, n: int = 2000) -> Result:
    """P7: pages of 4 KiB of the largest tensor at random places, never read before through this mount."""
    source = renamed(bench)
    seconds: list[float] = []
    factors: list[float] = []
    medians: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in DIRECT}
    for run in bench.repeats(SECONDS):
        warm(source)
        with bench.mount(source) as mount:
            path = max((e.path for e in os.scandir(f"{mount.path}/raw")), key=os.path.getsize)
            there = range(os.path.getsize(path) // 4096)
            if len(there) < 100:
                raise Skipped("the checkpoint has no tensor of 400 KiB")
            pages = random.Random(run).sample(there, min(n, len(there)))
            fd = os.open(path, os.O_RDONLY)
            try:
                os.pread(fd, 4096, 4096 * pages[0])  # the chunk table is read with the first block
                before = mount.bytes_read()
                timed = _timed_reads(fd, pages[1:])
                seconds += timed
                medians.append(1e3 * median(timed))
                factors.append((mount.bytes_read() - before) / (4096 * (len(pages) - 1)))
                for name, (size, readers) in DIRECT.items():
                    rates[name].append(_direct_rate(path, size, readers))
            finally:
                os.close(fd)
    points = statistics.quantiles(seconds, n=100)
    factor = median(factors)
    unmet = None if factor <= 16 else f"read from the source: {factor:.1f} x what was asked for, target 16 x"
    more: dict[str, Any] = {"p95 ms": points[94] * 1e3, "p99 ms": points[98] * 1e3, "largest ms": max(seconds) * 1e3}
    more["bytes read / asked"] = factor
    more |= {f"reads a second, {name}": spread(found) for name, found in rates.items()}
    return Result(median(medians), "ms", 1.0, medians, at_most=True, unmet=unmet, more=more)


def _timed_reads(fd: int, pages: Iterable[int]) -> list[float]:
    found = []
    for page in pages:
        start = time.perf_counter()
        os.pread(fd, 4096, 4096 * page)
        found.append(time.perf_counter() - start)
    return found


def _direct_rate(path: str, size: int, readers: int) -> float:
    """Reads a second of that many processes together, each at random places of its own."""
    with multiprocessing.get_context("fork").Pool(readers) as pool:
        start = time.perf_counter()
        pool.map(partial(_read_direct, path, size), range(readers), chunksize=1)
        return DIRECT_READS * readers / (time.perf_counter() - start)


def _read_direct(path: str, size: int, seed: int) -> None:
    places = random.Random(seed)
    n = os.path.getsize(path) // size
    buffer = mmap.mmap(-1, size)  # direct I/O wants pages
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for _ in range(DIRECT_READS):
            os.preadv(fd, [buffer], size * places.randrange(n))
    finally:
        os.close(fd)
