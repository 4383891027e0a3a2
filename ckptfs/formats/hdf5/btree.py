"""The index of a dataset's chunks: the version 1 B-tree, read with numpy.

Node: ``TREE``, u8 type (1), u8 level, u16 number of children, u64 left, u64 right, then key, child, key, child, …
Key: u32 stored nbytes, u32 filter mask, u64 element offset for each axis, u64 0. Child: u64 address, of a chunk at
level 0 and of a node below otherwise. (HDF5 File Format Specification, III.A.1.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.errors import CorruptChunk
from ckptfs.formats.hdf5.chunk_table import ChunkTable, chunk_grid
from ckptfs.native.prefetch import prefetch
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Shape

_HEAD = 24
_USUAL_CHILDREN = 64
_MAX_SPARSE = 1 << 20
"""Chunks that a grid may have however small the file is."""


def read_tree(file: SourceFile, key: str, base: int, address: int, shape: Shape, chunk: Shape) -> ChunkTable:
    """The chunk table of the B-tree at *address*; `CorruptChunk` naming *key* when the tree contradicts itself."""
    leaf = np.dtype([("nbytes", "<u4"), ("mask", "<u4"), ("at", "<u8", (len(shape) + 1,)), ("child", "<u8")])
    data = b"".join(part.data for part in _leaves(file, key, base, address, leaf))  # np.concatenate compares the fields
    entries = np.frombuffer(data, leaf) if data else np.zeros(0, leaf)
    return _table(
        file, key, shape, chunk, entries["at"][:, :-1], entries["child"] + base, entries["nbytes"], entries["mask"]
    )


def _leaves(file: SourceFile, key: str, base: int, root: int, leaf: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """The entries of each node of level 0. Levels decrease by one at each step, and no node is visited twice.

    Nodes do not overlap, so all of them together are no larger than the file.
    """
    todo: list[tuple[int, int | None]] = [(root, None)]
    seen: set[int] = set()
    nbytes = 0
    while todo:
        address, level = todo.pop()
        node = _node(file, base + address, leaf)
        if address in seen or node is None or (level is not None and node[0] != level):
            raise CorruptChunk(file.path, key, base + address, "the index of its chunks is damaged")
        nbytes += _HEAD + node[1].nbytes
        if nbytes > file.size:
            raise CorruptChunk(file.path, key, base + address, "the nodes of its chunks' index overlap")
        seen.add(address)
        if node[0] == 0:
            yield node[1]
        else:
            children = node[1]["child"].tolist()
            prefetch(file.fd, (base + child for child in children), _HEAD + _USUAL_CHILDREN * leaf.itemsize)
            todo.extend((child, node[0] - 1) for child in children)


def _node(file: SourceFile, offset: int, leaf: np.dtype[Any]) -> tuple[int, npt.NDArray[Any]] | None:
    """(level, entries) of the node at *offset*, None where there is none."""
    if offset + _HEAD > file.size:
        return None
    data = file.read(_HEAD + _USUAL_CHILDREN * leaf.itemsize, offset)
    if len(data) < _HEAD or data[:5] != b"TREE\1":
        return None
    count = int.from_bytes(data[6:8], "little")
    if len(data) < _HEAD + count * leaf.itemsize:
        data = file.read(_HEAD + count * leaf.itemsize, offset)
    if len(data) < _HEAD + count * leaf.itemsize:
        return None
    return data[5], np.frombuffer(data, leaf, count, _HEAD)


def listed_chunks(file: SourceFile, key: str, shape: Shape, chunk: Shape, found: Iterable[Any]) -> ChunkTable:
    """The chunk table of what libhdf5 lists for each chunk: (element offsets, file offset, stored nbytes, mask)."""
    try:
        rows = [[*at, offset, nbytes, mask] for at, offset, nbytes, mask in found]
        table = np.array(rows, np.uint64).reshape(-1, len(shape) + 3)
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptChunk(file.path, key, 0, "the index of its chunks is damaged") from error
    return _table(file, key, shape, chunk, table[:, :-3], table[:, -3], table[:, -2], table[:, -1])


def _table(
    file: SourceFile, key: str, shape: Shape, chunk: Shape, at: Any, offset: Any, nbytes: Any, mask: Any
) -> ChunkTable:
    grid = chunk_grid(shape, chunk)
    n = math.prod(grid)
    if n > max(_MAX_SPARSE, file.size // 8):
        raise CorruptChunk(file.path, key, 0, f"{n} chunks do not fit into a file of {file.size} bytes")
    cells, rest = np.divmod(at, np.array(chunk, np.uint64))
    bad = rest.any() or (cells >= np.array(grid, np.uint64)).any()
    if bad or (offset > file.size).any() or (nbytes > file.size).any():
        raise CorruptChunk(file.path, key, 0, "the index of its chunks names places outside of the tensor or the file")
    indexes = np.ravel_multi_index(tuple(cells.astype(np.int64).T), grid)
    offsets, sizes, masks = np.full(n, -1, np.int64), np.zeros(n, np.int64), np.zeros(n, np.uint32)
    offsets[indexes], sizes[indexes], masks[indexes] = offset, nbytes, mask
    return ChunkTable(grid, offsets, sizes, masks)
