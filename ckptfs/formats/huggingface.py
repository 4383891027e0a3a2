"""Hugging Face folders: ``config.json`` beside one file of weights, or beside shards and their index.

A model of several components is a folder of such folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from ckptfs.errors import CorruptHeader, MissingShard, SourceError, UnknownFormat, Unsafe
from ckptfs.formats.extents import ExtentFile, json_file
from ckptfs.formats.files import hf_config_beside, read_json
from ckptfs.formats.safetensors import safetensors_file
from ckptfs.formats.source import Item, Source
from ckptfs.tensors.tensor import Tensor, nbytes

MAX_INDEX = 256 << 20
"""Bytes of an index; 100,000 keys take about 10 MB."""
NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where weights are looked for, in the order of transformers: a whole file comes before the index of shards."""
COMPONENTS = (("q_encoder", "ctx_encoder"), ("image_model", "text_model"))
"""Folders that make one model together, in the order of its Cerebras checkpoint."""
OpenWeights = Callable[[str], Source]
"""Opens one file of weights, whatever its format."""


def open_folder(path: str | os.PathLike[str], open_weights: OpenWeights) -> Source:
    """Open a Hugging Face folder; `SourceError` when it holds no weights.

    *open_weights* opens its files, which may be of several formats. Items are in the order of the index's
    ``weight_map``, or of the single file. A folder of components gives ``component/key``, and the configs by
    component.
    """
    folder = os.fspath(path)
    components = components_in(folder)
    if components:
        return _open_components(folder, components, open_weights)
    return _open_one(folder, open_weights)


def _open_one(folder: str, open_weights: OpenWeights) -> Source:
    name = _weights_in(folder)
    index = f"{name}.index.json"
    both = index in NAMES and os.path.isfile(os.path.join(folder, index))
    if both and _names_only(os.path.join(folder, index), name):
        name, both = index, False  # the same tensors, in the order of the state dict
    whole = os.path.join(folder, name)
    if name.endswith(".json"):
        return replace(open_index(whole, open_weights), path=folder)
    source = with_config(open_weights(whole), folder, whole)
    if both:
        what = f"has both {name} and {index}: {name} is read, as transformers does, and the shards are left out"
        source.warnings.append(what)
    return source


def _names_only(index: str, name: str) -> bool:
    """Whether all keys of an index are in the file *name*."""
    weight_map = read_json(index, MAX_INDEX, "the index").get("weight_map")
    return isinstance(weight_map, dict) and set(map(str, weight_map.values())) == {name}


