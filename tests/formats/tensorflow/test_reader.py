"""TensorFlow checkpoints: what TensorFlow wrote is read alike; damage costs a variable, or the checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ckptfs.errors import CkptfsError, CorruptChunk, CorruptHeader, MissingCodec, MissingShard, UnknownFormat, Unsafe
from ckptfs.formats.detect import open_source
from ckptfs.formats.source import Source
from ckptfs.formats.tensorflow import checksum
from ckptfs.formats.tensorflow.bundle import checksum_field, entry_head, header_bytes, slice_key
from ckptfs.formats.tensorflow.checksum import crc32c, masked
from ckptfs.formats.tensorflow.table import Entry, table_file
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import read_into, to_bytes
from ckptfs.tensors.tensor import nbytes
from tests.formats.samples import n_fds
from tests.paths import DATA

HERE = DATA / "tensorflow"
SOUND = ("single.ckpt", "multi.ckpt", "sliced.ckpt", "grid.ckpt", "merged.ckpt", "obj/ck-1")


@contextmanager
def opened(path: Path | str, **options: Any) -> Iterator[Source]:
    source = open_source(path, TileCache(), **options)
    try:
        yield source
    finally:
        source.close()


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"{name}.expected.json").read_text())["tensors"]
    return found


def copied(name: str, folder: Path) -> Path:
    """The files of a checkpoint in *folder*; its prefix there."""
    for file in HERE.glob(f"{name}.*"):
        shutil.copyfile(file, folder / file.name)
    return folder / name


def strings(value: object) -> list[str]:
    if isinstance(value, list):
        return [text for inner in value for text in strings(inner)]
    return [str(value).encode("utf-8", "surrogateescape").hex()]


@pytest.mark.parametrize("name", SOUND)
def test_reads_what_tensorflow_writes(name: str) -> None:
    with opened(HERE / name) as source:
        want = expected(name)
        assert source.format == "tensorflow" and source.warnings == []
        assert list(source.items) == sorted(want)
        for key, item in source.items.items():
            if want[key]["dtype"] == "string":
                assert item.kind == "string" and list(item.shape or ()) == want[key]["shape"]
                assert strings(item.value) == want[key]["values"]
                continue
            assert item.kind == "tensor" and item.tensor is not None
            assert (item.tensor.dtype.name, list(item.tensor.shape)) == (want[key]["dtype"], want[key]["shape"])
            assert hashlib.sha256(to_bytes(item.tensor)).hexdigest() == want[key]["sha256"], key


@pytest.mark.parametrize("key", ["grid", "cube", "long"])
def test_any_byte_range_of_a_variable_in_slices(key: str) -> None:
    with opened(HERE / "grid.ckpt") as source:
        tensor = source.tensors()[key]
        whole = to_bytes(tensor)
        for start in range(0, len(whole), max(1, len(whole) // 17)):
            for size in (1, 3, 7, len(whole) - start):
                part = bytearray(min(size, len(whole) - start))
                read_into(tensor, start, memoryview(part))
                assert part == whole[start : start + len(part)]


@pytest.mark.parametrize("name", ["single.ckpt", "single.ckpt.index"])
def test_a_prefix_and_its_index_are_one(name: str) -> None:
    with opened(HERE / name) as source:
        assert "gpt2/embedding/kernel" in source.items


def test_a_folder_means_the_checkpoint_that_its_state_file_names(tmp_path: Path) -> None:
    with opened(HERE) as source:
        assert list(source.items) == ["emb", "plain/bias"]
    copied("multi.ckpt", tmp_path)
    (tmp_path / "checkpoint").write_bytes(b'model_checkpoint_path: "%s"\n' % bytes(tmp_path / "multi.ckpt"))
    with opened(tmp_path) as source:
        assert set(source.items) == set(expected("multi.ckpt"))
    (tmp_path / "checkpoint").write_bytes(b'model_checkpoint_path: "m\\165lti\\.ckpt"\n')
    with opened(tmp_path) as source:
        assert set(source.items) == set(expected("multi.ckpt"))


def test_a_folder_does_not_lead_elsewhere_in_silence(tmp_path: Path) -> None:
    state = tmp_path / "checkpoint"
    state.write_text(f'model_checkpoint_path: "{HERE / "single.ckpt"}"\n')
    with pytest.raises(Unsafe, match="follow links"), opened(tmp_path):
        pass
    with opened(tmp_path, follow_links=True) as source:
        assert "word" in source.items
    state.write_text('model_checkpoint_path: "../other/model.ckpt"\n')
    with pytest.raises(Unsafe), opened(tmp_path):
        pass
    state.write_text('model_checkpoint_path: "gone.ckpt"\n')
    with pytest.raises(MissingShard, match=r"gone\.ckpt"), opened(tmp_path):
        pass


def test_weights_of_hugging_face_come_before_a_state_file(tmp_path: Path) -> None:
    shutil.copyfile(HERE / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with opened(tmp_path) as source:
        assert source.format == "safetensors"


def test_a_damaged_variable_costs_that_variable() -> None:
    with opened(HERE / "bad_data_crc.ckpt") as source, opened(HERE / "single.ckpt") as sound:
        for key, tensor in source.tensors().items():
            if key == "gpt2/embedding/kernel":
                with pytest.raises(CorruptChunk, match=r"gpt2/embedding/kernel: its checksum is wrong"):
                    to_bytes(tensor)
                with pytest.raises(CorruptChunk):  # the first bytes are sound, but nobody can know that
                    read_into(tensor, 0, memoryview(bytearray(1)))
            else:
                assert to_bytes(tensor) == to_bytes(sound.tensors()[key])


def test_a_large_damaged_variable_fails_when_all_of_it_was_read() -> None:
    with mock.patch.object(checksum, "SMALL", 8), opened(HERE / "bad_data_crc.ckpt") as source:
        tensor = source.tensors()["gpt2/embedding/kernel"]
        half = nbytes(tensor) // 2
        read_into(tensor, half, memoryview(bytearray(nbytes(tensor) - half)))
        with pytest.raises(CorruptChunk):
            read_into(tensor, 0, memoryview(bytearray(half)))
        with pytest.raises(CorruptChunk):
            read_into(tensor, 0, memoryview(bytearray(4)))


def test_each_flipped_byte_of_the_data_is_found(tmp_path: Path) -> None:
    prefix = copied("single.ckpt", tmp_path)
    data = prefix.with_name("single.ckpt.data-00000-of-00001")
    sound = data.read_bytes()
    for at in range(0, len(sound), 7):
        data.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with opened(prefix) as source:
            bad = [key for key, item in source.items.items() if item.kind == "object"]
            for key, tensor in source.tensors().items():
                try:
                    to_bytes(tensor)
                except CorruptChunk:
                    bad.append(key)
            assert len(bad) == 1, at


def test_each_flipped_byte_of_the_index_is_found(tmp_path: Path) -> None:
    prefix = copied("single.ckpt", tmp_path)
    index = prefix.with_name("single.ckpt.index")
    sound, unused = index.read_bytes(), []
    for at in range(len(sound)):
        index.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        try:
            with opened(prefix):
                unused.append(at)
        except CkptfsError:
            pass
    # the empty block that nobody reads, its handle and the zeros of the footer
    assert all(at >= len(sound) - 48 - 9 - 5 - 40 for at in unused)


def test_a_data_file_that_was_cut_off_costs_its_last_variables(tmp_path: Path) -> None:
    prefix = copied("single.ckpt", tmp_path)
    data = prefix.with_name("single.ckpt.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:300])
    with opened(prefix) as source:
        lost = [item for item in source.items.values() if item.kind == "object"]
        assert lost and all("past the file's end" in str(item.reason) for item in lost)
        assert len(source.warnings) == len(lost) < len(source.items)
        for tensor in source.tensors().values():
            to_bytes(tensor)


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    prefix = copied("multi.ckpt", tmp_path)
    prefix.with_name("multi.ckpt.data-00001-of-00003").unlink()
    with pytest.raises(MissingShard, match=r"multi\.ckpt\.data-00001-of-00003"), opened(prefix):
        pass


def test_a_data_file_leads_to_its_index() -> None:
    with pytest.raises(UnknownFormat, match=r"name the \.index"), opened(HERE / "single.ckpt.data-00000-of-00001"):
        pass


def test_files_are_closed(tmp_path: Path) -> None:
    before = n_fds()
    for name in ("single.ckpt", "multi.ckpt", "bad_index_crc.ckpt", "nothing"):
        try:
            with opened(HERE / name):
                pass
        except CkptfsError:
            pass
    assert n_fds() == before


def test_without_the_library_the_error_says_what_to_install() -> None:
    with (
        mock.patch.object(checksum, "_library", lambda: None),
        pytest.raises(MissingCodec, match=r"pip install 'ckptfs\[tensorflow\]'"),
        opened(HERE / "single.ckpt"),
    ):
        pass


# -- hostile indices: their checksums are right ----------------------------------------------------------------------

DATA_BYTES = b"0123456789abcdef"
F32, STRING = 1, 7


def entry(dtype: int, shape: tuple[int, ...], offset: int, size: int, *, shard: int = 0) -> bytes:
    return entry_head(dtype, shape, shard, offset, size) + checksum_field(masked(crc32c(DATA_BYTES[offset:][:size])))


def written(folder: Path, entries: dict[bytes, bytes], *, header: bytes = b"") -> Path:
    rows = {b"": header or header_bytes(1), **entries}
    table = table_file([Entry(key, value) for key, value in sorted(rows.items())])
    data = bytearray(table.size)
    table.read_into(0, memoryview(data))
    (folder / "x.index").write_bytes(data)
    (folder / "x.data-00000-of-00001").write_bytes(DATA_BYTES)
    return folder / "x"


def test_a_sound_one_is_read(tmp_path: Path) -> None:
    with opened(written(tmp_path, {b"a": entry(F32, (4,), 0, 16)})) as source:
        assert to_bytes(source.tensors()["a"]) == DATA_BYTES


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({b"a": entry(F32, (4,), 0, 12)}, "has 12 bytes, but float32"),
        ({b"a": entry(F32, (1 << 40, 1 << 40), 0, 16)}, "more than 2"),
        ({b"a": entry(F32, (-1 & (1 << 64) - 1,), 0, 4)}, "negative"),
        ({b"a": entry(F32, (), -4 & (1 << 64) - 1, 4)}, "negative"),
        ({b"a": entry(F32, (), 0, 4, shard=1)}, "data file 1, but there are 1"),
        ({b"a": entry(F32, (2,), 0, 8), b"b": entry(F32, (2,), 4, 8)}, "b: its data overlap those of a"),
        ({b"\xff\xfe": entry(F32, (), 0, 4)}, "not Unicode"),
        ({b"a": b"\x0a\xff\xff\xff\x7f"}, "ends too early"),
        ({b"a": b"\x10\x01"}, "a number where a message belongs"),
        ({b"a": b"\x0b"}, "unknown kind"),
        ({b"a": entry(F32, (1,) * 40, 0, 4)}, "at most 32"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(entries: dict[bytes, bytes], what: str, tmp_path: Path) -> None:
    before = n_fds()
    with pytest.raises(CorruptHeader, match=what), opened(written(tmp_path, entries)):
        pass
    assert n_fds() == before


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (entry(F32, (4,), 8, 16), "past the file's end"),
        (entry(21, (1,), 0, 4), "variant cannot be shown"),
        (entry(99, (1,), 0, 4), "number 99 cannot be shown"),
        (entry(STRING, (1 << 40,), 0, 4), "ckptfs reads"),
        (entry(STRING, (2,), 0, 4), "ends too early"),
        (entry(F32, (4,), 0, 0) + b"\x3a\x04\x0a\x02\x10\x02", r"its slice \(\(0, 2\),\) is missing"),
    ],
)
def test_what_is_wrong_with_one_variable_stays_with_it(value: bytes, reason: str, tmp_path: Path) -> None:
    with opened(written(tmp_path, {b"a": value, b"b": entry(F32, (0,), 0, 0)})) as source:
        item = source.items["a"]
        assert item.kind == "object" and re.search(reason, str(item.reason)), item.reason
        assert source.warnings == [f"a: {item.reason}"]


def test_slices_with_a_gap_are_not_shown(tmp_path: Path) -> None:
    whole = entry(F32, (4,), 0, 0) + b"\x3a\x04\x0a\x02\x10\x02" + b"\x3a\x06\x0a\x04\x08\x03\x10\x01"
    parts = {slice_key(b"a", ((0, 2),)): entry(F32, (2,), 0, 8), slice_key(b"a", ((3, 1),)): entry(F32, (1,), 8, 4)}
    with opened(written(tmp_path, {b"a": whole, **parts})) as source:
        assert source.items["a"].reason == "its slices do not make a whole"


def test_a_slice_of_nothing_is_named(tmp_path: Path) -> None:
    entries = {b"b": entry(F32, (), 8, 4), slice_key(b"a", ((0, 2),)): entry(F32, (2,), 0, 8)}
    with opened(written(tmp_path, entries)) as source:
        assert list(source.items) == ["b"] and "1 slices belong to no variable" in source.warnings[0]


@pytest.mark.parametrize(
    ("header", "error"),
    [(b"\x08\x00", CorruptHeader), (b"\x08\x01\x10\x01", CkptfsError), (b"\x0a\x02ab", UnknownFormat)],
)
def test_other_headers_are_refused(header: bytes, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error), opened(written(tmp_path, {b"a": entry(F32, (), 0, 4)}, header=header)):
        pass


def test_names_that_look_like_paths_are_names(tmp_path: Path) -> None:
    names = [b"../../etc/passwd", b"/abs", b".", b"..", b"a\nb", "Größe".encode()]
    entries = {name: entry(F32, (), 4 * i, 4) if i < 4 else entry(F32, (0,), 0, 0) for i, name in enumerate(names)}
    with opened(written(tmp_path, entries)) as source:
        assert {key.encode() for key in source.items} == set(names)


def sum_of(block: bytearray) -> bytes:
    """The masked checksum of a block with its type byte."""
    return masked(crc32c(bytes(block))).to_bytes(4, "little")


def test_a_compressed_index_is_refused(tmp_path: Path) -> None:
    prefix = written(tmp_path, {b"a": entry(F32, (), 0, 4)})
    index = prefix.with_name("x.index")
    data = bytearray(index.read_bytes())
    size = next(n for n in range(len(data)) if sum_of(data[: n + 1]) == data[n + 1 : n + 5])
    data[size] = 1
    data[size + 1 : size + 5] = sum_of(data[: size + 1])
    index.write_bytes(data)
    with pytest.raises(MissingCodec, match=r"compressed \(type 1\)"), opened(prefix):
        pass


def test_checksums_of_parts_in_any_order_make_that_of_the_whole() -> None:
    rng = np.random.default_rng(1)
    with opened(HERE / "grid.ckpt") as source:
        plain = source.tensors()["long"]
        summed = checksum.Summed(plain)
        whole = to_bytes(plain)
        cuts = [0, *sorted(rng.choice(len(whole), 40, replace=False).tolist()), len(whole)]
        parts = list(pairwise(cuts))
        rng.shuffle(parts)
        for start, stop in parts:
            assert summed.known is None or start == stop
            read_into(summed, int(start), memoryview(bytearray(int(stop - start))))
        assert summed.known == crc32c(whole) == checksum.Summed(plain).crc()
