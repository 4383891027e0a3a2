"""What is fuzzed: each target makes an input from a seeded `Random` and feeds it to a reader.

A reader may return or raise `CkptfsError` or `OSError`; anything else is a finding, and so is a `MemoryError` that
a reader turned into one of its errors. The indexing child's code runs in the fuzzing process itself, which is a
hundred times faster than starting it; ``h5-child`` goes the whole way.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from ckptfs.errors import CkptfsError, CorruptChunk, CorruptHeader
from ckptfs.formats.cerebras.reader import open_h5
from ckptfs.formats.detect import open_source
from ckptfs.formats.files import open_file
from ckptfs.formats.hdf5 import filters as h5_filters
from ckptfs.formats.hdf5 import index as h5_index
from ckptfs.formats.hdf5 import index_worker
from ckptfs.formats.hdf5.decoder import Decoder
from ckptfs.formats.safetensors import open_safetensors
from ckptfs.formats.source import Source
from ckptfs.formats.tensorflow.reader import open_bundle
from ckptfs.formats.torch.legacy import open_torch_legacy
from ckptfs.formats.torch.reader import open_torch
from ckptfs.formats.torch.state import state_of
from ckptfs.formats.torch.unpickler import unpickle
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import read_into
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Tensor, nbytes
from ckptfs.vfs.views import build
from tests.formats.hdf5.h5_files import tensors_of
from tests.formats.samples import open_index
from tests.fuzz import corpus
from tests.fuzz.hdf5 import chunk_spans, spans_of
from tests.fuzz.mutate import damage, damage_json, damage_pickle

PIECE = 1 << 16
"""Bytes that are read at the start, at the end and in the middle of each tensor."""


@dataclass(frozen=True)
class Target:
    """*make* gives the bytes of an input; *feed* has a reader read them, in a folder of its own."""

    make: Callable[[Random], bytes]
    feed: Callable[[bytes, Path], None]


def read_all(source: Source) -> None:
    """Read pieces of every tensor, and list the tree that a mount would show; then close."""
    try:
        for item in source.items.values():
            if item.tensor is not None:
                with contextlib.suppress(CkptfsError, OSError):
                    _read_pieces(item.tensor)
        for _ in build(source).walk():
            pass
    finally:
        source.close()


def _read_pieces(tensor: Tensor) -> None:
    assert min(tensor.preferred_block) >= 1
    size = nbytes(tensor)
    buffer = memoryview(bytearray(min(size, PIECE)))
    for offset in {0, (size - len(buffer)) // 2, size - len(buffer)}:
        read_into(tensor, offset, buffer)


def _written(folder: Path, data: bytes) -> Path:
    path = folder / "input"
    path.write_bytes(data)
    return path


# -- HDF5 -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def child_in_process() -> Iterator[None]:
    """The indexing child as a function call, without libhdf5, which may crash on such input."""

    def ask(file: SourceFile, chunks: str | None, library: bool, early: h5_index.Early | None = None) -> Any:
        answer = json.loads(json.dumps(index_worker.answer(file.fd, file.path, sys.path, chunks, library)))
        if early is not None and "file" in answer:
            early(answer["file"])
        return _checked(file, answer)

    def refuse(fd: int, path: str, *_: object) -> Any:
        raise CorruptHeader(path, "left to libhdf5")

    def no_decoder(*_: object) -> Any:
        raise ValueError("left to libhdf5")

    with (
        mock.patch.object(h5_index, "_ask", ask),
        mock.patch.object(index_worker, "_with_library", refuse),
        mock.patch.object(Decoder, "chunk", no_decoder),
    ):
        yield


def _checked(file: SourceFile, answer: dict[str, Any]) -> dict[str, Any]:
    error = str(answer.get("error", ""))
    if "MemoryError" in error:
        raise MemoryError(error)
    if error:
        raise CorruptHeader(file.path, error)
    return answer


def _feed_h5(data: bytes, folder: Path) -> None:
    with child_in_process():
        read_all(open_h5(_written(folder, data), TileCache()))


def _make_h5(rng: Random) -> bytes:
    data = rng.choice(corpus.hdf5())
    return damage(rng, data, _spans(data), rng.choice(corpus.hdf5()))


_spans = cache(spans_of)
_chunk_spans = cache(chunk_spans)


def _feed_tensors(data: bytes, folder: Path) -> None:
    """Every dataset of any HDF5 file; the first error is the outcome."""
    with child_in_process(), tensors_of(_written(folder, data)) as tensors:
        for tensor in tensors.values():
            _read_pieces(tensor)


def _make_chunks(rng: Random) -> bytes:
    data = rng.choice(corpus.hdf5_chunked())
    return damage(rng, data, _chunk_spans(data))


def _feed_child(data: bytes, folder: Path) -> None:
    """The whole way: the indexing child, and the decoding child for filters that are left to libhdf5."""
    read_all(open_h5(_written(folder, data), TileCache()))


def _feed_library(data: bytes, folder: Path) -> None:
    """All metadata through libhdf5, in a child."""
    index = h5_index.read_index(_written(folder, data), library=True)
    index.file.close()


@cache
def _answers() -> list[Any]:
    found = []
    for path in corpus.hdf5_paths():
        file = open_file(path)
        answer = index_worker.answer(file.fd, file.path, sys.path, None, False)
        file.close()
        if "error" not in answer:
            found.append((path.name, json.loads(json.dumps(answer))))
    return found


def _make_answer(rng: Random) -> bytes:
    """A file's name, NUL, and what an indexing child that a file has taken over might say about it."""
    name, answer = rng.choice(_answers())
    made = damage_json(rng, answer)
    spec = made["file"].get("__spec__") if isinstance(made, dict) and isinstance(made.get("file"), dict) else None
    if isinstance(spec, str) and spec.startswith("[") and rng.random() < 0.5:
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            outer = json.loads(spec)
            inner = damage_json(rng, json.loads(outer[1]))
            made["file"]["__spec__"] = json.dumps([None, json.dumps(inner)])
    elif isinstance(spec, str) and rng.random() < 0.5:
        with contextlib.suppress(ValueError, IndexError, AttributeError):
            made["file"]["__spec__"] = damage_pickle(rng, bytes.fromhex(spec)).hex()
    return f"{name}\0{json.dumps(made)}".encode("utf-8", "surrogatepass")


