"""Small real files to start from, and the parts of them that faults are aimed at."""

from __future__ import annotations

import contextlib
import io
import json
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from ckptfs.formats.files import open_file
from ckptfs.formats.tensorflow.table import Entry, read_table, table_file
from tests.paths import FAMILIES

Span = tuple[int, int]
TESTS = Path(__file__).parent.parent
DATA = TESTS / "data"
MAX_SEED = 130_000
"""Larger files only make the run slower."""
_BROKEN = ("trunc_", "not_hdf5")


@cache
def hdf5_paths() -> list[Path]:
    """Checkpoints of all formats, among them damaged ones whose structure is whole; each name once."""
    folders = (DATA / "v05", DATA / "legacy", DATA / "h5" / "damaged")
    paths = [path for folder in folders for path in sorted(folder.glob("*.mdl"))]
    return [p for p in paths if p.stat().st_size <= MAX_SEED and not p.name.startswith(_BROKEN)]


@cache
def hdf5() -> list[bytes]:
    return [path.read_bytes() for path in hdf5_paths()]


@cache
def hdf5_chunked() -> list[bytes]:
    """Those that have a chunk index."""
    return [data for data in hdf5() if b"TREE\1" in data]


@cache
def safetensors() -> list[bytes]:
    paths = [DATA / "v05" / "st.safetensors", *sorted(FAMILIES.glob("*/*/hf/*.safetensors"))]
    return [path.read_bytes() for path in paths if path.stat().st_size <= 50_000][:8]


@cache
def shards() -> dict[str, bytes]:
    """Two shards, of different models so that no key stands in both."""
    gpt2, llama = (sorted((FAMILIES / name).glob("*/hf/*.safetensors"))[0] for name in ("gpt2", "llama"))
    return {"a.safetensors": gpt2.read_bytes(), "b.safetensors": llama.read_bytes()}


@cache
def indexes() -> list[bytes]:
    """The index of `shards`."""
    keys = {}
    for name, data in shards().items():
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        keys |= {key: name for key in header if key != "__metadata__"}
    return [json.dumps({"metadata": {"total_size": 1}, "weight_map": keys}).encode()]


@cache
def zip_files() -> list[bytes]:
    paths = [*sorted((DATA / "torch").glob("*.bin")), *sorted(FAMILIES.glob("*/*/hf/*.bin"))]
    found = [path.read_bytes() for path in paths if path.stat().st_size <= MAX_SEED]
    return [data for data in found if data.startswith(b"PK")][:8]


@cache
def zips() -> list[dict[str, bytes]]:
    """The same archives as records."""
    found = []
    for data in zip_files():
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(data)) as archive:  # a CRC of 0
            found.append({name: archive.read(name) for name in archive.namelist()})
    return found


@cache
def pickles() -> list[bytes]:
    """State dicts: torch's own, and the tree specs of old checkpoints."""
    return [records[name] for records in zips() for name in records if name.endswith("data.pkl")]


@cache
def torch_legacy() -> list[bytes]:
    return [(DATA / "torch" / "legacy.bin").read_bytes()]


@cache
def bundles() -> dict[str, bytes]:
    """The indices of TensorFlow's checkpoints by their names."""
    folder = DATA / "tensorflow"
    names = ("single.ckpt", "multi.ckpt", "sliced.ckpt", "grid.ckpt", "merged.ckpt")
    return {name: (folder / f"{name}.index").read_bytes() for name in names}


@cache
def bundle_data(name: str) -> dict[str, bytes]:
    """Its data files, by what follows the prefix."""
    paths = (DATA / "tensorflow").glob(f"{name}.data-*")
    return {path.name.removeprefix(name): path.read_bytes() for path in paths}


@cache
def entries(name: str) -> list[tuple[bytes, bytes]]:
    file = open_file(DATA / "tensorflow" / f"{name}.index")
    try:
        return list(read_table(file))
    finally:
        file.discard()


def table(entries: dict[bytes, bytes]) -> bytes:
    """The index with these entries; its checksums are right."""
    made = table_file([Entry(key, value) for key, value in sorted(entries.items())])
    data = bytearray(made.size)
    made.read_into(0, memoryview(data))
    return bytes(data)


def everything() -> list[list[bytes]]:
    return [hdf5(), safetensors(), zip_files(), torch_legacy(), indexes(), list(bundles().values())]


def zipped(records: dict[str, bytes]) -> bytes:
    """A stored archive, each record once."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


def zip_spans(data: bytes) -> list[Span]:
    """Local headers, directory entries and the records at the archive's end."""
    found = []
    for signature, size in ((b"PK\3\4", 30), (b"PK\1\2", 46), (b"PK\5\6", 22), (b"PK\6\6", 56), (b"PK\6\7", 20)):
        at = data.find(signature)
        while at >= 0:
            found.append((at, at + size))
            at = data.find(signature, at + 1)
    return found


def legacy_pickles(data: bytes) -> list[int]:
    """Where the five pickles of torch's old format begin, and where the last one ends."""
    starts = [0]
    for _ in range(5):
        last = max(at for _, _, at in pickletools.genops(data[starts[-1] :]) if at is not None)
        starts.append(starts[-1] + last + 1)
    return starts


def filtered(data: bytes, filters: Sequence[int]) -> bytes:
    """*data* as a chunk that went through HDF5 filters; a checksum that is wrong, but has its place."""
    for number in filters:
        if number == 1:
            data = zlib.compress(data)
        elif number == 2:
            n = len(data) // 4 * 4
            data = np.frombuffer(data[:n], np.uint8).reshape(-1, 4).T.tobytes() + data[n:]
        elif number == 3:
            data += b"\0\0\0\0"
        else:
            data = lz4_chunk(data)
    return data


def lz4_chunk(data: bytes) -> bytes:
    """As the HDF5 plugin writes it, in blocks of 64 KiB."""
    import lz4.block

    out = struct.pack(">QI", len(data), 1 << 16)
    for at in range(0, len(data), 1 << 16):
        block = data[at : at + (1 << 16)]
        packed = lz4.block.compress(block, store_size=False)
        packed = packed if len(packed) < len(block) else block
        out += struct.pack(">I", len(packed)) + packed
    return out
