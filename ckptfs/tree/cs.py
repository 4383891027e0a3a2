"""The folder `cs/`: a checkpoint as the Cerebras trainer wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ckptfs.formats.source import Tensor
from ckptfs.layouts.extent import File
from ckptfs.layouts.h5 import mdl_file
from ckptfs.layouts.h5_state import State, state_tree
from ckptfs.layouts.text import text_file
from ckptfs.tree.hf import View
from ckptfs.tree.node import Entry, Folder, Leaf


def cs_folder(view: View) -> Folder:
    """``checkpoint.mdl`` with the ``model`` state of *view*, and its config as ``params.yaml``."""

    def make() -> dict[str, Entry]:
        return {
            "checkpoint.mdl": Leaf(checkpoint_file(view.tensors, view.tgt)),
            "params.yaml": Leaf(params_file(view.config)),
        }

    return Folder(make)


def checkpoint_file(tensors: Mapping[str, Tensor], tgt: str) -> File:
    """A Cerebras checkpoint of that release with nothing but a ``model`` state."""
    return mdl_file(model_state(tensors), release=release_of(tgt))


def model_state(tensors: Mapping[str, Tensor]) -> State:
    """A state dict with nothing but a ``model`` state."""
    return state_tree({"model": dict(tensors)})


def release_of(tgt: str) -> str:
    """The release that a file of format *tgt* (``cs-2.9``) says wrote it."""
    return f"{tgt.removeprefix('cs-')}.0"


def params_file(config: Mapping[str, Any]) -> File:
    """A Cerebras config as the public converter spells it: YAML, sorted, four spaces."""
    return text_file(yaml.safe_dump(dict(config), indent=4))
