"""State dicts in torch's hands, checked against what the original package loaded."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from tests.formats.hdf5.h5_files import DATA

WRITTEN = [path for path in sorted((DATA / "v05").glob("*.mdl")) if path.stem != "deferred_full_uninit"]
"""Checkpoints of the real writer, each with its recorded state dict beside it, but for one of undefined values."""

_TYPES: dict[str, type] = {
    "dict": dict,
    "defaultdict": dict,
    "ordereddict": OrderedDict,
    "list": list,
    "deque": list,
    "tuple": tuple,
    "set": set,
}
REFUSED = "<not shown by ckptfs: "


def recorded(path: Path) -> dict[str, Any]:
    """The recorded tree of the checkpoint at *path*."""
    found: dict[str, Any] = json.loads(path.with_suffix(".expected.json").read_text())["tree"]
    return found


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def check_state(found: Any, want: dict[str, Any], where: str = "") -> None:
    """Types, keys, order and values of a loaded state dict against the recorded tree."""
    kind = want["kind"]
    if kind in _TYPES:
        assert type(found) is _TYPES[kind], where
        _check_children(found, want, where)
    elif kind in ("tensor", "ndarray"):
        _check_tensor(found, want, where)
    elif kind == "object":
        assert found.startswith(REFUSED), where
    else:
        assert repr(found) == repr(_plain(want.get("value"))), where


def _check_children(found: Any, want: dict[str, Any], where: str) -> None:
    items = want["items"]
    assert len(found) == len(items), where
    if want["kind"] == "set":
        assert {repr(value) for value in found} == {repr(_plain(item["value"])) for item in items}
    elif isinstance(found, dict):
        assert [repr(key) for key in found] == [repr(_plain(key["key"])) for key, _ in items], where
        for (key, value), (_, item) in zip(found.items(), items, strict=True):
            check_state(value, item, f"{where}.{key}")
    else:
        for i, (value, item) in enumerate(zip(found, items, strict=True)):
            check_state(value, item, f"{where}.{i}")


def _check_tensor(found: Any, want: dict[str, Any], where: str) -> None:
    assert type(found) is torch.Tensor, where
    assert list(found.shape) == want["shape"], where
    if want["kind"] == "tensor":
        assert str(found.dtype) == f"torch.{want['dtype']}", where
    if "sha256" in want and not want["dtype"].startswith(">"):
        assert hashlib.sha256(bits(found)).hexdigest() == want["sha256"], where


def _plain(value: Any) -> Any:
    """Large ints and floats are recorded as text."""
    if isinstance(value, dict) and "$int" in value:
        return int(value["$int"])
    if isinstance(value, dict) and "$float" in value:
        return float.fromhex(value["$float"])
    return value
