"""Throughput: P1 and P2 through the mount, P3 without it, P8 with two readers."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from typing import Any

from benchmarks import models
from benchmarks.common import GB, MIB, Bench, Result, Skipped, checkpoint, llama, median, renamed, spread
from benchmarks.mounting import cat, cat_halves, claim_memory, drop_cached, loopback_mount, warm


def rename_only(bench: Bench) -> Result:
    """P1: a Llama of which 98 % are only renamed."""
    return _against_loopback(bench, {"llama, 98 % renamed": renamed(bench)}, 0.8)


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
        nbytes = _copy_model(bench, source, converted)
        names = ("ckptfs", "loopback")
        rates: dict[str, list[float]] = {name + cold: [] for cold in ("", " cold") for name in names}
        cpu: dict[str, list[float]] = {f"{name} daemon's CPU s/GB": [] for name in names}
        for i in range(bench.runs):
            for cold in ("", " cold"):
                for name in names[:: 1 if i % 2 else -1]:
                    found = _cat_fresh(bench, source, converted, name, bool(cold))
                    if found:
                        rates[name + cold].append(nbytes / found[0] / GB)
                    if found and not cold:
                        cpu[f"{name} daemon's CPU s/GB"].append(found[1] / nbytes * GB)
    finally:
        if not bench.keep:
            shutil.rmtree(converted, ignore_errors=True)
    for cold in ("", " cold"):
        rates[f"ratio{cold}"] = [a / b for a, b in zip(rates[f"ckptfs{cold}"], rates[f"loopback{cold}"], strict=True)]
    return rates | cpu


def _copy_model(bench: Bench, source: str, folder: str) -> int:
    """Write the mounted model's weights to *folder*; their size."""
    os.makedirs(folder, exist_ok=True)
    with bench.mount(source) as mount:
        if not os.path.isdir(f"{mount.path}/hf"):
            raise Skipped("the checkpoint does not tell its model; give --model and --config")
        names = [n for n in os.listdir(f"{mount.path}/hf") if n.endswith(".safetensors")]
        for name in names:
            shutil.copyfile(f"{mount.path}/hf/{name}", f"{folder}/{name}")
    return sum(os.path.getsize(f"{folder}/{name}") for name in names)


def _cat_fresh(bench: Bench, source: str, converted: str, name: str, cold: bool) -> tuple[float, float] | None:
    """Seconds to ``cat`` all weight files of a mount that was never read, and of the daemon's processor time meanwhile.

    None when caches cannot be dropped.
    """
    weights = sorted(os.listdir(converted))
    below = [source] if name == "ckptfs" else [f"{converted}/{n}" for n in weights]
    if not cold:
        for path in below:
            warm(path)
    claim_memory(2 * sum(map(os.path.getsize, below)))
    with bench.mount(source) if name == "ckptfs" else loopback_mount(converted, bench.path("mnt")) as mount:
        if cold and not drop_cached(*below):
            return None
        folder = f"{mount.path}/hf" if name == "ckptfs" else mount.path
        before = mount.cpu_seconds()
        return sum(cat(f"{folder}/{n}") for n in weights), mount.cpu_seconds() - before


def own_reader(bench: Bench) -> Result:
    """P3: every tensor through ckptfs's reader against h5py, page cache warm; the worse of two dtypes counts."""
    sources = {"bfloat16": llama(bench)}
    if not bench.checkpoint:
        small = bench.size // 2
        sources["float32"] = checkpoint(bench, "float32", lambda: models.usual_llama(small, "float32"))
    elif not _is_hdf5(bench.checkpoint):
        raise Skipped("the checkpoint is no HDF5 file, h5py cannot read it")
    more: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {}
    for name, source in sources.items():
        ways = {
            "h5py into one array": lambda path: _read_h5py(path, reuse=True),
            "ckptfs": _read_own,
            "h5py": lambda path: _read_h5py(path, reuse=False),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(bench.runs):
            for way, read in ways.items():
                warm(source)  # each time: some kernels give cached pages back within seconds
                rates[way].append(read(source))
        pairs = zip(rates["ckptfs"], rates["h5py into one array"], strict=True)
        ratios[name] = [own / theirs for own, theirs in pairs]
        ratio = {"ratio": median(ratios[name]), "runs": ratios[name]}
        more[name] = {"rates in": "GB/s", **{k: spread(v) for k, v in rates.items()}, **ratio}
    worst = min(ratios.values(), key=statistics.median)
    return Result(median(worst), "ratio", 2.0, worst, more=more)


def _is_hdf5(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x89HDF"


def _read_own(source: str) -> float:
    """GB/s of `tensors.read` into one buffer of 8 MiB."""
    import ckptfs
    from ckptfs.formats.source import nbytes
    from ckptfs.tensors.read import read_into

    buffer = memoryview(bytearray(8 * MIB))
    with ckptfs.open(source) as opened:
        tensors = [t for t in opened.source.tensors().values() if t.shape]
        start = time.perf_counter()
        for tensor in tensors:
            size = nbytes(tensor)
            for at in range(0, size, len(buffer)):
                read_into(tensor, at, buffer[: size - at])
        seconds = time.perf_counter() - start
        return float(sum(map(nbytes, tensors)) / seconds / GB)


def _read_h5py(source: str, *, reuse: bool) -> float:
    """GB/s of h5py, tensor by tensor: into one array that is as large as the largest, or a new one each."""
    import h5py
    import hdf5plugin  # noqa: F401 - registers the LZ4 filter
    import numpy as np

    with h5py.File(source) as file:
        datasets = [d for d in file.values() if d.shape]
        pool = np.full(max(d.nbytes for d in datasets), 1, np.uint8)  # written to: its pages exist
        start = time.perf_counter()
        for dataset in datasets:
            if reuse:
                dataset.read_direct(pool[: dataset.nbytes].view(dataset.dtype).reshape(dataset.shape))
            else:
                dataset[...]
        seconds = time.perf_counter() - start
        return float(sum(d.nbytes for d in datasets) / seconds / GB)


def two_readers(bench: Bench) -> Result:
    """P8: throughput of two processes, each with its half of a file, against one with all of it."""
    source = renamed(bench)
    halves: list[float] = []
    same: list[float] = []
    for _ in range(bench.runs):
        seconds = []
        for read in (cat, cat_halves, lambda path: cat(path, path)):
            warm(source)
            claim_memory(2 * os.path.getsize(source))
            with bench.mount(source) as mount:
                if not os.path.isdir(f"{mount.path}/hf"):
                    raise Skipped("the checkpoint does not tell its model; give --model and --config")
                weights = sorted(e.path for e in os.scandir(f"{mount.path}/hf") if e.name.endswith(".safetensors"))
                seconds.append(read(weights[0]))
        halves.append(seconds[0] / seconds[1])
        same.append(2 * seconds[0] / seconds[2])
    more = {"both read the whole file": median(same), "cores": os.cpu_count()}
    return Result(median(halves), "ratio", 1.6, halves, more=more)
