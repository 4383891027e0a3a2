"""Whether a checkpoint is sound: what its reader noticed, and all of its data read once.

Data is read in blocks of bounded size. Where a block cannot be read, its parts are tried one by one, down to a chunk:
every damaged chunk is named, and the rest is known to be good.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ckptfs.errors import CkptfsError, CorruptChunk
from ckptfs.formats.source import Source
from ckptfs.formats.zip import damaged_records, is_zip
from ckptfs.tensors.file_tensor import FileTensor
from ckptfs.tensors.scan import count_nan_inf
from ckptfs.tensors.tensor import Tensor, n_cols, n_elements, n_rows, nbytes

PIECE = 4 << 20
"""Elements that are read at once, if a chunk has no more."""
MAX_SHOWN = 100
"""Damaged parts of one tensor that are named."""
_MAX_PARTS = 1 << 16
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_LAYER = re.compile(r"(.*?)\.(\d{1,6})\.", re.ASCII)
_MAX_LAYERS = 100_000
Progress = Callable[[int], object]
Block = tuple[int, int, int, int]
"""Row, column, rows, columns of a tensor's block view."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong; *key* is None where it is the whole checkpoint."""

    key: str | None
    what: str
    offset: int | None = None
    """Byte of the file, for damaged data."""
    block: Block | None = None
    """(row, column, rows, columns) of what cannot be read; all axes after the first are columns."""
    view: str | None = None
    """The format that has *key*, where it is not the checkpoint's own."""


@dataclass(slots=True)
class Report:
    """What the checks found."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is sound, but could not be inspected."""
    n_tensors: int = 0
    nbytes: int = 0
    """Bytes that have been read, tied tensors once."""

    @property
    def sound(self) -> bool:
        return not self.problems

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        problems = [{k: v for k, v in asdict(p).items() if v is not None or k == "key"} for p in self.problems]
        counts = {"n_tensors": self.n_tensors, "nbytes": self.nbytes}
        return {"sound": self.sound, **counts, "problems": problems, "notes": self.notes}


def check_structure(report: Report, source: Source) -> None:
    """What the reader noticed: data that is missing or contradicts its description, broken links."""
    echoes = set()
    for item in source.items.values():
        if item.reason is None:
            continue
        echoes.add(f"{item.key}: {item.reason}")
        if item.kind == "object" and item.class_name is not None:
            report.notes.append(f"{item.key}: {item.class_name}: {item.reason}")
        else:
            report.problems.append(Problem(item.key, item.reason))
    for warning in source.warnings:
        if warning not in echoes:
            key, colon, what = warning.partition(": ")
            known = bool(colon) and key in source.items
            report.problems.append(Problem(key, what) if known else Problem(None, warning))


def check_data(
    report: Report,
    tensors: Mapping[str, Tensor],
    *,
    view: str | None = None,
    values: bool = False,
    progress: Progress | None = None,
) -> None:
    """Read all of *tensors*, a *view*'s or the checkpoint's own. With *values*, NaN and infinities are problems."""
    for key, tensor in once(tensors).items():
        report.n_tensors, nan, inf = report.n_tensors + 1, 0, 0
        for elements in _read(report, key, tensor, view):
            if values:
                more = count_nan_inf(tensor.dtype, elements.reshape(-1))
                nan, inf = nan + more[0], inf + more[1]
            report.nbytes += elements.nbytes
            if progress is not None:
                progress(elements.nbytes)
        if nan or inf:
            found = [f"{n} {name}" for n, name in ((nan, "NaN"), (inf, "infinite")) if n]
            report.problems.append(Problem(key, f"{' and '.join(found)} of {n_elements(tensor.shape)} values"))


