"""Print what TensorFlow reads from checkpoints, as JSON; runs in TensorFlow's own environment."""

import hashlib
import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf


def data_of(value):
    if isinstance(value, bytes):
        return b"s" + value
    array = np.asarray(value)
    if array.dtype == object:
        return b"".join(len(item).to_bytes(8, "little") + item for item in array.reshape(-1))
    return array.tobytes()


def described(prefix):
    if os.path.isdir(prefix):
        prefix = tf.train.latest_checkpoint(prefix)
    try:
        reader = tf.train.load_checkpoint(prefix)
    except Exception:
        return None
    found = {}
    for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
        try:
            value = reader.get_tensor(name)
        except Exception:
            found[name] = None
            continue
        shape = list(reader.get_variable_to_shape_map()[name])
        found[name] = [dtype.name, shape, hashlib.sha256(data_of(value)).hexdigest()]
    return found


print(json.dumps([described(prefix) for prefix in sys.argv[1:]]))
