"""The command line of a process as ``ps`` shows it."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_MAP = struct.Struct("=12QIi")
"""``struct prctl_mm_map``: 11 addresses; the auxiliary vector and its size, the program's file (none: they stay)."""

_kept: list[ctypes.Array[ctypes.c_char]] = []
"""The text stays where the kernel was told that it is."""


def set_command_line(words: Sequence[str]) -> bool:
    """Make *words* the command line of this process; whether the kernel took it (it may be built without that).

    To be called while the process has one thread.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        libc = ctypes.CDLL(None)
        libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
        at = {number: int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47, 50, 51)}  # as in proc(5)
    except (OSError, ValueError, IndexError, AttributeError):
        return False
    text = ctypes.create_string_buffer(b"\0".join(map(os.fsencode, words)))
    start = ctypes.addressof(text)
    places = (at[26], at[27], at[45], at[46], at[47], 0, at[28], start, start + len(text), at[50], at[51])
    described = ctypes.create_string_buffer(_MAP.pack(*places, 0, 0, -1), _MAP.size)
    # The end of the heap must be today's: nothing between these two calls may grow it.
    struct.pack_into("=Q", described, 5 * 8, int(libc.sbrk(0) or 0))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, described, ctypes.c_ulong(_MAP.size), 0) != 0:
        return False
    _kept.append(text)
    return True
