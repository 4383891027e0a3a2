"""The folder `cs/`: a checkpoint as the Cerebras trainer wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.format_names import parse_format
from ckptfs.formats.cerebras.state import State, state_tree
from ckptfs.formats.cerebras.writer import mdl_file
from ckptfs.formats.extents import ExtentFile, text_file
from ckptfs.tensors.tensor import Tensor
from ckptfs.vfs.tree import Entry, Folder, Leaf


def cs_folder(view: Conversion) -> Folder:
    """``checkpoint.mdl`` with all that *view* has, and its config as ``params.yaml``."""

    def make() -> dict[str, Entry]:
        return {
            "checkpoint.mdl": Leaf(checkpoint_file(view)),
            "params.yaml": Leaf(params_file(view.config)),
        }

    return Folder(make)


def checkpoint_file(view: Conversion) -> ExtentFile:
    """The Cerebras checkpoint of *view*."""
    return mdl_file(state_of(view), release=release_of(view.tgt))


def state_of(view: Conversion) -> State:
    """The whole state dict of *view*: a ``model`` state and ``__metadata__`` where the view has no other."""
    if view.state is None or view.state.tree is None:
        return state_tree({"model": dict(view.tensors), "__metadata__": [trainer_metadata(view)]})
    return State(view.state.tree, view.state.items)


def trainer_metadata(view: Conversion) -> dict[str, Any]:
    """The entry of ``__metadata__`` that the trainer would write; *model_name* is the name of the family.

    The trainer refuses other releases than its own, but not a version with a local part: a checkpoint of ``cs-2.9``
    stays loadable in 2.10, as it is without metadata. ``cs-auto`` of the public converter reads it too.
    """
    return {"version": f"{release_of(view.tgt)}+ckptfs", "model_name": view.model, "params": dict(view.config)}


def model_state(tensors: Mapping[str, Tensor]) -> State:
    """A state dict with nothing but a ``model`` state."""
    return state_tree({"model": dict(tensors)})


def release_of(tgt: str) -> str:
    """The release that a file of format *tgt* (``cs-2.9``) says wrote it."""
    release = parse_format(tgt).release
    assert release is not None
    return "{}.{}.0".format(*release)


def params_file(config: Mapping[str, Any]) -> ExtentFile:
    """A Cerebras config as the public converter spells it: YAML, sorted, four spaces."""
    return text_file(yaml.safe_dump(dict(config), indent=4))
