"""ckptfs mounts large-model checkpoints as folders.

``open`` reads any supported checkpoint lazily, ``load`` as torch tensors, ``view`` shows it as another format,
``save`` writes a Cerebras one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Checkpoint", "LazyTensor", "View", "__version__", "load", "open", "save", "view"]

if TYPE_CHECKING:
    from ckptfs.api.checkpoint import Checkpoint, LazyTensor, View, open, view
    from ckptfs.api.load import load
    from ckptfs.api.save import save


def __getattr__(name: str) -> object:
    # Lazily, so that the indexing child and --help do not pay for numpy.
    if name == "save":
        from ckptfs.api.save import save

        return save
    if name == "load":
        from ckptfs.api.load import load

        return load
    if name in __all__:
        from ckptfs.api import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module 'ckptfs' has no attribute {name!r}")
