"""Threads that take over when the single server thread is held up, on few processors (``src/spare_threads.c``)."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_void_p
from typing import Any

from ckptfs.native import library

FEW_PROCESSORS = 3
"""Up to this many, another thread takes a processor from the readers, or shares its cache with them."""


def are_wanted() -> bool:
    """Whether a single thread should serve as long as it keeps up. C has to count its answers."""
    return library.LIBRARY is not None and len(os.sched_getaffinity(0)) <= FEW_PROCESSORS


def start(libfuse: Any, n: int) -> None:
    """Start *n* of them for the session of libfuse's `fuse_context`. Called in a callback of that session."""
    assert library.LIBRARY is not None
    libfuse.fuse_get_session.argtypes, libfuse.fuse_get_session.restype = (c_void_p,), c_void_p
    libfuse.fuse_session_fd.argtypes, libfuse.fuse_session_fd.restype = (c_void_p,), c_int
    session = libfuse.fuse_get_session(libfuse.fuse_get_context().contents.fuse)
    calls = (libfuse.fuse_session_receive_buf, libfuse.fuse_session_process_buf)
    receive, process = (ctypes.cast(call, c_void_p) for call in calls)
    library.LIBRARY.ckptfs_start_spare_threads(session, libfuse.fuse_session_fd(session), receive, process, n)


def stop() -> None:
    """End them, each after the request that it is answering. Called before the session ends."""
    assert library.LIBRARY is not None
    library.LIBRARY.ckptfs_stop_spare_threads()
