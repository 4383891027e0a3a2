"""The Python interface: `open` a checkpoint, `view` it as another format, read tensors when they are touched."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.cache import shared
from ckptfs.dataiter import configured_state
from ckptfs.errors import (
    CkptfsError,
    ConfigError,
    MappingError,
    MissingKey,
    NoPath,
    ShapeError,
    UnknownFamily,
    UsageError,
)
from ckptfs.formats.detect import open_source
from ckptfs.formats.folder import config_in
from ckptfs.formats.source import Item, Shape, Source, Tensor, nbytes, nearest_keys
from ckptfs.mappings import conversion, plan, registry
from ckptfs.mappings.family import Family
from ckptfs.mappings.formats import HF, Format, parse_format
from ckptfs.mappings.sections import model_section
from ckptfs.tensors.read import to_bytes, to_numpy

PathLike = str | os.PathLike[str]


class LazyTensor:
    """A tensor that is read when it is touched: ``numpy.asarray(t)`` reads all of it, ``t[a:b]`` those rows."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> Shape:
        return self._tensor.shape

    @property
    def dtype(self) -> str:
        """torch's name without the prefix, such as ``bfloat16``."""
        return self._tensor.dtype.name

    @property
    def nbytes(self) -> int:
        return nbytes(self._tensor)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("a lazy tensor is read from a file: an array of it is always a copy")
        array = to_numpy(self._tensor)
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        """As numpy's; only the rows that the first index names are read."""
        first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if not self.shape or not isinstance(first, int | slice | np.integer):
            return np.asarray(to_numpy(self._tensor)[index])
        n = self.shape[0]
        if not isinstance(first, slice):
            row = int(first) + (n if first < 0 else 0)
            if not 0 <= row < n:
                raise IndexError(f"row {int(first)} of a tensor with {n} rows")
            return np.asarray(to_numpy(self._tensor, row, row + 1)[0][rest])
        start, stop, step = first.indices(n)
        low, high = (start, stop) if step > 0 else (stop + 1, start + 1)
        rows = to_numpy(self._tensor, low, max(low, high))
        picked = rows[::step] if step > 0 else rows[::-1][::-step]
        inner = (slice(None), *rest)
        return np.asarray(picked[inner])

    def tobytes(self) -> bytes:
        """All data, C order, little-endian."""
        return to_bytes(self._tensor)

    def __repr__(self) -> str:
        return f"LazyTensor({self.dtype}, shape={self.shape})"


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint: flattened key -> `LazyTensor`, or the plain value of a scalar, string or None."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, key: str) -> Any:
        item = self.item(key)
        if item.tensor is not None:
            return LazyTensor(item.tensor)
        if item.reason is not None:
            raise CkptfsError(f"{self.source.path}: {key}: {item.reason}")
        return item.value

    def item(self, key: str) -> Item:
        """Everything that is known about *key*."""
        item = self.source.items.get(key)
        if item is None:
            raise MissingKey(self.source.path, key, nearest_keys(key, list(self.source.items)))
        return item

    def __contains__(self, key: object) -> bool:
        return key in self.source.items

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.items)

    def __len__(self) -> int:
        return len(self.source.items)

    @property
    def metadata(self) -> list[Mapping[str, Any]]:
        """The trainer's ``__metadata__``, oldest first."""
        return self.source.metadata

    def close(self) -> None:
        """Close the files; tensors of this checkpoint must not be read any more."""
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.source.path} ({self.source.format}, {len(self)} keys)>"


