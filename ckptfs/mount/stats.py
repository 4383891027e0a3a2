"""What a mount has done so far, as JSON: ``.ckptfs/stats.json`` of a mount with ``--stats``, and the log on SIGUSR1.

A mount without it pays nothing: `Stats.counted` wraps the callbacks when they are installed.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptfs.formats.extents import ExtentFile, file_of
from ckptfs.tensors import cache
from ckptfs.vfs.tree import Folder, Leaf, Tree

log = logging.getLogger(__name__)

FOLDER, NAME = ".ckptfs", "stats.json"
FILE_NBYTES = 4096
"""Size of the file: its JSON, then spaces, so that `stat` is right for any counters."""

Answer = Callable[..., int]


@dataclass(slots=True)
class _Counts:
    """What one thread has answered. No other thread writes here, so no lock is needed and no count is lost."""

    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[int] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    """Reads by the bit length of (size - 1)."""
    replied: int = 0
    seconds: float = 0.0


class Stats:
    """Counters of one mount. The threads that answer requests count; any thread may take a `snapshot`."""

    def __init__(self) -> None:
        self._all: list[_Counts] = []
        self._thread = threading.local()
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Start the clock and record what the process has read until now; called when the daemon starts to serve."""
        self._began = time.monotonic()
        self._read_before = bytes_read() or 0

    def counted(self, kind: str, answer: Answer) -> Answer:
        """The callback *answer* of that *kind*, counted. It returns a negative errno for an error."""
        return self._counted_read(answer) if kind == "read" else self._counted(kind, answer)

    def snapshot(self) -> dict[str, Any]:
        """All figures. Sizes in bytes, times in seconds; None for what the system does not provide."""
        with self._lock:
            parts = list(self._all)
        requests: Counter[str] = sum((p.requests.copy() for p in parts), Counter())
        errors: Counter[int] = sum((p.errors.copy() for p in parts), Counter())
        sizes: Counter[int] = sum((p.sizes.copy() for p in parts), Counter())
        replied, read = sum(p.replied for p in parts), bytes_read()
        source = None if read is None else read - self._read_before
        return {
            "uptime_s": round(time.monotonic() - self._began, 3),
            "requests": dict(sorted(requests.items())),
            "errors": {errno.errorcode.get(n, str(n)): count for n, count in sorted(errors.items())},
            "read_s": round(sum(p.seconds for p in parts), 6),
            "read_sizes": {str(1 << bits): n for bits, n in sorted(sizes.items())},
            "replied_bytes": replied,
            "source_bytes": source,
            "read_amplification": round(source / replied, 4) if source is not None and replied else None,
            "cache": _cache_figures(),
            **_process_figures(),
        }

    def _counted_read(self, answer: Answer) -> Answer:
        clock, own = time.perf_counter, self._own

        def read(path: bytes, out: Any, size: int, offset: int, fi: Any) -> int:
            start = clock()
            n = answer(path, out, size, offset, fi)
            mine = own()
            mine.seconds += clock() - start
            mine.requests["read"] += 1
            mine.sizes[(size - 1).bit_length()] += 1
            if n >= 0:
                mine.replied += n
            else:
                mine.errors[-n] += 1
            return n

        return read

    def _counted(self, kind: str, answer: Answer) -> Answer:
        def count(*args: Any) -> int:
            n = answer(*args)
            mine = self._own()
            mine.requests[kind] += 1
            if n < 0:
                mine.errors[-n] += 1
            return n

        return count

    def _own(self) -> _Counts:
        """The counters of the calling thread."""
        found: _Counts | None = getattr(self._thread, "counts", None)
        if found is None:
            found = self._thread.counts = _Counts()
            with self._lock:
                self._all.append(found)
        return found


def log_stats(stats: Stats) -> None:
    """A snapshot in the log, in one line."""
    log.info("stats %s", json.dumps(stats.snapshot()))


def with_stats(tree: Tree, stats: Stats) -> Tree:
    """*tree* with the hidden folder that shows *stats*."""

    def make() -> dict[str, Any]:
        leaf = Leaf(file_of([bytes(FILE_NBYTES)]), live=lambda: stats_file(stats))
        return {**tree.root.children, FOLDER: Folder(lambda: {NAME: leaf})}

    return Tree(Folder(make), tree.mtime_ns, tree.check)


def stats_file(stats: Stats) -> ExtentFile:
    """A snapshot as a file of `FILE_NBYTES` bytes."""
    text = json.dumps(stats.snapshot(), indent=1)
    assert len(text) < FILE_NBYTES, "there are not that many kinds, sizes and errors"
    return file_of([text.ljust(FILE_NBYTES - 1).encode() + b"\n"])


def bytes_read() -> int | None:
    """Bytes that this process has read by system calls, whether from the page cache or a disk; None if not known.

    It includes requests of the kernel (about 80 bytes each) and what a decoding child process returns.
    """
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:  # kernels without task accounting, some containers
        return None


def _process_figures() -> dict[str, Any]:
    """Memory of this process, now and at its peak, and its threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rss, peak = (int(status[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return {"memory": {"bytes": rss, "peak_bytes": peak}, "threads": int(status["Threads"])}


def _cache_figures() -> dict[str, Any]:
    tiles = cache.shared()
    return {
        "budget_bytes": tiles.budget,
        "bytes": tiles.nbytes,
        "hits": tiles.hits,
        "misses": tiles.misses,
        "evictions": tiles.evictions,
        "making_s": round(tiles.seconds, 6),
    }
