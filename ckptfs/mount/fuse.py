"""The kernel's side: libfuse's callbacks over a `Tree`. Nothing here knows what is mounted.

mfusepy has the C structures of every libfuse version. The callbacks are installed here, without its Python layer, so
that a read is answered in libfuse's own buffer. This is the only module that imports it.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptfs.errors import MountError
from ckptfs.formats.extents import ExtentFile
from ckptfs.mount import callbacks, spare_threads
from ckptfs.mount.open_file import Reader
from ckptfs.mount.stats import Stats
from ckptfs.native import library
from ckptfs.vfs.names import MAX_NAME
from ckptfs.vfs.tree import Entry, Folder, Leaf, Link, Tree, stable_ino

log = logging.getLogger(__name__)

INSTALL_HINT = "install it with 'apt install fuse3' ('dnf install fuse3 fuse3-libs')"
SONAMES = ("libfuse3.so.3", "libfuse3.so.4", "libfuse3.so")
FOREVER_S = 86400.0
"""How long the kernel keeps names and attributes of a tree that never changes."""
MIN_VERSION = (3, 2)
MIN_FOR_C = 16 << 10
"""Files from this size on (bytes) are read by C code. To prepare that takes longer than to read a small file."""

_FILL_DIR_PLUS = 1 << 1
_READDIR_PLUS = 1 << 0
_CAP_AUTO_INVAL_DATA = 1 << 12
_CAP_SPLICE = 1 << 7 | 1 << 8 | 1 << 9
_CAP_CACHE_SYMLINKS = 1 << 23
_PYBUF_WRITE = 0x200
_RESULTS = {1: "bad mount options", 3: "libfuse refused its options", 4: "the kernel or fusermount3 refused the mount"}


@dataclass(frozen=True, slots=True)
class MountOptions:
    """What a mount looks like to the system. Sizes in bytes."""

    threads: int | None = None
    """Threads that answer the kernel, all at any time. None is for `default_threads`, and for one that leads where
    `helpers` are wanted."""
    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    umask: int = 0
    allow_other: bool = False
    read_ahead: int = 4 << 20
    """Read-ahead window of the mount; 0 keeps the kernel's default (128 KiB)."""
    request: int = 1 << 20
    """Largest read that the kernel sends; 1 MiB is its own limit."""
    timeout_s: float = FOREVER_S
    """How long the kernel may keep names and attributes; short for a tree that changes."""
    source: str = ""
    """What is mounted, for the log."""
    source_nbytes: int = 0
    """Size that `df` shows."""
    stats: Stats | None = None
    """Counts requests, when given; SIGUSR1 logs it."""
    extra: tuple[str, ...] = ()
    """More options for libfuse, such as ``noexec``."""


def default_threads() -> int:
    """Two overlap reading with the kernel's copying. More compete for Python's lock, unless C reads without it."""
    return 2 if library.LIBRARY is None else max(2, min(4, len(os.sched_getaffinity(0))))


def load_binding() -> Any:
    """The mfusepy module, loaded with libfuse 3 even where libfuse 2 is installed; `MountError` without libfuse 3."""
    soname = find_libfuse()
    before = os.environ.get("FUSE_LIBRARY_PATH")
    os.environ["FUSE_LIBRARY_PATH"] = soname  # by itself mfusepy prefers libfuse 2
    try:
        import mfusepy
    except ImportError as exc:
        raise MountError(
            f"the Python package mfusepy is missing ({exc}); install it with 'pip install mfusepy'"
        ) from exc
    finally:
        if before is None:
            del os.environ["FUSE_LIBRARY_PATH"]
        else:
            os.environ["FUSE_LIBRARY_PATH"] = before
    if mfusepy.fuse_version_major != 3:
        raise MountError(
            f"mfusepy was already loaded with libfuse {mfusepy.fuse_version_major}; ckptfs needs libfuse 3"
        )
    return mfusepy


def find_libfuse() -> str:
    """Name under which the dynamic linker finds libfuse 3; `MountError` when it does not."""
    for soname in SONAMES:
        try:
            ctypes.CDLL(soname)
        except OSError:
            continue
        if libfuse_version(soname) < MIN_VERSION:
            raise MountError(f"libfuse {'.'.join(map(str, libfuse_version(soname)))} is too old; {INSTALL_HINT}")
        return soname
    raise MountError(f"libfuse 3 is not installed; {INSTALL_HINT}")


def libfuse_version(soname: str) -> tuple[int, int]:
    """(major, minor) of that library."""
    version: int = ctypes.CDLL(soname).fuse_version()
    return divmod(version, 100) if version >= 100 else divmod(version, 10)


