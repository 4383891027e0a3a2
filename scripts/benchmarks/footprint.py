"""What reading costs: P5 memory while huge models stream, P7 time and bytes of random reads."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterable

from benchmarks import emit, models
from benchmarks.common import GB, MIB, Bench, Result, Skipped, median, remove, renamed
from benchmarks.mounting import warm


def peak_memory(bench: Bench) -> Result:
    """P5: the daemon's peak memory while a 70B and a 7B model stream; the larger counts."""
    peaks: dict[str, float] = {}
    for name, model in (("7B", models.llama_7b()), ("70B", models.llama_70b())):
        path = bench.path(f"{name}.mdl")
        emit.emit_checkpoint(path, models.state_dict(model), stored_and_packed())
        with bench.mount(path) as mount:
            at_start = mount.status("VmRSS") / MIB
            streamed = stream(f"{mount.path}/hf", 6 * bench.size)
            peaks[name] = mount.status("VmHWM") / MIB
            peaks[f"{name} before the first read"] = at_start
            peaks[f"{name} GB read"] = streamed / GB
        remove(bench, path)
    worst = max(peaks["7B"], peaks["70B"])
    return Result(worst, "MiB", 300, [peaks["7B"], peaks["70B"]], at_most=True, more=peaks)


def stored_and_packed() -> dict[str, bytes]:
    """Chunks of emitted models: random bytes, which LZ4 stores, and in every tenth layer zeros, which it packs."""
    packed = {f"model.transformer_decoder.layers.{i}.": bytes(64) for i in range(0, 80, 10)}
    return {**packed, "model.": random.Random(0).randbytes(MIB)}


def stream(folder: str, most: int) -> int:
    """Read *most* bytes of the weight files in 8 parts, evenly spread over them, as a sequential reader; how many."""
    done = 0
    paths = sorted(f"{folder}/{n}" for n in os.listdir(folder) if n.endswith(".safetensors"))
    sizes = [os.path.getsize(path) for path in paths]
    for part in range(8):
        at = sum(sizes) * part // 8
        for path, size in zip(paths, sizes, strict=True):
            if at < size:
                done += _read_span(path, at, min(size - at, most // 8))
                break
            at -= size
    return done


def _read_span(path: str, start: int, nbytes: int) -> int:
    buffer = bytearray(MIB)
    done = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while done < nbytes:
            n = file.readinto(buffer)
            if not n:
                break
            done += n
    return done


def random_reads(bench: Bench, n: int = 2000) -> Result:
    """P7: pages of 4 KiB of the largest tensor at random places, never read before through this mount."""
    source = renamed(bench)
    seconds: list[float] = []
    factors: list[float] = []
    medians: list[float] = []
    for run in range(bench.runs):
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
            finally:
                os.close(fd)
    points = statistics.quantiles(seconds, n=100)
    factor = median(factors)
    unmet = None if factor <= 16 else f"read from the source: {factor:.1f} x what was asked for, target 16 x"
    more = {"p95 ms": points[94] * 1e3, "p99 ms": points[98] * 1e3, "largest ms": max(seconds) * 1e3}
    more["bytes read / asked"] = factor
    return Result(median(medians), "ms", 1.0, medians, at_most=True, unmet=unmet, more=more)


def _timed_reads(fd: int, pages: Iterable[int]) -> list[float]:
    found = []
    for page in pages:
        start = time.perf_counter()
        os.pread(fd, 4096, 4096 * page)
        found.append(time.perf_counter() - start)
    return found
