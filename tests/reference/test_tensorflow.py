"""What the real TensorFlow makes of the checkpoints that ckptfs writes.

Needs ``CKPTFS_TENSORFLOW_PYTHON``: a Python that has ``tensorflow``, in an environment of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs
from ckptfs.cli.main import run
from ckptfs.formats.tensorflow.writer import bundle_files
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.ranges import to_bytes
from tests.factories import tensor_of
from tests.formats.reading import content
from tests.paths import DATA

PYTHON = os.environ.get("CKPTFS_TENSORFLOW_PYTHON", "")
SCRIPT = Path(__file__).parent / "tensorflow_describe.py"
HERE = DATA / "tensorflow"

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(not PYTHON, reason="CKPTFS_TENSORFLOW_PYTHON names no Python with tensorflow"),
]


def described(*prefixes: Path) -> list[Any]:
    """What TensorFlow reads from each checkpoint: name to dtype, shape and digest."""
    done = subprocess.run([PYTHON, SCRIPT, *prefixes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_every_element_type(tmp_path: Path) -> None:
    shapes = [(), (0,), (4, 7), (2, 3, 4)]
    tensors = {f"{name}/{i}": tensor_of(name, shape, i) for name in DTYPES for i, shape in enumerate(shapes)}
    for name, file in bundle_files("m", tensors).items():
        (tmp_path / name).write_bytes(content(file))
    assert described(tmp_path / "m") == [
        {key: [t.dtype.name, list(t.shape), digest(to_bytes(t))] for key, t in sorted(tensors.items())}
    ]


def test_an_index_of_many_blocks_and_files(tmp_path: Path) -> None:
    tensors = {f"layer_{i:04d}/{'x' * (i % 40)}": tensor_of("uint8", (3,), i) for i in range(1500)}
    for name, file in bundle_files("m", tensors, lambda key: key[6:8]).items():
        (tmp_path / name).write_bytes(content(file))
    assert len(list(tmp_path.iterdir())) == 16
    assert described(tmp_path / "m")[0] == {
        key: ["uint8", [3], digest(to_bytes(t))] for key, t in sorted(tensors.items())
    }


@pytest.mark.parametrize("name", ["single.ckpt", "multi.ckpt", "grid.ckpt", "obj/ck-1"])
def test_there_and_back_is_the_same_to_tensorflow(tmp_path: Path, name: str) -> None:
    assert run(["tensorflow-to-h5", str(HERE / name), str(tmp_path / "x.h5")]) == 0
    assert run(["h5-to-tensorflow", str(tmp_path / "x.h5"), str(tmp_path / "y"), "--shard-by", "[a-z]+$"]) == 0
    before, after, by_folder = described(HERE / name, tmp_path / "y", tmp_path)
    assert before == after == by_folder


def test_it_refuses_what_ckptfs_refuses() -> None:
    bad, refused = described(HERE / "bad_data_crc.ckpt", HERE / "bad_index_crc.ckpt")
    assert refused is None
    assert [key for key, value in bad.items() if value is None] == ["gpt2/embedding/kernel"]
    with ckptfs.open(HERE / "bad_data_crc.ckpt") as source, pytest.raises(ckptfs.errors.CorruptChunk):
        np.asarray(source["gpt2/embedding/kernel"])
