"""Time to begin: P4 until a model is loaded, P6 until a mount is ready."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from typing import Any

from benchmarks import emit, models
from benchmarks.common import Bench, Result, Skipped, llama, median, remove, spread
from benchmarks.first_model import CONVERTER
from benchmarks.footprint import stored_and_packed
from benchmarks.mounting import drop_cached, environment

CONVERSIONS = 2
"""Most repeats of P4: one takes half a minute, and differs from the next by less than the target is away."""
MOUNTS_S = 15.0
"""For the repeats of P6, of each checkpoint."""


def first_model(bench: Bench) -> Result:
    """P4: mount and from_pretrained against a conversion and from_pretrained; the source is in the page cache."""
    source = llama(bench)
    other = "converter" if bench.converter else "cstorch" if bench.cstorch else "convert"
    if bench.converter:
        _look_for_converter(bench.converter)
    elif not _is_plain_llama(bench, source):
        raise Skipped("the stand-in for the converter knows bfloat16 Llama only; give the real one with --converter")
    times: dict[str, list[float]] = {"mount": [], other: []}
    more: dict[str, Any] = {}
    for _ in range(min(CONVERSIONS, bench.runs)):
        for way in times:
            found = _first_model(bench, way, source)
            times[way].append(found["seconds"])
            more |= {f"{way}: {k}": v for k, v in found.items()}
    ratios = [b / a for a, b in zip(times["mount"], times[other], strict=True)]
    more["ratio with all weights touched"] = more[f"{other}: touched"] / more["mount: touched"]
    more |= {f"{way}: seconds": spread(seconds) for way, seconds in times.items()}
    unmet = f"{more['mount: written']} bytes written" if more["mount: written"] else None
    loader = "cerebras_pytorch" if bench.cstorch else "h5py"
    stand_in = f"the conversion is a stand-in: {loader}, renames, row orders, saving; the public converter does more"
    stand_in += "" if bench.cstorch else ", and loads with what --cstorch PYTHON takes, far slower than h5py"
    notes = () if bench.converter else (stand_in,)
    return Result(statistics.median(ratios), "x less time", 10.0, ratios, unmet=unmet, more=more, notes=notes)


def _look_for_converter(python: str) -> None:
    done = subprocess.run([python, "-c", f"import {CONVERTER}"], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it fails"]
        raise Skipped(f"{python} cannot import the converter: {why[0]}")


def _is_plain_llama(bench: Bench, source: str) -> bool:
    """Whether the stand-in can convert *source*."""
    import ckptfs

    if source != bench.checkpoint:
        return True
    with ckptfs.open(source) as opened:
        dtypes = {t.dtype.name for key, t in opened.source.tensors().items() if key.startswith("model.") and t.shape}
        model = _option(bench, "--model") or (opened.metadata or [{}])[-1].get("model_name")
    return model == "llama" and dtypes == {"bfloat16"}


def _option(bench: Bench, name: str) -> str | None:
    """What follows *name* among the options of the mount."""
    return dict(zip(bench.view[::2], bench.view[1::2], strict=True)).get(name)


def _first_model(bench: Bench, way: str, source: str) -> dict[str, Any]:
    """One run of `benchmarks.first_model` in a process that has loaded nothing yet."""
    folder = bench.path("mnt" if way == "mount" else "model")
    view = bench.view if source == bench.checkpoint else ()
    given = {"view": view, "model": _option(bench, "--model"), "config": _option(bench, "--config")}
    options = json.dumps({**given, "converter": bench.converter, "cstorch": bench.cstorch})
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_model", way, source, folder, options]
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{way}: {done.stderr.strip()[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        if way != "mount" and not bench.keep:
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
        runs[name] = [_mount_seconds(bench, path) for _ in bench.repeats(MOUNTS_S)]
        more[f"{name}: seconds"] = spread(runs[name])
        if drop_cached(path):
            more[f"{name}: seconds cold"] = _mount_seconds(bench, path)
        remove(bench, path)
    many = median(runs["100,000 keys"])
    unmet = None if many <= 3 else f"100,000 keys: {many:.2f} s, target 3 s"
    return Result(median(runs["70B"]), "s", 0.5, runs["70B"], at_most=True, unmet=unmet, more=more)


def _mount_seconds(bench: Bench, path: str) -> float:
    with bench.mount(path) as mount:
        return mount.seconds
