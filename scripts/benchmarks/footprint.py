"""P5: memory while huge models stream."""

from __future__ import annotations

import os
import random

from benchmarks import emit, models
from benchmarks.common import GB, MIB, Bench, Result, remove


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