def has_weights(folder: str) -> bool:
    """Whether *folder* has weights under a name of `NAMES`, or components of a model."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in NAMES) or bool(components_in(folder))


def components_in(folder: str) -> tuple[str, ...]:
    """The components of a model in *folder*, each with its ``config.json``; none where *folder* has weights itself."""
    if any(os.path.isfile(os.path.join(folder, name)) for name in NAMES):
        return ()
    for names in COMPONENTS:
        if all(os.path.isfile(os.path.join(folder, name, "config.json")) for name in names):
            return names
    return ()


def config_in(folder: str) -> dict[str, Any]:
    """The ``config.json`` in *folder*, or those of its components by name; `SourceError` where there is none."""
    components = components_in(folder)
    if not components:
        config = hf_config_beside(os.path.join(folder, "config.json"))
        if config is None:
            raise SourceError(folder, "holds no config.json")
        return dict(config)
    return {name: hf_config_beside(os.path.join(folder, name, "config.json")) for name in components}


def _open_components(folder: str, names: tuple[str, ...], open_weights: OpenWeights) -> Source:
    with ExitStack() as undo:
        found: dict[str, Source] = {}
        for name in names:
            found[name] = _open_one(os.path.join(folder, name), open_weights)
            undo.callback(found[name].close)
        source = _together(folder, list(found.values()))
        undo.pop_all()  # from here on the files are the joined source's
    for name, part in found.items():
        for key, item in part.items.items():
            tied = f"{name}/{item.tied_to}" if item.tied_to is not None else None
            source.items[f"{name}/{key}"] = replace(item, key=f"{name}/{key}", tied_to=tied)
    return replace(source, config={name: part.config for name, part in found.items()})


def open_index(path: str | os.PathLike[str], open_weights: OpenWeights) -> Source:
    """Open the shards that a ``*.index.json`` names with *open_weights*, each once; items in its order.

    Raises `Unsafe` for a shard outside the index's folder, `MissingShard` for one that is not there and
    `CorruptHeader` for a key that its shard lacks. Keys that the index does not name are left out, with a warning.
    """
    index = os.fspath(path)
    content = read_json(index, MAX_INDEX, "the index")
    if "weight_map" not in content:
        raise UnknownFormat(index, "is JSON without a weight_map, so no index; open the model's folder instead")
    weight_map = content["weight_map"]
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptHeader(index, "has no weight_map from keys to file names")
    with ExitStack() as undo:
        shards: dict[str, Source] = {}
        for name in dict.fromkeys(weight_map.values()):
            shards[name] = open_weights(_shard_path(index, name))
            undo.callback(shards[name].close)
        source = _joined(index, weight_map, shards)
        undo.pop_all()  # from here on the files are the joined source's
    return with_config(source, index, index)


def _weights_in(folder: str) -> str:
    """The name of the file to open: the first of `NAMES`, else the only index, else the only safetensors file."""
    try:
        present = sorted(os.listdir(folder))
    except OSError as error:
        raise SourceError(folder, f"cannot be listed: {error.strerror}") from error
    for name in NAMES:
        if name in present:
            return name
    for suffixes in ((".safetensors.index.json", ".bin.index.json"), (".safetensors",)):
        found = [name for name in present if name.endswith(suffixes) and not name.startswith(".")]
        if len(found) == 1:
            return found[0]
        if found:
            raise SourceError(folder, f"holds {', '.join(found[:8])}; name the one to open")
    raise SourceError(folder, f"holds no weights: {_instead(folder, present)}")


def only_checkpoint(folder: str) -> str | None:
    """The one Cerebras checkpoint in *folder*, where nothing else in it can be opened; None otherwise."""
    try:
        present = sorted(os.listdir(folder))
    except OSError:
        return None
    others = any(name in NAMES or name.endswith((".index.json", ".safetensors", ".bin")) for name in present)
    found = [name for name in present if name.endswith(".mdl") and not name.startswith(".")]
    return os.path.join(folder, found[0]) if len(found) == 1 and not others and not components_in(folder) else None


def _instead(folder: str, present: list[str]) -> str:
    """What the user may have meant by a folder without weights."""
    checkpoints = [name for name in present if name.endswith(".mdl")]
    if checkpoints:
        return f"it has {len(checkpoints)} Cerebras checkpoints; name one, such as {checkpoints[-1]}"
    if "checkpoint.json" in present and "tensors" in present:
        return "it is a mount of ckptfs; name its hf/, cs/checkpoint.mdl or torch/checkpoint.pt"
    for names in COMPONENTS:
        missing = [name for name in names if not os.path.isfile(os.path.join(folder, name, "config.json"))]
        if 0 < len(missing) < len(names):
            return f"{missing[0]}/config.json is missing beside the other of {' and '.join(names)}"
    return f"none of {', '.join(NAMES)}"


def _shard_path(index: str, name: str) -> str:
    """Where the shard *name* is; `Unsafe` outside the index's folder, `MissingShard` when it is not there."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise Unsafe(index, f"names the shard {name[:200]!r}; shards must be in the index's own folder")
    path = os.path.join(os.path.dirname(index), name)
    if not os.path.exists(path):
        raise MissingShard(index, path, f"the shard {name} is not there; download or copy it beside the index")
    return path


