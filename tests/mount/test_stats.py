"""``ckptfs mount --stats``: what the hidden file says about requests that are known."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckptfs.mount.stats import FILE_NBYTES
from tests.conftest import Mounter
from tests.formats.hdf5.h5_files import write_checkpoint
from tests.mount.semantics import table
from tests.mount.test_faults import GOLDEN, MODEL
from tests.waiting import MAX_SECONDS, wait_for

pytestmark = pytest.mark.fuse

NAME = ".ckptfs/stats.json"
BIG = 40 << 20


@pytest.fixture(scope="module")
def counted(shared_mounter: Mounter) -> Path:
    """A safetensors file with one tensor of 40 MiB of zeros, mounted with ``--stats``."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [BIG], "data_offsets": [0, BIG]}}).encode()
    with (shared_mounter.folder / "big.safetensors").open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + BIG)
    path = shared_mounter.mountpoint("counted")
    done = shared_mounter.ckptfs("mount", shared_mounter.folder / "big.safetensors", path, "--stats")
    assert done.returncode == 0, done.stderr
    return path


def figures(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / NAME).read_text())
    return found


def test_reads_are_counted_exactly(counted: Path) -> None:
    fd = os.open(counted / "raw/w", os.O_RDONLY | os.O_DIRECT)
    try:
        before = figures(counted)
        for i in range(30):
            assert os.pread(fd, 100_000, i * 1_000_000) == bytes(100_000)
        after = figures(counted)
    finally:
        os.close(fd)
    # Reading the figures is counted, too: its own sizes are smaller than 100,000 bytes.
    assert after["requests"]["read"] >= before["requests"].get("read", 0) + 30
    assert after["read_sizes"]["131072"] == before["read_sizes"].get("131072", 0) + 30
    replied = after["replied_bytes"] - before["replied_bytes"]
    assert replied == 3_000_000 + FILE_NBYTES
    source = after["source_bytes"] - before["source_bytes"]
    assert 3_000_000 <= source < 3_100_000, "the bytes themselves, requests, and /proc"
    assert after["read_amplification"] == round(after["source_bytes"] / after["replied_bytes"], 4)
    assert 0 < after["read_s"] - before["read_s"] < 60


def test_errors_are_counted_by_name(counted: Path) -> None:
    before = figures(counted)["errors"].get("ENODATA", 0)
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            os.getxattr(counted / "raw/w", "user.none")
        assert caught.value.errno == errno.ENODATA
    assert figures(counted)["errors"]["ENODATA"] == before + 3


def test_the_file_is_fresh_at_each_open_and_its_size_is_right(counted: Path) -> None:
    with (counted / NAME).open("rb", buffering=0) as file:
        start = os.pread(file.fileno(), 100, 0)
        time.sleep(0.01)
        assert os.pread(file.fileno(), 100, 0) == start, "one open file never changes"
        whole = os.pread(file.fileno(), 100_000, 0)
    assert len(whole) == FILE_NBYTES == (counted / NAME).stat().st_size
    assert figures(counted)["uptime_s"] > json.loads(whole)["uptime_s"]
    said = subprocess.run(["cat", counted / NAME], capture_output=True, check=True).stdout
    assert json.loads(said)["uptime_s"] > json.loads(whole)["uptime_s"]


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_jq_reads_it(counted: Path) -> None:
    said = subprocess.run(["jq", "-c", ".requests.read", counted / NAME], capture_output=True, text=True, check=True)
    assert int(said.stdout) >= 0


def test_the_page_names_every_field(counted: Path) -> None:
    shown = figures(counted)
    assert [f"`{name}`" for name in shown] == list(table("Statistics"))
    assert 0 < shown["uptime_s"] < 3600
    assert 1 << 20 < shown["memory"]["bytes"] <= shown["memory"]["peak_bytes"] < 1 << 30
    assert 2 <= shown["threads"] < 20


def test_the_cache_tells_what_it_did(mounter: Mounter) -> None:
    """Eight compressed chunks of 64 KiB, and a cache with room for four: the second round finds the last four."""
    about = {
        "__TORCH__": True,
        "__TYPE__": "TorchTensorSerializer",
        "shapes": [[128, 1024]],
        "dtypes": ["torch.float32"],
    }
    packed = write_checkpoint(mounter.folder / "packed.h5", {"w": about})
    with h5py.File(packed, "r+") as file:
        file.create_dataset("w", (128, 1024), "f4", chunks=(16, 1024), compression="gzip", data=np.ones((128, 1024)))
    path = mounter.mountpoint()
    done = mounter.ckptfs("mount", packed, path, "--stats", "--cache-size", "256KiB")
    assert done.returncode == 0, done.stderr
    before = figures(path)["cache"]
    assert before == {"budget_bytes": 256 << 10, "bytes": 0, "hits": 0, "misses": 0, "evictions": 0, "making_s": 0}
    fd = os.open(path / "raw/w", os.O_RDONLY | os.O_DIRECT)
    try:
        for chunk in [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4]:
            assert os.pread(fd, 4, chunk << 16) == np.float32(1).tobytes()
    finally:
        os.close(fd)
    after = figures(path)["cache"]
    assert (after["misses"], after["hits"], after["evictions"], after["bytes"]) == (8, 4, 4, 256 << 10)
    assert 0 < after["making_s"] < 10


def test_without_the_option_there_is_no_such_folder(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.ckptfs("mount", GOLDEN / "cs.mdl", path, *MODEL).returncode == 0
    assert not (path / ".ckptfs").exists()


@pytest.mark.parametrize("options", [[], ["--stats"]], ids=["without", "with"])
def test_a_signal_logs_them_or_does_nothing(mounter: Mounter, options: list[str]) -> None:
    path = mounter.mountpoint()
    assert mounter.ckptfs("mount", GOLDEN / "cs.mdl", path, *MODEL, *options).returncode == 0
    os.kill(mounter.daemon_pid, signal.SIGUSR1)
    wait_for("the log", lambda: not options or " stats " in mounter.log)
    assert (path / "README.txt").read_text(), "it serves on"
    lines = [line for line in mounter.log.splitlines() if " stats " in line]
    assert len(lines) == len(options)
    for line in lines:
        assert json.loads(line.partition(" stats ")[2])["requests"]["getattr"] >= 1


@pytest.mark.parametrize("options", [[], ["--stats"]], ids=["without", "with"])
def test_a_signal_in_the_foreground_comes_to_any_thread(mounter: Mounter, options: list[str]) -> None:
    """There the process has threads of libraries, which were started before the mount."""
    path = mounter.mountpoint()
    process = mounter.start("-m", "ckptfs", "mount", GOLDEN / "cs.mdl", path, *MODEL, *options, "-f")
    wait_for("the mount", lambda: os.path.ismount(path) and (path / "README.txt").read_text())
    for _ in range(20):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.01)
    assert (path / "README.txt").read_text(), "it serves on"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=MAX_SECONDS)
    assert process.returncode == 0, err
    assert err.count(" stats {") >= len(options), err
    assert "Traceback" not in err
