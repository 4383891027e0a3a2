"""Runs inputs of a target in worker processes with limits, and says what went wrong.

Input *i* of a run follows from the seed, the target and *i* alone, so a finding can be made again. A worker has
1 GiB of address space beyond what Python itself takes; it is killed when one input takes too long, and the next
worker goes on with the next input.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import IO, Any

from tests.effort import MAX_EFFORT, measured, processor_seconds, unit

ROOT = Path(__file__).parent.parent.parent
MAX_MEMORY = 1 << 30
MAX_SECONDS = 30.0
"""Processor time after which an input is given up; what it may take is `MAX_EFFORT`. A silent worker is killed."""
PATIENCE = 10 * MAX_SECONDS
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass
class Report:
    """What a run of one target found."""

    target: str
    n_inputs: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    """Name of the error, or ``read``, to number of inputs."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """``index``, ``what`` and ``trace`` of each input that a reader did not handle."""
    peak: int = 0
    """Largest resident size of a worker or of a child of it, in bytes."""
    seconds: float = 0.0


def make_input(target: str, seed: int, index: int) -> bytes:
    """The bytes of one input."""
    from tests.fuzz.targets import TARGETS

    return TARGETS[target].make(Random(f"{seed}:{target}:{index}"))


def run(target: str, n_inputs: int, *, seed: int = 0, first: int = 0, max_findings: int = 20) -> Report:
    """Feed inputs ``[first, first + n_inputs)`` of *target* to its reader."""
    report = Report(target)
    begin = time.monotonic()
    at = first
    while at < first + n_inputs and len(report.findings) < max_findings:
        at = _run_worker(report, seed, at, first + n_inputs)
    report.seconds = time.monotonic() - begin
    return report


def run_file(target: str, path: Path) -> dict[str, Any]:
    """Feed one file to the reader of *target*, in a worker with the usual limits.

    ``outcome`` is what came of it, or ``what`` and ``trace`` stand for what the reader did not handle; ``peak`` is the
    worker's memory (or its child's) beyond what it took before, in bytes, ``effort`` its work (see `tests.effort`).
    """
    with tempfile.TemporaryFile("w+") as log:
        worker = _start(log, target, "--file", str(path))
        with worker:
            line = next(_lines(worker), "")
        log.seek(0)
        return json.loads(line) if line else {"what": f"the worker ended with {worker.returncode}", "trace": log.read()}


def _start(log: IO[str], *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fuzz.runner", *args]
    env = {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True)


def _run_worker(report: Report, seed: int, start: int, stop: int) -> int:
    """Let one worker go on from *start*; where the next one has to begin."""
    with tempfile.TemporaryFile("w+") as log:
        worker = _start(log, report.target, str(seed), str(start), str(stop))
        with worker:
            at = start
            for line in _lines(worker):
                message = json.loads(line)
                at = message["index"] + 1
                _note(report, message)
        if at < stop:
            log.seek(0)
            why = f"the worker ended with {worker.returncode} (a signal, when negative) or took too long"
            report.findings.append({"index": at, "what": why, "trace": log.read()[-2000:]})
            report.n_inputs += 1
            at += 1
    return at


def _note(report: Report, message: dict[str, Any]) -> None:
    report.n_inputs += 1
    report.peak = max(report.peak, message["peak"])
    if "what" in message:
        report.findings.append(message)
    else:
        report.outcomes[message["outcome"]] += 1


def _lines(worker: subprocess.Popen[str]) -> Iterator[str]:
    """What the worker says; it is killed when it says nothing for too long."""
    assert worker.stdout is not None
    while True:
        late = threading.Timer(PATIENCE, worker.kill)
        late.start()
        line = worker.stdout.readline()
        late.cancel()
        if not line.endswith("\n"):
            return
        yield line


class _TooSlow(BaseException):
    """The input took more than `MAX_SECONDS`."""


def _work(target: str, seed: int, start: int, stop: int) -> None:
    """The worker: one line of JSON for each input."""
    from tests.fuzz.targets import TARGETS

    make_input(target, seed, start)  # loads the corpus
    _limit()
    usual = unit()
    with _folder() as folder:
        for index in range(start, stop):
            data, begin = make_input(target, seed, index), processor_seconds()
            message = {"index": index, **_feed(TARGETS[target].feed, data, Path(folder)), "peak": _peak()}
            spent = processor_seconds() - begin
            if spent > MAX_EFFORT * usual and spent > MAX_EFFORT * unit():  # the machine may be slower meanwhile
                message = {"what": f"took {spent / usual:.0f} units of work", "trace": "", **message}
            print(json.dumps(message), flush=True)


def _work_file(target: str, path: Path) -> None:
    """The worker of `run_file`."""
    from tests.fuzz.targets import TARGETS

    data = path.read_bytes()
    _limit()
    before = _peak()
    with measured() as effort, _folder() as folder:
        message: dict[str, Any] = {**_feed(TARGETS[target].feed, data, Path(folder))}
    print(json.dumps({**message, "peak": _peak() - before, "effort": effort()}), flush=True)


def _limit() -> None:
    base = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (base + MAX_MEMORY, base + MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _too_slow)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """In memory where that is possible."""
    return tempfile.TemporaryDirectory(
        prefix="ckptfs-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )


def _feed(feed: Any, data: bytes, folder: Path) -> dict[str, str]:
    from ckptfs.errors import CkptfsError

    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        feed(data, folder)
        return {"outcome": "read"}
    except (CkptfsError, OSError) as error:
        return {"outcome": type(error).__name__}
    except (Exception, _TooSlow) as error:  # the very thing that is looked for
        what = f"{type(error).__name__}: {error}"[:300].encode("ascii", "backslashreplace").decode()
        return {"what": what, "trace": traceback.format_exc()[-3000:].encode("ascii", "backslashreplace").decode()}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_slow(*_: object) -> None:
    raise _TooSlow


def _peak() -> int:
    """Bytes. Of this process by VmHWM: its ru_maxrss would begin with that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    own = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) << 10


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        if sys.argv[2] == "--file":
            _work_file(sys.argv[1], Path(sys.argv[3]))
        else:
            _work(sys.argv[1], *map(int, sys.argv[2:5]))
