"""Filters that only libhdf5 undoes, and the child process that does it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import numpy.typing as npt
import pytest

from ckptfs.errors import CorruptChunk, MissingCodec
from ckptfs.formats.hdf5 import decoder
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import read_into, to_bytes
from ckptfs.tensors.tensor import Tensor
from tests.formats.hdf5.h5_files import tensors_of
from tests.waiting import MAX_SECONDS, wait_for

Array = npt.NDArray[Any]
FILTERS: dict[str, dict[str, Any]] = {
    "lzf": {"compression": "lzf"},
    "lzf_shuffle": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    "szip": {"compression": "szip"},
    "scale_offset": {"scaleoffset": 0},
    "zstd": dict(hdf5plugin.Zstd()),
    "blosc": dict(hdf5plugin.Blosc()),
    "bitshuffle": dict(hdf5plugin.Bitshuffle()),
}


def smooth(shape: tuple[int, ...], dtype: str) -> Array:
    return (np.arange(np.prod(shape)) // 7).astype(dtype).reshape(shape)


def write(path: Path, array: Array, chunks: tuple[int, ...] = (10, 8)) -> Path:
    """*array* once for each filter; edge chunks included."""
    with h5py.File(path, "w") as out:
        for name, options in FILTERS.items():
            if name == "szip" and not h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP):
                continue
            out.create_dataset(name, data=array, chunks=chunks, **options)
    return path


def children() -> set[int]:
    """Processes whose parent is this one."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(parts[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


@pytest.mark.parametrize("dtype", ["<i4", ">i2", "<u1", "<i8"])
def test_every_filter(tmp_path: Path, dtype: str) -> None:
    array = smooth((33, 29), dtype)
    with tensors_of(write(tmp_path / "f.h5", array)) as tensors:
        assert len(tensors) >= 6
        for name, tensor in tensors.items():
            assert to_bytes(tensor) == array.astype(array.dtype.newbyteorder("<")).tobytes(), name


def test_other_element_types(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {
        "bool": rng.integers(0, 2, (21, 9)).astype(bool),
        "complex": rng.normal(size=(21, 9)).astype("<c8"),
        "half": rng.normal(size=(21, 9)).astype("<f2"),
        "double": rng.normal(size=(21, 9)),
    }
    with h5py.File(tmp_path / "f.h5", "w") as out:
        for name, array in arrays.items():
            out.create_dataset(name, data=array, chunks=(4, 4), compression="lzf")
    with tensors_of(tmp_path / "f.h5") as tensors:
        assert {name: to_bytes(tensor) for name, tensor in tensors.items()} == {
            name: array.tobytes() for name, array in arrays.items()
        }


@pytest.mark.parametrize("name", ["lzf", "zstd"])
def test_any_block_is_a_slice(tmp_path: Path, name: str) -> None:
    array = smooth((5, 33, 29), "<i4")
    rng = np.random.default_rng(2)
    with tensors_of(write(tmp_path / "f.h5", array, (2, 10, 8)), TileCache(4000)) as tensors:
        flat = array.view("<u4").reshape(5, -1)
        for _ in range(30):
            row, col = int(rng.integers(5)), int(rng.integers(flat.shape[1]))
            rows, cols = int(rng.integers(1, 6 - row)), int(rng.integers(1, flat.shape[1] - col + 1))
            block = np.zeros((rows, cols), "<u4")
            tensors[name].read_block(row, col, block)
            assert (block == flat[row : row + rows, col : col + cols]).all()
            start = int(rng.integers(array.nbytes))
            part = bytearray(int(rng.integers(1, array.nbytes - start + 1)))
            read_into(tensors[name], start, memoryview(part))
            assert bytes(part) == array.tobytes()[start : start + len(part)]


def test_chunks_that_were_never_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as out:
        made = out.create_dataset("a", (20, 20), "<i4", chunks=(10, 10), compression="lzf", fillvalue=7)
        made[:10, :10] = 1
    want = np.full((20, 20), 7, "<i4")
    want[:10, :10] = 1
    with tensors_of(tmp_path / "f.h5") as tensors:
        assert to_bytes(tensors["a"]) == want.tobytes()


def test_chunk_stored_without_its_filter(tmp_path: Path) -> None:
    """libhdf5 leaves an optional filter out where it does not help."""
    array = np.random.default_rng(3).integers(0, 256, (64, 64)).astype("u1")
    with h5py.File(tmp_path / "f.h5", "w") as out:
        made = out.create_dataset("a", data=array, chunks=(32, 32), compression="lzf")
        assert made.id.get_chunk_info(0).filter_mask == 1
    before = children()
    with tensors_of(tmp_path / "f.h5") as tensors:
        assert to_bytes(tensors["a"]) == array.tobytes()
        assert children() == before


def test_one_child_for_a_file_and_none_after(tmp_path: Path) -> None:
    gc.collect()  # files of earlier tests close when they are collected
    array = smooth((33, 29), "<i4")
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))
    with tensors_of(write(tmp_path / "f.h5", array)) as tensors:
        assert children() == before
        for tensor in tensors.values():
            to_bytes(tensor)
        assert len(children() - before) == 1
    del tensors, tensor
    gc.collect()
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_child_holds_nothing_of_ours(tmp_path: Path) -> None:
    """No descriptor but the file and the pipes: an inherited /dev/fuse would keep a mount alive."""
    path = write(tmp_path / "f.h5", smooth((33, 29), "<i4"))
    secret = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(secret, True)
    before = children()
    with tensors_of(path) as tensors:
        to_bytes(tensors["lzf"])
        (child,) = children() - before
        held = {os.readlink(entry) for entry in Path(f"/proc/{child}/fd").iterdir()}
    os.close(secret)
    assert {name for name in held if not name.startswith("pipe:")} <= {str(path), os.devnull}


