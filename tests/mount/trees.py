"""A tree made by hand, and what its files hold."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from ckptfs.errors import CorruptChunk
from ckptfs.formats.extents import ExtentFile, file_of
from ckptfs.tensors.tensor import Elements
from ckptfs.vfs.tree import Entry, Folder, Leaf, Link, Tree
from tests.factories import ArrayTensor

MTIME_NS = 1_700_000_000_123_456_789
SOURCE_NBYTES = 10_000_000
N_MANY = 5000

rng = np.random.default_rng(7)
WEIGHTS = rng.integers(0, 2**16, (1500, 1001), dtype=np.uint16)
"""About 3 MB, of no round size."""
HEADER = b"header of eleven and more bytes\n"
BIG = HEADER + WEIGHTS.tobytes() + b"tail"
TEXT = b"one line\nanother line\nthe last line\n"
XATTRS: Mapping[str, bytes] = {"user.dtype": b"uint16", "user.shape": b"[1500, 1001]", "user.key": "a/é".encode()}
FILES: Mapping[str, bytes] = {
    "README.txt": TEXT,
    "empty": b"",
    "big.bin": BIG,
    "deep/er/text": TEXT,
    "deep/\N{GREEK SMALL LETTER PI} and space": b"pi",
}
"""Path to content of every readable file outside of ``many/``."""


class Damaged(ArrayTensor):
    """A tensor whose rows from 10 on cannot be read."""

    def read_block(self, row: int, col: int, out: Elements) -> None:
        if row + len(out) > 10:
            raise CorruptChunk("model.mdl", "model.weight", 4096, "chunk is damaged")
        super().read_block(row, col, out)


class Broken(ArrayTensor):
    """A tensor whose reader has a mistake."""

    def read_block(self, row: int, col: int, out: Elements) -> None:
        raise ZeroDivisionError("a mistake")


class Slow(ArrayTensor):
    """A tensor that takes long to read."""

    def read_block(self, row: int, col: int, out: Elements) -> None:
        time.sleep(600)


def big_file() -> ExtentFile:
    return file_of([HEADER, ArrayTensor(WEIGHTS), b"tail"])


def tree() -> Tree:
    """All of `FILES`, a folder of many files, damaged ones, and links."""
    zeros = np.zeros((20, 4096), np.uint8)
    entries: dict[str, Entry] = {
        "README.txt": Leaf(file_of([TEXT])),
        "empty": Leaf(file_of([])),
        "big.bin": Leaf(big_file(), XATTRS),
        "deep": Folder(lambda: {"er": Folder(lambda: {"text": Leaf(file_of([TEXT]))}), "π and space": pi()}),
        "many": Folder(lambda: {f"file-{i:05}": Leaf(file_of([b"x" * (i % 7)])) for i in range(N_MANY)}),
        "damaged": Leaf(file_of([Damaged(zeros)])),
        "broken": Leaf(file_of([Broken(zeros)])),
        "slow": Leaf(file_of([Slow(zeros)])),
        "link": Link("deep/er/text"),
    }
    return Tree(Folder(lambda: entries), MTIME_NS)


def pi() -> Leaf:
    return Leaf(file_of([b"pi"]))
