"""HDF5 filters, undone on one chunk. Sizes are checked before anything is allocated.

LZ4 (filter 32004): u64 BE decoded size, u32 BE block size, then for each block u32 BE stored size and that many bytes;
a block as large as its decoded part is an uncompressed copy, any other is one raw LZ4 block.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

GZIP, SHUFFLE, FLETCHER32, LZ4 = 1, 2, 3, 32004
KNOWN = frozenset({GZIP, SHUFFLE, FLETCHER32, LZ4})
MAX_FILTERS = 6
"""Applied to one chunk; no writer uses more than four, and each may take a copy of the chunk."""
LZ4_HEAD = 16
"""Bytes before the data of a chunk of one block."""
_PIECE = 1 << 17
_LZ4_RATIO = 256
"""One byte of LZ4 stands for at most 255 bytes."""

Bytes = npt.NDArray[np.uint8]


def is_uncompressed(head: bytes, nbytes: int) -> bool:
    """Whether an LZ4 chunk that starts with *head* is one block of *nbytes* uncompressed bytes."""
    total, block, stored = struct.unpack(">QII", head)
    return bool(total == nbytes == stored and block >= nbytes)


def decode(raw: Bytes, filters: Sequence[tuple[int, tuple[int, ...]]], mask: int, nbytes: int) -> Bytes:
    """Undo all *filters* that *mask* does not skip; the result has *nbytes*. ValueError when the data are damaged."""
    used = [entry for i, entry in enumerate(filters) if not mask >> i & 1]
    if len(used) > MAX_FILTERS:
        raise ValueError(f"it went through {len(used)} filters, more than {MAX_FILTERS}")
    for i in reversed(range(len(used))):
        number, values = used[i]
        want = nbytes + 4 * sum(n == FLETCHER32 for n, _ in used[:i])
        if number == LZ4:
            raw = _lz4(raw, want)
        elif number == GZIP:
            raw = _gzip(raw, want)
        elif number == SHUFFLE:
            raw = _unshuffle(raw, values[0] if values else 1)
        else:
            raw = _checked(raw)
    if len(raw) != nbytes:
        raise ValueError(f"a chunk of {nbytes} bytes has {len(raw)}")
    return raw


def _lz4(raw: Bytes, want: int) -> Bytes:
    import lz4.block

    if len(raw) < 12:
        raise ValueError("a chunk without its LZ4 header")
    total, block = struct.unpack(">QI", raw[:12].tobytes())
    block = min(block, total)
    if total != want or block == 0 or total > _LZ4_RATIO * len(raw) or -(-total // block) * 4 > len(raw):
        raise ValueError(f"its LZ4 header says {total} bytes in blocks of {block}, for a chunk of {want} bytes")
    out: Bytes = np.empty(total, np.uint8)
    at = 12
    for start in range(0, total, block):
        n = min(block, total - start)
        stored = int.from_bytes(raw[at : at + 4].tobytes(), "big")
        at += 4
        if at + stored > len(raw):
            raise ValueError("an LZ4 block reaches past its chunk")
        data = raw[at : at + stored]
        at += stored
        if stored != n:
            try:
                data = np.frombuffer(lz4.block.decompress(data.data, uncompressed_size=n), np.uint8)
            except lz4.block.LZ4BlockError as error:
                raise ValueError(f"an LZ4 block is damaged ({error})") from error
            if len(data) != n:
                raise ValueError("an LZ4 block has the wrong size")
        if n == total:
            return data
        out[start : start + n] = data
    return out


def _gzip(raw: Bytes, want: int) -> Bytes:
    try:
        data = zlib.decompressobj().decompress(raw.data, want + 1)
    except zlib.error as error:
        raise ValueError(f"its gzip data are damaged ({error})") from error
    return np.frombuffer(data, np.uint8)


def _unshuffle(raw: Bytes, size: int) -> Bytes:
    """Byte i of every element lies in part i; bytes that make no whole element stay at the end."""
    n = len(raw) // size if size else 0
    if n < 2 or size < 2:
        return raw
    whole = raw[: n * size].reshape(size, n).T.reshape(-1)
    return whole if n * size == len(raw) else np.concatenate([whole, raw[n * size :]])


def _checked(raw: Bytes) -> Bytes:
    """*raw* without the Fletcher checksum in its last four bytes, which is verified.

    libhdf5 sums big-endian 16-bit words modulo 65535; version 1.6.2 on little-endian machines swapped the bytes of
    the result, and readers accept both.
    """
    if len(raw) < 4:
        raise ValueError("a chunk without its checksum")
    data, stored = raw[:-4], int.from_bytes(raw[-4:].tobytes(), "little")
    found = _fletcher32(data)
    low, high = stored & 0xFFFF, stored >> 16
    if found not in ((low % 65535, high % 65535), (_swapped(low) % 65535, _swapped(high) % 65535)):
        raise ValueError("its checksum does not fit")
    return data


def _fletcher32(data: Bytes) -> tuple[int, int]:
    """Both sums, in pieces that fit the processor's cache."""
    first = second = 0
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        words = np.frombuffer(piece.tobytes() + b"\0" * (len(piece) % 2), ">u2").astype(np.int64)
        weights = np.arange(len(words), 0, -1, dtype=np.int64)
        second = (second + first * len(words) + int((words * weights).sum())) % 65535
        first = (first + int(words.sum())) % 65535
    return first, second


def _swapped(word: int) -> int:
    return (word & 0xFF) << 8 | word >> 8


def are_known(filters: Sequence[tuple[int, Any]], mask: int) -> bool:
    """Whether `decode` can undo all filters that *mask* does not skip; libhdf5 is needed for the others."""
    return all(mask >> i & 1 or number in KNOWN for i, (number, _) in enumerate(filters))
