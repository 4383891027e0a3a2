"""How costs grow: with the number of keys, with the size of a tensor, and memory with the size of a model."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import emit, models
from benchmarks.common import GB, MIB, Bench, remove
from benchmarks.footprint import stored_and_packed, stream
from benchmarks.memory import HeldMemory
from benchmarks.mounting import warm
from benchmarks.state import Stored

Row = dict[str, Any]
N_SAMPLES = 300
SPAN = 256 * MIB
"""Of a tensor larger than this, as much is read."""
PATTERN = random.Random(0).randbytes(MIB)


def by_keys(bench: Bench, n_keys: int) -> Row:
    """Mount, listing and single reads of a checkpoint with about *n_keys* keys: tiny Llama layers with AdamW state.

    The second ``ls -l`` finds names and attributes in the kernel, but asks the daemon again for two security attributes
    of each file: nobody keeps those.
    """
    path = bench.path("keys.mdl")
    state = models.state_dict(models.llama(64, 176, max(1, round((n_keys - 57) / 45)), 4, 2, 100), optimizer=True)
    keys = emit.emit_checkpoint(path, state, {"": PATTERN})
    os.sync()
    warm(path)
    with HeldMemory(GB) as held:  # what a mount of many keys needs for a while
        held.settle()
    with bench.mount(path) as mount:
        rss = mount.status("VmRSS")
        raw = f"{mount.path}/raw"
        first, again = _listed(raw), _listed(raw)
        names = os.listdir(raw)
        chosen = random.Random(1).sample(names, min(N_SAMPLES, len(names)))
        start = time.perf_counter()
        for name in chosen:
            with open(f"{raw}/{name}", "rb", buffering=0) as file:
                file.read()
        read = (time.perf_counter() - start) / len(chosen)
        after = mount.status("VmRSS")
    remove(bench, path)
    return {
        "keys": keys,
        "files": len(names),
        "mount s": mount.seconds,
        "RSS MiB": rss / MIB,
        "ls -l s": first,
        "ls -l again s": again,
        "ls -l us/file": 1e6 * first / len(names),
        "read ms/tensor": 1e3 * read,
        "RSS after MiB": after / MIB,
    }


def _listed(folder: str) -> float:
    """Seconds of ``ls -l``."""
    start = time.perf_counter()
    subprocess.run(["ls", "-l", folder], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def by_size(bench: Bench, nbytes: int, *, packed: bool) -> Row:
    """The first page of a bfloat16 tensor of about *nbytes*, for which its chunk table is read, and then its bytes.

    All chunks lie at one place in the file, so what is read comes from the processor's cache: the cost is that of
    handling chunks, not of memory.
    """
    path = bench.path("tensor.mdl")
    columns = 1 << max(3, min(13, int(math.log2(nbytes)) // 2))
    shape = max(1, nbytes // 2 // columns), columns
    pattern = bytes(64) if packed else PATTERN
    emit.emit_checkpoint(path, {"w": Stored(shape, "bfloat16")}, {"": pattern})
    chunk = emit.chunk_shape(shape, 2)
    n_chunks = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    warm(path)
    with bench.mount(path) as mount:
        name = f"{mount.path}/raw/w"
        size = os.path.getsize(name)
        first = _read(name, 0, 4096)
        before = mount.cpu_seconds()
        done = seconds = 0.0
        for part in range(8 if size > SPAN else 1):
            wanted = min(size, SPAN // 8 if size > SPAN else size)
            seconds += _read(name, size * part // 8, wanted)
            done += wanted
        cpu = mount.cpu_seconds() - before
        peak = mount.status("VmHWM")
    remove(bench, path)
    return {
        "bytes": size,
        "chunks": n_chunks,
        "packed": packed,
        "first page ms": 1e3 * first,
        "first page us/chunk": 1e6 * first / n_chunks,
        "GB/s": done / seconds / GB,
        "CPU s/GB": cpu / done * GB,
        "ms/chunk": 1e3 * seconds / max(1.0, n_chunks * done / size),
        "peak MiB": peak / MIB,
    }


def _read(path: str, start: int, nbytes: int) -> float:
    """Seconds to read that range with direct I/O: no read-ahead takes part."""
    buffer = bytearray(min(nbytes, MIB))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        begin, at = time.perf_counter(), start
        while at < start + nbytes:
            n = os.preadv(fd, [memoryview(buffer)[: start + nbytes - at]], at)
            if not n:
                break
            at += n
        return time.perf_counter() - begin
    finally:
        os.close(fd)


SHAPES = {
    "llama 7B": models.llama_7b,
    "llama 70B": models.llama_70b,
    "gpt2 7B": lambda: models.gpt2(4096, 32),
    "gpt2 70B": lambda: models.gpt2(8192, 86),
}
"""Models whose views are streamed; every large tensor of GPT-2 is transposed, its q, k and v are packed besides."""


def by_model(bench: Bench, name: str, nbytes: int) -> Row:
    """The daemon's peak memory while *nbytes* of a model's view are streamed, in 8 parts spread over the files."""
    path = bench.path("model.mdl")
    model = SHAPES[name]()
    emit.emit_checkpoint(path, models.state_dict(model), stored_and_packed())
    os.sync()
    with HeldMemory(nbytes * 3 // 2) as held, bench.mount(path) as mount:
        at_start = mount.status("VmRSS")
        held.settle()
        held.release()
        before, start = mount.cpu_seconds(), time.perf_counter()
        done = stream(f"{mount.path}/hf", nbytes)
        seconds = time.perf_counter() - start
        cpu, peak = mount.cpu_seconds() - before, mount.status("VmHWM")
    remove(bench, path)
    return {
        "model": name,
        "GB": model.nbytes / GB,
        "GB read": done / GB,
        "mount s": mount.seconds,
        "RSS MiB": at_start / MIB,
        "peak MiB": peak / MIB,
        "GB/s": done / seconds / GB,
        "CPU s/GB": cpu / done * GB,
    }


def slopes(rows: Sequence[Row], by: str, cost: str) -> list[float]:
    """How *cost* grows from each row to the next: 0 not at all, 1 as *by*, 2 as its square. Exponents, log by log."""
    found = []
    for a, b in itertools.pairwise(rows):
        if a[by] != b[by]:
            found.append(math.log(max(b[cost], 1e-12) / max(a[cost], 1e-12)) / math.log(b[by] / a[by]))
    return found
