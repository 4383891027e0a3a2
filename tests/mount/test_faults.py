"""Real checkpoints through a real mount when things go wrong: changed sources, damage, a killed daemon, crowds."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.conftest import Mounter
from tests.paths import FAMILIES
from tests.waiting import MAX_SECONDS, wait_until_open

pytestmark = pytest.mark.fuse

GOLDEN = FAMILIES / "llama/cs2hf-gqa-fp32"
MODEL = ("--model", "llama", "--config", GOLDEN / "cs.yaml")
WEIGHTS = (GOLDEN / "hf/model-00001-of-00001.safetensors").read_bytes()
"""What the original converter made of the checkpoint; hf/model.safetensors of the mount has the same bytes."""
SUMS = {
    key: facts["sha256"]
    for key, facts in json.loads((GOLDEN / "given_cs.json").read_text())["state"].items()
    if "sha256" in facts
}
"""Key to the recorded sha256 of the tensor's bytes."""
FIRST = "model.embedding_layer.word_embeddings.weight"
HEAD = "model.lm_head.weight"


def mounted(mounter: Mounter, source: Path) -> Path:
    return mounter.mounted(source, *MODEL)


def read(path: Path, offset: int = 0, length: int = 1 << 20) -> bytes:
    """From the daemon itself, not from the kernel's cache."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


def read_errno(path: Path) -> int | None:
    """The error of reading the whole file, None when it can be read."""
    try:
        read(path)
    except OSError as error:
        return error.errno
    return None


def chunk_at(source: Path, key: str) -> int:
    """Where the only chunk of *key* lies in the file, by h5py."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(source) as file:
        return int(file[key].id.get_chunk_info(0).byte_offset)


def spans(weights: bytes) -> dict[str, tuple[int, int]]:
    """Tensor name to its bytes [start, stop) in a safetensors file."""
    n = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + n])
    places = {name: t["data_offsets"] for name, t in header.items() if name != "__metadata__"}
    return {name: (8 + n + start, 8 + n + stop) for name, (start, stop) in places.items()}


def test_a_source_replaced_by_rename_keeps_the_old_bytes(mounter: Mounter, source: Path) -> None:
    path = mounted(mounter, source)
    other = source.with_name("new.mdl")
    shutil.copy(GOLDEN.parent / "cs2hf-l1-bf16/cs.mdl", other)
    other.rename(source)
    for _ in range(2):
        assert read(path / "hf/model.safetensors") == WEIGHTS
        assert hashlib.sha256(read(path / "raw" / HEAD)).hexdigest() == SUMS[HEAD]
    assert "ERROR" not in mounter.log


def test_a_source_cut_short_fails_only_what_is_missing(mounter: Mounter, source: Path) -> None:
    """In files that were open before; no file with data can be opened afterwards."""
    path = mounted(mounter, source)
    cut = 200_000
    assert chunk_at(source, FIRST) < cut < chunk_at(source, HEAD)
    opened = {key: os.open(path / "raw" / key, os.O_RDONLY | os.O_DIRECT) for key in (FIRST, HEAD)}
    try:
        for fd in opened.values():
            os.pread(fd, 1 << 20, 0)  # its chunk table
        os.truncate(source, cut)
        assert hashlib.sha256(os.pread(opened[FIRST], 1 << 20, 0)).hexdigest() == SUMS[FIRST]
        with pytest.raises(OSError) as caught:
            os.pread(opened[HEAD], 1 << 20, 0)
        assert caught.value.errno == errno.EIO
        line = next(line for line in mounter.log.splitlines() if f"/raw/{HEAD}:" in line)
        assert f"{source}: {HEAD}: " in line
        assert "(at byte " in line
        assert {read_errno(path / "raw" / key) for key in SUMS} == {errno.EIO}
        with pytest.raises(OSError):
            os.pread(opened[FIRST], 1 << 20, 0)
    finally:
        for fd in opened.values():
            os.close(fd)
    assert "Traceback" not in mounter.log
    assert json.loads((path / "checkpoint.json").read_text())["step"] == 42


