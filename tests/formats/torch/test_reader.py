"""torch's zip format: what torch writes is read alike; archives that lie are refused."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.errors import CkptfsError, CorruptChunk, CorruptHeader, SourceError, UnknownFormat
from ckptfs.formats.source import Container, Source
from ckptfs.formats.torch import reader
from ckptfs.formats.torch.reader import open_torch
from ckptfs.tensors.ranges import read_into, to_bytes
from tests.formats.samples import TORCH_TYPES, bytes_of, check_refusal, random_tensor
from tests.paths import DATA

DATA = DATA / "torch"


def saved(tmp_path: Path, state: object, **options: Any) -> Source:
    path = tmp_path / "x.pt"
    torch.save(state, path, **options)
    return open_torch(path)


def assert_same(source: Source, state: dict[str, torch.Tensor]) -> None:
    """Same keys in the same order, same dtypes, shapes and bytes."""
    tensors = source.tensors()
    assert list(tensors) == list(state)
    for key, want in state.items():
        assert f"torch.{tensors[key].dtype.name}" == str(want.dtype)
        assert tensors[key].shape == tuple(want.shape)
        assert to_bytes(tensors[key]) == bytes_of(want), key


def test_all_dtypes_and_shapes(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0, 2), (5,), (4, 7), (2, 3, 4)]
    types = [*TORCH_TYPES, torch.complex128]
    state = {f"{dtype}.{shape}": random_tensor(dtype, shape) for dtype in types for shape in shapes}
    source = saved(tmp_path, {key.replace(".", "_"): tensor for key, tensor in state.items()})
    assert_same(source, {key.replace(".", "_"): tensor for key, tensor in state.items()})
    status = (tmp_path / "x.pt").stat()
    assert (source.format, source.format_version) == ("torch-zip", "3")
    assert (source.nbytes, source.mtime_ns, len(source.files)) == (status.st_size, status.st_mtime_ns, 1)
    source.close()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_views_and_ties(tmp_path: Path, protocol: int) -> None:
    base = torch.randn(6, 8)
    conv = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    state = {
        "base": base,
        "tied": base,
        "alike": base.view(6, 8),
        "rows": base[2:4],
        "columns": base[:, 3:5],
        "turned": base.t(),
        "steps": base[::2, ::3],
        "repeated": torch.randn(1, 4).expand(3, 4),
        "conv": conv,
        "parameter": torch.nn.Parameter(base[1]),
    }
    source = saved(tmp_path, state, pickle_protocol=protocol)
    assert_same(source, state)
    ties = {key: item.tied_to for key, item in source.items.items() if item.tied_to}
    assert ties == {"tied": "base", "alike": "base"}
    assert source.items["tied"].tensor is source.items["base"].tensor
    source.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_any_byte_range_of_any_view(tmp_path: Path, shape: list[int], data: st.DataObject) -> None:
    base = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
    view = base.permute(data.draw(st.permutations(range(len(shape)))))
    view = view[tuple(slice(data.draw(st.integers(0, n - 1)), None, data.draw(st.integers(1, 3))) for n in view.shape)]
    source = saved(tmp_path, {"x": view})
    whole = bytes_of(view)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    out = bytearray(stop - start)
    read_into(source.tensors()["x"], start, memoryview(out))
    source.close()
    assert bytes(out) == whole[start:stop]


def test_a_training_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "note": "é", "no": None}
    source = saved(tmp_path, checkpoint)
    keys = list(source.items)
    assert keys[:2] == ["model.weight", "model.bias"]
    assert keys[-3:] == ["step", "note", "no"]
    assert [source.items[key].kind for key in keys[-3:]] == ["scalar", "string", "none"]
    assert [source.items[key].value for key in keys[-3:]] == [7, "é", None]
    assert source.items["optimizer.param_groups.0.lr"].value == 1e-3
    assert source.items["optimizer.param_groups.0.params.1"].value == 1
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    assert to_bytes(source.tensors()["optimizer.state.0.exp_avg"]) == bytes_of(moments)
    assert source.tree is not None
    assert (source.tree.type, source.tree.keys) == ("dict", tuple(checkpoint))
    assert source.tree.children[0] == Container("OrderedDict", ("weight", "bias"), ("model.weight", "model.bias"))
    source.close()


def test_containers_of_every_kind(tmp_path: Path) -> None:
    value = {
        "l": [1, (2, "x")],
        "d": deque([3]),
        "s": {4},
        "o": OrderedDict(a=5),
        6: {},
        "b": True,
        "size": torch.Size([7]),
    }
    source = saved(tmp_path, value)
    assert {key: item.value for key, item in source.items.items()} == {
        "l.0": 1, "l.1.0": 2, "l.1.1": "x", "d.0": 3, "s.0": 4, "o.a": 5, "b": True, "size.0": 7
    }  # fmt: skip
    assert source.tree == Container(
        "dict",
        ("l", "d", "s", "o", 6, "b", "size"),
        (
            Container("list", None, ("l.0", Container("tuple", None, ("l.1.0", "l.1.1")))),
            Container("deque", None, ("d.0",)),
            Container("set", None, ("s.0",)),
            Container("OrderedDict", ("a",), ("o.a",)),
            Container("dict", (), ()),
            "b",
            Container("tuple", None, ("size.0",)),
        ),
    )
    source.close()


def test_harmless_values_that_are_no_data_are_refused_one_by_one(tmp_path: Path) -> None:
    source = saved(tmp_path, {"dtype": torch.bfloat16, "device": torch.device("cpu"), "bytes": b"\xff", "x": 1})
    assert {key: item.class_name for key, item in source.items.items() if item.kind == "object"} == {
        "dtype": "torch.dtype",
        "device": "torch.device",
        "bytes": "bytes",
    }
    assert source.items["x"].value == 1
    source.close()


@pytest.mark.parametrize("name", ["zip_torch24.bin", "zip_torch213.bin", "synth_unordered_crc0.bin"])
def test_recorded_files(name: str) -> None:
    source = open_torch(DATA / name)
    loaded = torch.load(DATA / name, weights_only=True)
    assert_same(source, {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)})
    assert source.items["tied"].tensor is source.items[next(iter(source.items))].tensor
    source.close()


def test_two_entries_with_one_flattened_key(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"flattened key 'a\.b'"):
        saved(tmp_path, {"a": {"b": 1}, "a.b": 2})


def test_a_bare_tensor_is_no_state_dict(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="a single value"):
        saved(tmp_path, torch.ones(2))


def test_a_conjugate_view_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptHeader, match="resolve_conj"):
        saved(tmp_path, {"x": torch.ones(2, dtype=torch.complex64).conj()})


def test_a_truncated_file_fails_for_the_tensors_that_are_gone(tmp_path: Path) -> None:
    source = saved(tmp_path, {"first": torch.ones(100), "second": torch.ones(100_000)})
    os.truncate(tmp_path / "x.pt", 10_000)
    assert to_bytes(source.tensors()["first"]) == bytes_of(torch.ones(100))
    with pytest.raises(CorruptChunk, match="second"):
        to_bytes(source.tensors()["second"])
    source.close()


def archive(**changes: Any) -> bytes:
    """A small checkpoint as zipfile writes it; a record is replaced, added, or left out (None)."""
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(6.0)}, buffer)
    with zipfile.ZipFile(buffer) as old:
        prefix = old.namelist()[0].partition("/")[0]
        records = {name.partition("/")[2]: old.read(name) for name in old.namelist()}
    records.update(changes)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as new:
        for name, content in records.items():
            if content is not None:
                new.writestr(f"{prefix}/{name}", content)
    return made.getvalue()


def patched(name: str, field: int, size: int, value: int) -> bytes:
    """*archive* with a field of a record's central directory entry replaced; *field* is its offset there."""
    content = bytearray(archive())
    entry = content.rfind(b"PK\x01\x02", 0, content.rfind(f"/{name}".encode()))
    content[entry + field : entry + field + size] = value.to_bytes(size, "little")
    return bytes(content)


