"""Checkpoints of random weights, written with h5py in the layout of the Cerebras 2.10 writer.

Weights are normally distributed, so LZ4 finds nothing and stores each chunk as it is, as for trained weights.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.models import Model, state_dict
from benchmarks.state import FORMAT_VERSION, RELEASE, RTFX, TORCH, Stored, flatten, metadata_text, spec_text

POOL = 24 << 20
"""Random numbers that are made; tensors are windows of them. LZ4 looks back 64 KiB, so repeats stay unseen."""


def write_checkpoint(
    path: str, model: Model, *, optimizer: bool = False, chunked: bool = True, sparse: bool = False
) -> int:
    """Write *model* with random weights to *path*; the file's size. Needs h5py and hdf5plugin.

    *chunked* is False for contiguous datasets without a filter. *sparse* weights are zero for three parts of four, in
    runs, so that LZ4 packs every chunk.
    """
    import h5py

    pool = np.random.default_rng(0).standard_normal(POOL, np.float32) * np.float32(0.02)
    state = state_dict(model, optimizer)
    leaves = list(flatten(state))
    with h5py.File(path, "w") as file:
        file.attrs["__spec__"] = spec_text(state)
        file.attrs["__version__"] = FORMAT_VERSION
        file.attrs["__cstorch_version__"] = RELEASE
        for i, (key, leaf) in enumerate(leaves):
            if isinstance(leaf, Stored):
                data = weights(pool, i, leaf)
                write_dataset(file, key, leaf, pruned(data) if sparse else data, chunked=chunked)
        for key, leaf in leaves:
            file.attrs[f"{key}.__metadata__"] = metadata_text(key, leaf)
        file.attrs["__SUCCESS__"] = np.True_
    return os.path.getsize(path)


def weights(pool: npt.NDArray[np.float32], i: int, leaf: Stored) -> npt.NDArray[Any]:
    """Values of the *i*-th leaf; bfloat16 as the int16 of its bits, as the writer stores it."""
    n = int(np.prod(leaf.shape))
    if leaf.dtype == "int64":
        return np.full(leaf.shape, i, np.int64)
    start = i * 1_000_003 % len(pool)
    copies = -(-(start + n) // len(pool))
    parts = [pool[start:]] + [pool] * (copies - 1)
    if leaf.dtype == "float32":
        return np.concatenate(parts)[:n].reshape(leaf.shape)
    halves = [part.view(np.int16)[1::2] for part in parts]
    return np.concatenate(halves)[:n].reshape(leaf.shape)


def pruned(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """*data* with all but every fourth run of 32 elements of its rows zero."""
    columns = np.arange(data.shape[-1] if data.shape else 1)
    return np.where(columns // 32 % 4 == 0, data, np.zeros(1, data.dtype)).reshape(data.shape)


def write_dataset(file: Any, key: str, leaf: Stored, data: npt.NDArray[Any], *, chunked: bool = True) -> None:
    """One dataset with the writer's attributes; if *chunked*, with h5py's own chunk shape and the LZ4 filter."""
    import h5py
    import hdf5plugin

    storage = {"chunks": True, "compression": hdf5plugin.LZ4()} if leaf.shape and chunked else {}
    attributes = file.create_dataset(key, data=data, **storage).attrs
    attributes["__TORCH__"] = attributes["__NUMPY__"] = np.True_
    attributes["shapes"] = np.array([leaf.shape])
    attributes["dtypes"] = np.array([f"torch.{leaf.dtype}"], h5py.string_dtype())
    attributes["rtfx_dtypes"] = [RTFX[leaf.dtype]]
    attributes["__TYPE__"] = TORCH
    attributes["compressed"] = np.False_


def stored_plainly(path: str) -> float:
    """Share of the chunks of a checkpoint that LZ4 left as they are (decoded size + 16 bytes)."""
    import h5py

    plain = total = 0
    with h5py.File(path) as file:
        for dataset in file.values():
            if dataset.chunks is None:
                continue
            n = int(np.prod(dataset.chunks)) * dataset.dtype.itemsize
            for i in range(dataset.id.get_num_chunks()):
                total += 1
                plain += dataset.id.get_chunk_info(i).size == n + struct.calcsize(">QII")
    return plain / max(1, total)
