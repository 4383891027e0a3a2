"""Threads that answer when the usual one is held up, where processors are few (``src/spare_threads.c``)."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_void_p
from typing import Any

from ckptfs.native import library

FEW_PROCESSORS = 3
"""Up to so many a thread more takes a processor from the readers, or shares its cache with them."""


def wanted() -> bool:
    """Whether one thread should answer as long as it keeps up. C has to count what it answers."""
    return library.LIBRARY is not None and len(os.sched_getaffinity(0)) <= FEW_PROCESSORS


def start(libfuse: Any, n: int) -> None:
    """Start *n* of them for the session of libfuse's `fuse_context`. Call it in a callback of that session."""
    assert library.LIBRARY is not None
    libfuse.fuse_get_session.argtypes, libfuse.fuse_get_session.restype = (c_void_p,), c_void_p
    libfuse.fuse_session_fd.argtypes, libfuse.fuse_session_fd.restype = (c_void_p,), c_int
    session = libfuse.fuse_get_session(libfuse.fuse_get_context().contents.fuse)
    calls = (libfuse.fuse_session_receive_buf, libfuse.fuse_session_process_buf)
    receive, process = (ctypes.cast(call, c_void_p) for call in calls)
    library.LIBRARY.ckptfs_help(session, libfuse.fuse_session_fd(session), receive, process, n)


def end() -> None:
    """End them, each after the request that it is answering. Call it before the session ends."""
    assert library.LIBRARY is not None
    library.LIBRARY.ckptfs_end_help()
