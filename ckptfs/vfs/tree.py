"""The mounted tree: folders, files and links, without the kernel.

Nothing here knows errno or FUSE. Everything is immutable after it is built, except that a folder may make its
children when they are first asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ckptfs.formats.extents import ExtentFile


@dataclass(slots=True)
class Leaf:
    """A regular file. *xattrs* are names such as ``user.dtype`` with their values.

    A *live* file has new content at each open, of the size of *file*, and is never cached. *check* is called at each
    open in place of the tree's.
    """

    file: ExtentFile
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    ino: int = 0
    live: Callable[[], ExtentFile] | None = None
    check: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        return self.file.size


@dataclass(slots=True)
class Link:
    """A symbolic link."""

    target: str
    ino: int = 0

    @property
    def size(self) -> int:
        return len(self.target.encode())


class Folder:
    """A directory. *make* gives its children by name, in listing order, and is called once, when they are needed."""

    __slots__ = ("_children", "_lock", "_make", "ino")

    def __init__(self, make: Callable[[], dict[str, Entry]]) -> None:
        self._make = make
        self._children: dict[str, Entry] | None = None
        self._lock = threading.Lock()
        self.ino = 0

    @property
    def children(self) -> dict[str, Entry]:
        if self._children is None:
            with self._lock:
                if self._children is None:
                    self._children = self._make()
        return self._children

    @property
    def size(self) -> int:
        return 0


Entry = Leaf | Link | Folder


def stable_ino(path: str) -> int:
    """Inode number of the entry at *path* ("/hf/config.json"): the same at every mount of the same tree.

    63 bits of a hash of the path; 1 is the root's. Two of a million entries collide with probability 1e-7, which
    only matters to tools that take equal inode numbers for hard links (regular files report st_nlink 1).
    """
    import hashlib

    if path in ("", "/"):
        return 1
    digest = hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) | 2


@dataclass(slots=True)
class Tree:
    """A whole mount. *mtime_ns* is the source's, given to every entry.

    *check* is called whenever a file with tensor data is opened; it raises `SourceChanged` where these are not those
    that the tree was made of.
    """

    root: Folder
    mtime_ns: int
    check: Callable[[], None] = lambda: None
    _seen: dict[str, Entry] = field(default_factory=dict)

    def lookup(self, path: str) -> Entry | None:
        """The entry at an absolute *path*, or None. Sets its inode number on first sight."""
        entry = self._seen.get(path)
        if entry is not None:
            return entry
        entry = self.root
        for name in path.split("/"):
            if not name:
                continue
            if not isinstance(entry, Folder):
                return None
            found = entry.children.get(name)
            if found is None:
                return None
            entry = found
        if not entry.ino:
            entry.ino = stable_ino(path)
        self._seen[path] = entry
        return entry

    def walk(self) -> Iterator[tuple[str, Entry]]:
        """Every entry with its path, folders before their children."""
        stack: list[tuple[str, Entry]] = [("/", self.root)]
        while stack:
            path, entry = stack.pop()
            yield path, entry
            if isinstance(entry, Folder):
                base = path.rstrip("/")
                stack.extend((f"{base}/{name}", child) for name, child in reversed(entry.children.items()))