def serve(tree: Tree, mountpoint: str, options: MountOptions, on_start: Callable[[], None] | None = None) -> None:
    """Mount *tree* on *mountpoint* (absolute) and answer until it is unmounted.

    Call it in the main thread: libfuse installs handlers for signals that have none. *on_start* runs in a thread of
    its own when the kernel has made the mount, and may use the mount. The working directory becomes ``/``. Raises
    `MountError` when the mount cannot be made.
    """
    binding = load_binding()
    adapter = Adapter(binding, tree, options, on_start)
    args = [
        b"ckptfs",
        *(a.encode("utf-8", "surrogateescape") for a in _arguments(binding, options)),
        os.fsencode(mountpoint),
    ]
    operations = callbacks.operations(binding, adapter, options.stats)
    code = binding.fuse_main_real(
        len(args), (ctypes.c_char_p * len(args))(*args), ctypes.byref(operations), ctypes.sizeof(operations), None
    )
    if code and not adapter.started:
        why = _RESULTS.get(code, f"libfuse ended with code {code}")
        raise MountError(f"{mountpoint}: {why}; 'ckptfs doctor' checks the machine")


def _arguments(binding: Any, options: MountOptions) -> list[str]:
    """Arguments of libfuse's main function. It stays in the foreground: `daemon` makes the daemon."""
    flags = ["-f"]
    opts = ["ro", "nosuid", "nodev", "default_permissions", "fsname=ckptfs", "subtype=ckptfs"]
    opts.append(f"max_read={options.request}")
    if options.allow_other:
        opts.append("allow_other")
    threads = max(1, default_threads() if options.threads is None else options.threads)
    if is_single_server(options):
        flags.append("-s")
    elif binding.fuse_version_minor >= 12:
        # Without max_threads libfuse 3.14 complains about its own default; idle threads keep their buffers.
        opts += [f"max_threads={threads}", f"max_idle_threads={threads}"]
    elif threads == 1:
        flags.append("-s")
    else:
        opts.append(
            "max_idle_threads=64"
        )  # older ones cannot bound threads; threads that never end bound the Python states
    return [*flags, "-o", ",".join([*opts, *options.extra])]


def is_single_server(options: MountOptions) -> bool:
    """Whether one thread serves as long as it keeps up, with spare threads: not where Python counts the answers."""
    return options.threads is None and options.stats is None and spare_threads.are_wanted()


