"""Make `grid` and `merged` with TensorFlow: ``PYTHON_WITH_TENSORFLOW make.py FOLDER``.

`grid`: variables in slices along several axes, with starts that take one, two and three bytes. `merged`: two writers'
checkpoints merged into one with two data files.
"""

import hashlib
import json
import os
import sys

import numpy as np
import tensorflow as tf

SAVE = tf.raw_ops.SaveV2


def expected(arrays):
    return {
        name: {"dtype": str(a.dtype), "shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}
        for name, a in sorted(arrays.items())
    }


def write(prefix, arrays):
    with open(f"{prefix}.expected.json", "w") as file:
        json.dump({"tensorflow": tf.__version__, "tensors": expected(arrays)}, file, indent=1)


def make_grid(folder):
    grid = np.arange(6 * 5, dtype="f4").reshape(6, 5)
    cube = np.arange(2 * 3 * 4, dtype="i4").reshape(2, 3, 4)
    long = (np.arange(20_000) % 251).astype("u1")
    plan = [
        ("grid", "6 5 0,2:0,3", grid[0:2, 0:3]),
        ("grid", "6 5 0,2:3,2", grid[0:2, 3:5]),
        ("grid", "6 5 2,4:0,1", grid[2:6, 0:1]),
        ("grid", "6 5 2,4:1,4", grid[2:6, 1:5]),
        ("cube", "2 3 4 -:-:0,2", cube[:, :, 0:2]),
        ("cube", "2 3 4 -:-:2,2", cube[:, :, 2:4]),
        ("long", "20000 0,100", long[:100]),
        ("long", "20000 100,8900", long[100:9000]),
        ("long", "20000 9000,11000", long[9000:]),
    ]
    prefix = os.path.join(folder, "grid.ckpt")
    names, slices, values = zip(*plan, strict=True)
    tensors = [tf.constant(np.ascontiguousarray(a)) for a in values]
    SAVE(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=tensors)
    write(prefix, {"grid": grid, "cube": cube, "long": long})


def make_merged(folder):
    arrays = {"a": np.arange(3, dtype="f4"), "b": np.arange(4, dtype="i8"), "c": np.ones((2, 2), "f8")}
    parts = [os.path.join(folder, f"part{i}") for i in range(2)]
    for part, names in zip(parts, (["a", "c"], ["b"]), strict=True):
        SAVE(prefix=part, tensor_names=names, shape_and_slices=[""] * len(names), tensors=[arrays[n] for n in names])
    prefix = os.path.join(folder, "merged.ckpt")
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=False)
    write(prefix, arrays)


make_grid(sys.argv[1])
make_merged(sys.argv[1])
