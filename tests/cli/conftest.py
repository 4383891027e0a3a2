"""A small checkpoint on disk, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ckptfs.cli.main import run

WEIGHT = np.arange(12, dtype="<f4").reshape(3, 4)
BIAS = np.arange(5, dtype="<u2")


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()


def safetensors_bytes(tensors: dict[str, tuple[str, np.ndarray]]) -> bytes:  # type: ignore[type-arg]
    """A safetensors file, written out by hand."""
    header, data = {}, b""
    for key, (dtype, array) in tensors.items():
        start = len(data)
        data += array.tobytes()
        header[key] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A safetensors file with ``layer.weight`` (float32, 3x4) and ``layer.bias`` (bfloat16, 5)."""
    path = tmp_path / "small.safetensors"
    path.write_bytes(safetensors_bytes({"layer.weight": ("F32", WEIGHT), "layer.bias": ("BF16", BIAS)}))
    return path


@pytest.fixture
def ckptfs(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Result]:
    """Runs a command line; what it printed."""

    def call(*args: object) -> Result:
        code = run([str(a) for a in args])
        out, err = capfdbinary.readouterr()
        return Result(code, out, err.decode())

    return call
