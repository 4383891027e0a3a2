"""Writes HDF5 chunks as the Cerebras writer does: their shape, their LZ4 encoding, and the B-tree that indexes them.

::

    u64 big-endian   bytes of the chunk, decoded
    u32 big-endian   bytes of a block: the whole chunk
    u32 big-endian   bytes stored; equal to the decoded size when the bytes follow as they are
    data             one LZ4 block, or the bytes
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from ckptfs.tensors.tensor import Elements, Shape, Tensor, n_cols

UNDEFINED = (1 << 64) - 1
_BASE, _MIN_CHUNK, _MAX_CHUNK = 16 << 10, 8 << 10, 1 << 20
_MAX_GRID_ROW = 16 << 20
"""Bytes of whole rows that are read at once; of longer rows each chunk is read by itself."""
_NODE_CHILDREN = 64

Chunk = tuple[Shape, int, int]
"""(element offsets, address in the file, stored bytes)."""


def chunk_shape(shape: Shape, itemsize: int) -> Shape:
    """The shape that h5py (3.x) chooses for chunks: near 16 KiB for a tensor of 1 MiB, doubled with each factor 10."""
    chunk = [n or 1024 for n in shape]
    target = min(_MAX_CHUNK, max(_MIN_CHUNK, _BASE * 2 ** math.log10(math.prod(chunk) * itemsize / (1 << 20))))
    axis = 0
    while math.prod(chunk) > 1:
        n = math.prod(chunk) * itemsize
        if (n < target or abs(n - target) / target < 0.5) and n < _MAX_CHUNK:
            break
        chunk[axis % len(chunk)] = -(-chunk[axis % len(chunk)] // 2)
        axis += 1
    return tuple(chunk)


def encoded_chunks(tensor: Tensor, chunk: Shape) -> Iterator[tuple[Shape, bytes]]:
    """(element offsets, stored bytes) of each chunk, in the order of the offsets. Chunks at an edge are padded."""
    shape = tensor.shape
    row = n_cols(shape) * tensor.dtype.itemsize
    buffer = np.empty(min(chunk[0], shape[0]) * row if chunk[0] * row <= _MAX_GRID_ROW else 0, np.uint8)
    for first in range(0, shape[0], chunk[0]):
        n = min(chunk[0], shape[0] - first)
        grid_row = buffer[: n * row].view(tensor.dtype.storage_dtype)
        if grid_row.size:
            tensor.read_block(first, 0, grid_row.reshape(n, -1))
            grid_row = grid_row.reshape(n, *shape[1:])
        for rest in product(*(range(0, extent, step) for extent, step in zip(shape[1:], chunk[1:], strict=True))):
            offsets = (first, *rest)
            words = np.zeros(chunk, tensor.dtype.storage_dtype)
            inside = tuple(slice(min(c, s - o)) for c, s, o in zip(chunk, shape, offsets, strict=True))
            if grid_row.size:
                cut = slice(None), *(slice(o, o + c) for o, c in zip(rest, chunk[1:], strict=True))
                words[inside] = grid_row[cut]
            else:
                _read_chunk(tensor, offsets, words[inside])
            yield offsets, _encoded(words)


def _read_chunk(tensor: Tensor, offsets: Shape, out: Elements) -> None:
    """The part of *tensor* at *offsets*, as blocks: rows are the first axis, columns run along the last."""
    if out.ndim == 1:
        tensor.read_block(offsets[0], 0, out.reshape(-1, 1))
        return
    for middle in np.ndindex(out.shape[1:-1]):
        col = 0
        for extent, start, at in zip(tensor.shape[1:-1], offsets[1:-1], middle, strict=True):
            col = col * extent + start + at
        cut = slice(None), *middle
        tensor.read_block(offsets[0], col * tensor.shape[-1] + offsets[-1], out[cut])


def _encoded(words: Elements) -> bytes:
    import lz4.block

    data = words.tobytes()
    block = lz4.block.compress(data, store_size=False)
    stored = block if len(block) < len(data) else data
    return struct.pack(">QII", len(data), len(data), len(stored)) + stored


def chunk_tree(chunks: Sequence[Chunk], chunk: Shape, itemsize: int, at: int) -> tuple[bytes, int]:
    """(bytes, address of the root) of the B-tree over *chunks*, in the order of their offsets, laid at *at*."""
    keys = [struct.pack(f"<II{len(chunk) + 1}Q", n, 0, *offsets, 0) for offsets, _, n in chunks]
    beyond = [offset + extent for offset, extent in zip(chunks[-1][0], chunk, strict=True)]
    keys.append(struct.pack(f"<II{len(chunk) + 1}Q", 0, 0, *beyond, itemsize))
    node_bytes = 24 + 8 * _NODE_CHILDREN + len(keys[0]) * (_NODE_CHILDREN + 1)
    level = [(where, i) for i, (_, where, _) in enumerate(chunks)]  # (address, number of its first chunk)
    data = bytearray()
    depth = 0
    while depth == 0 or len(level) > 1:
        start, above = at + len(data), []
        for i in range(0, len(level), _NODE_CHILDREN):
            children = level[i : i + _NODE_CHILDREN]
            last = i + _NODE_CHILDREN >= len(level)
            where = start + i // _NODE_CHILDREN * node_bytes
            left, right = where - node_bytes if i else UNDEFINED, UNDEFINED if last else where + node_bytes
            body = b"".join(keys[first] + struct.pack("<Q", child) for child, first in children)
            body += keys[-1] if last else keys[level[i + _NODE_CHILDREN][1]]
            node = struct.pack("<4sBBHQQ", b"TREE", 1, depth, len(children), left, right) + body
            data += node.ljust(node_bytes, b"\0")
            above.append((where, children[0][1]))
        level, depth = above, depth + 1
    return bytes(data), level[0][0]
