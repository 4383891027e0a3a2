"""`convert`, `diff` and `check`: what the commands of these names do, for Python."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, overload

from ckptfs.api.checkpoint import Checkpoint, View, open, view
from ckptfs.conversion.resolve import PathLike
from ckptfs.errors import UsageError
from ckptfs.formats.source import Item
from ckptfs.tools import check as checking
from ckptfs.tools import diff as comparing
from ckptfs.tools import export
from ckptfs.tools.check import Report
from ckptfs.tools.diff import Comparison
from ckptfs.vfs.hf import DEFAULT_SHARD_BYTES

Progress = Callable[[int], object]
Readable = Checkpoint | View | PathLike


def convert(
    checkpoint: Checkpoint | PathLike,
    tgt_fmt: str = "hf",
    *,
    output_dir: PathLike | None = None,
    model: str | None = None,
    config: PathLike | Mapping[str, Any] | None = None,
    src_fmt: str | None = None,
    drop_unmatched_keys: bool = False,
    hf_shard_size: int = DEFAULT_SHARD_BYTES,
    export_safetensors: bool = False,
    compress: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write *checkpoint* as *tgt_fmt*: the files that ``ckptfs convert`` writes, and where they are.

    *output_dir* is by default the checkpoint's folder, *hf_shard_size* is in bytes, *progress* gets the bytes of each
    piece. Raises `UsageError` for outputs that exist (without *force*), and what `ckptfs.view` raises.
    """
    with _opened(checkpoint) as opened:
        shown = view(
            opened, tgt_fmt, model=model, config=config, src_fmt=src_fmt, drop_unmatched_keys=drop_unmatched_keys
        )
        if compress is not None and (compress != "lz4" or shown.plan.tgt == "hf"):
            raise UsageError(f"compress={compress!r}: a Cerebras target takes None or 'lz4', hf takes None")
        path = opened.recipe.path if opened.recipe else opened.source.path
        folder = os.fspath(output_dir) if output_dir is not None else os.path.dirname(path)
        files = export.outputs(
            shown.plan,
            path,
            None if config is None or isinstance(config, Mapping) else os.fspath(config),
            shard_bytes=hf_shard_size,
            safetensors=export_safetensors,
            compress=compress,
            folder=folder,
        )
        written = export.write_outputs(files, folder, force=force, progress=progress, check=opened.check)
    for warning in shown.plan.warnings:
        warnings.warn(warning, stacklevel=2)
    return [Path(name) for name in written]


def diff(
    a: Readable,
    b: Readable,
    *,
    keys: Sequence[str] = (),
    ignore: Sequence[str] = (),
    prefix_a: str = "",
    prefix_b: str = "",
    rtol: float = 0.0,
    atol: float = 0.0,
    equal_nan: bool = False,
    dtypes: bool = True,
    values: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """All differences between two checkpoints or views; ``diff(a, b).equal`` says whether there are none.

    Only keys that match one of *keys* (if any) and none of *ignore* are compared, of each side those that begin with
    its prefix, without it. Values x of *a* and y of *b* are the same if ``|x - y| <= atol + rtol * |y|``; *dtypes* and
    *values* say whether element types and data count. Data that cannot be read are among its errors.
    """
    with _opened(a) as first, _opened(b) as second:
        sides = [
            comparing.chosen(_items(side), prefix=prefix, keys=keys, ignore=ignore)
            for side, prefix in ((first, prefix_a), (second, prefix_b))
        ]
        if not any(sides):
            raise UsageError("no keys are left to compare")
        how = comparing.How(rtol=rtol, atol=atol, equal_nan=equal_nan, dtypes=dtypes, values=values)
        return comparing.compare(sides[0], sides[1], how, progress=progress)


def check(source: Readable, *, values: bool = False, progress: Progress | None = None) -> Report:
    """Read all of a checkpoint, or of a view and its checkpoint, once; ``check(path).sound`` says whether all is well.

    With *values*, NaN and infinite values are problems. *progress* gets the bytes of each piece.
    """
    report = Report()
    with _opened(source) as opened:
        checkpoint = opened.checkpoint if isinstance(opened, View) else opened
        checking.check_structure(report, checkpoint.source)
        if isinstance(opened, View) and opened.plan.tgt == "hf":
            checking.check_layers(report, opened.plan.tensors, opened.config)
        checking.check_data(report, checkpoint.source.tensors(), values=values, progress=progress)
        checking.check_sums(report, checkpoint.source)
        if isinstance(opened, View):
            checking.check_data(report, opened.plan.tensors, view=opened.plan.tgt, progress=progress)
        checkpoint.check()
    return report


@overload
def _opened(source: Checkpoint | PathLike) -> AbstractContextManager[Checkpoint]: ...
@overload
def _opened(source: Readable) -> AbstractContextManager[Checkpoint | View]: ...
def _opened(source: Readable) -> AbstractContextManager[Checkpoint | View]:
    """*source* itself, or what lies at that path, closed afterwards."""
    return nullcontext(source) if isinstance(source, (Checkpoint, View)) else open(source)


def _items(source: Checkpoint | View) -> Mapping[str, Item]:
    """What is compared: of a Cerebras view the whole checkpoint, or its ``model`` state where that is all there is."""
    if isinstance(source, Checkpoint):
        return source.source.items
    if source.plan.state is not None:
        return source.plan.state.items
    prefix = "" if source.plan.tgt == "hf" else "model."
    return {prefix + key: Item(prefix + key, "tensor", tensor=tensor) for key, tensor in source.plan.tensors.items()}
