"""Time to begin: P4 until a model is loaded, P6 until a mount is ready."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from typing import Any

from benchmarks import emit, models
from benchmarks.common import Bench, Result, llama, median, remove
from benchmarks.footprint import stored_and_packed
from benchmarks.mounting import ckptfs_mount, drop_caches, environment, warm


def first_model(bench: Bench) -> Result:
    """P4: mount and from_pretrained against a conversion and from_pretrained; the source is in the page cache."""
    source = llama(bench)
    times: dict[str, list[float]] = {"mount": [], "convert": []}
    written = {"mount": 0, "convert": 0}
    more: dict[str, Any] = {"stand-in": "reads, renames, orders rows, saves: less than the public converter"}
    for _ in range(bench.runs):
        for way in times:
            warm(source)
            found = _first_model(bench, way, source)
            times[way].append(found["seconds"])
            written[way] = found["written"]
            more |= {f"{way}: {k}": v for k, v in found.items()}
    ratios = [b / a for a, b in zip(times["mount"], times["convert"], strict=True)]
    more |= {"mount: seconds": median(times["mount"]), "convert: seconds": median(times["convert"])}
    unmet = f"{written['mount']} bytes written" if written["mount"] else None
    return Result(statistics.median(ratios), "x less time", 10.0, ratios, unmet=unmet, more=more)


def _first_model(bench: Bench, way: str, source: str) -> dict[str, Any]:
    """One run of `benchmarks.first_model` in a process that has loaded nothing yet."""
    folder = bench.path("mnt" if way == "mount" else "model")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_model", way, source, folder]
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{way}: {done.stderr.strip()[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        if way == "convert" and not bench.keep:
            shutil.rmtree(folder, ignore_errors=True)


def ready(bench: Bench) -> Result:
    """P6: until ``ckptfs mount`` returns, for Llama 70B with AdamW state and for 100,000 keys."""
    more: dict[str, Any] = {}
    runs: dict[str, list[float]] = {}
    cases: list[tuple[str, models.Model, dict[str, bytes]]] = [
        ("70B", models.llama_70b(), stored_and_packed()),
        ("100,000 keys", models.llama(256, 704, 2222, 4, 2, 1000), {}),
    ]
    for name, model, chunks in cases:
        path = bench.path("keys.mdl")
        more[f"{name}: keys"] = emit.emit_checkpoint(path, models.state_dict(model, optimizer=True), chunks)
        runs[name] = [_mount_seconds(bench, path) for _ in range(bench.runs)]
        more[f"{name}: seconds"] = median(runs[name])
        if drop_caches():
            more[f"{name}: seconds cold"] = _mount_seconds(bench, path)
        remove(bench, path)
    many = median(runs["100,000 keys"])
    unmet = None if many <= 3 else f"100,000 keys: {many:.2f} s, target 3 s"
    return Result(median(runs["70B"]), "s", 0.5, runs["70B"], at_most=True, unmet=unmet, more=more)


def _mount_seconds(bench: Bench, path: str) -> float:
    with ckptfs_mount(path, bench.path("mnt")) as mount:
        return mount.seconds
