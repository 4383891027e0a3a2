"""A Cerebras checkpoint with LZ4 chunks, as the real writer makes them.

The size of a chunk depends on its data, so this file cannot be described ahead: it is written from front to back,
data after a gap for the structures (whose own sizes are known), each tensor's B-tree after its chunks, and the
structures last. A file that was not finished has no superblock.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptfs.formats.cerebras.state import State
from ckptfs.formats.cerebras.writer import RELEASE, plan_structures
from ckptfs.formats.hdf5.chunk_writer import Chunk, chunk_shape, chunk_tree, encoded_chunks
from ckptfs.formats.hdf5.encode import UNDEFINED
from ckptfs.tensors.ranges import to_bytes
from ckptfs.tensors.tensor import Tensor, nbytes

Write = Callable[[int, bytes], object]
"""Puts bytes at an offset of the file."""


def write_lz4(
    state: State, write: Write, *, release: str = RELEASE, progress: Callable[[int], object] | None = None
) -> None:
    """Write the file of *state*; *progress* gets the decoded bytes of each tensor. Raises what `mdl_file` raises."""
    plan = plan_structures(state, release=release, lz4=True)
    at = plan.end
    places = []
    for tensor in plan.tensors:
        place, at = _write_tensor(tensor, write, at)
        places.append(place)
        if progress is not None:
            progress(nbytes(tensor))
    offset = 0
    for part in plan.structures(places, at):
        write(offset, part)
        offset += len(part)


def _write_tensor(tensor: Tensor, write: Write, at: int) -> tuple[int, int]:
    """(address for its layout message, end) of the data written at *at*."""
    if not nbytes(tensor):
        return UNDEFINED, at
    if not tensor.shape:
        write(at, to_bytes(tensor))
        return at, at + tensor.dtype.itemsize
    chunk = chunk_shape(tensor.shape, tensor.dtype.itemsize)
    chunks: list[Chunk] = []
    for offsets, data in encoded_chunks(tensor, chunk):
        write(at, data)
        chunks.append((offsets, at, len(data)))
        at += len(data)
    tree, root = chunk_tree(chunks, chunk, tensor.dtype.itemsize, at)
    write(at, tree)
    return root, at + len(tree)
