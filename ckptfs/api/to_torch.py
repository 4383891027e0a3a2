"""Lazy tensors as torch tensors. The only module that imports torch, when it is asked for one."""

from __future__ import annotations

from typing import Any

from ckptfs.errors import MissingCodec
from ckptfs.tensors.ranges import read_into
from ckptfs.tensors.tensor import Tensor, nbytes


def to_torch(tensor: Tensor, what: str) -> Any:
    """The torch tensor; *what* is for messages. Raises `MissingCodec` without torch, or when it lacks the type."""
    torch = import_torch(what)
    dtype = getattr(torch, tensor.dtype.name, None)
    if dtype is None:
        raise MissingCodec(what, f"torch {torch.__version__} has no {tensor.dtype.name}; update it")
    data = torch.empty(nbytes(tensor), dtype=torch.uint8)
    read_into(tensor, 0, data.numpy().data)
    return data.view(dtype).reshape(tensor.shape)


def import_torch(what: str) -> Any:
    """torch; `MissingCodec` naming *what* needs it."""
    try:
        import torch
    except ImportError as error:
        raise MissingCodec(what, "needs torch, which is not installed: pip install 'ckptfs[torch]'") from error
    return torch
