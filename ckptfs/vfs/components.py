"""Views of several models: a folder for each component, as `hf` and `torch` make one for a single model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from ckptfs.conversion.components import within
from ckptfs.conversion.conversion import Conversion
from ckptfs.vfs.generation import lacks_end
from ckptfs.vfs.tree import Entry, Folder, Leaf


def parts_of(view: Conversion, where: str = "") -> dict[str, Conversion]:
    """The components of *view* by folder, which lie in the folder *where* (an empty text where that is not known)."""
    configs = {name: dict(view.config[name]) for name in view.components}
    for path in view.paths:
        folder, _, name = path.partition("/")
        configs[folder][name] = os.path.join(where, configs[folder][name])
    return {
        name: replace(
            view,
            tensors=within(view.tensors, f"{name}/"),
            config=configs[name],
            files=within(view.files, f"{name}/"),
            components=(),
            paths=(),
        )
        for name in view.components
    }


def model_folder(
    view: Conversion,
    one: Callable[[Conversion, Mapping[str, Entry]], Folder],
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
    return Folder(lambda: {name: one(part, _again(beside_part(part, extra or {}))) for name, part in parts.items()})


def beside_part(part: Conversion, extra: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """The files of a tokenizer for one component: all of them, if it has a vocabulary."""
    return extra if "vocab_size" in part.config else {}


def unknown_end(view: Conversion, extra: Mapping[str, Entry]) -> list[str]:
    """What to tell of models for text whose end-of-text token nothing names; *extra* are the tokenizer's files."""
    if view.tgt != "hf":
        return []
    parts = [part for part in parts_of(view).values() if "vocab_size" in part.config] if view.components else [view]
    if not any(lacks_end(part.config, extra) for part in parts):
        return []
    return ["no file names the end-of-text token: loaders take that of their model class; --tokenizer DIR brings it"]


def _again(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The same files for another folder."""
    return {name: Leaf(e.file, e.xattrs) if isinstance(e, Leaf) else e for name, e in entries.items()}
