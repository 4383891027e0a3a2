"""The indexing child: both ways to read metadata agree, and nothing that a file says gets out of hand."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckptfs.errors import CkptfsError, CorruptHeader
from ckptfs.formats.cerebras import reader
from ckptfs.formats.cerebras.reader import open_h5
from ckptfs.formats.hdf5 import index as h5_index
from ckptfs.formats.hdf5 import index_worker, object_headers, superblock, workers
from ckptfs.formats.hdf5.dataset import at_address
from ckptfs.formats.hdf5.index import object_path, read_index
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.file_tensor import FileTensor
from ckptfs.tensors.ranges import to_bytes, to_numpy
from ckptfs.tensors.source_file import SourceFile
from tests.formats.hdf5.h5_files import DATA, scalar, write_checkpoint

FILES = sorted([*(DATA / "v05").rglob("*.mdl"), *(DATA / "h5" / "damaged").glob("*.mdl")])


def answer(path: Path, *, library: bool = False) -> dict[str, Any]:
    """What the child says, with shared parts and long texts written out; without chunk indexes, which only the walker
    names."""
    fd = os.open(path, os.O_RDONLY)
    found: dict[str, Any] = index_worker.answer(fd, str(path), sys.path, None, library)
    os.close(fd)
    found = json.loads(json.dumps(found))
    if "error" in found:
        return found
    for name, value in found["file"].items():
        if isinstance(value, dict):
            data = path.read_bytes()[value["at"] : value["at"] + value["nbytes"]]
            found["file"][name] = data.decode(errors="surrogateescape")
    fields, records = found.pop("fields"), found.pop("records")
    for key, entry in found["metadata"].items():
        if isinstance(entry, int):
            found["metadata"][key] = [[key], {key: fields[entry]}]
    for name, record in found["objects"].items():
        if isinstance(record, list):
            place, address = record
            layout = list(records[place]["layout"])
            layout[1 if layout[0] == "contiguous" else 2] = address if layout[0] == "contiguous" else None
            found["objects"][name] = {**records[place], "layout": layout}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_walker_and_library_agree(path: Path) -> None:
    assert answer(path) == answer(path, library=True)


def test_walker_and_library_agree_on_other_files(tmp_path: Path) -> None:
    """Types, layouts and attributes that checkpoints do not have."""
    path = tmp_path / "types.h5"
    with h5py.File(path, "w") as out:
        for name in ("<f2", ">f8", "<u8", "|i1", ">c16", "|S7"):
            out.create_dataset(name, (4,), name)
        out.create_dataset("text", data=["a", "b"], dtype=h5py.string_dtype())
        out.create_dataset("void", (3,), "V5")
        out.create_dataset("pair", (3,), [("x", "<f4"), ("i", "<f4")])
        out.create_dataset("enum", (3,), h5py.enum_dtype({"A": 1, "B": 2}, basetype="i2"))
        out.create_dataset("fill", (9, 9), "<f4", chunks=(4, 4), fillvalue=7, compression="gzip", shuffle=True)
        out.create_dataset("half", (3,), h5py.h5t.IEEE_F16LE)
        for name, value in {"dtypes": ["torch.int8"], "is_bfloat16": True, "__BYTES__": np.void(b"\x80\x04N.")}.items():
            out["fill"].attrs[name] = value
        out["soft"] = h5py.SoftLink("/fill")
        out["deep/er/still"] = 3
        out["hard"] = out["fill"]
        out["deep/circle"] = out["/"]
        out.attrs["__version__"] = np.float32(0.5)
        out.attrs["__spec__"] = np.bytes_(b"fixed")
    found = answer(path)
    assert found == answer(path, library=True)
    assert found["objects"]["soft"] == {"link": "soft"}
    assert found["objects"]["hard"]["fill"] is not None
    assert found["file"] == {"__version__": 0.5, "__spec__": "fixed"}


@pytest.mark.parametrize("name", ["", "a", "a/b", "/abs", "a//b/", "./a/./b", "..", "../up", "."])
def test_paths_resolve_as_in_hdf5(name: str, tmp_path: Path) -> None:
    """Two names that HDF5 takes for one object are one path."""
    with h5py.File(tmp_path / "names.h5", "w") as out:
        if object_path(name):
            out[name] = 1
            found: list[str] = []
            out.visit(found.append)
            assert found[-1] == object_path(name)
        else:
            assert name in ("", ".")


def test_shared_metadata_is_what_each_key_says(tmp_path: Path) -> None:
    """Texts that differ only in the key share fields; texts whose meaning depends on the key do not."""
    fields: dict[str, Any] = {f"layer.{i}.weight": scalar(3) for i in range(5)}
    fields |= {str(i): scalar(10 + i) for i in range(5)}
    fields |= {f"name_{i}": {"string_value": f"I am name_{i}", "__TYPE__": "StringSerializer"} for i in range(3)}
    fields |= {"norm": {"string_value": "a\nnorm", "__TYPE__": "StringSerializer"}}
    fields |= {"torm": {"string_value": "a\ntorm", "__TYPE__": "StringSerializer"}}
    fields |= {"u00e9m": {"string_value": "\u00e9m", "__TYPE__": "StringSerializer"}}
    source = open_h5(write_checkpoint(tmp_path / "c.mdl", fields), TileCache())
    want = {key: value.get("scalar_value", value.get("string_value")) for key, value in fields.items()}
    assert {key: item.value for key, item in source.items.items()} == want
    source.close()


def test_random_damage_of_metadata() -> None:
    """The walker ends with an answer or an error, whatever bytes it meets."""
    data = (DATA / "h5" / "damaged" / "good.mdl").read_bytes()
    rng = np.random.default_rng(11)
    fd = os.memfd_create("damaged")
    ends = {"index": 0, "error": 0}
    for _ in range(1500):
        damaged = bytearray(data)
        for at in rng.integers(0, 30000, rng.integers(1, 8)):
            damaged[at] = rng.choice([0, 1, 0x7F, 0xFF, rng.integers(256)])
        os.pwrite(fd, damaged, 0)
        # sys_path without h5py: libhdf5 must not run on such files in this process
        found = run_walker(fd)
        ends["error" if "error" in found else "index"] += 1
    os.close(fd)
    assert min(ends.values()) > 20


def run_walker(fd: int) -> dict[str, Any]:
    def no_library(*_: object) -> Any:
        raise CorruptHeader("damaged", "left to libhdf5")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_worker, "_with_library", no_library)
        found: dict[str, Any] = index_worker.answer(fd, "damaged", [], None, False)
        json.dumps(found)
        return found


def test_random_damage_of_files(tmp_path: Path) -> None:
    """Opening and reading a damaged file gives values or an error of ours, nothing else."""
    data = (DATA / "v05" / "tied.mdl").read_bytes()
    rng = np.random.default_rng(13)
    path = tmp_path / "damaged.mdl"
    opened = 0
    for _ in range(40):
        damaged = bytearray(data)
        for at in rng.integers(0, len(data), 30):
            damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            source = open_h5(path, TileCache())
        except CkptfsError as error:
            assert str(error).startswith(str(path))
            continue
        opened += 1
        for tensor in source.tensors().values():
            try:
                to_bytes(tensor)
            except CkptfsError as error:
                assert str(path) in str(error)
        source.close()
    assert opened > 0


def test_child_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START", "import os; os.kill(os.getpid(), 11)")
    with pytest.raises(CorruptHeader, match=r"good\.mdl: .*died"):
        read_index(DATA / "h5" / "damaged" / "good.mdl")


def test_child_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START", "import time; time.sleep(600)")
    monkeypatch.setattr(h5_index, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(CorruptHeader, match=r"good\.mdl"):
        read_index(DATA / "h5" / "damaged" / "good.mdl")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"base":0,"file":[],"metadata":{},"objects":{},"fields":[],"records":[]}',
        '{"file":{"__spec__":{}}}',
        '{"file":{"__spec__":{"at":0,"nbytes":1e3}}}',
        '{"file":{"__spec__":{"at":-5,"nbytes":10}}}',
        '{"file":{"__spec__":{"at":100,"nbytes":1000000000000}}}',
    ],
)
def test_a_child_that_gives_invalid_answers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START", f"print({text!r})")
    with pytest.raises(CorruptHeader, match="invalid answer"):
        read_index(DATA / "h5" / "damaged" / "good.mdl")


HALF = [
    '{"file":{"__version__":0.5}}\n',
    '{"file":{"__version__":0.5}}\n{"metadata":{},"fields":[]}\n{"base":0,"obj',
    '{"file":{"__version__":0.5}}\n{"error":"gone"}\n',
]


@pytest.mark.parametrize("text", HALF)
def test_child_that_dies_half_way(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START", f"print({text!r}, end='')")
    with pytest.raises(CorruptHeader, match=r"good\.mdl: .*(died|gone)"):
        read_index(DATA / "h5" / "damaged" / "good.mdl")


@pytest.mark.parametrize("text", ["x" * 5, "y" * object_headers.LONG_TEXT, 'z\u00e4\u20ac\n"' * 20_000, ""])
def test_texts_of_any_length(text: str, tmp_path: Path) -> None:
    """Long ones are told by their place, also in a file that begins behind a user block."""
    for block in (0, 1024):
        path = tmp_path / f"{block}.h5"
        with h5py.File(path, "w", userblock_size=block) as file:
            file.attrs["before"] = "b" * 100
            file.attrs["__spec__"] = text
            file.attrs["__cstorch_version__"] = "2.10.0"
        index = read_index(path)
        index.file.close()
        assert index.attributes == {"__spec__": text, "__cstorch_version__": "2.10.0"}


def test_a_long_text_of_a_file_that_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(1000))
    monkeypatch.setattr(workers, "_START", """print('{"file":{"__spec__":{"at":0,"nbytes":1000}}}')""")
    opened = h5_index.open_file

    def then_shrinks(path: str | os.PathLike[str]) -> SourceFile:
        file = opened(path)
        os.truncate(path, 999)
        return file

    monkeypatch.setattr(h5_index, "open_file", then_shrinks)
    with pytest.raises(CorruptHeader, match="became shorter"):
        read_index(path)


def test_what_describes_the_file_is_known_early() -> None:
    """Before the rest, and once; not at all when libhdf5 says everything at once."""
    told: list[Any] = []
    path = DATA / "v05" / "trainer_like.mdl"
    index = read_index(path, early=told.append)
    assert told == [index.attributes]
    assert {"__spec__", "__version__", "__SUCCESS__"} <= told[0].keys()
    index.file.close()
    read_index(path, library=True, early=pytest.fail).file.close()


@pytest.mark.parametrize("name", ["bad_json_spec", "unknown_spec_type", "no_success"])
def test_errors_are_those_of_a_spec_that_is_read_late(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = DATA / "h5" / "damaged" / f"{name}.mdl"
    said = []
    for _ in range(2):
        with pytest.raises(CkptfsError) as caught:
            open_h5(path, TileCache())
        said.append(str(caught.value))
        monkeypatch.setattr(reader, "read_index", lambda path, early: read_index(path))
    assert said[0] == said[1]


def test_plain_datasets_that_differ_in_their_place_alone(tmp_path: Path) -> None:
    fields = {f"n.{i}": {"__TYPE__": "NumpyArraySerializer"} for i in range(6)}
    arrays = {f"n.{i}": np.arange(3, dtype=np.int32) + i for i in range(6)}
    source = open_h5(write_checkpoint(tmp_path / "c.mdl", fields, arrays=arrays), TileCache())
    tensors = {key: item.tensor for key, item in source.items.items()}
    assert all(isinstance(tensor, FileTensor) for tensor in tensors.values())
    assert {key: to_numpy(tensor).tolist() for key, tensor in tensors.items() if tensor} == {
        key: array.tolist() for key, array in arrays.items()
    }
    assert [tensor.key for tensor in tensors.values() if isinstance(tensor, FileTensor)] == list(tensors)
    index = read_index(tmp_path / "c.mdl")
    first = tensors["n.0"]
    assert first is not None
    for address in (-1, index.file.size - 11, 1 << 64, None, "8", 8.0):
        assert at_address(first, index, "n.9", address) is None
    index.file.close()
    source.close()


def test_pages_are_read_in_runs_and_right(tmp_path: Path) -> None:
    data = np.random.default_rng(5).bytes(900_000)
    path = tmp_path / "pages"
    path.write_bytes(data)
    with path.open("rb") as opened:
        file = superblock.MetadataFile(opened.fileno(), str(path))
        chance = random.Random(5)
        at = 0
        for _ in range(4000):
            n = chance.choice([1, 16, 300, 5000, 16384, 20000])
            at = at + n if chance.random() < 0.8 else chance.randrange(len(data))
            if at + n > len(data):
                with pytest.raises(CorruptHeader):
                    file.read(at, n)
                at = 0
            else:
                assert file.read(at, n) == data[at : at + n]
            assert len(file._pages) <= superblock._MAX_PAGES


def test_no_descriptor_stays_open_after_a_failure() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("trunc_50", "no_success", "bad_json_spec", "unknown_spec_type"):
        with pytest.raises(CkptfsError):
            open_h5(DATA / "h5" / "damaged" / f"{name}.mdl", TileCache())
    assert len(os.listdir("/proc/self/fd")) == before


def test_hdf5_stays_out_of_the_process() -> None:
    """Neither opening nor reading loads h5py here, also for a file that the child needs it for."""
    code = (
        "import sys; from ckptfs.tensors.cache import TileCache; from ckptfs.formats.cerebras.reader import open_h5;"
        "from ckptfs.tensors.ranges import to_bytes; source = open_h5(sys.argv[1], TileCache());"
        "[to_bytes(t) for t in source.tensors().values()]; print('h5py' in sys.modules, len(source.items))"
    )
    for name, n in (("trainer_like", 43), ("objects", 18)):
        path = DATA / "v05" / f"{name}.mdl"
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", str(n)]


def answered(fd: int, path: Path) -> dict[str, Any]:
    """What the lines of an answer say together; only what is right when there is an error."""
    found: dict[str, Any] = {}
    for line in index_worker.respond(fd, str(path), sys.path, None, False):
        found |= json.loads(line)
    return {"error": found["error"]} if "error" in found else found


@pytest.mark.parametrize("path", [*FILES, DATA / "h5" / "damaged" / "raw12000.bin"], ids=lambda path: path.stem)
def test_two_processes_say_what_one_says(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    found = answered(fd, path)
    assert found == json.loads(json.dumps(index_worker.answer(fd, str(path), sys.path, None, False)))
    os.close(fd)


def test_the_second_process_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(fd: int, path: str, sys_path: list[str]) -> dict[str, Any]:
        os.kill(os.getpid(), 9)
        return {}

    monkeypatch.setattr(index_worker, "_listed", die)
    path = DATA / "h5" / "damaged" / "good.mdl"
    fd = os.open(path, os.O_RDONLY)
    assert "died" in answered(fd, path)["error"]
    os.close(fd)


def test_an_early_worker_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = DATA / "h5" / "damaged" / "good.mdl"
    want = read_index(path)
    with workers.start_early(str(path)):
        monkeypatch.setattr(h5_index, "start", lambda *args, **options: pytest.fail("another child was started"))
        found = read_index(path)
    assert found.objects == want.objects and found.metadata == want.metadata
    for index in (want, found):
        index.file.close()


def test_an_early_worker_that_nobody_claims_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "a.mdl"
    path.write_bytes((DATA / "h5" / "damaged" / "good.mdl").read_bytes())
    with workers.start_early(str(path)):
        (child,) = workers._early_workers.values()
        os.utime(path, (1, 1))  # written to since: another file
        read_index(path).file.close()
        assert list(workers._early_workers.values()) == [child]
    assert child.returncode is not None and not workers._early_workers


@pytest.mark.parametrize("content", [None, b"", b"not hdf5"])
def test_no_early_worker_for_other_files(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if content is not None:
        path.write_bytes(content)
    with workers.start_early(str(path)):
        assert not workers._early_workers
