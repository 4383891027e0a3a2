#!/usr/bin/env python3
"""What each kind of source and each operation costs: throughput, and the daemon's processor seconds for each GB.

Sources (chunks stored plainly, chunks packed, contiguous, safetensors) times operations (renamed, rotary rows, packed
q/k/v, transposed, scaled) times the way of reading (page cache or direct I/O, one reader or two): see
docs/performance.md. Not named profile.py, which would hide Python's own module of that name from whatever runs here.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import click
from benchmarks import cases
from benchmarks.common import GB, finite, spread
from benchmarks.machine import about, work_folder, write
from benchmarks.memory import HeldMemory
from benchmarks.mounting import Mounted, mounted_case, warm

from ckptfs.cli.options import size

BLOCK = 1 << 20
WAYS = {"cached-1": (False, 1), "cached-2": (False, 2), "direct-1": (True, 1), "direct-2": (True, 2)}
"""A way of reading: with direct I/O or through the page cache, and how many readers."""
PAGE_CACHE = 5
"""Memory to have ready for it, as a multiple of what is read: the kernel may prefer to take some that is not there."""


@click.command()
@click.option("--size", "nbytes", type=size, default="256MB", show_default=True, help="Bytes of each source.")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Repeats; medians are shown.")
@click.option("--only", metavar="TEXT[,TEXT…]", help="Only cases whose 'source/operation' has one of these in it.")
@click.option("--stats", is_flag=True, help="Count requests as 'ckptfs mount --stats' does, to see what that costs.")
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write the results there, too.")
@click.option("--work", type=click.Path(), metavar="DIR", help="Folder for the sources (a temporary one).")
def main(nbytes: int, runs: int, only: str | None, stats: bool, json_file: str | None, work: str | None) -> None:
    """Measure the daemon's cost by source, operation and way of reading."""
    found: list[dict[str, Any]] = []
    click.echo(heading())
    with work_folder(work, keep=False) as folder:
        for source, operation, path in prepared(folder, nbytes, only):
            found.append(measured(folder, source, operation, path, runs, *(["stats"] if stats else [])))
            click.echo(line(found[-1]))
            if json_file:
                write(json_file, finite({"machine": about(), "size": nbytes, "cases": found}))


def prepared(folder: str, nbytes: int, only: str | None) -> Iterator[tuple[str, str, str]]:
    """(source, operation, file) of each case that is asked for; a source is there until its last case is done."""
    for source in cases.SOURCES:
        operations = [cases.LOOPBACK] if source == "safetensors" else []
        wanted = [op for op in [*operations, *cases.OPERATIONS] if _asked(f"{source}/{op}", only)]
        if not wanted:
            continue
        path = cases.write_source(source, folder, nbytes)
        for operation in wanted:
            yield source, operation, path
        os.unlink(path)


def _asked(name: str, only: str | None) -> bool:
    return only is None or any(text.strip() in name for text in only.split(","))


def measured(folder: str, source: str, operation: str, path: str, runs: int, *options: str) -> dict[str, Any]:
    """One case: for each way of reading its GB/s and CPU s/GB, always of a mount that was never read."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(runs):
        for way, (direct, readers) in WAYS.items():
            mounted = mounted_case(path, operation, os.path.join(folder, "mnt"), *options)
            with HeldMemory(0 if direct else PAGE_CACHE * os.path.getsize(path)) as held, mounted as mount:
                held.settle()
                warm(path)
                held.release()
                seconds, cpu, nbytes = _read(mount, direct, readers)
            rates[way].append(nbytes / seconds / GB)
            costs[way].append(cpu / nbytes * GB)
    ways = {way: {"GB/s": spread(rates[way]), "CPU s/GB": spread(costs[way])} for way in WAYS}
    return {"source": source, "operation": operation, "ways": ways}


def _read(mount: Mounted, direct: bool, readers: int) -> tuple[float, float, int]:
    """Seconds, the daemon's processor seconds, and bytes; each reader has a part of the file."""
    path = f"{mount.path}/{cases.NAME}"
    nbytes = os.path.getsize(path)
    share = -(-nbytes // BLOCK // readers) or 1
    flags = ["iflag=direct"] if direct else []
    before, start = mount.cpu_seconds(), time.perf_counter()
    running = []
    for i in range(readers):
        part = [f"skip={i * share}", *([f"count={share}"] if i + 1 < readers else [])]
        command = ["dd", f"if={path}", "of=/dev/null", f"bs={BLOCK}", "status=none", *part, *flags]
        running.append(subprocess.Popen(command))
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError(f"dd of {path} failed")
    return time.perf_counter() - start, mount.cpu_seconds() - before, nbytes


def heading() -> str:
    ways = "".join(f"{name:>16}" for name in WAYS)
    return f"GB/s and the daemon's CPU s/GB; cached: page cache, direct: O_DIRECT, 1 or 2 readers\n{'':<32}{ways}"


def line(case: dict[str, Any]) -> str:
    """One row of the table."""
    cells = [(way["GB/s"]["median"], way["CPU s/GB"]["median"]) for way in case["ways"].values()]
    return f"{case['source']:<18}{case['operation']:<14}" + "".join(
        f"{rate:>10.2f}{cost:>6.2f}" for rate, cost in cells
    )


if __name__ == "__main__":
    main()
