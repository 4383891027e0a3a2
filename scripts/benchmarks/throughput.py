"""Throughput: P1 and P2 through the mount, P3 without it, P8 with two readers."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

import ckptfs
from benchmarks import models
from benchmarks.common import GB, Bench, Result, Skipped, checkpoint, llama, median, renamed, spread
from benchmarks.memory import HeldMemory
from benchmarks.mounting import (
    DIRECT,
    cat,
    cat_halves,
    drop_cached,
    forget,
    loopback_mount,
    read_direct,
    warm,
)
from ckptfs.tensors.ranges import read_into
from ckptfs.tensors.tensor import nbytes

COLD_RUNS = 1
"""Runs in which the source is read from the disk, after all others: they take long, and no target is about them."""
COMPARE_S, READ_S, TWO_READERS_S = 40.0, 20.0, 30.0
"""For the repeats of one comparison of P1 and P2, of P3, of P8."""
NOT_COUNTED_RUNS = 1
"""Of what P8 reports besides."""
PASSES = 3
"""Of either side in a run of P3, in turn; the fastest counts. One takes a tenth of a second, short on busy machines."""


def rename_only(bench: Bench) -> Result:
    """P1: GPT-J, of which every tensor is only renamed."""
    return _against_loopback(bench, {"gptj": renamed(bench)}, 0.8)


def moved(bench: Bench) -> Result:
    """P2: transposes and packing (GPT-2), rotary row orders (Llama); the slower of the two counts."""
    sources = {"llama": llama(bench)}
    if not bench.checkpoint:
        sources["gpt2"] = checkpoint(bench, "gpt2", lambda: models.usual_gpt2(bench.size))
    return _against_loopback(bench, sources, 0.6)


def _against_loopback(bench: Bench, sources: dict[str, str], target: float) -> Result:
    found = {name: _compare(bench, source) for name, source in sources.items()}
    worst = min(found.values(), key=lambda rates: statistics.median(rates["ratio"]))
    more: dict[str, Any] = {
        name: {**{k: spread(v) for k, v in rates.items()}, "runs": rates["ratio"]} for name, rates in found.items()
    }
    return Result(median(worst["ratio"]), "ratio", target, worst["ratio"], more=more)


def _compare(bench: Bench, source: str) -> dict[str, list[float]]:
    """GB/s of the mounted model and of its converted copy behind a loopback, source warm and cold, in turn."""
    converted = bench.path("converted")
    try:
        total = copy_model(bench, source, converted)
        names = ("ckptfs", "loopback")
        rates: dict[str, list[float]] = {name + cold: [] for cold in ("", " cold") for name in names}
        cpu: dict[str, list[float]] = {f"{name} daemon's CPU s/GB": [] for name in names}
        cold_turns = ((i, " cold") for i in range(min(COLD_RUNS, bench.runs)))
        for i, cold in chain(((i, "") for i in bench.repeats(COMPARE_S)), cold_turns):
            for name in names[:: 1 if i % 2 else -1]:
                found = _cat_fresh(bench, source, converted, name, bool(cold))
                if found:
                    rates[name + cold].append(total / found[0] / GB)
                if found and not cold:
                    cpu[f"{name} daemon's CPU s/GB"].append(found[1] / total * GB)
    finally:
        if not bench.keep:
            shutil.rmtree(converted, ignore_errors=True)
    for cold in ("", " cold"):
        rates[f"ratio{cold}"] = [a / b for a, b in zip(rates[f"ckptfs{cold}"], rates[f"loopback{cold}"], strict=True)]
    return rates | cpu


def copy_model(bench: Bench, source: str, folder: str) -> int:
    """Write the mounted model's weights to *folder*; their size."""
    os.makedirs(folder, exist_ok=True)
    with bench.mount(source) as mount:
        if not os.path.isdir(f"{mount.path}/hf"):
            raise Skipped("the checkpoint does not tell its model; give --model and --config")
        names = [n for n in os.listdir(f"{mount.path}/hf") if n.endswith(".safetensors")]
        for name in names:
            shutil.copyfile(f"{mount.path}/hf/{name}", f"{folder}/{name}")
    for name in names:  # as the checkpoint; and the disk must not be busy with it while others are timed
        forget(f"{folder}/{name}")
    return sum(os.path.getsize(f"{folder}/{name}") for name in names)


