"""The C loops give the bytes that numpy gives, and touch nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.native import library

needs_library = pytest.mark.skipif(library.LIBRARY is None, reason="installed without a C compiler")
SIZES = st.integers(1, 150)


def test_they_were_compiled_where_a_compiler_works(tmp_path: Path) -> None:
    if library.LIBRARY is None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        sources = Path(library.__file__).with_name("src").glob("*.c")
        command = [compiler or "", "-shared", "-fPIC", "-o", str(tmp_path / "a.so"), *map(str, sources)]
        assert not compiler or subprocess.run(command, capture_output=True).returncode != 0


@needs_library
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INTERFACE", library.INTERFACE + 1)
    assert library._load() is None


def test_they_can_be_switched_off() -> None:
    code = "from ckptfs.native import library; print(library.LIBRARY)"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "CKPTFS_PURE_PYTHON": "1"}, capture_output=True, text=True
    )
    assert found.stdout == "None\n"


@needs_library
@settings(deadline=None, max_examples=200)
@given(rows=SIZES, cols=SIZES, size=st.sampled_from([1, 2, 4, 8]), gap=st.integers(0, 9))
def test_transpose(rows: int, cols: int, size: int, gap: int) -> None:
    rng = np.random.default_rng(rows * cols)
    found = rng.integers(0, 256, (rows, (cols + gap) * size), np.uint8).view(f"u{size}")[:, :cols]
    out = np.zeros((cols, rows + 2 * gap), f"u{size}")
    library.transpose(found, out[:, gap : gap + rows])
    assert (out[:, gap : gap + rows] == found.T).all()
    assert not out[:, :gap].any() and not out[:, gap + rows :].any()


@needs_library
@settings(deadline=None, max_examples=200)
@given(
    data=st.data(),
    rows=SIZES,
    cols=SIZES,
    chunk_row_nbytes=st.integers(1, 40),
    scratch=st.sampled_from([40, 100, 1 << 18]),
)
def test_gather(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    rows: int,
    cols: int,
    chunk_row_nbytes: int,
    scratch: int,
) -> None:
    """Any range of bytes of a matrix that lies in the file in columns of *chunk_row_nbytes*, in any order."""
    rng = np.random.default_rng(rows + cols)
    matrix = rng.integers(0, 256, (rows, cols), np.uint8)
    count = -(-cols // chunk_row_nbytes)
    padded = np.pad(matrix, ((0, 0), (0, count * chunk_row_nbytes - cols)))
    order = rng.permutation(count)
    path = tmp_path_factory.getbasetemp() / "chunks"
    path.write_bytes(b"".join(padded[:, i * chunk_row_nbytes : (i + 1) * chunk_row_nbytes].tobytes() for i in order))
    starts = np.empty(count, np.int64)
    starts[order] = np.arange(count) * rows * chunk_row_nbytes
    begin = data.draw(st.integers(0, rows * cols - 1))
    end = data.draw(st.integers(begin + 1, rows * cols))
    out = np.zeros(end - begin + 20, np.uint8)
    row, head = divmod(begin, cols)
    fd = os.open(path, os.O_RDONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "SCRATCH", scratch)
        library.gather(fd, starts, row * chunk_row_nbytes, chunk_row_nbytes, cols, head, end - begin, out[10:-10], cols)
    os.close(fd)
    assert out[10:-10].tobytes() == matrix.tobytes()[begin:end]
    assert not out[:10].any() and not out[-10:].any()


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("chunk_row_nbytes", [256, 300, 1000, 2048, 2049, 4096, 100])
@pytest.mark.parametrize("offset", [0, 1, 16, 63])
def test_ranges_too_large_for_the_caches(tmp_path: Path, chunk_row_nbytes: int, offset: int) -> None:
    """They are written past them, wherever they begin and end."""
    rng = np.random.default_rng(chunk_row_nbytes + offset)
    chunk_rows, count = 500, 6
    rows, cols = 9 * chunk_rows, count * chunk_row_nbytes - 40
    rows += -(-(9 << 20) // cols) if rows * cols < 9 << 20 else 0
    grid_rows = -(-rows // chunk_rows)
    data = rng.integers(0, 256, (grid_rows, count, chunk_rows, chunk_row_nbytes), np.uint8)
    path = tmp_path / "chunks"
    path.write_bytes(data.tobytes())
    matrix = data.transpose(0, 2, 1, 3).reshape(grid_rows * chunk_rows, -1)[:rows, :cols].reshape(-1)
    starts = np.arange(grid_rows * count, dtype=np.int64) * chunk_rows * chunk_row_nbytes
    room = np.zeros(matrix.size + 200, np.uint8)
    first = -room.ctypes.data % 64 + offset
    fd = os.open(path, os.O_RDONLY)
    for begin, n in ((0, matrix.size), (77, 5 << 20), (cols + 1, (4 << 20) + 1), (3 * cols, 8 << 20)):
        room[:] = 0
        library.gather_range(fd, starts, count, chunk_rows, chunk_row_nbytes, cols, begin, room[first : first + n])
        assert (room[first : first + n] == matrix[begin : begin + n]).all()
        assert not room[:first].any() and not room[first + n :].any()
    os.close(fd)


@needs_library
@pytest.mark.parametrize("chunk_row_nbytes", [128, 300, 5000])
@pytest.mark.parametrize("offset", [0, 16])
def test_large_ranges_with_gaps_between_the_rows(tmp_path: Path, chunk_row_nbytes: int, offset: int) -> None:
    count, cols = 9, 9 * chunk_row_nbytes - 7
    rows, pitch = -(-(5 << 20) // cols), cols + 24
    data = np.random.default_rng(chunk_row_nbytes).integers(0, 256, (count, rows + 3, chunk_row_nbytes), np.uint8)
    path = tmp_path / "chunks"
    path.write_bytes(data.tobytes())
    starts = np.arange(count, dtype=np.int64) * (rows + 3) * chunk_row_nbytes
    room = np.zeros(rows * pitch + 200, np.uint8)
    first = -room.ctypes.data % 64 + offset
    fd = os.open(path, os.O_RDONLY)
    library.gather(fd, starts, 3 * chunk_row_nbytes, chunk_row_nbytes, cols, 0, rows * cols, room[first:-100], pitch)
    os.close(fd)
    found = room[first : first + rows * pitch].reshape(rows, pitch)
    assert (found[:, :cols] == data.transpose(1, 0, 2).reshape(rows + 3, -1)[3:, :cols]).all()
    assert not found[:, cols:].any() and not room[:first].any() and not room[first + rows * pitch :].any()


@needs_library
def test_a_file_that_ends_early_says_where(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDONLY)
    out = np.zeros(200, np.uint8)
    with pytest.raises(library.Truncated) as e:
        library.gather(fd, np.array([0, 900]), 0, 10, 20, 0, 400, np.zeros(400, np.uint8), 20)
    assert e.value.offset == 1000
    with pytest.raises(library.Truncated):
        library.gather_transposed(fd, np.array([950]), (10, 10), 1, (0, 10), (0, 10), out[:100].reshape(10, 10))
    with pytest.raises(library.Truncated):
        library.classify_chunks(fd, np.array([990]), 1, 100, np.zeros(1, np.uint8))
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        library.classify_chunks(fd, np.array([0]), 1, 100, np.zeros(1, np.uint8))


@needs_library
@pytest.mark.parametrize("scalar", [3.0, 0.1, -1 / 7, 1e30, 1e-40, 0.0, float("inf")])
@pytest.mark.parametrize("kind", library.BFLOAT16_STEPS)
def test_arithmetic_on_every_bfloat16(kind: str, scalar: float) -> None:
    """Infinities, NaN of both signs and subnormal numbers among them."""
    words = np.arange(1 << 16, dtype=np.uint16)
    numbers = words.view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(all="ignore"):
        wide = getattr(np, kind)(numbers, np.float32(scalar))
        want = wide.astype(ml_dtypes.bfloat16).view(np.uint16)
    library.bfloat16(words, kind, scalar)
    assert (words == want).all()
