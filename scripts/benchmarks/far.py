"""FAR: throughput from a source that is as far away as a file server."""

from __future__ import annotations

import os
import shutil
import statistics

from benchmarks.common import GB, MIB, Bench, Result, llama, median, spread
from benchmarks.memory import HeldMemory
from benchmarks.mounting import cat, ckptfs_mount, far_mount, loopback_mount, warm
from benchmarks.throughput import copy_model

MILLISECONDS = 1.0
RUNS = 2
READ_AHEAD = {"128 KiB": 0, "4 MiB": 4 * MIB}
"""Of the source's file system: the kernel's default, and what an administrator may set."""


def far_source(bench: Bench) -> Result:
    """``cat`` of the mounted model / of its converted copy behind a loopback; each request to either takes long.

    The worse of two settings of the source's read-ahead counts.
    """
    source, folder = llama(bench), bench.path("far")
    os.makedirs(folder)
    try:
        copy_model(bench, source, folder)
        weights = sorted(os.listdir(folder))
        os.symlink(source, os.path.join(folder, "source.mdl"))
        rates: dict[str, list[float]] = {}
        for i in range(min(RUNS, bench.runs)):
            for name, read_ahead in READ_AHEAD.items():
                if i and not read_ahead:  # the better by far, and the longer
                    continue
                for way in ("ckptfs", "loopback"):
                    rates.setdefault(f"{way}, {name}", []).append(_rate(bench, folder, weights, way, read_ahead))
    finally:
        if not bench.keep:
            shutil.rmtree(folder)
    ratios = {
        name: [a / b for a, b in zip(rates[f"ckptfs, {name}"], rates[f"loopback, {name}"], strict=True)]
        for name in READ_AHEAD
    }
    worst = min(ratios.values(), key=statistics.median)
    more = {"rates in": "GB/s", **{name: spread(found) for name, found in (rates | ratios).items()}}
    each = "; ".join(f"read-ahead of the source {name}: {median(found):.2f}" for name, found in ratios.items())
    return Result(median(worst), "ratio", 0.6, worst, more=more, notes=(each,))


def _rate(bench: Bench, folder: str, weights: list[str], way: str, read_ahead: int) -> float:
    """GB/s of all weight files, through mounts that were never read."""
    nbytes = sum(os.path.getsize(os.path.join(folder, name)) for name in weights)
    with HeldMemory(3 * nbytes) as held, far_mount(folder, bench.path("far-mnt"), MILLISECONDS, read_ahead) as far:
        own = ckptfs_mount(f"{far.path}/source.mdl", bench.path("mnt"), *bench.view)
        with own if way == "ckptfs" else loopback_mount(far.path, bench.path("mnt")) as mount:
            below = f"{mount.path}/hf" if way == "ckptfs" else mount.path
            held.settle()
            for name in weights if way == "loopback" else ["source.mdl"]:
                warm(os.path.join(folder, name))  # what is slow here is the way to it
            held.release()
            return nbytes / sum(cat(f"{below}/{name}") for name in weights) / GB
