"""A file described as extents: literal bytes and tensor data at known offsets.

Sizes and offsets are fixed when the description is made, from headers alone. `ExtentFile.read_into` evaluates just
the part asked for. The mount and every writer read through it, so they cannot differ.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from ckptfs.errors import UsageError
from ckptfs.tensors.ranges import read_into
from ckptfs.tensors.tensor import Tensor, nbytes

Body = bytes | Tensor


@dataclass(frozen=True, slots=True)
class ExtentFile:
    """Bodies laid end to end. *starts* has each body's offset and, at its end, the file's size."""

    bodies: tuple[Body, ...]
    starts: tuple[int, ...] = field(repr=False)

    @property
    def size(self) -> int:
        """Size in bytes, exact."""
        return self.starts[-1]

    @property
    def has_data(self) -> bool:
        """Whether there is more than literal bytes in it."""
        return any(not isinstance(body, bytes) for body in self.bodies)

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill *out* from *offset* on; how many bytes there were (fewer at the end of the file, 0 past it)."""
        n = max(0, min(len(out), self.size - offset))
        done = 0
        i = self.body_at(offset)
        while done < n:
            at = offset + done - self.starts[i]
            take = min(n - done, self.starts[i + 1] - self.starts[i] - at)
            if take > 0:
                body = self.bodies[i]
                if isinstance(body, bytes):
                    out[done : done + take] = body[at : at + take]
                else:
                    read_into(body, at, out[done : done + take])
                done += take
            i += 1
        return n

    def body_at(self, offset: int) -> int:
        """Index of the body that has the byte at *offset*; empty bodies before it are skipped."""
        return bisect_right(self.starts, offset) - 1


def file_of(bodies: Iterable[Body]) -> ExtentFile:
    """The file of these bodies, laid end to end."""
    kept = tuple(bodies)
    sizes = (len(b) if isinstance(b, bytes) else nbytes(b) for b in kept)
    return ExtentFile(kept, tuple(accumulate(sizes, initial=0)))


def json_file(value: object, *, indent: int | None = 2, newline: bool = True, sort_keys: bool = False) -> ExtentFile:
    """*value* as JSON in Python's spelling: exact integers, shortest floats, ``NaN`` and ``Infinity`` bare.

    Any mapping is an object, tuples are arrays. Raises `UsageError` for what JSON cannot say.
    """
    try:
        text = json.dumps(value, indent=indent, sort_keys=sort_keys, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot write this value as JSON: {error}") from error
    return text_file(text + "\n" if newline else text)


def text_file(text: str) -> ExtentFile:
    """*text* in UTF-8."""
    return file_of([text.encode("utf-8", "surrogatepass")])


def raw_file(tensor: Tensor) -> ExtentFile:
    """The tensor's bare bytes: C order, little-endian."""
    return file_of([tensor])


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not a plain value")