@pytest.mark.parametrize("change", ["a few bytes", "cp of another step"])
def test_a_source_written_to_in_place_is_read_no_more(mounter: Mounter, source: Path, change: str) -> None:
    path = mounted(mounter, source)
    cached = (path / "raw" / HEAD).read_bytes()
    reader = os.open(path / "hf/model.safetensors", os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.pread(reader, 1 << 20, 0) == WEIGHTS
        if change == "a few bytes":
            with open(source, "r+b") as file:
                file.seek(chunk_at(source, HEAD) + 16)
                file.write(bytes(64))
        else:
            subprocess.run(["cp", GOLDEN.parent / "cs2hf-l1-bf16/cs.mdl", source], check=True)
        wanted = [path / "raw" / HEAD, path / "raw" / FIRST, path / "hf/model.safetensors", path / "torch/model.pt"]
        for name in [*wanted, path / "tensors" / f"{HEAD.replace('.', '/')}.npy"] * 2:
            with pytest.raises(OSError) as caught:
                os.close(os.open(name, os.O_RDONLY))
            assert caught.value.errno == errno.EIO
        with pytest.raises(OSError) as caught:  # a file that was open already, too
            os.pread(reader, 1 << 20, 0)
        assert caught.value.errno == errno.EIO
    finally:
        os.close(reader)
    lines = [line for line in mounter.log.splitlines() if "ERROR" in line]
    assert len(lines) == 1
    assert f"{source}: was written to after it was opened" in lines[0]
    assert hashlib.sha256(cached).hexdigest() == SUMS[HEAD]
    assert (path / "README.txt").read_text()  # what has no data of the source stays


def test_shards_written_to_one_by_one_never_stand_side_by_side(mounter: Mounter, tmp_path: Path) -> None:
    """``cp new/* old/`` under a mount: what is read is of the old step, or EIO."""
    folder = tmp_path / "model"
    folder.mkdir()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    old, new = bytes([1] * 40_000), bytes([2] * 40_000)
    for key, name in shards.items():
        save_file({key: np.frombuffer(old, np.uint8)}, folder / name)
    path = mounter.mountpoint()
    assert mounter.ckptfs("mount", folder, path).returncode == 0
    assert [read(path / "raw" / key) for key in shards] == [old, old]
    save_file({"b": np.frombuffer(new, np.uint8)}, tmp_path / "new")
    subprocess.run(["cp", tmp_path / "new", folder / shards["b"]], check=True)
    assert [read_errno(path / "raw" / key) for key in shards] == [errno.EIO, errno.EIO]
    assert shards["b"] in mounter.log


def test_a_damaged_chunk_fails_one_tensor(mounter: Mounter, source: Path) -> None:
    at = chunk_at(source, HEAD)
    with open(source, "r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 16)
    path = mounted(mounter, source)
    found = {key: read_errno(path / "raw" / key) for key in SUMS}
    assert found == {key: errno.EIO if key == HEAD else None for key in SUMS}
    for key in SUMS.keys() - {HEAD}:
        assert hashlib.sha256((path / "raw" / key).read_bytes()).hexdigest() == SUMS[key]
    for name, (start, stop) in spans(WEIGHTS).items():
        if name == "lm_head.weight":
            with pytest.raises(OSError) as caught:
                read(path / "hf/model.safetensors", start, stop - start)
            assert caught.value.errno == errno.EIO
        else:
            assert read(path / "hf/model.safetensors", start, stop - start) == WEIGHTS[start:stop]
    assert f"{HEAD}: chunk 0: " in mounter.log
    assert f"(at byte {at})" in mounter.log
    assert "Traceback" not in mounter.log


READER = """
import os, random, sys
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
size = os.fstat(fd).st_size
print("reading", flush=True)
try:
    while True:
        os.pread(fd, 4096, random.randrange(size))
except OSError as error:
    sys.exit(error.errno)
"""


def test_a_killed_daemon_ends_all_its_readers(mounter: Mounter, source: Path) -> None:
    path = mounted(mounter, source)
    names = ["hf/model.safetensors", f"raw/{HEAD}", f"raw/{FIRST}", "README.txt"] * 2
    readers = [mounter.start("-c", READER, path / name) for name in names]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
    for reader, name in zip(readers, names, strict=True):
        wait_until_open(reader.pid, path / name)
    assert [reader.poll() for reader in readers] == [None] * 8
    os.kill(mounter.daemon_pid, signal.SIGKILL)
    for reader in readers:
        _, err = reader.communicate(timeout=MAX_SECONDS)
        assert reader.returncode in (errno.ENOTCONN, errno.ECONNABORTED), err


@pytest.mark.parametrize("direct", [0, os.O_DIRECT], ids=["cached", "direct"])
def test_thirty_two_threads_read_random_ranges(mounter: Mounter, direct: int) -> None:
    path = mounted(mounter, GOLDEN / "cs.mdl")
    wholes = {path / "hf/model.safetensors": WEIGHTS}
    for key in SUMS:
        wholes[path / "raw" / key] = (path / "raw" / key).read_bytes()
        assert hashlib.sha256(wholes[path / "raw" / key]).hexdigest() == SUMS[key]

    def check(seed: int) -> int:
        rng = random.Random(seed)
        for _ in range(40):
            name = rng.choice(list(wholes))
            offset, length = rng.randrange(len(wholes[name]) + 100), rng.choice([1, 7, 512, 5000, 1 << 20])
            fd = os.open(name, os.O_RDONLY | direct)
            try:
                assert os.pread(fd, length, offset) == wholes[name][offset : offset + length], (name, offset, length)
            finally:
                os.close(fd)
        return seed

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(check, range(32))) == list(range(32))


COPY = {
    "cp": 'cp -a "$MNT/." "$TO"',
    "tar": 'tar -C "$MNT" -c . | tar -C "$TO" -x',
    "rsync": 'rsync -a "$MNT/" "$TO"',
}


@pytest.mark.parametrize("tool", [tool for tool in COPY if shutil.which(tool)])
def test_copies_of_a_whole_mount_are_the_mount(tool: str, mounter: Mounter, tmp_path: Path) -> None:
    path, copy = mounted(mounter, GOLDEN / "cs.mdl"), tmp_path / "copy"
    copy.mkdir()
    commands = f"""
        {COPY[tool]}
        chmod -R u+w "$TO"
        diff -r "$MNT" "$TO" >&2
        (cd "$MNT" && find . -type f -exec sha256sum {{}} +) | (cd "$TO" && sha256sum --quiet -c - >&2)
        find "$TO" -type f | wc -l
        find "$MNT" -type f ! -newer "$SOURCE" | wc -l
        grep -c '"' "$TO/hf/config.json"
        """
    env = {**os.environ, "MNT": str(path), "TO": str(copy), "SOURCE": str(GOLDEN / "cs.mdl")}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    n_copied, n_mounted, n_lines = map(int, done.stdout.split())
    assert n_copied == n_mounted > 60
    assert n_lines == len([line for line in (path / "hf/config.json").read_text().splitlines() if '"' in line])
    assert (copy / "hf/model.safetensors").read_bytes() == WEIGHTS
    assert (copy / "raw" / HEAD).stat().st_mtime_ns // 10**9 == (GOLDEN / "cs.mdl").stat().st_mtime_ns // 10**9
