"""Opening a checkpoint for a command, and what can be said about it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ckptfs.conversion import resolve
from ckptfs.formats.detect import open_source
from ckptfs.formats.source import Source
from ckptfs.tensors import cache
from ckptfs.vfs.facts import facts


@contextlib.contextmanager
def opened(path: str, *, follow_links: bool = False, cache_size: int | None = None) -> Iterator[Source]:
    """The checkpoint at *path*, closed afterwards. Its paths are absolute: a daemon leaves the working directory."""
    tiles = cache.shared()
    if cache_size is not None:
        tiles.budget = cache_size
    source = open_source(os.path.abspath(path), tiles, follow_links=follow_links)
    try:
        yield source
    finally:
        source.close()


def describe(source: Source, **options: Any) -> tuple[dict[str, Any], str | None]:
    """The facts of *source* and, where it cannot be seen as a model, the reason."""
    view, reason = resolve.prepare(source, **options)
    return facts(source, view), reason
