"""Convert between HDF5 and TensorFlow checkpoints, on disk: whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress

from ckptfs.errors import UsageError, WriteError
from ckptfs.formats.cerebras.flat import flat_file, write_flat_lz4
from ckptfs.formats.extents import ExtentFile, file_of
from ckptfs.formats.source import Source
from ckptfs.formats.tensorflow.checksum import need_crc32c
from ckptfs.formats.tensorflow.reader import STATE_FILE
from ckptfs.formats.tensorflow.writer import bundle_files, shard_by, state_text, variables_of
from ckptfs.tools.write import PIECE, new_file, write_file

Progress = Callable[[int], object]
_MAX_SHOWN = 8


def bundle_of(source: Source, saver_path: str, pattern: str | None = None) -> dict[str, ExtentFile]:
    """Path to file of the checkpoint that `write_bundle` writes under the prefix *saver_path*.

    *pattern* is a regular expression: one data file for each text that it finds in names. Raises `UsageError`,
    naming the keys, for what TensorFlow cannot hold.
    """
    need_crc32c(saver_path)
    if source.format != "cerebras-h5":
        raise UsageError(f"{source.path}: is no HDF5 file ({source.format}); a mount shows it in tf/")
    variables, reasons = variables_of(source)
    if reasons:
        shown = [f"{key!r:.200}: {why}" for key, why in list(reasons.items())[:_MAX_SHOWN]]
        more = [f"and {len(reasons) - _MAX_SHOWN} more"] if len(reasons) > _MAX_SHOWN else []
        raise UsageError(f"cannot be written as a TensorFlow checkpoint: {'; '.join(shown + more)}")
    if not os.path.basename(saver_path):
        raise UsageError(f"{saver_path}: is a folder; name a checkpoint in it, such as {saver_path}model.ckpt")
    try:
        shards = {} if pattern is None else {"shard_of": shard_by(re.compile(pattern))}
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a regular expression: {error}") from error
    return bundle_files(saver_path, variables, **shards)


def write_bundle(
    files: Mapping[str, ExtentFile], saver_path: str, *, force: bool = False, progress: Progress | None = None
) -> tuple[list[str], bool]:
    """Write *files* and, where the folder has none yet, its state file: (paths written, whether that was written).

    No file has its name before all are complete; the index is last. Raises `UsageError` when one exists (without
    *force*), `WriteError` when the disk is full.
    """
    _write_together(files, force=force, progress=progress)
    state = os.path.join(os.path.dirname(saver_path), STATE_FILE)
    if os.path.lexists(state):
        return list(files), False
    write_file(file_of([state_text(os.path.basename(saver_path))]), state)
    return [*files, state], True


def write_h5(
    source: Source, path: str, *, compress: str | None = None, force: bool = False, progress: Progress | None = None
) -> None:
    """Write the variables of a TensorFlow checkpoint as one HDF5 file; *compress* is None or ``lz4``."""
    if source.format != "tensorflow":
        raise UsageError(f"{source.path}: is no TensorFlow checkpoint ({source.format}); it cannot be the source")
    if compress is None:
        write_file(flat_file(source.items), path, force=force, progress=progress)
        return
    with new_file(path, force=force) as output:
        write_flat_lz4(source.items, output.write_at, progress=progress)


def _write_together(files: Mapping[str, ExtentFile], *, force: bool, progress: Progress | None) -> None:
    """Write all *files*, then give them their names in order. The last one makes the others count."""
    *_, last = files
    there = {path for path in files if os.path.lexists(path)}
    try:
        with ExitStack() as unnamed:  # closes in the other order: the last file is named last
            outputs = {path: unnamed.enter_context(new_file(path, force=force)) for path in reversed([*files])}
            _check_room(last, sum(file.size for file in files.values()))
            buffer = memoryview(bytearray(PIECE))
            for path, file in files.items():
                offset = 0
                while n := file.read_into(offset, buffer):
                    outputs[path].write_at(offset, buffer[:n])
                    offset += n
                    if progress is not None:
                        progress(n)
            with suppress(FileNotFoundError):
                os.unlink(last)  # an old index must not stand beside new data
    except BaseException:
        for path in files.keys() - there:
            with suppress(FileNotFoundError):
                os.unlink(path)
        raise


def _check_room(path: str, size: int) -> None:
    """Refuse before the first byte what cannot fit."""
    status = os.statvfs(os.path.dirname(path) or ".")
    free = status.f_bavail * status.f_frsize
    if size > free:
        raise WriteError(path, errno.ENOSPC, f"{size} bytes are needed, {free} are free")