def _joined(index: str, weight_map: dict[str, str], shards: dict[str, Source]) -> Source:
    items: dict[str, Item] = {}
    first: dict[int, str] = {}
    for key, name in weight_map.items():
        item = shards[name].items.get(key)
        if item is None:
            raise CorruptHeader(index, f"{key[:200]} should be in {name}, which does not have it")
        if item.tensor is not None:  # the index may name a tied tensor's keys in another order than the shard
            holder = first.setdefault(id(item.tensor), key)
            item = replace(item, tied_to=None if holder == key else holder)
        items[key] = item
    sources = list(shards.values())
    extra = sum(len(source.items) for source in sources) - len(items)
    warnings = [f"{extra} keys of the shards are not in the index and left out"] if extra else []
    return replace(_together(index, sources), items=items, warnings=warnings)


def _together(path: str, sources: list[Source]) -> Source:
    """One source without items that owns the files of *sources*."""
    formats = sorted({source.format for source in sources})
    return Source(
        path,
        "+".join(formats) or "safetensors",
        sources[0].format_version if sources else None,
        None,
        {},
        mtime_ns=max((source.mtime_ns for source in sources), default=0),
        nbytes=sum(source.nbytes for source in sources),
        files=[file for source in sources for file in source.files],
        warnings=[warning for source in sources for warning in source.warnings],
    )


def with_config(source: Source, path: str, beside: str) -> Source:
    """*source* with the config beside it, under the name that the user gave; closed when the config is broken."""
    with ExitStack() as undo:
        undo.callback(source.close)
        config = hf_config_beside(beside)
        undo.pop_all()
    return replace(source, path=path, config=config)


Numbering: TypeAlias = Literal["as needed", "always"]
"""``as needed``: one plain file without an index when everything fits into it, as transformers saves.
``always``: numbers and an index even for one shard, as the Cerebras converter saves."""


def shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """*tensors* split into shards of at most *max_bytes* of tensor data, at least one, filled in key order.

    A key that would exceed the limit opens a new shard; a tensor above the limit has a shard of its own.
    """
    found: list[dict[str, Tensor]] = [{}]
    used = 0
    for key, tensor in tensors.items():
        size = nbytes(tensor)
        if found[-1] and used + size > max_bytes:
            found.append({})
            used = 0
        found[-1][key] = tensor
        used += size
    return found


def named_shards(
    tensors: Mapping[str, Tensor],
    max_bytes: int,
    *,
    stem: str = "model",
    suffix: str = ".safetensors",
    numbering: Numbering = "as needed",
) -> dict[str, dict[str, Tensor]]:
    """File name to the tensors in it: ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    parts = shards(tensors, max_bytes)
    if len(parts) == 1 and numbering == "as needed":
        return {f"{stem}{suffix}": parts[0]}
    return {f"{stem}-{i:05d}-of-{len(parts):05d}{suffix}": part for i, part in enumerate(parts, 1)}


def index_file(named: Mapping[str, Mapping[str, Tensor]], *, numbering: Numbering = "as needed") -> ExtentFile:
    """The ``.index.json`` of these shards, spelled as transformers (sorted) or the Cerebras converter spells it."""
    index = {
        "metadata": {"total_size": sum(nbytes(t) for part in named.values() for t in part.values())},
        "weight_map": {key: name for name, part in named.items() for key in part},
    }
    if numbering == "always":
        return json_file(index, indent=4, newline=False)
    return json_file(index, sort_keys=True)


def hf_files(
    tensors: Mapping[str, Tensor], max_bytes: int, *, numbering: Numbering = "as needed"
) -> dict[str, ExtentFile]:
    """The weight files of a Hugging Face model in safetensors, with ``model.safetensors.index.json`` if numbered."""
    named = named_shards(tensors, max_bytes, numbering=numbering)
    files = {name: safetensors_file(part) for name, part in named.items()}
    if len(named) > 1 or numbering == "always":
        files["model.safetensors.index.json"] = index_file(named, numbering=numbering)
    return files