def patched_end(field: int, size: int, value: int) -> bytes:
    content = bytearray(archive())
    at = content.rfind(b"PK\x05\x06") + field
    content[at : at + size] = value.to_bytes(size, "little")
    return bytes(content)


def compressed() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive())) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return made.getvalue()


def doubled() -> bytes:
    made = io.BytesIO()
    with pytest.warns(UserWarning), zipfile.ZipFile(made, "w") as new:
        for _ in range(2):
            new.writestr("a/data.pkl", b"\x80\x02}.")
    return made.getvalue()


def zip64_end(n: int, size: int, start: int) -> bytes:
    """An archive whose zip64 end record says these numbers."""
    body = archive()
    end = body.rfind(b"PK\x05\x06")
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, n, n, size, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    return (
        body[:end]
        + record
        + locator
        + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    )


ARCHIVES: list[tuple[str, Callable[[], bytes], type[CkptfsError], str]] = [
    ("cut off", lambda: archive()[:-30], CorruptHeader, "cut off"),
    ("no data.pkl", lambda: archive(**{"data.pkl": None}), UnknownFormat, "without data.pkl"),
    ("big-endian", lambda: archive(byteorder=b"big"), UnknownFormat, "big-endian"),
    ("storage missing", lambda: archive(**{"data/0": None}), CorruptHeader, "storage '0' is not"),
    ("storage short", lambda: archive(**{"data/0": b"abc"}), CorruptHeader, "data/0 has 3 bytes, but 6 .* take 24"),
    ("storage long", lambda: archive(**{"data/0": bytes(25)}), CorruptHeader, "data/0 has 25 bytes"),
    ("compressed", compressed, CorruptHeader, "compressed or encrypted"),
    ("name twice", doubled, CorruptHeader, "twice"),
    ("record of 4 GB", lambda: patched("data/0", 24, 4, 2**32 - 2), CorruptHeader, "are not inside the archive"),
    ("record past the data", lambda: patched("data/0", 42, 4, 2**31), CorruptHeader, "are not inside the archive"),
    ("no local header", lambda: patched("data/0", 42, 4, 3), CorruptHeader, "no zip header"),
    ("encrypted", lambda: patched("data/0", 8, 2, 1), CorruptHeader, "compressed or encrypted"),
    ("zip64 without its field", lambda: patched("data/0", 24, 4, 2**32 - 1), CorruptHeader, "are not inside"),
    ("a part elsewhere", lambda: patched_end(10, 2, 60_000), CorruptHeader, "split over"),
    ("directory too long", lambda: patched_end(12, 4, 2**31), CorruptHeader, "does not fit"),
    ("directory too far", lambda: patched_end(16, 4, 2**32 - 2), CorruptHeader, "does not fit"),
    ("directory elsewhere", lambda: patched_end(16, 4, 0), CorruptHeader, "damaged"),
    ("zip64: 2**63 records", lambda: zip64_end(2**63, 46, 0), CorruptHeader, "does not fit"),
    ("zip64: 2**64 bytes", lambda: zip64_end(1, 2**64 - 1, 2**64 - 1), CorruptHeader, "does not fit"),
]


