"""What distinguishes tensors, configs and states from the recorded ones; empty lists when nothing does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ckptfs
from ckptfs.formats.source import Container, Source
from ckptfs.tensors.ranges import to_bytes

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Key to dtype, shape and bytes."""
EXTRA_FIELDS = ("architectures", "torch_dtype")
"""Fields of ``config.json`` that ckptfs adds, because loaders want them, where the converter writes none."""


def tensors_of(view: ckptfs.View | ckptfs.Checkpoint) -> Tensors:
    """All tensors of a view, or of a checkpoint."""
    return {key: (t.dtype, t.shape, t.tobytes()) for key, t in view.items() if isinstance(t, ckptfs.LazyTensor)}


def tensors_in(folder: Path, *suffixes: str) -> Tensors:
    """What safetensors and torch themselves find in the weight files of *folder*."""
    import torch
    from safetensors.torch import load_file

    state = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix in (suffixes or (".safetensors", ".bin"))):
        state |= load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return {
        key: (str(t.dtype)[6:], tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, t in state.items()
    }


def differences(found: Tensors, expected: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What distinguishes tensors from the recorded ones."""
    wrong = _other_keys(found, expected)
    for key, want in expected.items():
        if key not in found:
            continue
        dtype, shape, data = found[key]
        if (dtype, list(shape)) != (want["dtype"], want["shape"]):
            wrong.append(f"{key}: {dtype} {shape}, recorded {want['dtype']} {want['shape']}")
        elif not want.get("random") and hashlib.sha256(data).hexdigest() != want["sha256"]:
            wrong.append(f"{key}: other bytes")
    return wrong


def config_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What distinguishes a ``config.json`` from the recorded one, apart from `EXTRA_FIELDS`."""
    return [
        f"{key}: {found.get(key, 'absent')!r}, recorded {expected.get(key, 'absent')!r}"
        for key in {**found, **expected}
        if not (key in EXTRA_FIELDS and key not in expected)
        and (key in found, found.get(key)) != (key in expected, expected.get(key))
    ]


def state_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What distinguishes two states, as `leaves` gives them."""
    wrong = _other_keys(found, expected)
    for key, want in expected.items():
        got = found.get(key)
        if got is not None and "empty" in want and "empty" in got:
            continue
        if got is not None and any(got.get(k) != v for k, v in want.items() if k in ("value", "shape", "sha256")):
            wrong.append(f"{key}: {got}, recorded {want}")
    return wrong


def leaves(source: Source) -> dict[str, dict[str, Any]]:
    """A whole state as it is recorded: tensors by hash, other leaves by value, containers that are empty as such."""
    assert source.tree is not None
    return dict(_leaves(source, source.tree, ""))


def lasting(what: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of a leaf, but for the content of tensors that the converter makes at random."""
    return {name: value for name, value in what.items() if name != "sha256" or not what.get("random")}


def _leaves(source: Source, node: Container | str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, str):
        item = source.items[node]
        if item.tensor is None:
            yield path, {"value": item.value}
        else:
            sha256 = hashlib.sha256(to_bytes(item.tensor)).hexdigest()
            yield path, {"dtype": item.tensor.dtype.name, "shape": list(item.tensor.shape), "sha256": sha256}
        return
    if not node.children and path:
        yield path, {"empty": {"list": "list", "tuple": "tuple"}.get(node.type, "dict")}
    for i, child in enumerate(node.children):
        part = str(node.keys[i]) if node.keys is not None else str(i)
        yield from _leaves(source, child, f"{path}.{part}" if path else part)


def _other_keys(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    missing = [f"missing {key}" for key in expected if key not in found]
    return missing + [f"unexpected {key}" for key in found if key not in expected]
