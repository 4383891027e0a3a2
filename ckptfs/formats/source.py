"""What every reader hands out: a `Source` of `Item`s, whose data are lazy `Tensor`s.

Shapes, dtypes and plain values are known when a source is open; tensor data is read only when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Shape, Tensor

OUTSIDE = "outside of the checkpoint's folder"
"""How the reason of a link ends that was not followed because of where it leads."""
MAX_CHECKED = 16
"""Files that are looked at each time."""
CHECK_S = 0.01
Kind: TypeAlias = Literal["tensor", "array", "scalar", "string", "none", "object", "link"]


@dataclass(frozen=True, slots=True)
class Item:
    """One leaf of the state dict.

    ``tensor``/``array``: *tensor* is set (arrays were numpy's, tensors torch's). ``scalar``/``string``: *value* is a
    bool, int, float or str; with a *shape*, lists of texts. ``none``: None. ``object``: refused, *reason* says why and
    *class_name* what it is.
    ``link``: its data is in another file or key that could not be followed; *reason* says why, *target* where.
    """

    key: str
    kind: Kind
    tensor: Tensor | None = None
    value: object = None
    tied_to: str | None = None
    """First key that holds the same Python object, for a tied tensor (whose *tensor* is that same object)."""
    class_name: str | None = None
    reason: str | None = None
    target: str | None = None
    shape: Shape | None = None
    """Of an array of strings, whose *value* is lists of lists; None for one text."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container of the nested state dict: what `torch.load` would give back.

    *type* is one of dict, OrderedDict, list, tuple, set, deque, namedtuple; *keys* are the dict's keys (str, int,
    …) or None for sequences; a child is a `Container` or, for a leaf, the flattened key of its `Item`.
    """

    type: str
    keys: tuple[object, ...] | None
    children: tuple[Container | str, ...]


@dataclass(slots=True)
class Source:
    """An open checkpoint. Readers return one; nothing subclasses it.

    *items* keeps the order of the state dict: the order of what is made from it depends on that. *files* are those
    that its tensors read from: they keep serving the same bytes when the name is deleted or replaced.
    """

    path: str
    format: str
    """``cerebras-h5``, ``safetensors``, ``torch-zip``, ``torch-legacy``, ``tensorflow``."""
    format_version: str | None
    release: str | None
    """Cerebras release that wrote the file ("2.10.0"), None when the file does not say."""
    items: dict[str, Item]
    tree: Container | None = None
    """Structure of the nested state dict; None for flat formats."""
    metadata: list[Mapping[str, Any]] = field(default_factory=list)
    """The trainer's ``__metadata__`` list (version, model_name, params), oldest first."""
    config: Mapping[str, Any] | None = None
    """The Hugging Face ``config.json`` beside the tensors, for folders."""
    mtime_ns: int = 0
    nbytes: int = 0
    """Size of the source's files in bytes."""
    files: list[SourceFile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What a user should know (ignored parts, refused objects), one line each."""
    _checked: float = field(default=0.0, repr=False)

    def tensors(self) -> dict[str, Tensor]:
        """Key to tensor, in order, without anything that is not a tensor."""
        return {k: i.tensor for k, i in self.items.items() if i.tensor is not None}

    @property
    def closed(self) -> bool:
        """Whether its tensors cannot be read any more."""
        return any(file.closed for file in self.files)

    def check(self) -> None:
        """Raise `SourceChanged` when a file was written to since it was opened, `SourceClosed` after `close`.

        One system call a file. A source of many files is looked at once in `CHECK_S`.
        """
        now = time.monotonic() if len(self.files) > MAX_CHECKED else 0.0
        if now and now < self._checked + CHECK_S:
            return
        for file in self.files:
            file.check()
        self._checked = now

    def close(self) -> None:
        """Close the files: reading a tensor of this source raises `SourceClosed` from now on."""
        for file in self.files:
            file.close()


def nearest_keys(key: str, keys: Sequence[str], n: int = 2) -> list[str]:
    """Up to *n* keys that look like *key*, for error messages; cheap also for 100,000 keys."""
    import difflib

    tail = key.rsplit(".", 2)[-2:]
    likely = [k for k in keys if any(part in k for part in tail)][:2000]
    return difflib.get_close_matches(key, likely or keys[:2000], n=n, cutoff=0.3)
