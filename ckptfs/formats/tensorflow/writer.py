"""Writing TensorFlow checkpoints: data files and their index, as extents.

All sizes are known before any data are read. Only the checksums in the index are not: a block of the index computes
those of its own variables when it is read. Data files note the checksums of what is read from them, so an index that is
read after them costs nothing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ckptfs.formats.extents import Body, ExtentFile, file_of
from ckptfs.formats.source import Item, Source
from ckptfs.formats.tensorflow.bundle import (
    NUMBERS,
    STRING,
    checksum_field,
    data_name,
    entry_head,
    header_bytes,
    index_name,
    string_bytes,
)
from ckptfs.formats.tensorflow.checksum import Summed, crc32c, masked
from ckptfs.formats.tensorflow.table import MAX_KEY, Entry, table_file
from ckptfs.tensors.tensor import Shape, Tensor, nbytes


@dataclass(frozen=True, slots=True)
class Literal:
    """A variable whose data are at hand: strings, and plain numbers."""

    dtype: int
    """TensorFlow's number."""
    shape: Shape
    data: bytes
    crc: int
    """Masked."""


Variable: TypeAlias = Tensor | Literal
ShardOf = Callable[[str], str]
"""The name of the data file that a variable belongs to; any text."""


def bundle_files(
    prefix: str, variables: Mapping[str, Variable], shard_of: ShardOf = lambda key: ""
) -> dict[str, ExtentFile]:
    """File name to file of the checkpoint *prefix*: data files in order, then the index. Reads no data.

    Data files stand in the order in which *shard_of* first names them, the variables in each in the order given.
    The names of *variables* are those that `name_refusal` has nothing against.
    """
    shards: dict[str, list[str]] = {}
    for key in variables:
        shards.setdefault(shard_of(key), []).append(key)
    groups = list(shards.values()) or [[]]
    sums: dict[int, Summed] = {}
    entries, files = [Entry(b"", header_bytes(len(groups)))], {}
    for shard, keys in enumerate(groups):
        bodies, at = [], 0
        for key in keys:
            body, size, entry = _laid(key, variables[key], shard, at, sums)
            bodies.append(body)
            entries.append(entry)
            at += size
        files[data_name(prefix, shard, len(groups))] = file_of(bodies)
    files[index_name(prefix)] = table_file(sorted(entries, key=lambda entry: entry.key))
    return files


def _laid(key: str, variable: Variable, shard: int, at: int, sums: dict[int, Summed]) -> tuple[Body, int, Entry]:
    """(data, their size, entry) of one variable at the offset *at*. Tied tensors share one checksum."""
    if isinstance(variable, Literal):
        size = len(variable.data)
        head = entry_head(variable.dtype, variable.shape, shard, at, size)
        return variable.data, size, Entry(key.encode(), head + checksum_field(variable.crc))
    size = nbytes(variable)
    head = entry_head(NUMBERS[variable.dtype.name], variable.shape, shard, at, size)
    if not size:
        return b"", 0, Entry(key.encode(), head + checksum_field(masked(0)))
    summed = sums.setdefault(id(variable), Summed(variable))
    return summed, size, Entry(key.encode(), head + checksum_field(0), summed)


def state_text(prefix: str) -> bytes:
    """The text file ``checkpoint`` of a folder whose only checkpoint is *prefix*."""
    quoted = "".join(char if char not in '"\\\n' else f"\\{ord(char):03o}" for char in prefix)
    return f'model_checkpoint_path: "{quoted}"\nall_model_checkpoint_paths: "{quoted}"\n'.encode(
        "utf-8", "surrogateescape"
    )


def shard_by(pattern: re.Pattern[str]) -> ShardOf:
    """One data file for each text that *pattern* (or its first group) finds in a name, one for names without it."""

    def shard_of(key: str) -> str:
        found = pattern.search(key)
        return "" if found is None else found[1 if pattern.groups else 0] or ""

    return shard_of


def variables_of(source: Source) -> tuple[dict[str, Variable], dict[str, str]]:
    """(variables, reasons) of the items of *source*: what a checkpoint can hold, and why it cannot hold the rest."""
    found: dict[str, Variable] = {}
    reasons: dict[str, str] = {}
    for key, item in source.items.items():
        variable = name_refusal(key) or _variable(item)
        if isinstance(variable, str):
            reasons[key] = variable
        else:
            found[key] = variable
    return found, reasons


def name_refusal(key: str) -> str | None:
    """Why *key* cannot be the name of a variable; None when it can."""
    if any("\ud800" <= char <= "\udfff" for char in key):
        return "a name must be valid Unicode"
    if not key or key.startswith("\0"):
        return "a name must not be empty or begin with NUL"
    return f"a name has at most {MAX_KEY} bytes" if len(key.encode()) > MAX_KEY else None


def _variable(item: Item) -> Variable | str:
    """The variable of one item, or why there is none. Python's numbers are 64 bits wide."""
    if item.tensor is not None:
        return item.tensor
    value = item.value
    if item.kind == "string":
        texts = [text.encode("utf-8", "surrogateescape") for text in _texts(value)]
        data, crc = string_bytes(texts)
        return Literal(STRING, item.shape or (), data, crc)
    if isinstance(value, bool):
        return _number("bool", np.uint8(value).tobytes())
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            return "the number does not fit into 64 bits"
        return _number("int64", struct.pack("<q", value))
    if isinstance(value, float):
        return _number("float64", struct.pack("<d", value))
    return item.reason or f"there is no value to write ({item.kind})"


def _number(dtype: str, data: bytes) -> Literal:
    return Literal(NUMBERS[dtype], (), data, masked(crc32c(data)))


def _texts(value: object) -> list[str]:
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [str(value)]