class View(Mapping[str, LazyTensor]):
    """A checkpoint as another format: target key -> `LazyTensor`; ``config`` is the converted config.

    Keys of a Cerebras target are those inside its ``model`` state.
    """

    def __init__(self, planned: plan.View) -> None:
        self.plan = planned

    @property
    def config(self) -> Mapping[str, Any]:
        return self.plan.config

    @property
    def state(self) -> Checkpoint | None:
        """The whole checkpoint, with optimizer, step and the like, for one Cerebras release as another; else None."""
        return Checkpoint(self.plan.state) if self.plan.state is not None else None

    def __getitem__(self, key: str) -> LazyTensor:
        if key not in self.plan.tensors:
            raise MissingKey(f"{self.plan.model} as {self.plan.tgt}", key, nearest_keys(key, list(self.plan.tensors)))
        return LazyTensor(self.plan.tensors[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.tensors)

    def __len__(self) -> int:
        return len(self.plan.tensors)


def open(path: PathLike, *, follow_links: bool = False) -> Checkpoint:
    """Open any supported checkpoint; reads headers only. Links out of its folder are followed with *follow_links*."""
    return Checkpoint(open_source(os.fspath(path), shared(), follow_links=follow_links))


def view(
    checkpoint: Checkpoint | PathLike,
    tgt_fmt: str = "hf",
    *,
    model: str | None = None,
    config: PathLike | Mapping[str, Any] | None = None,
    src_fmt: str | None = None,
    drop_unmatched_keys: bool = False,
) -> View:
    """*checkpoint* (open, or a path) as *tgt_fmt* (``hf``, ``cs-2.9``, ``cs-current``).

    *model* and *config* (a mapping, or a YAML or JSON file) default to what the checkpoint says itself. Raises
    `UsageError` when it says nothing, and the errors of `ckptfs.mappings.conversion.make_view`.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open(checkpoint)
    return View(
        plan_view(opened.source, tgt_fmt, model=model, config=config, src_fmt=src_fmt, drop=drop_unmatched_keys)
    )


def prepare(
    source: Source,
    *,
    model: str | None = None,
    config: PathLike | Mapping[str, Any] | None = None,
    src_fmt: str | None = None,
    tgt_fmt: str | None = None,
    drop_unmatched_keys: bool = False,
) -> tuple[plan.View | None, str | None]:
    """The view a mount shows, or None and the reason why there is none.

    A model or config that cannot be converted is a reason; a name or file that does not exist is an error, and so is a
    *tgt_fmt* to which no way leads.
    """
    try:
        wanted = tgt_fmt or ("hf" if is_cerebras(source, src_fmt) else "cs-current")
        return plan_view(source, wanted, model=model, config=config, src_fmt=src_fmt, drop=drop_unmatched_keys), None
    except (UnknownFamily, UsageError) as e:
        if model or src_fmt or tgt_fmt:
            raise
        if isinstance(e, UnknownFamily) and e.name:
            return None, f"the checkpoint names a model that is not known here ({e.name}); 'ckptfs list' shows all"
        return None, "nothing in the checkpoint tells its model family; name it with --model and --config"
    except (MappingError, ConfigError, ShapeError) as e:
        if tgt_fmt and isinstance(e, NoPath):
            raise
        return None, str(e)


def told_family(source: Source) -> str | None:
    """The family that the checkpoint names itself, also where its config cannot be converted; None when it does not."""
    if source.metadata:
        found = registry.by_cs_name(str(source.metadata[-1].get("model_name") or ""))
        return found.name if found else None
    candidates = registry.by_hf_config(source.config or {})
    return candidates[0].name if candidates else None


def is_cerebras(source: Source, src_fmt: str | None = None) -> bool:
    """Whether *source* is a Cerebras checkpoint (by *src_fmt*, if given)."""
    return src_fmt != "hf" if src_fmt else source.format == "cerebras-h5"


def plan_view(
    source: Source,
    tgt_fmt: str,
    *,
    model: str | None = None,
    config: PathLike | Mapping[str, Any] | None = None,
    src_fmt: str | None = None,
    drop: bool = False,
) -> plan.View:
    """Settle formats, family and config, and plan the view."""
    last = source.metadata[-1] if source.metadata else {}
    tgt = parse_format(tgt_fmt)
    cerebras = is_cerebras(source, src_fmt)
    # What wrote the file may have been a converter: good enough to a Hugging Face model, not between releases.
    auto = last.get("version") or (source.release if tgt == HF or not cerebras else None)
    src = parse_format(src_fmt or ("cs-auto" if cerebras else "hf"), auto=str(auto) if auto else _fallback(tgt))
    values = _config(source, config, last if cerebras else {})
    inputs = _inputs(config, values) if HF not in (src, tgt) else None
    problems: list[CkptfsError] = []
    for family in _families(model, values, last, cerebras):
        try:
            src, tgt = _in_full(src, src_fmt, family), _in_full(tgt, tgt_fmt, family)
            return conversion.make_view(source, family, values, src, tgt, dataloader=inputs, drop_unmatched=drop)
        except (MappingError, ShapeError) as e:  # a headless or another variant may fit; a config would not change
            problems.append(e)
    raise problems[0]


def convert_config(
    config: Mapping[str, Any],
    src_fmt: str,
    tgt_fmt: str,
    *,
    model: str | None = None,
    warnings: list[str] | None = None,
) -> tuple[dict[str, Any], str]:
    """A whole config in another format, and that format's full name; errors as `view`'s.

    What gets lost on the way is added to *warnings*, one line each.
    """
    view = config_view(config, src_fmt, tgt_fmt, model=model, warnings=warnings)
    return {**view.config}, view.tgt


def config_view(
    config: Mapping[str, Any],
    src_fmt: str,
    tgt_fmt: str,
    *,
    model: str | None = None,
    warnings: list[str] | None = None,
) -> plan.View:
    """The view that `view` would plan, without its tensors; as `convert_config`."""
    src, tgt = parse_format(src_fmt), parse_format(tgt_fmt)
    family = _families(model, config, {}, src != HF)[0]
    src, tgt = _in_full(src, src_fmt, family), _in_full(tgt, tgt_fmt, family)
    made = conversion.config_as(family, config, src, tgt, warnings=warnings)
    if tgt != HF:
        return plan.View(family.name, src.name, tgt.name, {}, made)
    files = family.files(made)
    return plan.View(
        *(family.name, src.name, tgt.name, {}, made), components=family.components, files=files, paths=family.paths
    )


def _in_full(fmt: Format, name: str | None, family: Family) -> Format:
    """The family's variant of *fmt*, unless *name* says which release it is: ``cs-2.9`` is not ``cs-2.9-dpo``."""
    if fmt == HF or name not in (None, "cs-auto", "cs-current"):
        return fmt
    return replace(fmt, variant=family.variant)


def _inputs(config: PathLike | Mapping[str, Any] | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The input state that stood apart from the checkpoint; a checkpoint itself cannot point out of its file."""
    if config is None:
        return None
    return configured_state(values, "" if isinstance(config, Mapping) else os.path.dirname(os.fspath(config)))


def _fallback(tgt: Format) -> str | None:
    """HF <-> CS tensors are the same for all releases of a layout, so an unknown release is taken as the current."""
    return "2.10" if tgt == HF else None


def _config(source: Source, config: PathLike | Mapping[str, Any] | None, last: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if config is not None:
        return read_config(config)
    found = last.get("params") or source.config
    if not isinstance(found, Mapping):
        raise UsageError(f"{source.path}: the checkpoint holds no model config; give it with --config")
    return found


def read_config(path: PathLike) -> Mapping[str, Any]:
    """A YAML or JSON config file, or the ``config.json`` files in a model's folder, as plain data."""
    import yaml

    if os.path.isdir(path):
        return config_in(os.fspath(path))

    try:
        with builtins.open(path, encoding="utf-8") as file:
            text = file.read()
        values = json.loads(text) if os.fspath(path).endswith(".json") else yaml.safe_load(text)
    except OSError as e:
        raise UsageError(f"{os.fspath(path)}: cannot read the config: {e.strerror}") from e
    except (ValueError, yaml.YAMLError) as e:
        first = str(e).splitlines()[0]
        raise ConfigError(f"{os.fspath(path)}: the config is not valid YAML or JSON: {first}") from e
    if not isinstance(values, Mapping):
        raise ConfigError(f"{os.fspath(path)}: the config is not a mapping")
    return values


def _families(model: str | None, config: Mapping[str, Any], last: Mapping[str, Any], cerebras: bool) -> list[Family]:
    """The families to try, likeliest first."""
    if model:
        return [registry.family(model)]
    if cerebras:
        name = last.get("model_name") or model_section(config).get("name") or ""
        known = registry.by_cs_name(str(name)) is not None
        found = registry.by_cs_config(str(name), model_section(config)) if known else []
    else:
        name = config.get("model_type") or ""
        found = registry.by_hf_config(config)
    if not found:
        raise UnknownFamily(str(name)) if name else UsageError("nothing tells the model family; name it with --model")
    return found
