"""The folder `tf/`: the state dict as a TensorFlow checkpoint, `tf.train.load_checkpoint` takes the folder."""

from __future__ import annotations

from ckptfs.formats.extents import ExtentFile, file_of, json_file
from ckptfs.formats.source import Source
from ckptfs.formats.tensorflow.bundle import index_name
from ckptfs.formats.tensorflow.reader import STATE_FILE
from ckptfs.formats.tensorflow.writer import bundle_files, state_text, variables_of
from ckptfs.vfs.tree import Entry, Folder, Leaf

PREFIX = "model.ckpt"
LEFT_OUT = "left-out.json"
"""Which keys TensorFlow cannot hold, and why; there where it is not empty."""


def tf_folder(source: Source) -> Folder:
    """``model.ckpt`` with every tensor, number and text under its flattened key, and the state file that names it."""

    def make() -> dict[str, Entry]:
        variables, left_out = variables_of(source)
        files: dict[str, ExtentFile] = {STATE_FILE: file_of([state_text(PREFIX)])}
        if left_out:
            files[LEFT_OUT] = json_file(left_out)
        files |= bundle_files(PREFIX, variables)
        return {name: _index(file) if name == index_name(PREFIX) else Leaf(file) for name, file in files.items()}

    return Folder(make)


def _index(file: ExtentFile) -> Leaf:
    """Past the page cache: the kernel's read-ahead would have several threads wait for checksums at once."""
    return Leaf(file, live=lambda: file)
