"""Tensors of every type that torch has, and what tests ask of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptfs.errors import CkptfsError
from ckptfs.formats import huggingface
from ckptfs.formats.detect import ReadOptions, open_weights
from ckptfs.formats.source import Source
from ckptfs.tensors.cache import TileCache

TORCH_TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64),
]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits (NaN payloads too); 0 and 1 for bool."""
    n = int(np.prod(shape)) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (n,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def check_refusal(open_path: Callable[[Path], object], path: Path, error: type[CkptfsError], message: str) -> None:
    """Opening *path* is refused in one line, and leaves no file open."""
    before = n_fds()
    with pytest.raises(error, match=message) as caught:
        open_path(path)
    assert n_fds() == before
    assert "\n" not in str(caught.value)


def n_fds() -> int:
    """Files that this process has open."""
    gc.collect()  # files of earlier tests close when they are collected
    return len(os.listdir("/proc/self/fd"))


def open_folder(path: Path | str) -> Source:
    """A Hugging Face folder with files of any format."""
    return huggingface.open_folder(path, _open_weights)


def open_index(path: Path | str) -> Source:
    """An index with shards of any format."""
    return huggingface.open_index(path, _open_weights)


def _open_weights(path: str) -> Source:
    return open_weights(path, ReadOptions(TileCache()))
