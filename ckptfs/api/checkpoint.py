"""The Python interface: `open` a checkpoint, `view` it as another format, read tensors when they are touched."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from ckptfs.api import html
from ckptfs.api.reopen import Recipe, check_same, recipe_of
from ckptfs.api.tensor import LazyTensor
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.resolve import PathLike, plan_view, prepare, recorded_config, recorded_family
from ckptfs.errors import CkptfsError, MissingKey, SourceChanged, UsageError
from ckptfs.formats.detect import open_source
from ckptfs.formats.source import Item, Source, nearest_keys
from ckptfs.tensors.cache import shared
from ckptfs.vfs import facts


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint: flattened key -> `LazyTensor`, or the plain value of a scalar, string or None.

    The beginning of keys, such as ``checkpoint["model"]``, gives the `Group` of all keys below it. Once it is closed,
    its tensors raise `SourceClosed`; closing is left to Python where nobody calls `close`.
    """

    def __init__(self, source: Source, recipe: Recipe | None = None) -> None:
        self.source = source
        self.recipe = recipe
        """How to open it again; None for one that was not opened by `open`."""

    def __getitem__(self, key: str) -> Any:
        if key not in self.source.items and self._has_group(key):
            return Group(self, f"{key}.")
        item = self.item(key)
        if item.tensor is not None:
            return LazyTensor(item.tensor, self, key)
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
        return key in self.source.items or (isinstance(key, str) and self._has_group(key))

    def _has_group(self, name: str) -> bool:
        start = f"{name}."
        return any(key.startswith(start) for key in self.source.items)

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.items)

    def __len__(self) -> int:
        return len(self.source.items)

    def info(self) -> dict[str, Any]:
        """The facts that ``ckptfs info --json`` prints."""
        return facts.facts(self.source, prepare(self.source)[0])

    @property
    def step(self) -> int | None:
        """The training step that it was written at; None when it does not say."""
        return facts.step(self.source)

    @property
    def family(self) -> str | None:
        """The model family that it names; None when it names none."""
        return recorded_family(self.source)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model config that it holds or lies beside: the trainer's parameters, or ``config.json``."""
        return recorded_config(self.source)

    @property
    def metadata(self) -> list[Mapping[str, Any]]:
        """The trainer's ``__metadata__``, oldest first."""
        return self.source.metadata

    @property
    def closed(self) -> bool:
        return self.source.closed

    def check(self) -> None:
        """Raise `SourceClosed` after `close`, and `SourceChanged` when a file was written to since it was opened."""
        self.source.check()

    def close(self) -> None:
        """Close the files: reading a tensor of this checkpoint, or of a view of it, raises from now on."""
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return reopened, (_recipe(self),)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<Checkpoint {self.source.path} ({self.source.format}, {len(self)} keys{state})>"

    def _repr_html_(self) -> str:
        return html.table(repr(self), _shown(self.source.items.values()), len(self))


