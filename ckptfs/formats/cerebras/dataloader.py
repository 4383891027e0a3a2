"""Input state that old trainers kept beside their checkpoints, as the ``dataloader`` state of a checkpoint.

============================================  ===========================================================
file of the folder                            first line
============================================  ===========================================================
data_iter_checkpoint_state_file_global        the data step: which of the next files count
data_iter_state_file_worker_<W>_step_<S>.txt  samples that worker W had streamed at step S
============================================  ===========================================================

All other files are ignored, and so are blanks around a number and further lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from ckptfs.errors import SourceError, UnsupportedValue, UsageError
from ckptfs.formats.cerebras.state import State, state_tree
from ckptfs.formats.source import Container, Source

Kind = Literal["map", "iterable"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PROCESSORS: Mapping[str, Kind] = {"GptHDF5MapDataProcessor": "map", "GptHDF5DataProcessor": "iterable"}
"""Kinds of data processors whose state was kept apart from the checkpoint."""
GLOBAL = "data_iter_checkpoint_state_file_global"
KEY = "dataloader"
_NEW = "\0"
"""Prefix of new items; no key in a file has it."""
_WORKER = re.compile(r"data_iter_state_file_worker_(\d{1,18})_step_(\d{1,18})\.txt", re.ASCII)
_NUMBER = re.compile(rb"\s*\+?(\d{1,18})\s*", re.ASCII)
_MAX_LINE = 4096


def dataloader_state(folder: str | os.PathLike[str], kind: Kind, seed: int = 0) -> dict[str, Any]:
    """The ``dataloader`` state for the files in *folder*.

    ``map``: the samples of all workers together, and *seed*, that of the shuffling. ``iterable``: the samples of each
    worker, by shard. Without a file for the data step there are no samples. Raises `UsageError` when *folder* or its
    global file is not there, `SourceError` for a first line that is not a number.
    """
    samples = worker_samples(folder)
    if kind == "map":
        return {"samples_streamed": sum(n for _, n in samples), "seed": seed}
    return {"all_worker_states": [{"samples_streamed": n, "shard_index": shard} for shard, n in samples]}


def worker_samples(folder: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """(shard, samples streamed) of each file of the data step, by shard. Errors as `dataloader_state`'s."""
    place = os.fspath(folder)
    if not os.path.isdir(place):
        raise UsageError(f"{place}: is not a folder; name the one that has {GLOBAL}")
    path = os.path.join(place, GLOBAL)
    if not os.path.exists(path):
        raise UsageError(f"{path}: does not exist; name the folder that the trainer wrote its input state to")
    step = _first_number(path)
    matches = [found for name in os.listdir(place) if (found := _WORKER.fullmatch(name))]
    counted = sorted((int(found[1]), found[0]) for found in matches if int(found[2]) == step)
    return [(shard, _first_number(os.path.join(place, name))) for shard, name in counted]


def configured_state(config: Mapping[str, Any], folder: str) -> dict[str, Any] | None:
    """The ``dataloader`` state that a trainer's *config* points to; None where it names none.

    A relative ``cerebras.save_iter_state_path`` is looked up in the working directory, then in *folder*, the config's
    own. Raises `UnsupportedValue` where the training data were not read as `PROCESSORS` do, and the errors of
    `dataloader_state`.
    """
    section, inputs = config.get("cerebras"), config.get("train_input")
    path = section.get("save_iter_state_path") if isinstance(section, Mapping) else None
    if path is None:
        return None
    if not isinstance(path, str):
        raise UnsupportedValue("input state", "cerebras.save_iter_state_path", path, "it must be the path of a folder")
    processor = inputs.get("data_processor") if isinstance(inputs, Mapping) else None
    if not isinstance(processor, str) or processor not in PROCESSORS:
        allowed = f"input state can only be converted for {' and '.join(PROCESSORS)}"
        raise UnsupportedValue("input state", "train_input.data_processor", processor, allowed)
    return dataloader_state(path if os.path.isdir(path) else os.path.join(folder, path), PROCESSORS[processor])


def with_dataloader(source: Source, state: Mapping[str, Any]) -> State:
    """The state dict of *source* with *state* under ``dataloader``, which replaces an older one.

    Raises `UsageError` when the state dict is a list or another container without keys.
    """
    keys = tuple(source.items)
    tree = source.tree or Container("dict", keys, keys)
    if tree.keys is None:
        raise UsageError(f"{source.path}: its state is a {tree.type}; only a dict has a place for {KEY!r}")
    added = state_tree({KEY: state})
    children = dict(zip(tree.keys, tree.children, strict=True))
    children[KEY] = _renamed(added.tree.children[0])
    items = {**source.items, **{_NEW + key: item for key, item in added.items.items()}}
    return State(Container(tree.type, tuple(children), tuple(children.values())), items)


def _renamed(node: Container | str) -> Container | str:
    """*node* with new names for its items: old items keep theirs, for others may be tied to them."""
    if isinstance(node, str):
        return _NEW + node
    return Container(node.type, node.keys, tuple(map(_renamed, node.children)))


def _first_number(path: str) -> int:
    """The number on the first line."""
    with open(path, "rb") as file:
        line = file.readline(_MAX_LINE)
    found = _NUMBER.fullmatch(line)
    if found is None:
        raise SourceError(path, f"its first line is {line[:40]!r}, not a count")
    return int(found[1])
