"""The kernel's side: libfuse callbacks, open files, the daemon, the mount table, doctor.

Knows `vfs.Tree` and nothing of checkpoints. The only room that imports the FUSE binding.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """``ckptfs.mount(source, folder)``: the function `ckptfs.api.mount.mount`, under the name that this package has."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from ckptfs.api.mount import mount

        return mount(*args, **options)


sys.modules[__name__].__class__ = _Callable
