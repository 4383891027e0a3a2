#!/usr/bin/env python3
"""Reads a mount in every way for a long time, and prints what its daemon holds, once a minute.

A daemon that is sound holds the same after an hour as after a few minutes. Memory is the resident set, without the
pages of mapped files.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import threading
import time
from pathlib import Path

import click
from benchmarks.mounting import Mounted, ckptfs_mount

WAYS = ("whole", "random", "mapped", "direct", "listing", "attributes")


def read_once(rng: random.Random, files: list[Path]) -> None:
    """One access of a random kind to a random file."""
    path, way = rng.choice(files), rng.choice(WAYS)
    size = path.stat().st_size
    if way == "listing":
        os.listdir(path.parent)
    elif way == "attributes":
        path.stat()
        for name in os.listxattr(path):
            os.getxattr(path, name)
    elif way == "mapped" and size:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            for _ in range(16):
                view[rng.randrange(size)]
    else:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0))
        try:
            if way == "random":
                for _ in range(64):
                    os.pread(fd, 4096, rng.randrange(size + 1) & ~4095)
            else:
                buffer = mmap.mmap(-1, 1 << 20)
                while os.readv(fd, [buffer]):
                    pass
        finally:
            os.close(fd)


def figures(mount: Mounted) -> dict[str, int]:
    """What the daemon holds: bytes of memory of its own, file descriptors and threads."""
    process = f"/proc/{mount.pid}"
    return {
        "anonymous_nbytes": mount.status("RssAnon"),
        "descriptors": len(os.listdir(f"{process}/fd")),
        "threads": len(os.listdir(f"{process}/task")),
    }


@click.command()
@click.argument("source", type=click.Path(exists=True))
@click.option("--minutes", default=60.0, show_default=True, help="How long to read.")
@click.option("--readers", default=4, show_default=True, help="Readers at once.")
@click.option("--interval", default=60.0, show_default=True, metavar="SECONDS", help="Seconds from line to line.")
@click.option("--cache-drops", is_flag=True, help="Drop the page cache at each line (root).")
@click.argument("mount_options", nargs=-1)
def main(
    source: str, minutes: float, readers: int, interval: float, cache_drops: bool, mount_options: tuple[str, ...]
) -> None:
    """Read a mount of SOURCE for a long time. Options behind -- go to 'ckptfs mount'."""
    ends = time.monotonic() + 60 * minutes
    done = threading.Event()
    counts = [0] * readers

    def read(number: int) -> None:
        rng = random.Random(number)
        while not done.is_set():
            read_once(rng, files)
            counts[number] += 1

    with tempfile.TemporaryDirectory() as folder, ckptfs_mount(source, folder, *mount_options) as mount:
        files = [Path(where) / name for where, _, names in os.walk(folder) for name in names]
        threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(readers)]
        for thread in threads:
            thread.start()
        click.echo(f"{'minute':>8}{'accesses':>12}{'memory MiB':>12}{'descriptors':>13}{'threads':>9}")
        start = time.monotonic()
        while time.monotonic() < ends:
            time.sleep(min(interval, max(0.0, ends - time.monotonic())))
            if cache_drops:
                Path("/proc/sys/vm/drop_caches").write_text("3")
            now = figures(mount)
            click.echo(
                f"{(time.monotonic() - start) / 60:8.1f}{sum(counts):12,}{now['anonymous_nbytes'] / 2**20:12.1f}"
                f"{now['descriptors']:13}{now['threads']:9}"
            )
        done.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
