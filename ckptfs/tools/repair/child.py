"""The process that copies and changes old checkpoints with libhdf5, which can crash on malformed files.

It uses h5py and not `formats.hdf5`: formats before 0.5 describe a dataset in attributes of any number and type, pickles
among them, which must be copied as they are. Nothing here interprets them.

stdin: a JSON object with ``source`` and ``target`` (descriptors; source None: the target is changed as it is),
``spec``, ``links`` (new name to that of an object) and ``values`` (name to number). stdout: a line a piece of data,
with its bytes; then ``"done"``, or a JSON object with ``error``, ``errno`` and ``name``, the dataset that was not read
(None: writing failed).
"""

from __future__ import annotations

import itertools
import json
import math
import resource
import sys
from collections.abc import Iterator
from typing import Any

PIECE = 8 << 20
"""Bytes that are read and written at once; a chunk that is larger is read whole."""
MAX_MEMORY = 8 << 30
SPEC = "__spec__"


class Unreadable(Exception):
    """A dataset of the source cannot be read: (name, why)."""


def main() -> None:
    """Serve the one request."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    _limit_memory()
    sys.path[:] = json.loads(sys.argv[1])["sys_path"]
    try:
        _serve(**json.load(sys.stdin))
    except Unreadable as error:
        name, why = error.args
        _say({"error": why, "errno": None, "name": name})
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
        _say({"error": f"{type(error).__name__}: {error}", "errno": getattr(error, "errno", None), "name": None})
    else:
        _say("done")


def _limit_memory() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY if hard == resource.RLIM_INFINITY else hard, hard))


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _serve(source: int | None, target: int, spec: str, links: dict[str, str], values: dict[str, int]) -> None:
    import h5py
    import hdf5plugin  # noqa: F401 - registers the LZ4 filter

    mode = "r+" if source is None else "w"
    with h5py.File(f"/proc/self/fd/{target}", mode, locking=False) as new:
        if source is not None:
            with h5py.File(f"/proc/self/fd/{source}", "r", locking=False) as old:
                _copy_all(old, new)
        new.attrs[SPEC] = spec
        for name, known in links.items():
            new[name] = new[known]  # a hard link
        for name, value in values.items():
            new[name][...] = value


def _copy_all(old: Any, new: Any) -> None:
    """Every object of the root group, and its attributes but the spec. Hard links stay links."""
    import h5py

    _copy_attributes(old.id, new.id, {SPEC.encode()})
    seen: dict[int, str] = {}
    for name in old:
        link = old.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            new[name] = link
            continue
        found = _opened(old, name)
        first = seen.setdefault(h5py.h5o.get_info(found.id).addr, name)
        if first != name:
            new[name] = new[first]
        elif isinstance(found, h5py.Dataset):
            _copy_dataset(found, new, name)
        else:
            old.copy(found, new, name)


def _opened(old: Any, name: str) -> Any:
    try:
        return old[name]
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise Unreadable(name, str(error)) from error


def _copy_dataset(found: Any, new: Any, name: str) -> None:
    """Its type, shape, attributes and data; the new data is contiguous and unfiltered."""
    import h5py

    if found.id.get_create_plist().get_external_count():
        raise Unreadable(name, "its data is in another file")
    space, kind = found.id.get_space(), found.id.get_type()
    if space.get_simple_extent_type() == h5py.h5s.SIMPLE:
        space = h5py.h5s.create_simple(found.shape)
    made = h5py.Dataset(h5py.h5d.create(new.id, name.encode(), kind, space))
    _copy_attributes(found.id, made.id, set())
    if found.shape is None or not found.size:
        return
    for box in _boxes(found):
        try:
            data = found[box]
        except (OSError, RuntimeError, ValueError) as error:
            raise Unreadable(name, str(error)) from error
        made[box] = data
        _say(int(data.nbytes))


def _boxes(dataset: Any) -> Iterator[tuple[slice, ...]]:
    """Parts that cover it: its chunks, or contiguous pieces."""
    if dataset.chunks:
        yield from dataset.iter_chunks()
        return
    shape = dataset.shape
    most = max(1, PIECE // dataset.dtype.itemsize)
    inner = next(i for i in range(len(shape) + 1) if math.prod(shape[i:]) <= most)  # axes that are read whole
    if not inner:
        yield tuple(slice(0, n) for n in shape)
        return
    step = most // math.prod(shape[inner:])
    for lead in itertools.product(*map(range, shape[: inner - 1])):
        for i in range(0, shape[inner - 1], step):
            place = slice(i, min(i + step, shape[inner - 1]))
            yield (*(slice(j, j + 1) for j in lead), place, *(slice(0, n) for n in shape[inner:]))


def _copy_attributes(old: Any, new: Any, without: set[bytes]) -> None:
    """Their types, shapes and values as they are."""
    import numpy as np
    from h5py import h5a, h5s

    for i in range(h5a.get_num_attrs(old)):
        found = h5a.open(old, index=i)
        name, space = found.get_name(), found.get_space()
        if name in without:
            continue
        made = h5a.create(new, name, found.get_type(), space)
        if space.get_simple_extent_type() != h5s.NULL:
            value = np.empty(found.shape, found.dtype)
            found.read(value)
            made.write(value)
