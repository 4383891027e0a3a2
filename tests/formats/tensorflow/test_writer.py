"""TensorFlow checkpoints that ckptfs writes: the reader agrees, and checksums cost one pass over the data."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckptfs.errors import CorruptChunk
from ckptfs.formats.detect import open_source
from ckptfs.formats.source import Item
from ckptfs.formats.tensorflow.bundle import NUMBERS
from ckptfs.formats.tensorflow.writer import Variable, bundle_files, shard_by, variables_of
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.ranges import to_bytes
from ckptfs.tensors.tensor import Tensor
from tests.factories import ArrayTensor, array_of, source_of, tensor_of
from tests.formats.reading import content


class Counted(ArrayTensor):
    """Counts the bytes that are read of it."""

    n_read = 0
    lock = threading.Lock()

    def read_block(self, row: int, col: int, out: npt.NDArray[Any]) -> None:
        super().read_block(row, col, out)
        with self.lock:
            Counted.n_read += out.nbytes


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    Counted.n_read = 0


def counted(name: str, shape: tuple[int, ...]) -> Counted:
    return Counted(array_of(name, shape))


def written(folder: Path, variables: Mapping[str, Variable], **options: Any) -> Path:
    for name, file in bundle_files("m.ckpt", variables, **options).items():
        (folder / name).write_bytes(content(file))
    return folder / "m.ckpt"


def read(prefix: Path) -> dict[str, Any]:
    """What the checkpoint holds: (dtype, shape, bytes), or the value."""
    source = open_source(prefix, TileCache())
    try:
        assert source.warnings == []
        return {key: told(item) for key, item in source.items.items()}
    finally:
        source.close()


def told(item: Item) -> Any:
    if item.tensor is None:
        return item.value, item.shape
    return item.tensor.dtype.name, item.tensor.shape, to_bytes(item.tensor)


def test_every_element_type_has_a_number() -> None:
    assert set(NUMBERS) == set(DTYPES)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0, 2), (5,), (4, 7), (2, 3, 4)]
    tensors = {f"{name}/{i}": tensor_of(name, shape, i) for name in DTYPES for i, shape in enumerate(shapes)}
    assert read(written(tmp_path, tensors)) == {key: told(Item(key, "tensor", t)) for key, t in tensors.items()}


def test_plain_values_and_strings(tmp_path: Path) -> None:
    source = source_of({"step": 7, "lr": 0.5, "on": True, "text": "π", "none": None, "huge": 1 << 70})
    source.items["odd"] = Item("odd", "string", value=[["a", "\udcff\0"], ["", "b" * 300]], shape=(2, 2))
    source.items["no rows"] = Item("no rows", "string", value=[], shape=(0, 3))
    source.items[""] = Item("", "string", value="")
    variables, reasons = variables_of(source)
    assert set(reasons) == {"none", "huge", ""}
    found = read(written(tmp_path, variables))
    assert found.pop("odd") == ([["a", "\udcff\0"], ["", "b" * 300]], (2, 2))
    assert found.pop("no rows") == ([], (0, 3))
    assert found.pop("text") == ("π", None)
    assert {k: (v[0], np.frombuffer(v[2], v[0])[0]) for k, v in found.items()} == {
        "step": ("int64", 7),
        "lr": ("float64", 0.5),
        "on": ("bool", True),
    }


def test_an_index_of_many_blocks(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {f"layer_{i:04d}/{'x' * (i % 40)}": tensor_of("uint8", (3,), i) for i in range(1500)}
    prefix = written(tmp_path, tensors)
    assert (tmp_path / "m.ckpt.index").stat().st_size > 10 * 4096
    assert read(prefix) == {key: told(Item(key, "tensor", t)) for key, t in tensors.items()}


def test_any_range_of_the_index() -> None:
    file = bundle_files("m", {f"v{i}": tensor_of("float32", (i,)) for i in range(300)})["m.index"]
    whole = content(file)
    for start in range(0, len(whole), 997):
        for size in (1, 5, 4096, 9000):
            part = bytearray(size)
            n = file.read_into(start, memoryview(part))
            assert part[:n] == whole[start : start + size]


def test_names_say_which_data_file(tmp_path: Path) -> None:
    tensors = {name: tensor_of("int8", (4,)) for name in ("emb", "h/layer_1/w", "h/layer_0/w", "h/layer_1/b", "head")}
    prefix = written(tmp_path, tensors, shard_of=shard_by(re.compile(r"layer_(\d+)")))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"m.ckpt.data-0000{i}-of-00003" for i in range(3)),
        "m.ckpt.index",
    ]
    assert read(prefix).keys() == tensors.keys()
    sizes = [(tmp_path / f"m.ckpt.data-0000{i}-of-00003").stat().st_size for i in range(3)]
    assert sizes == [8, 8, 4]


def test_no_data_are_read_for_sizes() -> None:
    files = bundle_files("m", {"a": counted("float32", (1000,))})
    assert all(file.size for file in files.values())
    assert Counted.n_read == 0


def test_data_then_index_is_one_pass() -> None:
    files = bundle_files("m", {f"v{i}": counted("float32", (100, 11)) for i in range(200)})
    for file in files.values():
        content(file)
        content(file)
    assert Counted.n_read == 2 * 200 * 4400  # the data file, twice


def test_the_index_alone_is_one_pass_however_many_read_it() -> None:
    index = bundle_files("m", {f"v{i}": counted("float32", (100, 11)) for i in range(200)})["m.index"]
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(content(index))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert Counted.n_read == 200 * 4400


def test_a_block_of_the_index_waits_for_its_own_variables_only() -> None:
    index = bundle_files("m", {f"v{i:04d}": counted("float32", (1000,)) for i in range(2000)})["m.index"]
    index.read_into(index.size - 48, memoryview(bytearray(48)))
    assert Counted.n_read == 0
    index.read_into(0, memoryview(bytearray(10)))
    assert 0 < Counted.n_read < 2000 * 4000 / 5


def test_tied_tensors_are_summed_once(tmp_path: Path) -> None:
    tensor = counted("float32", (100,))
    files = bundle_files("m.ckpt", {"a": tensor, "b": tensor})
    content(files["m.ckpt.index"])
    assert Counted.n_read == 400
    found = read(written(tmp_path, {"a": tensor, "b": tensor}))
    assert found["a"] == found["b"]


def test_damaged_data_never_get_a_checksum() -> None:
    class Damaged(ArrayTensor):
        def read_block(self, row: int, col: int, out: npt.NDArray[Any]) -> None:
            raise CorruptChunk("file", "a", 0, "damaged")

    bad = Damaged(array_of("float32", (9,)))
    index = bundle_files("m", {"a": bad, "b": tensor_of("int8", (1,))})["m.index"]
    for _ in range(2):
        with pytest.raises(CorruptChunk):
            content(index)