def _feed_answer(data: bytes, folder: Path) -> None:
    name, _, text = data.decode("utf-8", "surrogatepass").partition("\0")
    path = next(path for path in corpus.hdf5_paths() if path.name == name)

    def ask(file: SourceFile, chunks: str | None, library: bool, early: h5_index.Early | None = None) -> Any:
        answer = json.loads(text)
        if not isinstance(answer, dict):
            raise CorruptHeader(file.path, "no object")
        if early is not None and isinstance(answer.get("file"), dict):
            early(answer["file"])
        return _checked(file, answer)

    with child_in_process(), mock.patch.object(h5_index, "_ask", ask):
        read_all(open_h5(path, TileCache()))


_FILTERS = ((1, (6,)), (2, (4,)), (3, ()), (32004, (0,)), (2, (0,)), (2, (1 << 31,)))


def _make_filtered(rng: Random) -> bytes:
    """One byte for each of: number of filters, the filters, mask; four for the size; then the chunk."""
    chosen = [rng.randrange(len(_FILTERS)) for _ in range(rng.choice((1, 1, 1, 2, 3, 5)))]
    plain = rng.choice((bytes(rng.choice((0, 1, 4096, 70_000))), rng.randbytes(300), b"abc" * 700))
    data = corpus.filtered(plain, [_FILTERS[i][0] for i in chosen])
    made = damage(rng, data, [(0, 16), (12, 20)]) if rng.random() < 0.9 else data
    size = len(plain) if rng.random() < 0.8 else rng.choice((0, 1, 8, 1 << 20, 1 << 27))
    return bytes([len(chosen), *chosen, rng.choice((0, 0, 0, 1, 2, 255))]) + size.to_bytes(4, "little") + made


def _feed_filtered(data: bytes, folder: Path) -> None:
    n = data[0]
    filters = [_FILTERS[i] for i in data[1 : 1 + n]]
    size = int.from_bytes(data[n + 2 : n + 6], "little")
    raw = np.frombuffer(data[n + 6 :], np.uint8)
    try:
        found = h5_filters.decode(raw, filters, data[n + 1], size)
    except ValueError as error:  # as in `hdf5.chunked`
        raise CorruptChunk("input", "w", 0, str(error)) from error
    assert len(found) == size


# -- safetensors, JSON, torch ---------------------------------------------------------------------------------------