@pytest.mark.parametrize(
    ("content", "error", "message"), [row[1:] for row in ARCHIVES], ids=[row[0] for row in ARCHIVES]
)
def test_lies_in_the_archive(
    tmp_path: Path, content: Callable[[], bytes], error: type[CkptfsError], message: str
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(content())
    check_refusal(open_torch, path, error, message)


def test_a_plain_rewritten_archive_is_read(tmp_path: Path) -> None:
    """The archives above are refused for their lies, not for being written by zipfile."""
    (tmp_path / "x.bin").write_bytes(archive())
    source = open_torch(tmp_path / "x.bin")
    assert_same(source, {"x": torch.arange(6.0)})
    source.close()


FULL = 2**32 - 1


def local_header(name: bytes, size: int) -> bytes:
    fixed = struct.pack("<4s5H3L2H", b"PK\x03\x04", 45, 0, 0, 0, 0, 0, FULL, FULL, len(name), 20)
    return fixed + name + struct.pack("<2H2Q", 1, 16, size, size)


def directory_entry(name: bytes, size: int, at: int) -> bytes:
    fields = (*[45] * 2, *[0] * 5, *[FULL] * 2, len(name), 28, 0, 0, 0, 0, FULL)
    return struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *fields) + name + struct.pack("<2H3Q", 1, 24, size, size, at)


def test_zip64_records(tmp_path: Path) -> None:
    """A sparse archive with a storage past 4 GiB and one behind it, their sizes and offsets in zip64 fields."""
    n = (1 << 32) + 64
    path = tmp_path / "big.bin"
    with zipfile.ZipFile(path, "w") as new, zipfile.ZipFile(io.BytesIO(archive())) as old:
        new.writestr("big/data.pkl", old.read(next(name for name in old.namelist() if name.endswith("data.pkl"))))
    begun = path.read_bytes()
    big_at = begun.find(b"PK\x01\x02")
    small_at = big_at + len(local_header(b"big/data/9", n)) + n
    data = local_header(b"big/data/0", 24) + torch.arange(6.0).numpy().tobytes()
    at = small_at + len(data)
    directory = begun[big_at : begun.rfind(b"PK\x05\x06")]
    directory += directory_entry(b"big/data/9", n, big_at) + directory_entry(b"big/data/0", 24, small_at)
    with path.open("r+b") as file:
        file.truncate(big_at)
        file.seek(big_at)
        file.write(local_header(b"big/data/9", n))
        file.seek(small_at)
        file.write(data + directory)
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 3, 3, len(directory), at))
        file.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, at + len(directory), 1))
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 3, 3, len(directory), FULL, 0))
    source = open_torch(path)
    assert_same(source, {"x": torch.arange(6.0)})
    source.close()


def test_a_large_pickle_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_PICKLE", 50)
    with pytest.raises(CorruptHeader, match="more than 50"):
        saved(tmp_path, {"x": torch.ones(2)})


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 100_000), byte=st.integers(0, 255), cut=st.integers(0, 5))
def test_damage_never_surprises(tmp_path: Path, at: int, byte: int, cut: int) -> None:
    content = bytearray(archive())
    content[at % len(content)] = byte
    (tmp_path / "x").write_bytes(content[: len(content) - cut])
    try:
        source = open_torch(tmp_path / "x")
    except CkptfsError:
        return
    for tensor in source.tensors().values():
        assert len(to_bytes(tensor)) <= len(content)
    source.close()
