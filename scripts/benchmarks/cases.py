"""What `profiles` measures: sources that differ in how bytes are stored, operations that differ in how they move.

A mount of one case is made by hand (``python -m benchmarks.cases SOURCE OPERATION MOUNTPOINT [stats]``): its one file
has the tensors of the source, one after the other, behind the operation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import ckptfs
from benchmarks import files
from benchmarks.models import Model
from benchmarks.mounting import Passthrough, as_file, forget
from benchmarks.state import Stored
from ckptfs.conversion.ops import Concat, Op, Transpose, permute_for_rope, ungroup_heads
from ckptfs.formats.extents import ExtentFile, file_of
from ckptfs.formats.safetensors import safetensors_file
from ckptfs.mount.daemon import mount_in_background
from ckptfs.mount.fuse import MountOptions
from ckptfs.mount.stats import Stats
from ckptfs.tensors.elementwise import elementwise
from ckptfs.tensors.tensor import Tensor
from ckptfs.tools.write import write_file
from ckptfs.vfs.tree import Folder, Leaf, Tree

N_TENSORS = 6
COLUMNS = 4096
HEAD = 128
"""Rows of one attention head."""

SOURCES: dict[str, tuple[str, bool, bool]] = {
    "lz4-stored-f32": ("float32", True, False),
    "lz4-stored-bf16": ("bfloat16", True, False),
    "lz4-packed-bf16": ("bfloat16", True, True),
    "contiguous-h5": ("bfloat16", False, False),
    "safetensors": ("bfloat16", False, False),
}
"""Source to its dtype, whether it has chunks, and whether LZ4 makes them smaller."""
OPERATIONS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "rename": lambda xs: xs,
    "rotary rows": lambda xs: [y for x in xs for y in _applied(permute_for_rope(x.shape[0] // HEAD).inverse(), [x])],
    "packed qkv": lambda xs: [y for i in range(0, len(xs), 3) for y in _packed(xs[i : i + 3])],
    "transposed": lambda xs: _applied(Transpose(), xs),
    "scaled": lambda xs: [elementwise(x, ("multiply", 0.7)) for x in xs],
}
LOOPBACK = "loopback"
"""A source that is served by nothing but ``preadv``: what the kernel and the adapter cost by themselves."""
NAME = "data"
"""The file of a mount."""


def write_source(name: str, folder: str, nbytes: int) -> str:
    """Write about *nbytes* of tensors as *name* stores them; the file."""
    dtype, chunked, sparse = SOURCES[name]
    size = 4 if dtype == "float32" else 2
    rows = max(1, nbytes // (N_TENSORS * COLUMNS * size * HEAD)) * HEAD
    model = Model({f"w{i}.weight": Stored((rows, COLUMNS), dtype) for i in range(N_TENSORS)}, {"name": "none"})
    path = os.path.join(folder, f"{name}.mdl")
    files.write_checkpoint(path, model, chunked=chunked, sparse=sparse)
    if name != "safetensors":
        forget(path)
        return path
    target = os.path.join(folder, "model.safetensors")
    with ckptfs.open(path) as opened:
        write_file(safetensors_file(dict(opened.source.tensors())), target, force=True)
    os.unlink(path)
    forget(target)
    return target


def case_file(source: str, operation: str) -> ExtentFile:
    """All tensors of *source*, one after the other, through *operation*. Its files stay open."""
    if operation == LOOPBACK:
        return as_file(Passthrough(os.open(source, os.O_RDONLY), os.path.getsize(source)))
    tensors = ckptfs.open(source).source.tensors()
    return file_of(OPERATIONS[operation]([t for t in tensors.values() if len(t.shape) == 2]))


def _applied(op: Op, xs: list[Tensor]) -> list[Tensor]:
    return op.apply(xs, {"rotary": HEAD})


def _packed(xs: list[Tensor]) -> list[Tensor]:
    """q, k and v as one matrix, head by head."""
    heads = xs[0].shape[0] // HEAD
    return _applied(ungroup_heads(heads, (1, 1, 1)).inverse(), _applied(Concat((1, 1, 1)), xs))


def _mount(source: str, operation: str, mountpoint: str, stats: str = "") -> None:
    leaf = Leaf(case_file(source, operation))
    tree = Tree(Folder(lambda: {NAME: leaf}), os.stat(source).st_mtime_ns)
    options = MountOptions(stats=Stats() if stats else None)
    mount_in_background(tree, os.path.abspath(mountpoint), options)


if __name__ == "__main__":
    _mount(*sys.argv[1:])