def once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under its first key; tied keys hold the same object."""
    first: dict[int, str] = {}
    for key, tensor in tensors.items():
        first.setdefault(id(tensor), key)
    return {key: tensors[key] for key in first.values()}


def _read(report: Report, key: str, tensor: Tensor, view: str | None) -> Iterator[Any]:
    """The elements of each block that can be read; the others become problems."""
    messages: set[str] = set()
    todo = list(_blocks(tensor))[::-1]
    while todo:
        block = todo.pop()
        row, col, rows, cols = block
        elements = np.empty((rows, cols), tensor.dtype.storage_dtype)
        try:
            tensor.read_block(row, col, elements)
        except (CkptfsError, OSError) as error:
            parts = list(_parts(tensor, block))
            if len(parts) > 1:
                todo += parts[::-1]
            elif str(error) not in messages:
                messages.add(str(error))
                at = error.offset if isinstance(error, CorruptChunk) else None
                if len(messages) <= MAX_SHOWN:
                    report.problems.append(Problem(key, _short(error, key), at, block, view))
        else:
            yield elements
    if len(messages) > MAX_SHOWN:
        report.problems.append(Problem(key, f"and {len(messages) - MAX_SHOWN} more parts that cannot be read"))


def _short(error: Exception, key: str) -> str:
    """The message without the path and the key, which the report has already."""
    return str(error).removeprefix(f"{getattr(error, 'path', '')}: ").removeprefix(f"{key}: ")


def _blocks(tensor: Tensor) -> Iterator[Block]:
    """The whole tensor in blocks of at most `PIECE` elements (or one chunk), with edges at chunks."""
    rows, cols = n_rows(tensor.shape), n_cols(tensor.shape)
    if not rows * cols:
        return
    block_rows, block_cols = (min(a, b) for a, b in zip(tensor.preferred_block, (rows, cols), strict=True))
    block_cols = min(cols, max(block_cols, PIECE // block_rows // block_cols * block_cols))
    block_rows = min(rows, max(block_rows, PIECE // block_cols // block_rows * block_rows))
    yield from _tiles((0, 0, rows, cols), block_rows, block_cols)


def _parts(tensor: Tensor, block: Block) -> Iterator[Block]:
    """The chunks of *block*; the block itself where there are none, or far too many."""
    block_rows, block_cols = tensor.preferred_block
    _, _, rows, cols = block
    if (
        isinstance(tensor, FileTensor)
        or (block_rows, block_cols) == (1, 1)
        or -(-rows // block_rows) * -(-cols // block_cols) > _MAX_PARTS
    ):
        return iter([block])
    return _tiles(block, block_rows, block_cols)


def _tiles(block: Block, block_rows: int, block_cols: int) -> Iterator[Block]:
    row, col, rows, cols = block
    for i in range(row, row + rows, block_rows):
        for j in range(col, col + cols, block_cols):
            yield i, j, min(block_rows, row + rows - i), min(block_cols, col + cols - j)


def check_layers(report: Report, keys: Iterable[str], config: Mapping[str, Any]) -> None:
    """Whether a Hugging Face model has the layers that its config says; loaders fill gaps with random numbers."""
    wanted = next((config[name] for name in _LAYERS if type(config.get(name)) is int), None)
    layers: dict[str, dict[int, int]] = {}
    for key in keys:
        if found := _LAYER.match(key):
            numbers = layers.setdefault(found[1], {})
            numbers[int(found[2])] = numbers.get(int(found[2]), 0) + 1
    if wanted is None or not layers:
        return
    prefix = max(layers, key=lambda name: sum(layers[name].values()))  # lists of other modules are shorter
    there, should = set(layers[prefix]), set(range(min(wanted, _MAX_LAYERS)))
    if there != should:
        odd = [str(n) for n in sorted(there ^ should)]
        more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
        what = f"the config says {wanted} layers: {prefix}.{{{', '.join(odd[:8])}}}{more} are missing or too many"
        report.problems.append(Problem(None, what))


def check_sums(report: Report, source: Source) -> None:
    """Compare the checksums in zip files with the data; torch writes 0 where it leaves one out."""
    stored = [t for t in source.tensors().values() if isinstance(t, FileTensor)]
    for file in source.files:
        mine = [t for t in stored if t.file is file]
        if not is_zip(file.read(4, 0)):
            continue
        for record, start in damaged_records(file):
            keys: list[str | None] = [t.key for t in mine if start <= t.offset < start + record.nbytes]
            what = f"the checksum of {record.name} is wrong: its data have changed"
            report.problems += [Problem(key, what, start) for key in keys or [None]]


def data_nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that `check_data` reads."""
    return sum(map(nbytes, once(tensors).values()))
