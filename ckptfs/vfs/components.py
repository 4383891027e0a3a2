"""Views of several models: a folder for each component, as `hf` and `torch` make one for a single model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfs.conversion.components import within
from ckptfs.tensors.tensor import Tensor
from ckptfs.vfs.hf import View
from ckptfs.vfs.tree import Entry, Folder, Leaf


@dataclass(frozen=True, slots=True)
class Part:
    """One model of a view of several; a `View` too."""

    model: str
    tgt: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    components: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


def parts_of(view: View, where: str = "") -> dict[str, Part]:
    """The components of *view* by folder, which lie in the folder *where* (an empty text where that is not known)."""
    configs = {name: dict(view.config[name]) for name in view.components}
    for path in view.paths:
        folder, _, name = path.partition("/")
        configs[folder][name] = os.path.join(where, configs[folder][name])
    return {
        name: Part(
            *(view.model, view.tgt, within(view.tensors, f"{name}/"), configs[name]),
            files=within(view.files, f"{name}/"),
        )
        for name in view.components
    }


def model_folder(
    view: View,
    one: Callable[[View, Mapping[str, Entry]], Folder],
    *,
    where: str = "",
    extra: Mapping[str, Entry] | None = None,
) -> Folder:
    """What *one* makes of *view* and of *extra*, or a folder with what it makes of each component.

    *extra* are files of a tokenizer: of the components, those with a vocabulary get them. An entry has one inode
    number, of the path it was first seen at, so every folder has entries of its own.
    """
    if not view.components:
        return one(view, _again(extra or {}))
    parts = parts_of(view, where)
    return Folder(
        lambda: {
            name: one(part, _again(extra or {}) if "vocab_size" in part.config else {}) for name, part in parts.items()
        }
    )


def _again(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The same files for another folder."""
    return {name: Leaf(e.file, e.xattrs) if isinstance(e, Leaf) else e for name, e in entries.items()}
