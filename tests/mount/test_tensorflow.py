"""`tf/` on a real mount: the index makes nobody else wait, and is the index of the data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from tests.conftest import Mounter
from tests.paths import FAMILIES

pytestmark = pytest.mark.fuse
PYTHON = os.environ.get("CKPTFS_TENSORFLOW_PYTHON", "")
GOLDEN = FAMILIES / "llama/cs2hf-gqa-fp32"
N = 24


def test_ckptfs_reads_the_folder(mounter: Mounter) -> None:
    mnt = mounter.mountpoint()
    assert mounter.ckptfs("mount", GOLDEN / "cs.mdl", mnt).returncode == 0
    with ckptfs.open(GOLDEN / "cs.mdl") as want, ckptfs.open(mnt / "tf") as found:
        for key, tensor in want.source.tensors().items():
            assert found[key].shape == tensor.shape
            assert np.asarray(found[key]).tobytes() == np.asarray(want[key]).tobytes()


def test_others_read_while_somebody_waits_for_the_index(mounter: Mounter, tmp_path: Path) -> None:
    """A sparse file of 6 GB takes seconds to sum; meanwhile the mount answers, for longer than one request."""
    header, size = {}, 256 << 20
    for i in range(N):
        header[f"w{i}"] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [i * size, (i + 1) * size]}
    text = json.dumps(header).encode()
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + N * size)
    mnt = mounter.mountpoint()
    assert mounter.ckptfs("mount", path, mnt).returncode == 0
    code = "import sys; print(len(open(sys.argv[1], 'rb').read()))"
    index = mnt / "tf/model.ckpt.index"
    with subprocess.Popen([sys.executable, "-c", code, index], stdout=subprocess.PIPE, text=True) as reader:
        n_answers = 0
        while reader.poll() is None:
            assert (mnt / "checkpoint.json").stat().st_size > 0
            with (mnt / "raw" / f"w{n_answers % N}").open("rb") as file:
                file.seek(n_answers * 8192 % size)
                assert file.read(10) == bytes(10)
            n_answers += 1
        assert reader.stdout is not None and int(reader.stdout.read()) == index.stat().st_size
    assert n_answers > 20


@pytest.mark.skipif(not PYTHON, reason="CKPTFS_TENSORFLOW_PYTHON names no Python with tensorflow")
def test_tensorflow_reads_the_folder(mounter: Mounter) -> None:
    mnt = mounter.mountpoint()
    assert mounter.ckptfs("mount", GOLDEN / "cs.mdl", mnt).returncode == 0
    code = (
        "import sys, tensorflow as tf\n"
        "reader = tf.train.load_checkpoint(sys.argv[1])\n"
        "found = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}\n"
        "print(sum(len(v) if isinstance(v, bytes) else v.nbytes for v in found.values()))"
    )
    done = subprocess.run([PYTHON, "-c", code, mnt / "tf"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with ckptfs.open(mnt / "tf") as found:
        texts = [item.value for item in found.source.items.values() if isinstance(item.value, str)]
        want = sum(np.asarray(found[key]).nbytes for key in found.source.tensors())
    assert int(done.stdout) == want + sum(len(text.encode()) for text in texts)
