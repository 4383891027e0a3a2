"""How a checkpoint is found again in another process: what a pickle of it, of its views and of its tensors says.

A pickle holds paths and options, no data. Who loads it opens the same files once more, and what is loaded shares them.
A file that was written to or replaced since is refused: it would give other tensors under the same name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptfs.errors import SourceChanged
from ckptfs.formats.source import Source
from ckptfs.tensors.source_file import Identity


@dataclass(frozen=True, slots=True)
class Recipe:
    """What opens a checkpoint again, and tells whether it is the same."""

    path: str
    """Absolute."""
    follow_links: bool
    files: tuple[tuple[str, Identity], ...]


def recipe_of(source: Source, path: str, *, follow_links: bool) -> Recipe:
    """Of a source that was just opened at *path*."""
    files = tuple((os.path.abspath(file.path), file.identity) for file in source.files)
    return Recipe(os.path.abspath(path), follow_links, files)


def check_same(recipe: Recipe, source: Source) -> None:
    """Raise `SourceChanged`, and close *source*, when it does not have the files of *recipe*."""
    files = recipe_of(source, recipe.path, follow_links=recipe.follow_links).files
    if files == recipe.files:
        return
    source.close()
    before = dict(recipe.files)
    other = next((path for path, now in files if before.get(path) != now), recipe.path)
    raise SourceChanged(other, "is not the file that was pickled: it was replaced or written to since")
