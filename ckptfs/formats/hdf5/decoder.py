"""Decodes chunks whose filters only libhdf5 and its plugins know (lzf, szip, Zstandard, Blosc, …), in a child process.

Each file has one child, which starts with the first such chunk and is kept: its start costs as much as decoding 50 MB.
It inherits the file and two pipes, nothing else. It ends when the `Decoder` is collected, when our end of the pipes
closes for any reason, or after a minute without a request; the next request starts a new one.

Request: u32 length, JSON. Answer: u8 status, u64 length, then the decoded chunk or a text.
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.errors import MissingCodec, SourceError
from ckptfs.formats.hdf5.workers import child_command
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Shape

TIMEOUT_SECONDS = 60.0
"""How long one chunk, at most 256 MiB, may take."""
DECODED, DAMAGED, NO_CODEC = range(3)
_MAX_ERROR = 4096
_HEAD = struct.Struct("<BQ")


class _Died(Exception):
    """The child ended before it answered: it may have been idle, or libhdf5 may have crashed."""


@dataclass(eq=False)  # no slots: `weakref` needs a place (a slot for it exists from Python 3.11 on)
class Decoder:
    """Decodes chunks of one file, one at a time, for any thread. A forked process gets a child of its own."""

    file: SourceFile
    _child: subprocess.Popen[bytes] | None = None
    _end: weakref.finalize[Any, Any] | None = None
    _owner: int = 0
    """The process that started the child."""
    _locks: dict[int, threading.Lock] = field(default_factory=dict)
    """By process: the parent's lock may have been held when this process was forked."""

    def chunk(
        self, name: str, start: Shape, shape: Shape, filters: tuple[int, ...], nbytes: int
    ) -> npt.NDArray[np.uint8]:
        """The chunk of dataset *name* (a path) whose first element is *start*: *nbytes* in the stored byte order.

        Elements outside of the dataset are zero. ValueError when it cannot be decoded, `MissingCodec` when a filter
        is not installed.
        """
        self.file.fail_if_closed()
        request = json.dumps({"name": name, "start": start, "shape": shape, "filters": filters}).encode()
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            try:
                status, data = self._ask(request, nbytes)
            except _Died:
                try:
                    status, data = self._ask(request, nbytes)
                except _Died as error:
                    raise ValueError("the process that decodes it died") from error
        if status == DECODED and len(data) == nbytes:
            return data
        text = data.tobytes().decode(errors="replace")
        if status == NO_CODEC:
            what = f"{name}: HDF5 filter {text} is not installed. A newer hdf5plugin may have it"
            raise MissingCodec(self.file.path, what)
        raise ValueError(f"libhdf5 cannot decode it ({text:.300})" if status == DAMAGED else "it has another size")

    def _ask(self, request: bytes, nbytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(len(request).to_bytes(4, "little") + request)
            head = bytearray(_HEAD.size)
            _receive(child.stdout.fileno(), memoryview(head))
            status, n = _HEAD.unpack(head)
            if n > max(nbytes, _MAX_ERROR):
                raise ValueError("the process that decodes it gave an invalid answer")
            data = np.empty(n, np.uint8)
            _receive(child.stdout.fileno(), data.data)
        except (BrokenPipeError, _Died) as error:
            self._stop()
            raise _Died from error
        except (TimeoutError, ValueError) as error:
            self._stop()
            raise ValueError(str(error)) from error
        return status, data

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._owner != os.getpid():
            self._stop()
            self._child = _start(self.file)
            self._owner = os.getpid()
            self._end = weakref.finalize(self, _end, self._child, self._owner)
            self.file.at_close(self._end)  # the child holds the file, too
        return self._child

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._child = self._end = None


def _start(file: SourceFile) -> subprocess.Popen[bytes]:
    command = child_command({"decode": file.fd})
    try:
        return subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(file.fd,),
        )
    except OSError as error:
        raise SourceError(file.path, f"the process that decodes its chunks does not start: {error}") from error


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    """Kill and reap the child; in a fork of its owner, only forget it."""
    if os.getpid() == owner:
        child.kill()
        child.wait()
    else:
        child.returncode = 0
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _receive(fd: int, out: memoryview) -> None:
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    done = 0
    while done < len(out):
        if not ready.poll(TIMEOUT_SECONDS * 1000):
            raise TimeoutError("the process that decodes it takes too long")
        got = os.readv(fd, [out[done:]])
        if got == 0:
            raise _Died
        done += got
