"""The list of views, and `build`: the tree of one mounted checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckptfs.conversion.conversion import Conversion
from ckptfs.formats.extents import json_file, text_file
from ckptfs.formats.source import Source
from ckptfs.formats.tensorflow.checksum import have_crc32c
from ckptfs.vfs.cerebras import cs_folder
from ckptfs.vfs.components import model_folder
from ckptfs.vfs.facts import facts
from ckptfs.vfs.hf import DEFAULT_SHARD_BYTES, hf_folder
from ckptfs.vfs.readme import readme
from ckptfs.vfs.tensorflow import tf_folder
from ckptfs.vfs.tensors import raw_folder, tensors_folder
from ckptfs.vfs.torch import hf_bin_folder, torch_folder
from ckptfs.vfs.tree import Entry, Folder, Leaf, Tree


@dataclass(frozen=True, slots=True)
class Subject:
    """What is mounted, and how."""

    source: Source
    view: Conversion | None
    """The checkpoint in another format; None where it cannot be converted."""
    about: Mapping[str, Any]
    """The `facts` of the source, with the warnings of *view*."""
    reason: str | None = None
    """Why there is no *view*."""
    shard_bytes: int = DEFAULT_SHARD_BYTES
    beside: Mapping[str, Entry] = field(default_factory=dict)
    """Files that belong beside the weights, such as a tokenizer."""
    where: str = ""
    """The mount point, for configs that name a path."""


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """One row of `VIEWS`: an entry at the top of a mount."""

    name: str
    about: str
    """One line for README.txt and for the message of ``ckptfs mount``."""
    applies: Callable[[Subject], bool]
    make: Callable[[Subject], Entry]
    """Reads no tensor data. A folder makes its children when it is first looked into."""


def _always(subject: Subject) -> bool:
    return True


def _has_hf(subject: Subject) -> bool:
    return subject.view is not None and subject.view.tgt == "hf"


def _has_cs(subject: Subject) -> bool:
    return subject.view is not None and subject.view.tgt != "hf"


def _readme(subject: Subject) -> Leaf:
    entries = [(spec.name, spec.about) for spec in _applying(subject)]
    return Leaf(text_file(readme(subject.about, entries, no_hf_reason=subject.reason)))


def _model(name: str, one_model: Callable[..., Folder], subject: Subject) -> Folder:
    """The folder *name*: what *one_model* makes of the view, or of each of its components."""
    assert subject.view is not None
    return model_folder(
        subject.view,
        lambda view, extra: one_model(view, shard_bytes=subject.shard_bytes, extra=extra),
        where=os.path.join(subject.where, name) if subject.where else "",
        extra=subject.beside,
    )


def _cerebras(subject: Subject) -> Folder:
    assert subject.view is not None
    return cs_folder(subject.view)


VIEWS: tuple[ViewSpec, ...] = (
    ViewSpec("README.txt", "this page", _always, _readme),
    ViewSpec(
        "checkpoint.json",
        "facts about the checkpoint: release, step, family, sizes",
        _always,
        lambda subject: Leaf(json_file(subject.about)),
    ),
    ViewSpec(
        "tensors",
        "the state dict as folders; numpy.load reads a .npy, a .json holds a plain value",
        _always,
        lambda subject: tensors_folder(subject.source.items.values()),
    ),
    ViewSpec(
        "raw",
        "the same tensors as bare little-endian bytes; attributes user.dtype, user.shape, user.key",
        _always,
        lambda subject: raw_folder(subject.source.items.values()),
    ),
    ViewSpec(
        "hf",
        "a Hugging Face model: AutoModel.from_pretrained takes this folder",
        _has_hf,
        partial(_model, "hf", hf_folder),
    ),
    ViewSpec("hf-bin", "the same model as pytorch_model.bin", _has_hf, partial(_model, "hf-bin", hf_bin_folder)),
    ViewSpec(
        "torch",
        "files for torch.load: checkpoint.pt is the whole state dict, model.pt the model only",
        _always,
        lambda subject: torch_folder(subject.source),
    ),
    ViewSpec(
        "tf",
        "a TensorFlow checkpoint: tf.train.load_checkpoint takes this folder",
        lambda _: have_crc32c(),
        lambda subject: tf_folder(subject.source),
    ),
    ViewSpec("cs", "a Cerebras checkpoint with its model config", _has_cs, _cerebras),
)
"""Everything that a mount may have at its top, in the order of its listing."""


def build(
    source: Source,
    view: Conversion | None = None,
    *,
    reason: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    beside: Mapping[str, Entry] | None = None,
    where: str = "",
) -> Tree:
    """The tree of one checkpoint: the rows of `VIEWS` that apply to it. Reads no tensor data.

    *view* is the checkpoint in another format, *reason* says why there is none. *beside* adds files to ``hf/`` and
    ``hf-bin/`` that they lack. *where* is the mount point, for configs that name a path.
    """
    about = facts(source, view, beside)
    subject = Subject(source, view, about, None if view else reason, shard_bytes, beside or {}, where)
    children = {spec.name: spec.make(subject) for spec in _applying(subject)}
    return Tree(Folder(lambda: children), source.mtime_ns, source.check)


def listing(tree: Tree) -> list[tuple[str, str]]:
    """(name, about) of everything at the top of *tree*."""
    about = {spec.name: spec.about for spec in VIEWS}
    return [(name, about[name]) for name in tree.root.children]


def _applying(subject: Subject) -> list[ViewSpec]:
    return [spec for spec in VIEWS if spec.applies(subject)]
