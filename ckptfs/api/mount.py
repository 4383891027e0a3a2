"""`mount`: a checkpoint as a folder, for the length of a ``with`` block.

A process of its own makes the mount: the daemon is a fork, and a fork of the caller would take its threads' locks, its
memory and its open files along.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfs.api.checkpoint import Checkpoint
from ckptfs.conversion.resolve import PathLike, prepare
from ckptfs.errors import CkptfsError, MountError, MountRefused
from ckptfs.formats.detect import open_source
from ckptfs.tensors.cache import shared
from ckptfs.vfs import hf, views

_START = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "from ckptfs.api.mount import serve_request; serve_request()"
)


@contextmanager
def mount(
    source: Checkpoint | PathLike,
    mountpoint: PathLike | None = None,
    *,
    model: str | None = None,
    config: PathLike | Mapping[str, Any] | None = None,
    src_fmt: str | None = None,
    tgt_fmt: str | None = None,
    drop_unmatched_keys: bool = False,
    follow_links: bool = False,
    shard_size: int | None = None,
    log_file: PathLike | None = None,
) -> Iterator[Path]:
    """*source* as a folder on *mountpoint*, an empty folder, or a new temporary one; unmounted at the block's end.

    *source* is a path, or a checkpoint that was opened from one. The other arguments are those of ``ckptfs mount``;
    *shard_size* is in bytes. Files that are still open at the end stay readable, out of sight, until they are closed.
    Raises `MountError` where the machine does not allow it, and what `ckptfs.open` and `ckptfs.view` raise.
    """
    where: str | Checkpoint = source if isinstance(source, Checkpoint) else os.path.abspath(source)
    how = {
        "model": model,
        "config": config if config is None or isinstance(config, Mapping) else os.path.abspath(config),
        "src_fmt": src_fmt,
        "tgt_fmt": tgt_fmt,
        "drop_unmatched_keys": drop_unmatched_keys,
    }
    log = os.path.abspath(log_file) if log_file is not None else None
    with ExitStack() as undo:
        if mountpoint is None:
            mountpoint = undo.enter_context(tempfile.TemporaryDirectory(prefix="ckptfs-"))
        folder = os.path.abspath(mountpoint)
        _ask(_Request(where, folder, how, follow_links, shard_size, log))
        undo.callback(_unmount, folder)
        yield Path(folder)


@dataclass(frozen=True, slots=True)
class _Request:
    """What is mounted, where and how; all paths are absolute."""

    source: str | Checkpoint
    """A checkpoint is opened again, if it is still the same."""
    mountpoint: str
    how: Mapping[str, Any]
    """Keywords of `resolve.prepare`."""
    follow_links: bool
    shard_size: int | None
    log_file: str | None


def _ask(request: _Request) -> None:
    """Have a process of its own mount it; raises what that raises."""
    path = [os.path.abspath(entry) for entry in sys.path]
    command = [sys.executable, "-c", _START, json.dumps(path)]
    done = subprocess.run(command, input=pickle.dumps(request), capture_output=True, cwd="/")
    if done.returncode == 0 and not done.stdout:
        return
    try:
        error = pickle.loads(done.stdout)
    except (pickle.UnpicklingError, EOFError):
        error = None
    if isinstance(error, (CkptfsError, OSError)):
        raise error
    said = done.stderr.decode(errors="replace").strip().splitlines()
    raise MountError(f"{request.mountpoint}: the process that mounts it failed ({said[-1] if said else 'no message'})")


def serve_request() -> None:
    """The process of its own: mount what stdin says; stdout gets the error, or nothing."""
    try:
        _mount(pickle.load(sys.stdin.buffer))
    except (CkptfsError, OSError) as error:
        sys.stdout.buffer.write(pickle.dumps(error))
        sys.stdout.flush()
    os._exit(0)  # nothing of the daemon's is undone


def _mount(request: _Request) -> None:
    from ckptfs.mount import daemon, fuse
    from ckptfs.mount.mount_table import check_mountpoint

    fuse.load_binding()
    if isinstance(request.source, Checkpoint):
        source = request.source.source
    else:
        source = open_source(request.source, shared(), follow_links=request.follow_links)
    where = check_mountpoint(request.mountpoint, source.path)
    view, reason = prepare(source, **request.how)
    size = request.shard_size or hf.DEFAULT_SHARD_BYTES
    tree = views.build(source, view, reason=reason, shard_bytes=size, where=where)
    daemon.mount_in_background(tree, where, fuse.MountOptions(source_nbytes=source.nbytes), log_file=request.log_file)


def _unmount(folder: str) -> None:
    from ckptfs.mount.daemon import unmount_and_wait
    from ckptfs.mount.mount_table import mount_at, resolve

    if mount_at(resolve(folder)) is None:  # somebody was faster
        return
    try:
        unmount_and_wait(folder)
    except MountRefused:
        unmount_and_wait(folder, lazy=True)  # a file is still open, or mapped
