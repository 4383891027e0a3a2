"""The tensor behind one HDF5 dataset, whatever its layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from ckptfs.errors import CorruptChunk, CorruptHeader
from ckptfs.formats.files import checked_shape
from ckptfs.formats.hdf5.btree import listed_chunks, read_tree
from ckptfs.formats.hdf5.chunk_table import ChunkTable
from ckptfs.formats.hdf5.chunked import ChunkedTensor
from ckptfs.formats.hdf5.index import H5Object, Index, chunk_list
from ckptfs.native.scratch import borrow
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.dtypes import BY_NUMPY, DTYPES, DType
from ckptfs.tensors.file_tensor import FileTensor
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Elements, FromSource, Shape, Tensor, n_elements, nbytes

_MAX_DIM = (1 << 32) - 1
_SWAP_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class ConstantTensor:
    """A tensor whose elements are all the same *element* (bytes, little-endian)."""

    dtype: DType
    shape: Shape
    element: bytes
    file: SourceFile
    """The file that says so: once it is closed, this cannot be read either."""

    @property
    def preferred_block(self) -> tuple[int, int]:
        return 1, 1

    def read_block(self, row: int, col: int, out: Elements) -> None:
        self.file.fail_if_closed()
        out[...] = np.frombuffer(self.element, self.dtype.storage_dtype)[0]


@dataclass(frozen=True, slots=True)
class InlineTensor:
    """A small tensor whose bytes are stored in the file's metadata."""

    dtype: DType
    shape: Shape
    data: bytes
    file: SourceFile
    """As `ConstantTensor.file`."""

    @property
    def preferred_block(self) -> tuple[int, int]:
        return 1, 1

    def read_block(self, row: int, col: int, out: Elements) -> None:
        self.file.fail_if_closed()
        rows = self.shape[0] if self.shape else 1
        words = np.frombuffer(self.data, self.dtype.storage_dtype).reshape(rows, -1)
        out[...] = words[row : row + out.shape[0], col : col + out.shape[1]]


@dataclass(frozen=True, slots=True)
class SwappedTensor(FromSource):
    """A big-endian tensor, read as little-endian."""

    source: Tensor

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def read_block(self, row: int, col: int, out: Elements) -> None:
        part = self.dtype.itemsize // (2 if self.dtype.name.startswith("complex") else 1)
        step = max(1, _SWAP_BUFFER // max(1, out.shape[1] * self.dtype.itemsize))
        for i in range(0, len(out), step):
            rows = out[i : i + step]
            with borrow(rows.size * self.dtype.itemsize) as buffer:
                words = buffer.view(self.dtype.storage_dtype).reshape(rows.shape)
                self.source.read_block(row + i, col, words)
                buffer.view(f"u{part}").byteswap(inplace=True)
                rows[...] = words


def stored_dtype(found: H5Object) -> DType | None:
    """The dtype that the dataset has by itself; None for text, objects and other types without one."""
    return _DTYPES.get(found.type)


_DTYPES = {
    name: dtype for np_dtype, dtype in BY_NUMPY.items() for name in (np_dtype.str, np_dtype.newbyteorder(">").str)
}


def stored_as(found: H5Object, dtype: DType) -> bool:
    """Whether the dataset's type is the one in which *dtype* is stored."""
    return _DTYPES.get(found.type) is _DTYPES.get(DTYPES[dtype.name].hdf5)


def make_tensor(index: Index, name: str, found: H5Object, dtype: DType, cache: TileCache) -> Tensor:
    """The lazy tensor of the dataset *name*, in *dtype* (an element type of the stored size).

    Raises `CorruptHeader` naming *name* when shape, layout and file contradict each other. Chunk tables are only
    read with the first block.
    """
    path = index.file.path
    try:
        shape = _checked_shape(found.shape, dtype.itemsize)
    except ValueError as error:
        raise CorruptHeader(path, f"{name}: {error}") from error
    fill = found.fill if found.fill is not None else bytes(dtype.itemsize)
    if len(fill) != dtype.itemsize or found.layout is None:
        raise CorruptHeader(path, f"{name}: its layout does not fit its type")
    tensor = _in_layout(index, name, found, dtype, shape, fill, cache)
    return SwappedTensor(tensor) if found.type.startswith(">") else tensor


def at_address(tensor: Tensor, index: Index, name: str, address: object) -> Tensor | None:
    """The tensor of a dataset *name* that differs from that of *tensor* in its address alone.

    None where `make_tensor` has to make it.
    """
    if type(tensor) is ConstantTensor and address is None:
        return ConstantTensor(tensor.dtype, tensor.shape, tensor.element, tensor.file)
    if type(tensor) is FileTensor and type(address) is int and 0 <= address <= index.file.size - nbytes(tensor):
        return FileTensor(tensor.dtype, tensor.shape, tensor.file, address, None, name)
    if type(tensor) is not ChunkedTensor or type(address) is not int or not -1 <= address < 1 << 64:
        return None
    shape, chunk = tensor.shape, tensor.chunk
    load = partial(_load_chunks, index.file, index.base, name, shape, chunk, address)
    filters, fill, cache = tensor.filters, tensor.fill, tensor.cache
    return ChunkedTensor(tensor.dtype, shape, index.file, name, chunk, filters, fill, load, cache, index.decoder)


_checked_shape = lru_cache(maxsize=1024)(checked_shape)


def _in_layout(
    index: Index, name: str, found: H5Object, dtype: DType, shape: Shape, fill: bytes, cache: TileCache
) -> Tensor:
    assert found.layout is not None
    kind, where, rest = (*found.layout, None)[:3]
    size = n_elements(shape) * dtype.itemsize
    if kind == "chunked":
        if len(where) != len(shape) or not shape or not _is_chunk_shape(where):
            raise CorruptHeader(index.file.path, f"{name}: its chunks have the shape {where}, it has {shape}")
        load = partial(_load_chunks, index.file, index.base, name, shape, where, rest)
        return ChunkedTensor(dtype, shape, index.file, name, where, found.filters, fill, load, cache, index.decoder)
    if kind == "compact" and len(where) == size:
        return InlineTensor(dtype, shape, where, index.file)
    if kind == "contiguous" and where is None:
        return ConstantTensor(dtype, shape, fill, index.file)
    if kind == "contiguous" and rest == size and type(where) is int and 0 <= where <= index.file.size - size:
        return FileTensor(dtype, shape, index.file, where, None, name)
    raise CorruptHeader(index.file.path, f"{name}: its data ({size} bytes) do not lie inside the file")


@lru_cache(maxsize=1024)
def _is_chunk_shape(chunk: Shape) -> bool:
    return all(type(c) is int and 0 < c <= _MAX_DIM for c in chunk)


def _load_chunks(file: SourceFile, base: int, name: str, shape: Shape, chunk: Shape, tree: int | None) -> ChunkTable:
    """Of the B-tree; through libhdf5 where the chunks have another kind of index (*tree* is None)."""
    try:
        if tree is None:
            return listed_chunks(file, name, shape, chunk, chunk_list(file, name))
        if tree < 0:
            return listed_chunks(file, name, shape, chunk, ())
        return read_tree(file, name, base, tree, shape, chunk)
    except CorruptHeader as error:
        raise CorruptChunk(file.path, name, 0, f"the index of its chunks cannot be read ({error})") from error
