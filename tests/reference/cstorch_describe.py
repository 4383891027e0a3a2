"""Prints what ``cstorch.load`` makes of checkpoints, as JSON: run by the Python that has ``cerebras_pytorch``.

``cstorch_describe.py FILE…`` describes each file; ``cstorch_describe.py --resave FILE NEW`` loads FILE and saves it as
NEW. Stands alone: ckptfs is not installed there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import cerebras.pytorch as cstorch
import numpy as np
import torch


def describe(value: Any, path: str, seen: dict[int, str]) -> Any:
    """Nested description; a tensor met before is the path of its first place."""
    if isinstance(value, dict):
        return [type(value).__name__, [[k, describe(v, f"{path}.{k}", seen)] for k, v in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [describe(v, f"{path}.{i}", seen) for i, v in enumerate(value)]]
    if isinstance(value, (torch.Tensor, np.ndarray)) or hasattr(value, "__array__"):
        if id(value) in seen:
            return ["same", seen[id(value)]]
        seen[id(value)] = path
    if isinstance(value, torch.Tensor):
        words = torch.empty(value.shape, dtype=value.dtype).copy_(value).flatten().view(torch.uint8)
        return ["tensor", str(value.dtype), list(value.shape), digest(words.numpy().tobytes())]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        return ["array", array.dtype.str, list(array.shape), digest(array.tobytes())]
    return [type(value).__name__, repr(value)]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main(args: list[str]) -> None:
    if args[0] == "--resave":
        cstorch.save(cstorch.load(args[1]), args[2])
        return
    json.dump([describe(cstorch.load(path), "", {}) for path in args], sys.stdout)


main(sys.argv[1:])
