"""Python methods as libfuse's callbacks: errors become errno values. C answers the reads that it can.

Each callback is a ctypes function that a thread of libfuse enters.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from ckptfs.errors import CkptfsError, SourceChanged
from ckptfs.mount.stats import Stats
from ckptfs.native import library as native
from ckptfs.tensors.cache import shared

log = logging.getLogger(__name__)


def operations(binding: Any, adapter: object, stats: Stats | None) -> Any:
    """libfuse's table of callbacks: the methods of *adapter*, counted by *stats* if there is one.

    Callbacks that the adapter lacks stay empty: the kernel then does their work itself (locks).
    """
    table = binding.fuse_operations()
    callbacks = {}
    for name, prototype in binding.fuse_operations._fields_:
        method = getattr(adapter, name, None)
        if method is not None:
            answer = _answering(method)
            if stats is not None and name not in ("init", "destroy"):  # these answer no request
                answer = stats.counted(name, answer)
            callbacks[name] = prototype(answer)
    table.in_python = dict(callbacks)  # the structure alone would not keep those that C calls
    if native.LIBRARY is not None and stats is None:
        callbacks |= _reads_in_c(callbacks["read"], native.LIBRARY, binding)
    for name, callback in callbacks.items():
        setattr(table, name, callback)
    return table


def _reads_in_c(python: Any, library: ctypes.CDLL, binding: Any) -> dict[str, Any]:
    """Callbacks in C that call *python* only for reads that C cannot answer: the others do not wait for Python's lock.

    libfuse prefers ``read_buf`` to ``read``.
    """
    library.ckptfs_set_tile_budget(shared().lend(_TILES_IN_C))
    info = binding.fuse_file_info
    library.ckptfs_set_fallback(ctypes.cast(python, ctypes.c_void_p), info.fh.offset, info.flags.offset)
    prototypes = dict(binding.fuse_operations._fields_)
    in_c = {"read": library.ckptfs_fuse_read, "read_buf": library.ckptfs_fuse_read_buf}
    return {name: prototypes[name](ctypes.cast(answer, ctypes.c_void_p).value) for name, answer in in_c.items()}


_TILES_IN_C = 0.25
"""Part of the cache's budget that goes to C, for tiles of transposed matrices."""


def _answering(method: Callable[..., int]) -> Callable[..., int]:
    """*method* with its errors as negative errno values, each logged once."""

    @functools.wraps(method)
    def answer(*args: Any) -> int:
        _keep_thread_state()
        try:
            return method(*args)
        except SourceChanged as exc:
            _log_change(str(exc))
            return -exc.errno
        except CkptfsError as exc:
            _log_once(f"{os.fsdecode(args[0] or b'')}: {exc}")
            return -exc.errno
        except OSError as exc:
            if exc.errno not in _EXPECTED:
                _log_once(f"{os.fsdecode(args[0] or b'')}: {exc}")
            return -(exc.errno or errno.EIO)
        except Exception:
            log.exception("unexpected error in %s", method.__name__)
            return -errno.EIO

    return answer


_EXPECTED = frozenset(
    {
        errno.ENOENT,
        errno.ENAMETOOLONG,
        errno.ENODATA,
        errno.ERANGE,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.EINVAL,
    }
)
_logged: dict[str, int] = {}


def _log_once(message: str) -> None:
    """Log the first occurrence of a message, then its tenth, hundredth, …: a damaged chunk is read many times."""
    if len(_logged) > 1000:
        _logged.clear()
    n = _logged[message] = _logged.get(message, 0) + 1
    if str(n).rstrip("0") == "1":
        log.error("%s%s", message, f" ({n} times)" if n > 1 else "")


def _log_change(message: str) -> None:
    """Log it once: every file that is opened from now on would say the same."""
    if message not in _changes:
        _changes.add(message)
        log.error("%s", message)


_changes: set[str] = set()


class _ThreadMark(threading.local):
    kept = False


_thread = _ThreadMark()


def _keep_thread_state() -> None:
    """Let this libfuse thread keep its Python state between callbacks.

    ctypes makes a state at each callback of a foreign thread and throws it away afterwards, and with it the
    thread's scratch buffers. One more reference, never given back, keeps both.
    """
    if not _thread.kept:
        ctypes.pythonapi.PyGILState_Ensure()
        _thread.kept = True
