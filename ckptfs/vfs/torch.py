"""The folders of torch files: `torch/` with the checkpoint itself, `hf-bin/` with the Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping

from ckptfs.conversion.conversion import Conversion
from ckptfs.formats.huggingface import index_file, named_shards
from ckptfs.formats.nested import model_state, nested_state
from ckptfs.formats.source import Source
from ckptfs.formats.torch.writer import torch_file
from ckptfs.vfs.hf import DEFAULT_SHARD_BYTES, leaves, model_files
from ckptfs.vfs.tree import Entry, Folder, Leaf

STEM = "pytorch_model"


def torch_folder(source: Source) -> Folder:
    """``checkpoint.pt``, the whole state dict as it is nested, and ``model.pt``, its ``model`` state."""

    def make() -> dict[str, Entry]:
        return {
            "checkpoint.pt": Leaf(torch_file(nested_state(source))),
            "model.pt": Leaf(torch_file(model_state(source))),
        }

    return Folder(make)


def hf_bin_folder(
    view: Conversion, *, shard_bytes: int = DEFAULT_SHARD_BYTES, extra: Mapping[str, Entry] | None = None
) -> Folder:
    """As `hf.hf_folder`, with the weights in ``pytorch_model.bin`` or its shards and their index."""

    def make() -> dict[str, Entry]:
        named = named_shards(view.tensors, shard_bytes, stem=STEM, suffix=".bin")
        weights = {name: torch_file(part) for name, part in named.items()}
        if len(named) > 1:
            weights[f"{STEM}.bin.index.json"] = index_file(named)
        return leaves(model_files(view, weights, extra or {}))

    return Folder(make)