def _cat_fresh(bench: Bench, source: str, converted: str, name: str, cold: bool) -> tuple[float, float] | None:
    """Seconds to ``cat`` all weight files of a mount that was never read, and of the daemon's processor time meanwhile.

    None when caches cannot be dropped.
    """
    weights = sorted(os.listdir(converted))
    below = [source] if name == "ckptfs" else [f"{converted}/{n}" for n in weights]
    nbytes = sum(map(os.path.getsize, below))
    mounted = bench.mount(source) if name == "ckptfs" else loopback_mount(converted, bench.path("mnt"))
    # Where caches are dropped, dropping the source gives the other half of the memory.
    with HeldMemory(nbytes if cold else 2 * nbytes) as held, mounted as mount:
        folder = f"{mount.path}/hf" if name == "ckptfs" else mount.path
        if cold and not drop_cached(*below):
            return None
        if not cold:  # a disk takes longer than what this waits for
            held.settle()
            for path in below:
                warm(path)
        before = mount.cpu_seconds()
        held.release()
        return sum(cat(f"{folder}/{n}") for n in weights), mount.cpu_seconds() - before


def own_reader(bench: Bench) -> Result:
    """P3: every tensor through ckptfs's reader against h5py, both into one array, page cache warm; the worse of two
    dtypes counts."""
    sources = {"bfloat16": llama(bench)}
    if not bench.checkpoint:
        small = bench.size // 2
        sources["float32"] = checkpoint(bench, "float32", lambda: models.usual_llama(small, "float32"))
    elif not _is_hdf5(bench.checkpoint):
        raise Skipped("the checkpoint is no HDF5 file, h5py cannot read it")
    more: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {}
    counted = ["h5py into one array", "ckptfs"]
    for name, source in sources.items():
        pool = _pool(source)
        ways = {
            "h5py into one array": partial(_read_h5py, pool=pool),
            "ckptfs": partial(_read_own, pool=pool),
            "h5py": partial(_read_h5py, pool=None),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in bench.repeats(READ_S):
            passes: dict[str, list[float]] = {way: [] for way in ways}
            for way in [*counted * PASSES, "h5py"]:
                warm(source)  # each time: some kernels give cached pages back within seconds
                passes[way].append(ways[way](source))
            for way, found in passes.items():
                rates[way].append(max(found))
        pairs = zip(rates["ckptfs"], rates["h5py into one array"], strict=True)
        ratios[name] = [own / theirs for own, theirs in pairs]
        ratio = {"ratio": median(ratios[name]), "runs": ratios[name]}
        more[name] = {"rates in": "GB/s", **{k: spread(v) for k, v in rates.items()}, **ratio}
    worst = min(ratios.values(), key=statistics.median)
    return Result(median(worst), "ratio", 2.0, worst, more=more)


def _is_hdf5(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x89HDF"


def _read_own(source: str, pool: Any) -> float:
    """GB/s of `tensors.read`, tensor by tensor, into *pool*."""
    with ckptfs.open(source) as opened:
        tensors = [t for t in opened.source.tensors().values() if t.shape]
        start = time.perf_counter()
        for tensor in tensors:
            read_into(tensor, 0, pool[: nbytes(tensor)].data)
        seconds = time.perf_counter() - start
        return float(sum(map(nbytes, tensors)) / seconds / GB)


def _pool(source: str) -> npt.NDArray[np.uint8]:
    """Room for the largest tensor, whose pages exist."""
    with ckptfs.open(source) as opened:
        return np.full(max(map(nbytes, opened.source.tensors().values())), 1, np.uint8)


def _read_h5py(source: str, pool: Any) -> float:
    """GB/s of h5py, tensor by tensor, into *pool*, or a new array each."""
    import h5py
    import hdf5plugin  # noqa: F401 - registers the LZ4 filter

    with h5py.File(source) as file:
        datasets = [d for d in file.values() if d.shape]
        start = time.perf_counter()
        for dataset in datasets:
            if pool is None:
                dataset[...]
            else:
                dataset.read_direct(pool[: dataset.nbytes].view(dataset.dtype).reshape(dataset.shape))
        seconds = time.perf_counter() - start
        return float(sum(d.nbytes for d in datasets) / seconds / GB)


def two_readers(bench: Bench) -> Result:
    """P8: bytes a second of two processes, each with its half of a file, against one with all of it.

    Through the page cache one reader keeps two cores busy, its own and the daemon's, so that is what counts from four
    cores on; with fewer it is direct I/O, where the two take turns. What a loopback gains, and two processes that both
    read all of it through the page cache, is reported besides.
    """
    source, converted = renamed(bench), bench.path("converted")
    cached: dict[str, Callable[[str], float]] = {"one": cat, "halves": cat_halves, "same": lambda path: cat(path, path)}
    uncached: dict[str, Callable[[str], float]] = {"one": read_direct, "halves": lambda path: cat_halves(path, DIRECT)}
    cores = os.cpu_count() or 1
    halves: list[float] = []
    same: list[float] = []
    direct: list[float] = []
    allowed: list[float] = []
    try:
        copy_model(bench, source, converted)
        weights = min(os.listdir(converted))
        timed = partial(_seconds, bench, source, converted, weights)
        for _ in bench.repeats(TWO_READERS_S):
            seconds = {way: timed(read, cached=False) for way, read in uncached.items()}
            direct.append(seconds["one"] / seconds["halves"])
        for _ in bench.repeats(TWO_READERS_S) if cores >= 4 else range(min(NOT_COUNTED_RUNS, bench.runs)):
            seconds = {way: timed(read) for way, read in cached.items()}
            halves.append(seconds["one"] / seconds["halves"])
            same.append(2 * seconds["one"] / seconds["same"])
            seconds = {way: timed(cached[way], loopback=True) for way in ("one", "halves")}
            allowed.append(seconds["one"] / seconds["halves"])
    finally:
        if not bench.keep:
            shutil.rmtree(converted, ignore_errors=True)
    more = {"all of it, both": spread(same), "halves, direct I/O": spread(direct), "halves, page cache": spread(halves)}
    more["halves, page cache, loopback"] = spread(allowed)
    counted = halves if cores >= 4 else direct
    notes = (
        f"with direct I/O: {median(direct):.2f}; through the page cache: {median(halves):.2f}, loopback"
        f" {median(allowed):.2f}; both all of it: {median(same):.2f}; {cores} cores",
    )
    return Result(median(counted), "ratio", 1.6, counted, more=more | {"cores": cores}, notes=notes)


def _seconds(
    bench: Bench,
    source: str,
    converted: str,
    name: str,
    read: Callable[[str], float],
    loopback: bool = False,
    cached: bool = True,
) -> float:
    """How long *read* takes for the file *name* of a mount that was never read, its source in the page cache.

    *cached* says whether it goes through the mount's page cache, which needs memory then.
    """
    below = f"{converted}/{name}" if loopback else source
    mounted = loopback_mount(converted, bench.path("mnt")) if loopback else bench.mount(source)
    with HeldMemory(2 * os.path.getsize(below) if cached else 0) as held, mounted as mount:
        held.settle()
        warm(below)
        held.release()
        return read(f"{mount.path}/{name}" if loopback else f"{mount.path}/hf/{name}")
