"""Few processors: one thread answers as long as it keeps up, others join when it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.mount.fuse import MountOptions, is_single_server
from ckptfs.mount.stats import Stats
from ckptfs.native import library
from tests.conftest import Mounter
from tests.mount.test_reading import check_many_readers
from tests.mount.trees import BIG, N_MANY, TEXT
from tests.waiting import MAX_SECONDS, wait_for, wait_until_open

pytestmark = pytest.mark.fuse

in_c = pytest.mark.skipif(library.LIBRARY is None, reason="installed without a C compiler")


@pytest.fixture(params=[1, 2], ids=["one processor", "two processors"])
def few(request: pytest.FixtureRequest) -> Iterator[int]:
    """That many processors for this test and the daemons that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[: request.param])
    yield request.param
    os.sched_setaffinity(0, before)


@in_c
def test_when_a_single_thread_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert is_single_server(MountOptions())
    assert not is_single_server(MountOptions(threads=2)), "as many as were asked for, at any time"
    assert not is_single_server(MountOptions(stats=Stats())), (
        "Python counts, C does not know whether a request was answered"
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert not is_single_server(MountOptions())


def test_a_long_read_keeps_nobody_waiting(mounter: Mounter, few: int) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    held = subprocess.Popen(["cat", path / "slow"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_open(held.pid, path / "slow")
        program = (
            "import os, sys; os.chdir(sys.argv[1]);"
            "print(len([os.stat(f'many/{name}') for name in os.listdir('many')]));"
            "print(open('README.txt', 'rb').read() == open('deep/er/text', 'rb').read());"
            "print(len(open('big.bin', 'rb').read()))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=MAX_SECONDS
        )
        assert done.stdout.split() == [str(N_MANY), "True", str(len(BIG))], done.stderr
        assert held.poll() is None
    finally:
        os.kill(mounter.daemon_pid, signal.SIGKILL)  # it would go on for minutes
        held.wait(MAX_SECONDS)


def test_many_readers_with_direct_io(mounter: Mounter, few: int) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    check_many_readers(path, 16)
    assert (path / "big.bin").read_bytes() == BIG, "through the page cache afterwards"


def test_an_idle_mount_sleeps(mounter: Mounter, few: int) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    assert (path / "big.bin").read_bytes() == BIG
    assert (path / "README.txt").read_bytes() == TEXT
    wait_for("a quiet second", lambda: wakeups_of_a_second(mounter.daemon_pid) <= 5)


def wakeups_of_a_second(pid: int) -> int:
    before = wakeups(pid)
    time.sleep(1)
    return wakeups(pid) - before


def wakeups(pid: int) -> int:
    """How often threads of a process began to wait for something."""
    found = 0
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = path.read_text().splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found
