"""Runs of elements of a tensor, in C order: what files are made of.

A tensor may have a ``read_span(start, out)`` of its own, where it knows a better way than rectangles, and a
``read_transposed(row, col, out)`` that fills ``out[c, r]`` with its elements ``(row + r, col + c)``, or says False.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ckptfs import native
from ckptfs.cache import borrow
from ckptfs.formats.source import Tensor, n_cols

PIECE = 8 << 20
"""Bytes evaluated at once when a whole tensor is read; bounds every node's scratch memory."""


def read_elements(tensor: Tensor, start: int, out: npt.NDArray[Any]) -> None:
    """Elements ``[start, start + len(out))`` of *tensor* into *out*, a 1-d array of its words."""
    read_span = getattr(tensor, "read_span", None)
    if read_span is None:
        read_blocks(tensor, start, out)
        return
    step = PIECE // tensor.dtype.itemsize
    for done in range(0, len(out), step):
        read_span(start + done, out[done : done + step])


def read_blocks(tensor: Tensor, start: int, out: npt.NDArray[Any]) -> None:
    """As `read_elements`, by `read_block` alone: a partial first row, whole rows, a partial last row."""
    cols = n_cols(tensor.shape)
    step = max(1, PIECE // (cols * tensor.dtype.itemsize))
    done = 0
    while done < len(out):
        row, col = divmod(start + done, cols)
        left = len(out) - done
        if col or left < cols:  # part of one row
            n = min(left, cols - col)
            tensor.read_block(row, col, out[done : done + n].reshape(1, n))
        else:
            n_whole = min(left // cols, step)
            n = n_whole * cols
            tensor.read_block(row, 0, out[done : done + n].reshape(n_whole, cols))
        done += n


def read_transposed(tensor: Tensor, row: int, col: int, out: npt.NDArray[Any]) -> None:
    """Fill ``out[c, r]`` with the elements ``(row + r, col + c)`` of the block view. *out* is a few MiB at most."""
    own = getattr(tensor, "read_transposed", None)
    if own is not None and own(row, col, out):
        return
    with borrow(out.nbytes) as buffer:
        block = buffer.view(out.dtype).reshape(out.shape[1], out.shape[0])
        tensor.read_block(row, col, block)
        if native.can_transpose(out):
            native.transpose(block, out)
        else:
            out[...] = block.T