class Adapter:
    """libfuse's callbacks. Each finds its entry and copies what the tree says into the C structures."""

    def __init__(self, binding: Any, tree: Tree, options: MountOptions, on_start: Callable[[], None] | None) -> None:
        self.started = False
        self.single_server = is_single_server(options)
        self._tree = tree
        self._options = options
        self._on_start = on_start
        self._binding = binding
        self._handles: dict[int, Any] = {}
        self._numbers = itertools.count(1, 2)  # odd: addresses are even
        self._stats = {kind: self._template(mode) for kind, mode in _MODES.items()}
        self._view = ctypes.pythonapi.PyMemoryView_FromMemory
        self._view.restype = ctypes.py_object
        self._view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

    def init(self, conn: Any, config: Any) -> int:
        self.started = True
        options = self._options
        if options.stats is not None:
            options.stats.begin()
        if self.single_server:
            spare_threads.start(self._binding._libfuse, default_threads() - 1)
        limits, wishes = conn.contents, config.contents
        # max_write sets how many pages a request may have, reads included.
        limits.max_write = limits.max_read = options.request
        limits.max_readahead = max(options.read_ahead, options.request)
        limits.max_background, limits.congestion_threshold = 64, 48
        limits.want &= ~(_CAP_AUTO_INVAL_DATA | _CAP_SPLICE)
        limits.want |= limits.capable & _CAP_CACHE_SYMLINKS
        wishes.use_ino = wishes.kernel_cache = 1
        wishes.entry_timeout = wishes.attr_timeout = wishes.negative_timeout = options.timeout_s
        if self._on_start is not None:
            threading.Thread(target=self._on_start, name="on_start", daemon=True).start()
        return 0

    def destroy(self, data: Any) -> None:
        if self.single_server:
            spare_threads.stop()

    def getattr(self, path: bytes, out: Any, fi: Any) -> int:
        self._fill(out, self._find(path))
        return 0

    def readlink(self, path: bytes, out: Any, size: int) -> int:
        entry = self._find(path)
        if not isinstance(entry, Link):
            raise OSError(errno.EINVAL, "not a symbolic link")
        data = os.fsencode(entry.target)[: size - 1] + b"\0"
        ctypes.memmove(out, data, len(data))
        return 0

    def open(self, path: bytes, fi: Any) -> int:
        info = fi.contents
        if info.flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND):
            raise OSError(errno.EROFS, "read-only file system")
        entry = self._find(path)
        if not isinstance(entry, Leaf):
            raise OSError(errno.EISDIR if isinstance(entry, Folder) else errno.ELOOP, "not a file")
        info.keep_cache = 1
        info.direct_io = 1 if entry.live or info.flags & os.O_DIRECT else 0
        file = entry.live() if entry.live else entry.file
        if isinstance(file, ExtentFile) and file.has_data:
            (entry.check or self._tree.check)()
        if library.LIBRARY is not None and isinstance(file, ExtentFile) and file.size >= MIN_FOR_C:
            reader = Reader(file)
            info.fh = self._keep(reader.read_into, reader.address)
        else:
            info.fh = self._keep(file.read_into)
        return 0

    def read(self, path: bytes, out: Any, size: int, offset: int, fi: Any) -> int:
        n: int = self._handles[fi.contents.fh](offset, self._view(out, size, _PYBUF_WRITE))
        return n  # 0 past the end: with direct I/O the kernel does not clamp, and readers would loop

    def release(self, path: bytes, fi: Any) -> int:
        self._handles.pop(fi.contents.fh, None)
        return 0

    def opendir(self, path: bytes, fi: Any) -> int:
        folder = self._find(path)
        if not isinstance(folder, Folder):
            raise OSError(errno.ENOTDIR, "not a directory")
        if self._options.timeout_s >= FOREVER_S:
            fi.contents.cache_readdir = fi.contents.keep_cache = 1
        fi.contents.fh = self._keep(list(self._listing(path.decode("utf-8", "surrogateescape"), folder)))
        return 0

    def readdir(self, path: bytes, out: Any, filler: Any, offset: int, fi: Any, flags: int) -> int:
        listing = self._handles[fi.contents.fh]
        plus = _FILL_DIR_PLUS if flags & _READDIR_PLUS else 0
        st = self._binding.c_stat()
        for i in range(offset, len(listing)):
            name, entry = listing[i]
            self._fill(ctypes.byref(st), entry)
            if filler(out, name, st, i + 1, plus):
                break
        return 0

    releasedir = release

    def statfs(self, path: bytes, out: Any) -> int:
        info = out.contents
        info.f_bsize = info.f_frsize = 4096
        info.f_blocks = -(-self._options.source_nbytes // 4096)
        info.f_namemax = MAX_NAME
        return 0

    def getxattr(self, path: bytes, name: bytes, out: Any, size: int) -> int:
        if not name.startswith(b"user."):
            return -errno.ENODATA  # 'ls -l' asks for two security attributes of each file
        entry = self._find(path)
        value = entry.xattrs.get(name.decode("utf-8", "surrogateescape")) if isinstance(entry, Leaf) else None
        if value is None:
            raise OSError(errno.ENODATA, "no such attribute")
        return _reply(value, out, size)

    def listxattr(self, path: bytes, out: Any, size: int) -> int:
        entry = self._find(path)
        names = entry.xattrs if isinstance(entry, Leaf) else ()
        return _reply(b"".join(n.encode("utf-8", "surrogateescape") + b"\0" for n in names), out, size)

    def refuse(self, *args: Any) -> int:
        # The kernel refuses for a read-only mount; this refuses after 'mount -o remount,rw'.
        raise OSError(errno.EROFS, "read-only file system")

    mkdir = mknod = unlink = rmdir = symlink = link = rename = create = refuse
    chmod = chown = truncate = utimens = write = fallocate = setxattr = removexattr = refuse

    def _find(self, path: bytes) -> Entry:
        entry = self._tree.lookup(path.decode("utf-8", "surrogateescape"))
        if entry is None:
            if any(len(name) > MAX_NAME for name in path.split(b"/")):
                raise OSError(errno.ENAMETOOLONG, "a name is too long")
            raise OSError(errno.ENOENT, "no such entry")
        return entry

    def _keep(self, what: Any, number: int = 0) -> int:
        number = number or next(self._numbers)
        self._handles[number] = what
        return number

    def _listing(self, path: str, folder: Folder) -> Iterator[tuple[bytes, Entry]]:
        """The folder's entries with their encoded names, all inode numbers set."""
        base = path.rstrip("/")
        yield b".", folder
        yield b"..", self._tree.lookup(os.path.dirname(path)) or folder
        for name, entry in folder.children.items():
            if not entry.ino:
                entry.ino = stable_ino(f"{base}/{name}")
            yield name.encode("utf-8", "surrogateescape"), entry

    def _template(self, mode: int) -> Any:
        """A stat structure with what entries of one kind share."""
        st = self._binding.c_stat()
        st.st_mode = mode & ~self._options.umask
        st.st_uid, st.st_gid = self._options.uid, self._options.gid
        st.st_nlink = 1
        st.st_blksize = 4096
        for time in (st.st_atimespec, st.st_mtimespec, st.st_ctimespec):
            time.tv_sec, time.tv_nsec = divmod(self._tree.mtime_ns, 10**9)
        return st

    def _fill(self, out: Any, entry: Entry) -> None:
        """Write the attributes of *entry* into the stat structure at *out*."""
        st = self._stats[type(entry)]
        size = entry.size
        filled = type(st).from_buffer_copy(st)
        filled.st_ino, filled.st_size, filled.st_blocks = entry.ino, size, -(-size // 512)
        ctypes.memmove(out, ctypes.byref(filled), ctypes.sizeof(filled))


_MODES: dict[type, int] = {Leaf: stat.S_IFREG | 0o444, Folder: stat.S_IFDIR | 0o555, Link: stat.S_IFLNK | 0o777}


def _reply(value: bytes, out: Any, size: int) -> int:
    """An extended attribute's answer: its size when asked for that, ERANGE when the buffer is too small."""
    if size == 0:
        return len(value)
    if len(value) > size:
        raise OSError(errno.ERANGE, "buffer too small")
    ctypes.memmove(out, value, len(value))
    return len(value)
