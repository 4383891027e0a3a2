"""ckptfs mounts large-model checkpoints as folders.

``open`` reads any supported checkpoint lazily, ``load`` as torch tensors, ``view`` shows it as another format,
``save`` writes a Cerebras one. ``convert``, ``diff``, ``check`` and ``mount`` do what the commands of these names do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "CkptfsError",
    "LazyTensor",
    "View",
    "__version__",
    "check",
    "convert",
    "diff",
    "load",
    "mount",
    "open",
    "save",
    "view",
]

if TYPE_CHECKING:
    from ckptfs.api.checkpoint import Checkpoint, View, open, view
    from ckptfs.api.load import load
    from ckptfs.api.mount import mount
    from ckptfs.api.save import save
    from ckptfs.api.tensor import LazyTensor
    from ckptfs.api.work import check, convert, diff
    from ckptfs.errors import CkptfsError

_HOMES = {
    "Checkpoint": "api.checkpoint",
    "CkptfsError": "errors",
    "LazyTensor": "api.tensor",
    "View": "api.checkpoint",
    "check": "api.work",
    "convert": "api.work",
    "diff": "api.work",
    "load": "api.load",
    "open": "api.checkpoint",
    "save": "api.save",
    "view": "api.checkpoint",
}


def __getattr__(name: str) -> object:
    # Lazily, so that the indexing child and --help do not pay for numpy.
    if name in _HOMES:
        return getattr(import_module(f"ckptfs.{_HOMES[name]}"), name)
    if name == "mount":  # the package, which can be called
        return import_module("ckptfs.mount")
    raise AttributeError(f"module 'ckptfs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
