"""Other ways to the same bytes, as far as they are installed: h5py, hdfuse, and ratarmount on a torch file.

Each reads one tensor, the largest, in a process that knows nothing of it yet; its source is in the page cache.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import GB, Bench, Result, Skipped, llama, spread
from benchmarks.memory import HeldMemory
from benchmarks.mounting import cat, forget, warm

RUNS = 3
TIMEOUT_S = 60.0
"""For one read: hdfuse decodes the whole dataset for each request."""
READ_H5PY = """
import sys, h5py, hdf5plugin
with h5py.File(sys.argv[1]) as file:
    sys.stdout.buffer.write(memoryview(file[sys.argv[2]][...]).cast("B"))
"""
EDITOR = """#!/bin/sh
for i in $(seq 100); do mountpoint -q "$1" && break; sleep 0.1; done
start=$(date +%s%N)
cat "$1/$CKPTFS_BENCH_TENSOR" > /dev/null && echo $(($(date +%s%N) - start)) > "$CKPTFS_BENCH_SAID"
fusermount -u "$1" || fusermount3 -u "$1" || true
"""
"""hdfuse mounts for as long as an editor runs on its folder: this is the editor."""


class Left(Exception):
    """A peer that is not there or does not read the file, and why."""


def others(bench: Bench) -> Result:
    """Throughput of one tensor through ckptfs against the fastest peer, from the same source each."""
    source = llama(bench)
    key, nbytes = largest(source)
    wanted = bool(shutil.which("ratarmount"))  # or there is nothing to compare a .bin with
    packed = _torch_file(bench, source) if wanted else ""
    ways: dict[str, Callable[[HeldMemory], float]] = {
        "ckptfs, .mdl": lambda held: _ours(bench, source, key, held),
        "h5py, .mdl": lambda held: nbytes / _h5py(source, key, held),
        "hdfuse, .mdl": lambda held: nbytes / _hdfuse(bench, source, key, held),
        "ckptfs, .bin": lambda held: _ours(bench, packed, largest(packed)[0], held),
        "ratarmount, .bin": lambda held: _ratarmount(bench, packed, held),
    }
    left: dict[str, str] = {}
    if not wanted:
        left["ratarmount, .bin"] = _missing("ratarmount")
        del ways["ckptfs, .bin"]
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(min(RUNS, bench.runs)):
        for name in [n for n in ways if n not in left]:
            with HeldMemory(4 * nbytes) as held:
                held.settle()
                warm(source if name.endswith(".mdl") else packed)
                try:
                    rates[name].append(ways[name](held) / GB)
                except Left as why:
                    left[name] = str(why)
    if wanted and not bench.keep:
        os.unlink(packed)
    ratios = {name: _ratios(rates, name) for name in rates if not name.startswith("ckptfs") and name not in left}
    worst = min(ratios.values(), key=statistics.median)
    more = {"rates in": "GB/s", **{name: spread(found) for name, found in rates.items() if found}}
    notes = tuple(f"{name}: left out, {why}" for name, why in left.items())
    return Result(statistics.median(worst), "ratio", 1.0, worst, more=more, notes=notes)


def largest(source: str) -> tuple[str, int]:
    """Key and size of the checkpoint's largest tensor."""
    import ckptfs
    from ckptfs.tensors.tensor import nbytes

    with ckptfs.open(source) as opened:
        sizes = {key: nbytes(tensor) for key, tensor in opened.source.tensors().items()}
    return max(sizes.items(), key=lambda item: item[1])


def _ratios(rates: dict[str, list[float]], name: str) -> list[float]:
    """Ours through a peer's, run by run, from the file that the peer reads."""
    ours = rates[f"ckptfs, {name.rpartition(', ')[2]}"]
    return [a / b for a, b in zip(ours, rates[name], strict=False)]


def _ours(bench: Bench, source: str, key: str, held: HeldMemory) -> float:
    """Bytes a second of ``cat raw/KEY``."""
    with bench.mount(source) as mount:
        return _rate(f"{mount.path}/raw/{key}", held)


def _rate(path: str, held: HeldMemory) -> float:
    """Bytes a second of ``cat``; the memory that is *held* is freed right before, as by all who take it here."""
    held.release()
    return os.path.getsize(path) / cat(path)


def _h5py(source: str, key: str, held: HeldMemory) -> float:
    """Seconds of a program that reads the dataset and writes it to a pipe, without the time that importing takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import h5py, hdf5plugin"], check=True)
    loading = time.perf_counter() - start
    held.release()
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", READ_H5PY, source, key], stdout=subprocess.PIPE) as reader:
        subprocess.run(["cat"], stdin=reader.stdout, stdout=subprocess.DEVNULL, check=True)
    return max(1e-9, time.perf_counter() - start - loading)


def _hdfuse(bench: Bench, source: str, key: str, held: HeldMemory) -> float:
    """Seconds of ``cat`` of the dataset below hdfuse's own mount of a folder that has the file."""
    import hdf5plugin

    program = _program("hdfuse")
    folder, editor, said = bench.path("hdfuse"), bench.path("editor.sh"), Path(bench.path("hdfuse.said"))
    os.makedirs(folder, exist_ok=True)
    said.unlink(missing_ok=True)
    link = Path(folder, "model.h5")
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(source)  # it takes symbolic links for devices
    except OSError as error:
        raise Left(f"the checkpoint cannot be linked into its folder: {error.strerror}") from error
    Path(editor).write_text(EDITOR)
    os.chmod(editor, 0o755)
    env = {**os.environ, "CKPTFS_BENCH_TENSOR": f"model.h5/{key}", "CKPTFS_BENCH_SAID": str(said)}
    env.setdefault("HDF5_PLUGIN_PATH", hdf5plugin.PLUGIN_PATH)  # it knows no filters of its own
    held.release()
    try:
        _ended([program, "-d", folder, "-e", editor], env)
    except Left:  # its editor unmounts, for it would never end otherwise, and then it cannot
        pass
    finally:
        link.unlink()
    if not said.exists() or not said.read_text():
        raise Left("it cannot read the dataset (hdfuse 1.0.2 can read none with h5py 3)")
    return int(said.read_text()) / 1e9


def _ratarmount(bench: Bench, packed: str, held: HeldMemory) -> float:
    """Bytes a second of ``cat`` of the archive's largest record; the index stays in memory."""
    program = _program("ratarmount")
    mountpoint = bench.path("ratar")
    os.makedirs(mountpoint, exist_ok=True)
    _ended([program, "--index-file", ":memory:", packed, mountpoint], dict(os.environ))
    try:
        files = [path for path in Path(mountpoint).rglob("*") if path.is_file()]
        return _rate(str(max(files, key=lambda path: path.stat().st_size)), held)
    finally:
        subprocess.run([program, "-u", mountpoint], capture_output=True)


def _torch_file(bench: Bench, source: str) -> str:
    """The model as a ``pytorch_model.bin`` on disk."""
    path = bench.path("pytorch_model.bin")
    with bench.mount(source, "--shard-size", "1TB") as mount:
        if not os.path.isdir(f"{mount.path}/hf-bin"):
            raise Skipped("the checkpoint does not tell its model; give --model and --config")
        shutil.copyfile(f"{mount.path}/hf-bin/pytorch_model.bin", path)
    forget(path)
    return path


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Left(_missing(name))
    return found


def _missing(name: str) -> str:
    return f"not installed (pip install {name})"


def _ended(command: list[str], env: dict[str, str]) -> None:
    """Run *command*; `Left` with its last words when it fails or takes too long."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Left(f"it took more than {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise Left(words[0])