class Group(Mapping[str, Any]):
    """The keys of a checkpoint that begin alike, without that beginning."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        """With the dot at its end."""

    def __getitem__(self, key: str) -> Any:
        return self.checkpoint[self.prefix + key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.prefix + key in self.checkpoint

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.checkpoint if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(key.startswith(self.prefix) for key in self.checkpoint)

    def __reduce__(self) -> tuple[Any, ...]:
        return Group, (self.checkpoint, self.prefix)

    def __repr__(self) -> str:
        return f"<Group {self.prefix.removesuffix('.')} of {self.checkpoint.source.path} ({len(self)} keys)>"

    def _repr_html_(self) -> str:
        items = (self.checkpoint.item(self.prefix + key) for key in self)
        return html.table(repr(self), _shown(items), len(self))


class View(Mapping[str, LazyTensor]):
    """A checkpoint as another format: target key -> `LazyTensor`; ``config`` is the converted config.

    Keys of a Cerebras target are those inside its ``model`` state. In a ``with`` block, or by `close`, it closes the
    checkpoint that it shows.
    """

    def __init__(self, planned: Conversion, checkpoint: Checkpoint, options: Options | None = None) -> None:
        self.plan = planned
        self.checkpoint = checkpoint
        """What is shown."""
        self._options = options

    @property
    def config(self) -> Mapping[str, Any]:
        return self.plan.config

    @property
    def state(self) -> Checkpoint | None:
        """The whole checkpoint, with optimizer, step and the like, for one Cerebras release as another; else None."""
        return Checkpoint(self.plan.state) if self.plan.state is not None else None

    def check(self) -> None:
        """As `Checkpoint.check`."""
        self.checkpoint.check()

    def close(self) -> None:
        """Close the checkpoint."""
        self.checkpoint.close()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getitem__(self, key: str) -> LazyTensor:
        if key not in self.plan.tensors:
            raise MissingKey(f"{self.plan.model} as {self.plan.tgt}", key, nearest_keys(key, list(self.plan.tensors)))
        return LazyTensor(self.plan.tensors[key], self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.tensors)

    def __len__(self) -> int:
        return len(self.plan.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._options is None:
            raise UsageError(f"{self!r} cannot be pickled: it was not made by ckptfs.view")
        return _viewed_again, (self.checkpoint, self._options, _digest(self.plan))

    def __repr__(self) -> str:
        path = self.checkpoint.source.path
        return f"<View of {path} as {self.plan.tgt} ({self.plan.model}, {len(self)} keys)>"

    def _repr_html_(self) -> str:
        return html.table(repr(self), self.plan.tensors.items(), len(self))


@dataclass(frozen=True, slots=True)
class Options:
    """What `view` was asked for."""

    tgt_fmt: str
    model: str | None
    config: str | Mapping[str, Any] | None
    """A path is absolute."""
    src_fmt: str | None
    drop_unmatched_keys: bool


def open(path: PathLike, *, follow_links: bool = False) -> Checkpoint:
    """Open any supported checkpoint; reads headers only. Links out of its folder are followed with *follow_links*."""
    name = os.fspath(path)
    source = open_source(name, shared(), follow_links=follow_links)
    return Checkpoint(source, recipe_of(source, name, follow_links=follow_links))


def reopened(recipe: Recipe) -> Checkpoint:
    """The checkpoint that was pickled: the one that was opened for this recipe before, as long as somebody has it.

    Raises `SourceChanged` when a file is another one by now, and what `open` raises.
    """
    with _lock:
        found = _by_recipe.get(recipe)
        if found is None or found.closed:
            found = open(recipe.path, follow_links=recipe.follow_links)
            check_same(recipe, found.source)
            _by_recipe[recipe] = found
    return found


_by_recipe: WeakValueDictionary[Recipe, Checkpoint] = WeakValueDictionary()
_lock = threading.Lock()


def _begin_anew() -> None:
    """In a forked process: the lock may have been held by a thread that is not there."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


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
    `UsageError` when it says nothing, and the errors of `ckptfs.conversion.plan.make_view`.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open(checkpoint)
    kept = config if config is None or isinstance(config, Mapping) else os.path.abspath(config)
    return _viewed(opened, Options(tgt_fmt, model, kept, src_fmt, drop_unmatched_keys))


def _viewed(checkpoint: Checkpoint, options: Options) -> View:
    planned = plan_view(
        checkpoint.source,
        options.tgt_fmt,
        model=options.model,
        config=options.config,
        src_fmt=options.src_fmt,
        drop=options.drop_unmatched_keys,
    )
    return View(planned, checkpoint, options)


def _viewed_again(checkpoint: Checkpoint, options: Options, digest: str) -> View:
    """The view that was pickled."""
    found = _viewed(checkpoint, options)
    if _digest(found.plan) != digest:
        what = "gives another config than when its view was pickled: a config file was written to since"
        raise SourceChanged(checkpoint.source.path, what)
    return found


def _digest(planned: Conversion) -> str:
    """Of what a config file decides on."""
    said = [planned.model, planned.src, planned.tgt, dict(planned.config), planned.dropped]
    return hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _recipe(checkpoint: Checkpoint) -> Recipe:
    if checkpoint.recipe is None:
        raise UsageError(f"{checkpoint!r} cannot be pickled: it was not opened by ckptfs.open")
    checkpoint.check()
    return checkpoint.recipe


def _shown(items: Any) -> Iterator[tuple[str, Any]]:
    """Keys with tensors or values, for a notebook."""
    return ((item.key, item.tensor if item.tensor is not None else item.reason or item.value) for item in items)
