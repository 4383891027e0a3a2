"""Reading whole files, for tests."""

from __future__ import annotations

from ckptfs.formats.extents import ExtentFile
from ckptfs.tensors.tensor import Elements
from tests.factories import ArrayTensor


def content(file: ExtentFile) -> bytes:
    """All bytes of *file*; asserts that it has exactly as many as it says, and none past its end."""
    out = bytearray(file.size + 7)
    assert file.read_into(0, memoryview(out)) == file.size
    assert file.read_into(file.size, memoryview(out)[:7]) == 0
    assert out[file.size :] == bytes(7)
    return bytes(out[: file.size])


class Counting(ArrayTensor):
    """Counts the elements that are read."""

    elements = 0

    def read_block(self, row: int, col: int, out: Elements) -> None:
        super().read_block(row, col, out)
        self.elements += out.size
