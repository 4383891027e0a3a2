"""Write a view to disk: the files that a mount shows, under the names that the public converter gives them."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml

from ckptfs.conversion.conversion import Conversion
from ckptfs.errors import UsageError, WriteError
from ckptfs.formats.cerebras.lz4_writer import write_lz4
from ckptfs.formats.cerebras.state import State
from ckptfs.formats.cerebras.writer import RELEASE, mdl_file
from ckptfs.formats.extents import ExtentFile, json_file, text_file
from ckptfs.formats.huggingface import hf_files, index_file, named_shards
from ckptfs.formats.torch.writer import torch_file
from ckptfs.tensors.tensor import Tensor
from ckptfs.tensors.tensor import nbytes as tensor_nbytes
from ckptfs.tools.write import new_file, write_file
from ckptfs.vfs.cerebras import checkpoint_file, model_state, params_file, release_of, state_of
from ckptfs.vfs.components import beside_part, parts_of
from ckptfs.vfs.hf import json_files, model_files
from ckptfs.vfs.tree import Entry

Progress = Callable[[int], object]
Check = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Compressed:
    """A Cerebras checkpoint with LZ4 chunks: its sizes are known only when it is written."""

    state: State
    release: str

    @property
    def size(self) -> int:
        """Bytes of the tensors: about the maximum that the file can have."""
        tensors = {id(i.tensor): i.tensor for i in self.state.items.values() if i.tensor is not None}
        return sum(map(tensor_nbytes, tensors.values()))

    def write(self, path: str, *, force: bool, progress: Progress | None, check: Check | None) -> None:
        with new_file(path, force=force) as output:
            write_lz4(self.state, output.write_at, release=self.release, progress=progress)
            if check is not None:
                check()


Written = ExtentFile | Compressed
Files = Mapping[str, Written | dict[str, ExtentFile]]
"""Names to files, or to folders of files."""


def stem(path: str) -> str:
    """The name that outputs begin with: *path*'s without its alphabetic extensions.

    ``pytorch_model.bin.index.json`` is ``pytorch_model``, ``checkpoint_1.7.mdl`` is ``checkpoint_1.7``.
    """
    name = os.path.basename(os.path.abspath(path))
    return re.sub(r"(\.[A-Za-z]+)+$", "", name) or name


def config_stem(path: str) -> str:
    """The same for a config, which a folder holds as ``config.json``."""
    return "config" if os.path.isdir(path) else stem(path)


def outputs(
    view: Conversion,
    checkpoint: str,
    config: str | None,
    *,
    shard_bytes: int,
    safetensors: bool,
    compress: str | None = None,
    folder: str = "",
    beside: Mapping[str, Entry] | None = None,
) -> dict[str, Written | dict[str, ExtentFile]]:
    """What a conversion writes: names to files, or to folders of files. *config* is the source config's path.

    *compress* is None or ``lz4``, for Cerebras targets; *beside* are the files of a tokenizer's folder, for Hugging
    Face. *folder* is where the outputs go, for configs that name a path. Several components have a folder each; the
    names of the folders that they come from do not matter. Of a Cerebras checkpoint, the config is last.
    """
    one_model = partial(hf_outputs, shard_bytes=shard_bytes, safetensors=safetensors)
    if view.components and view.tgt == "hf":
        parts = parts_of(view, folder).items()
        return {name: one_model(part, beside=beside_part(part, beside or {})) for name, part in parts}
    if view.components:
        checkpoint, config = "pytorch_model", "config"
    if view.tgt == "hf":
        return {f"{stem(checkpoint)}_to_hf": one_model(view, beside=beside)}
    return {
        f"{stem(checkpoint)}_to_{view.tgt}.mdl": Compressed(state_of(view), release_of(view.tgt))
        if compress
        else checkpoint_file(view),
        f"{config_stem(config or 'config.json')}_to_{view.tgt}.yaml": params_file(view.config),
    }


def hf_outputs(
    view: Conversion, *, shard_bytes: int, safetensors: bool, beside: Mapping[str, Entry] | None = None
) -> dict[str, ExtentFile]:
    """What the mount shows, with numbered shards and their index also when there is only one."""
    if safetensors:
        return model_files(view, hf_files(view.tensors, shard_bytes, numbering="always"), beside or {})
    named = named_shards(view.tensors, shard_bytes, stem="pytorch_model", suffix=".bin", numbering="always")
    weights = {name: torch_file(part) for name, part in named.items()}
    weights["pytorch_model.bin.index.json"] = index_file(named, numbering="always")
    return model_files(view, weights, beside or {})


def _configs(view: Conversion) -> dict[str, ExtentFile]:
    """``config.json``, and the JSON files that belong to it."""
    return json_files({**view.files, "config.json": view.config})


def in_place(
    files: Mapping[str, Written | dict[str, ExtentFile]], checkpoint: str, config: str | None
) -> dict[str, Written | dict[str, ExtentFile]]:
    """*files* of `outputs` under absolute names, each beside its input: a config beside the source *config*."""
    folder = os.path.dirname(os.path.abspath(checkpoint))
    placed = {os.path.join(folder, name): file for name, file in files.items()}
    if config is None or os.path.isdir(config):
        return placed
    *others, last = placed
    if not last.endswith(".yaml"):
        return placed
    beside = os.path.join(os.path.dirname(os.path.abspath(config)), os.path.basename(last))
    return {**{name: placed[name] for name in others}, beside: placed[last]}


def config_output(view: Conversion, path: str, *, folder: str = "") -> dict[str, Written | dict[str, ExtentFile]]:
    """The file of a converted config: JSON for hf, YAML for a Cerebras release; for components, folders of them.

    *view* may be without tensors, *path* is the source config's, *folder* is as in `outputs`.
    """
    if view.components:
        return {name: _configs(part) for name, part in parts_of(view, folder).items()}
    if view.tgt == "hf":
        return {f"{config_stem(path)}_to_hf.json": json_file(view.config, indent=4, newline=False)}
    return {f"{config_stem(path)}_to_{view.tgt}.yaml": params_file(view.config)}


def folded_outputs(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], params: str, checkpoint: str, *, release: str | None
) -> dict[str, ExtentFile]:
    """A checkpoint without adapters and its config, under the inputs' names with ``_folded`` before the extension.

    *tensors* are its ``model`` state, which is all that the checkpoint holds.
    """
    names = ["{}_folded{}".format(*os.path.splitext(os.path.basename(path))) for path in (checkpoint, params)]
    return {
        names[0]: mdl_file(model_state(tensors), release=release or RELEASE),
        names[1]: text_file(yaml.safe_dump(dict(config), sort_keys=False)),
    }


def nbytes(files: Files) -> int:
    """Bytes of everything in *files*."""
    return sum(nbytes({**f}) if isinstance(f, dict) else f.size for f in files.values())


def write_outputs(
    files: Mapping[str, Written | dict[str, ExtentFile]],
    folder: str,
    *,
    force: bool = False,
    progress: Progress | None = None,
    check: Check | None = None,
) -> list[str]:
    """Write *files* below *folder*, which is made if need be; the paths written.

    Each gets its name when it is complete, and nothing is left of what failed or was interrupted. *check* is called
    before that: it raises where the source was written to meanwhile. Raises `UsageError` before the first byte when
    one exists (without *force*), `WriteError` when the disk is full or becomes full.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from error
    targets = {os.path.join(folder, name): file for name, file in files.items()}
    for path in targets:
        if os.path.lexists(path) and not force:
            raise UsageError(f"{path} exists already", option="force")
    _check_room(folder, nbytes(files))
    for path in targets:
        if not os.access(os.path.dirname(path), os.W_OK):
            raise UsageError(f"{path} cannot be written there; give another folder", option="output_dir")
    for path, file in targets.items():
        if isinstance(file, ExtentFile):
            write_file(file, path, force=force, progress=progress, check=check)
        elif isinstance(file, Compressed):
            file.write(path, force=force, progress=progress, check=check)
        else:
            _write_folder(file, path, progress, check)
    return list(targets)


def _write_folder(files: Mapping[str, ExtentFile], path: str, progress: Progress | None, check: Check | None) -> None:
    """Write all *files* into a new folder that gets its name when they are complete."""
    mark = secrets.token_hex(4)
    temporary, old = f"{path}.{mark}.tmp", f"{path}.{mark}.old"
    try:
        os.mkdir(temporary)
        for name, file in files.items():
            write_file(file, os.path.join(temporary, name), progress=progress, check=check)
        if os.path.lexists(path):
            os.rename(path, old)
        os.rename(temporary, path)
    except OSError as error:
        raise WriteError(path, error.errno or errno.EIO, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if os.path.lexists(path):
            shutil.rmtree(old, ignore_errors=True)


def _check_room(folder: str, size: int) -> None:
    """Refuse before the first byte what cannot fit."""
    status = os.statvfs(folder)
    if status.f_flag & os.ST_RDONLY:
        raise UsageError(f"{folder}: is on a read-only file system; write elsewhere", option="output_dir")
    free = status.f_bavail * status.f_frsize
    if size > free:
        raise WriteError(folder, errno.ENOSPC, f"{size} bytes are needed, {free} are free")
