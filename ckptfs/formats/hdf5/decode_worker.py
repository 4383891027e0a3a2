"""The child process that decodes chunks with libhdf5, for `decoder`: libhdf5 can crash on malformed files."""

from __future__ import annotations

import json
import os
import resource
import select
import struct
import sys
from typing import Any, BinaryIO

import h5py
import numpy as np
from h5py import h5d, h5o, h5s, h5z

from ckptfs.formats.hdf5.decoder import DAMAGED, DECODED, NO_CODEC
from ckptfs.formats.hdf5.libhdf5 import FAILURES, open_file

IDLE_SECONDS = 60.0
CPU_SECONDS = 60
"""For one chunk."""


def serve(fd: int) -> None:
    """Answer requests on standard input until it ends, or until none comes for a while."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a plugin that prints must not spoil the answers
    _answer_all(fd, out)


def _answer_all(fd: int, out: BinaryIO) -> None:
    file = None
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        length = os.read(0, 4)
        if len(length) < 4:
            return
        request = json.loads(_read(int.from_bytes(length, "little")))
        _limit_cpu()
        try:
            file = file or open_file(fd)
            status, data = answer(file, **request)
        except (*FAILURES, MemoryError) as error:
            status, data = DAMAGED, f"{type(error).__name__}: {error}".encode()[:4096]
        out.write(struct.pack("<BQ", status, len(data)))
        out.write(data)
        out.flush()


def _limit_cpu() -> None:
    """Let the kernel end the process when a request takes too long, also where nobody waits for it any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most, hard = int(used.ru_utime + used.ru_stime) + CPU_SECONDS, resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _read(n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = os.read(0, n - len(data))
        if not part:
            sys.exit()
        data += part
    return data


def answer(file: h5py.File, name: str, start: list[int], shape: list[int], filters: list[int]) -> tuple[int, Any]:
    """(status, the chunk's bytes or a text)."""
    absent = [number for number in filters if not _available(number)]
    if absent:
        return NO_CODEC, str(absent[0]).encode()
    return DECODED, read_chunk(h5o.open(file.id, name.encode(errors="surrogateescape")), start, shape)


def _available(number: int) -> bool:
    if not h5z.filter_avail(number):
        try:
            import hdf5plugin  # noqa: F401  registers its filters
        except ImportError:
            return False
    return bool(h5z.filter_avail(number))


def read_chunk(dataset: h5d.DatasetID, start: list[int], shape: list[int]) -> memoryview:
    """The elements of a chunk from *start* on, as they are stored; zero beyond the end of the dataset."""
    kind = dataset.get_type()
    chunk = np.zeros(shape, f"V{kind.get_size()}")
    extents = tuple(min(n, whole - at) for n, whole, at in zip(shape, dataset.shape, start, strict=True))
    inside, target = dataset.get_space(), h5s.create_simple(tuple(shape))
    inside.select_hyperslab(tuple(start), extents)
    target.select_hyperslab((0,) * len(shape), extents)
    dataset.read(target, inside, chunk, kind)
    return chunk.reshape(-1).view(np.uint8).data