def _make_safetensors(rng: Random) -> bytes:
    data = rng.choice(corpus.safetensors())
    n = int.from_bytes(data[:8], "little")
    if rng.random() < 0.4:
        return damage(rng, data, [(0, 8), (8, 8 + n)])
    header = json.dumps(damage_json(rng, json.loads(data[8 : 8 + n]))).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + n :]


def _make_index(rng: Random) -> bytes:
    data = rng.choice(corpus.indexes())
    if rng.random() < 0.3:
        return damage(rng, data)
    return json.dumps(damage_json(rng, json.loads(data))).encode()


def _feed_index(data: bytes, folder: Path) -> None:
    for name, content in corpus.shards().items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
    read_all(open_index(_written(folder, data)))


def _make_pickle(rng: Random) -> bytes:
    return damage_pickle(rng, rng.choice(corpus.pickles()))


def _feed_pickle(data: bytes, folder: Path) -> None:
    found = unpickle(data, "input")
    with _written(folder, data).open("rb") as file:
        state_of(found.value, SourceFile("input", os.dup(file.fileno())), lambda storage: 0)


def _make_zip(rng: Random) -> bytes:
    records = dict(rng.choice(corpus.zips()))
    if rng.random() < 0.3:
        name = next(name for name in records if name.endswith("data.pkl"))
        records[name] = damage_pickle(rng, records[name])
        return corpus.zipped(records)
    data = rng.choice(corpus.zip_files())
    return damage(rng, data, corpus.zip_spans(data))


def _make_legacy(rng: Random) -> bytes:
    data = rng.choice(corpus.torch_legacy())
    if rng.random() < 0.5:
        return damage(rng, data)
    starts = corpus.legacy_pickles(data)
    i = rng.choice((2, 3, 3, 3, 3, 4))
    return data[: starts[i]] + damage_pickle(rng, data[starts[i] : starts[i + 1]]) + data[starts[i + 1] :]


def _make_bundle(rng: Random) -> bytes:
    """An index whose checksums are right, for nothing else lets a fault in; sometimes with wrong ones."""
    name = rng.choice(sorted(corpus.bundles()))
    index = corpus.bundles()[name]
    if rng.random() < 0.2:
        return name.encode() + b"\0" + damage(rng, index)
    entries = dict(corpus.entries(name))
    for _ in range(rng.choice((1, 1, 2, 4))):
        key = rng.choice(sorted(entries))
        value = damage(rng, entries[key], other=rng.choice(sorted(entries.values())))
        entries[damage(rng, key) if rng.random() < 0.3 else key] = value
    return name.encode() + b"\0" + corpus.table(entries)


def _feed_bundle(data: bytes, folder: Path) -> None:
    name, _, index = data.partition(b"\0")
    for shard, content in corpus.bundle_data(name.decode()).items():
        (folder / f"input{shard}").write_bytes(content)
    (folder / "input.index").write_bytes(index)
    read_all(open_bundle(folder / "input.index"))


def _make_any(rng: Random) -> bytes:
    data = rng.choice(rng.choice(corpus.everything()))
    spans = _spans(data) if data.startswith(b"\x89HDF") else ()
    return damage(rng, data, spans)


def _feed_any(data: bytes, folder: Path) -> None:
    with child_in_process():
        read_all(open_source(_written(folder, data), TileCache()))


def _opened_by(reader: Callable[[Path], Source], data: bytes, folder: Path) -> None:
    read_all(reader(_written(folder, data)))


TARGETS: Mapping[str, Target] = {
    "h5-index": Target(_make_h5, _feed_h5),
    "h5-chunks": Target(_make_chunks, _feed_h5),
    "h5-tensors": Target(_make_chunks, _feed_tensors),
    "h5-filters": Target(_make_filtered, _feed_filtered),
    "h5-answer": Target(_make_answer, _feed_answer),
    "h5-child": Target(_make_h5, _feed_child),
    "h5-library": Target(_make_h5, _feed_library),
    "safetensors": Target(_make_safetensors, partial(_opened_by, open_safetensors)),
    "index-json": Target(_make_index, _feed_index),
    "pickle": Target(_make_pickle, _feed_pickle),
    "zip": Target(_make_zip, partial(_opened_by, open_torch)),
    "torch-legacy": Target(_make_legacy, partial(_opened_by, open_torch_legacy)),
    "tensorflow": Target(_make_bundle, _feed_bundle),
    "open-source": Target(_make_any, _feed_any),
}
