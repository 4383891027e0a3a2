"""Files of ``numpy.save``: numpy's header, then the tensor's bytes in C order."""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np

from ckptfs.formats.extents import ExtentFile, file_of
from ckptfs.tensors.tensor import Shape, Tensor


def npy_file(tensor: Tensor) -> ExtentFile:
    """What ``numpy.save`` writes for the tensor: version 1.0, data aligned to 64 bytes.

    bfloat16 is the opaque ``<V2``, as for an ml_dtypes array: ``numpy.load(f).view(ml_dtypes.bfloat16)``. Both
    float8 types are ``|V1`` likewise (numpy.save calls float8_e5m2 ``<f1``, which numpy.load refuses).
    """
    return file_of([npy_header(tensor), tensor])


def npy_header(tensor: Tensor) -> bytes:
    """What comes before the data: a multiple of 64 bytes."""
    return _header(tensor.dtype.npy, tensor.shape)


@lru_cache(maxsize=4096)
def _header(descr: str, shape: Shape) -> bytes:
    """Cached: a model has many tensors of few shapes, and numpy takes 15 us for a header."""
    header = io.BytesIO()
    # Version 1.0 has room for 64 KiB of header, far more than HDF5's 32 or torch's 64 axes need.
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()