def test_child_that_was_killed_is_replaced(tmp_path: Path) -> None:
    array = smooth((33, 29), "<i4")
    before = children()
    with tensors_of(write(tmp_path / "f.h5", array), TileCache(0)) as tensors:
        for name in ("zstd", "lzf", "lzf"):
            assert to_bytes(tensors[name]) == array.tobytes()
            (child,) = children() - before
            os.kill(child, signal.SIGKILL)
        assert to_bytes(tensors["lzf"]) == array.tobytes()
        assert len(children() - before) == 1


def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    """Also when the parent is killed and cleans up nothing."""
    path = write(tmp_path / "f.h5", smooth((33, 29), "<i4"))
    code = (
        "import sys, os, signal; from pathlib import Path; from tests.formats.hdf5.test_filters import *\n"
        "with tensors_of(Path(sys.argv[1])) as tensors:\n"
        "    to_bytes(tensors['lzf']); print(*children(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    (child,) = map(int, ran.stdout.split())
    wait_for(
        "the children",
        lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes(),
    )


def test_fork_gets_a_child_of_its_own(tmp_path: Path) -> None:
    """Two processes that talk to one child would read each other's answers."""
    array = smooth((60, 60), "<i4")
    with tensors_of(write(tmp_path / "f.h5", array), TileCache(0)) as tensors:
        to_bytes(tensors["lzf"])
        pid = os.fork()
        if pid == 0:
            good = all(to_bytes(tensors["lzf"]) == array.tobytes() for _ in range(20))
            os._exit(0 if good else 1)
        assert all(to_bytes(tensors["lzf"]) == array.tobytes() for _ in range(20))
        assert os.waitpid(pid, 0)[1] == 0


def test_threads_share_the_child(tmp_path: Path) -> None:
    array = smooth((40, 40), "<i4")
    with tensors_of(write(tmp_path / "f.h5", array), TileCache(0)) as tensors, ThreadPoolExecutor(6) as pool:
        names = [name for name in tensors for _ in range(4)]
        assert all(data == array.tobytes() for data in pool.map(lambda name: to_bytes(tensors[name]), names))


def test_first_reads_of_many_threads_start_one_child(tmp_path: Path) -> None:
    array = smooth((33, 29), "<i4")
    path = write(tmp_path / "f.h5", array)
    before = children()
    for _ in range(5):
        with tensors_of(path) as tensors, ThreadPoolExecutor(8) as pool:
            found = list(pool.map(to_bytes, [tensors["lzf"], tensors["zstd"]] * 4))
            assert len(children() - before) == 1
        assert found == [array.tobytes()] * 8
        del tensors
        gc.collect()


def unknown_filter(path: Path, array: Array) -> Path:
    """The file with the number of Zstandard's filter replaced by one that nobody has."""
    with h5py.File(path, "w") as out:
        out.create_dataset("odd", data=array, chunks=(10, 10), **hdf5plugin.Zstd())
        out.create_dataset("good", data=array, chunks=(10, 10), compression="lzf")
    data = path.read_bytes()
    number = (32015).to_bytes(2, "little")
    assert number in data
    path.write_bytes(data.replace(number, (32999).to_bytes(2, "little")))
    return path


def test_unknown_filter_concerns_one_tensor(tmp_path: Path) -> None:
    array = smooth((30, 30), "<i4")
    with tensors_of(unknown_filter(tmp_path / "f.h5", array)) as tensors:
        assert to_bytes(tensors["good"]) == array.tobytes()
        with pytest.raises(MissingCodec, match=r"odd: HDF5 filter 32999 is not installed"):
            to_bytes(tensors["odd"])
        assert to_bytes(tensors["good"]) == array.tobytes()


@pytest.mark.parametrize("name", ["lzf", "zstd"])
def test_damaged_chunk(tmp_path: Path, name: str) -> None:
    """The chunk's reads fail, naming its place; other chunks stay readable."""
    array = np.random.default_rng(5).integers(0, 4, (20, 20)).astype("<i4")
    with h5py.File(tmp_path / "f.h5", "w") as out:
        out.create_dataset("a", data=array, chunks=(10, 20), **FILTERS[name])
        where = out["a"].id.get_chunk_info_by_coord((10, 0))
    with open(tmp_path / "f.h5", "r+b") as opened:
        opened.seek(where.byte_offset)
        opened.write(b"\xff" * where.size)
    with tensors_of(tmp_path / "f.h5") as tensors:
        with pytest.raises(CorruptChunk, match="a: chunk 1: libhdf5 cannot decode it") as caught:
            to_bytes(tensors["a"])
        assert caught.value.offset == where.byte_offset
        block = np.zeros((10, 20), "<u4")
        tensors["a"].read_block(0, 0, block)
        assert (block == array[:10]).all()


def decoder_with(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Another program in the child's place."""
    monkeypatch.setattr(decoder, "child_command", lambda request: [sys.executable, "-I", "-S", "-c", code])


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("", "died"),
        ("import os; os.read(0, 9); os.kill(os.getpid(), 11)", "died"),
        ("import os, struct; os.read(0, 9); os.write(1, struct.pack('<BQ', 0, 1 << 60))", "invalid answer"),
        ("import os, struct; os.read(0, 9); os.write(1, struct.pack('<BQ', 0, 3) + b'abc')", "another size"),
        ("import os, struct; os.read(0, 9); os.write(1, struct.pack('<BQ', 7, 3) + b'abc')", "another size"),
        ("import os, struct; os.read(0, 9); os.write(1, struct.pack('<BQ', 0, 300) + b'abc')", "died"),
        ("import time; time.sleep(600)", "too long"),
    ],
)
def test_child_that_misbehaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, what: str) -> None:
    path = write(tmp_path / "f.h5", smooth((33, 29), "<i4"))
    before = children()
    with tensors_of(path) as tensors:
        decoder_with(monkeypatch, code)
        monkeypatch.setattr(decoder, "TIMEOUT_SECONDS", 0.5 if what == "too long" else MAX_SECONDS)
        with pytest.raises(CorruptChunk, match=what):
            read_one(tensors["lzf"])
    del tensors
    gc.collect()
    assert children() <= before


def read_one(tensor: Tensor) -> None:
    tensor.read_block(0, 0, np.zeros((1, 1), tensor.dtype.storage_dtype))
