"""The kernel's side: libfuse callbacks, open files, the daemon, the mount table, doctor.

Knows `vfs.Tree` and nothing of checkpoints. The only room that imports the FUSE binding.

The package can be called: ``ckptfs.mount(source, folder)`` is `ckptfs.api.mount.mount`, which has the same name.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from ckptfs.api.mount import mount

        return mount(*args, **options)


sys.modules[__name__].__class__ = _Callable
