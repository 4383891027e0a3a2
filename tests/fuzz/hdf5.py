"""Where the structures of an HDF5 file lie, told by their signatures, so that faults hit metadata and not only data."""

from __future__ import annotations

import struct

Span = tuple[int, int]
_SIZES = {b"HEAP": 48, b"OHDR": 512, b"OCHK": 256, b"FRHP": 146, b"BTHD": 38, b"FADB": 64, b"FAHD": 28, b"EAHD": 72}


def spans_of(data: bytes) -> list[Span]:
    """Superblock, group nodes, object headers, heaps and chunk indexes; small ones count as much as large ones."""
    found = [(0, 96), *_trees(data, 0), *_trees(data, 1), *chunk_heads(data)]
    for at in _all(data, b"SNOD"):
        n = int.from_bytes(data[at + 6 : at + 8], "little")
        found.append((at, at + 8 + 40 * n))
        for i in range(n):
            (header,) = struct.unpack_from("<Q", data, at + 16 + 40 * i)
            size = int.from_bytes(data[header + 8 : header + 12], "little")
            found.append((header, min(header + 16 + size, len(data) - 1)))
    for at in _all(data, b"GCOL"):
        size = int.from_bytes(data[at + 8 : at + 16], "little")
        found += [(at, at + 32), (at, min(at + size, len(data)))]
    for signature, size in _SIZES.items():
        found += [(at, at + size) for at in _all(data, signature)]
    return [(a, min(b, len(data))) for a, b in found if a < b and a < len(data)]


def chunk_spans(data: bytes) -> list[Span]:
    """Chunk indexes, the chunks' first bytes, and a little of their contents."""
    chunks = [(a, a + 256) for a, _ in chunk_heads(data)]
    return _trees(data, 1) + [(a, b) for a, b in chunk_heads(data) if a < len(data)] + chunks


def chunk_heads(data: bytes) -> list[Span]:
    """The first 24 bytes of each chunk that a version 1 B-tree names; the tensors' ranks are not known here, so a
    few addresses are none."""
    found = []
    for start, stop in _trees(data, 1):
        for at in range(start + 24, stop - 8, 8):
            (address,) = struct.unpack_from("<Q", data, at)
            if 512 < address < len(data) - 24 and data[address : address + 4] == b"\0\0\0\0":
                found.append((address, address + 24))
    return found


def _trees(data: bytes, kind: int) -> list[Span]:
    found = []
    for at in _all(data, b"TREE" + bytes([kind])):
        n = int.from_bytes(data[at + 6 : at + 8], "little")
        found.append((at, min(len(data), at + 24 + n * (16 if kind == 0 else 48))))
    return found


def _all(data: bytes, signature: bytes) -> list[int]:
    found, at = [], data.find(signature)
    while at >= 0:
        found.append(at)
        at = data.find(signature, at + 1)
    return found
