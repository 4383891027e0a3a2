"""The facts of a checkpoint: the content of `checkpoint.json` and of ``ckptfs info --json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.hf import model_state
from ckptfs.conversion.resolve import recorded_family
from ckptfs.errors import SourceError
from ckptfs.formats.source import Container, Item, Source
from ckptfs.tensors.ranges import to_numpy
from ckptfs.tensors.tensor import Tensor, n_elements, nbytes
from ckptfs.vfs.components import unknown_end
from ckptfs.vfs.tree import Entry

STEP_KEY = "global_step"


def facts(source: Source, view: Conversion | None = None, beside: Mapping[str, Entry] | None = None) -> dict[str, Any]:
    """What is known about *source* before any tensor is read, ready for JSON.

    Parameters are the elements of the tensors of the ``model`` state, or of all tensors where there is no such
    state. A tied tensor counts once in *n_parameters* and *nbytes*, under each of its keys in *n_tensors* and
    *dtypes*. *view* is the checkpoint in another format; it tells the family and has warnings of its own. *beside* are
    the files of a tokenizer's folder.
    """
    held = source.tensors()
    return {
        "source": PurePath(source.path).name,
        "format": source.format,
        "format_version": source.format_version,
        "release": source.release,
        "family": view.model if view else recorded_family(source),
        "model_name": _recorded_model(source),
        "step": step(source),
        "n_tensors": len(held),
        "n_parameters": sum(n_elements(t.shape) for t in _once(model_state(source))),
        "nbytes": sum(map(nbytes, _once(held))),
        "source_nbytes": source.nbytes,
        "dtypes": dict(Counter(tensor.dtype.name for tensor in held.values())),
        "states": states(source),
        "views": {view.tgt: {"n_tensors": len(view.tensors)}} if view else {},
        "refused": [_refusal(item) for item in source.items.values() if item.kind in ("object", "link")],
        "warnings": [*source.warnings, *((*view.warnings, *unknown_end(view, beside or {})) if view else ())],
    }


def step(source: Source) -> int | None:
    """The training step that the checkpoint was written at, None when it does not say (or the number is damaged)."""
    item = source.items.get(STEP_KEY)
    if item is None:
        return None
    if item.tensor is not None and n_elements(item.tensor.shape) == 1:
        try:
            value = to_numpy(item.tensor).reshape(-1)[0].item()
        except (SourceError, OSError):
            return None
    else:
        value = item.value
    sane = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return value if sane else None


def states(source: Source) -> list[str]:
    """Top-level names of the state dict, in order; of a flat one the first parts of its keys."""
    if source.tree is not None and source.tree.keys is not None and _nested(source.tree):
        return [str(key) for key in source.tree.keys]
    return list(dict.fromkeys(key.partition(".")[0] for key in source.items))


def _nested(node: Container) -> bool:
    return any(isinstance(child, Container) for child in node.children)


def _once(tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
    """Each tensor once; tied keys hold the same object."""
    return {id(tensor): tensor for tensor in tensors.values()}.values()


def _recorded_model(source: Source) -> str | None:
    name = source.metadata[-1].get("model_name") if source.metadata else None
    return name if isinstance(name, str) else None


def _refusal(item: Item) -> dict[str, str | None]:
    """Why an item's data is not shown."""
    why = {"key": item.key, "class": item.class_name, "reason": item.reason}
    return why if item.target is None else {**why, "target": item.target}
