"""Every error that ckptfs raises on purpose.

::

    CkptfsError                       exit 3, EIO        something about the input is broken
    ├─ SourceError                    exit 3, EIO        a checkpoint cannot be read
    │  ├─ SourceClosed                exit 2, EBADF      it is read after it was closed
    │  ├─ SourceChanged               exit 3, EIO        a file was written to after it was opened
    │  ├─ NotReadable                 exit 3, EACCES     a file may not be read (PermissionError)
    │  ├─ UnknownFormat               exit 3, EIO        the file has none of the known formats
    │  ├─ CorruptHeader               exit 3, EIO        header, index or directory is damaged
    │  ├─ CorruptChunk                exit 3, EIO        the data of one tensor is damaged
    │  ├─ Incomplete                  exit 3, EIO        the writer never finished the file
    │  ├─ MissingKey                  exit 1, ENOENT     the checkpoint has no such key
    │  ├─ MissingShard                exit 3, ENOENT     an index names a file that is not there (FileNotFoundError)
    │  ├─ MissingCodec                exit 4, EIO        a filter or reader library is not installed
    │  └─ Unsafe                      exit 1, EPERM      reading would run code or leave the checkpoint
    ├─ MappingError                   exit 1, EINVAL     the tensors do not fit the model family
    │  ├─ UnknownFamily               exit 2, EINVAL     the model name is not known
    │  ├─ NoPath                      exit 2, EINVAL     these two formats are not connected
    │  ├─ UnmatchedKeys               exit 1, EINVAL     keys that no rule claims
    │  └─ MissingKeys                 exit 1, EINVAL     keys that a rule needs as a group
    ├─ ConfigError                    exit 1, EINVAL     the model config cannot be converted
    │  ├─ UnsupportedValue            exit 1, EINVAL     a field has a value that the target cannot express
    │  └─ MissingField                exit 1, EINVAL     a field that the conversion needs is absent
    ├─ ShapeError                     exit 1, EINVAL     a tensor does not have the shape that a rule needs
    ├─ UsageError                     exit 2, EINVAL     the request is wrong
    │  └─ MissingFile                 exit 2, ENOENT     a file or folder is not there (FileNotFoundError)
    ├─ WriteError                     exit 4, EIO        an output cannot be written (errno: the system's own)
    └─ MountError                     exit 4, EIO        FUSE or the machine does not allow it
       └─ MountRefused                exit 1, EBUSY      nothing to unmount, or it is in use

A message says what, where and what to try, on one line. It names no option of a command: `CkptfsError.option` says
which one helps. Fields carry the same facts for programs. Every error can be pickled: worker processes send theirs to
the process that started them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any


class CkptfsError(Exception):
    """Root of the tree; ``exit_code`` is for commands, ``errno`` for the mount."""

    exit_code = 3
    errno: int = errno.EIO
    option = ""
    """The argument that helps, such as ``config``: functions and commands have it under the same name."""

    def __init__(self, message: str, *, option: str = "") -> None:
        if option:
            self.option = option
        super().__init__(message)

    __str__ = Exception.__str__  # KeyError would quote the message, OSError put a number before it

    def __reduce__(self) -> tuple[Any, ...]:
        # By default the message would be given to ``__init__``, which takes the facts that it is made of.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[CkptfsError], args: tuple[Any, ...], fields: dict[str, Any]) -> CkptfsError:
    """The error that was pickled."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class SourceError(CkptfsError):
    """A checkpoint cannot be read. *path* is the file as the user named it."""

    def __init__(self, path: object, what: str) -> None:
        self.path = str(path)
        super().__init__(f"{self.path}: {what}")


class SourceClosed(SourceError):
    """A checkpoint is read after it was closed."""

    exit_code = 2
    errno = errno.EBADF

    def __init__(self, path: object) -> None:
        self.path = str(path)
        CkptfsError.__init__(self, f"checkpoint {self.path} is closed; open it again to read it")


class SourceChanged(SourceError):
    """A file of the checkpoint was written to after it was opened: what is known of it does not fit any more."""


class NotReadable(SourceError, PermissionError):
    """The system does not allow to read a file."""

    errno = errno.EACCES
    strerror = os.strerror(errno)
    filename = property(lambda self: self.path)


class UnknownFormat(SourceError):
    """The content is none of the formats that ckptfs reads."""


class CorruptHeader(SourceError):
    """Header, index or directory of the file contradicts itself or the file's size."""


class CorruptChunk(SourceError):
    """The data of one tensor is damaged; *key* says which, *offset* is the position in the file (bytes)."""

    def __init__(self, path: object, key: str, offset: int, what: str) -> None:
        self.key = key
        self.offset = offset
        super().__init__(path, f"{key}: {what} (at byte {offset})")


class Incomplete(SourceError):
    """The file was never finished."""


class MissingKey(SourceError, KeyError):
    """The checkpoint has no such key."""

    exit_code = 1
    errno = errno.ENOENT

    def __init__(self, path: object, key: str, nearest: Sequence[str] = (), *, pattern: bool = False) -> None:
        self.key = key
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        what = f"no key matches {key!r}" if pattern else f"no key {key!r}"
        super().__init__(path, f"{what}{hint}")


class MissingShard(SourceError, FileNotFoundError):
    """An index names a file that is not there. *path* is the index, *filename* the file."""

    errno = errno.ENOENT
    strerror = os.strerror(errno)
    filename = property(lambda self: self.shard)

    def __init__(self, path: object, shard: str, what: str) -> None:
        self.shard = shard
        super().__init__(path, what)


class MissingCodec(SourceError):
    """Reading needs a library that is not installed."""

    exit_code = 4


class Unsafe(SourceError):
    """Reading would run code from the file or follow a link out of its folder."""

    exit_code = 1
    errno = errno.EPERM


class MappingError(CkptfsError):
    """The tensors do not fit the model family."""

    exit_code = 1
    errno = errno.EINVAL


class UnknownFamily(MappingError):
    """The model name is not known."""

    exit_code = 2

    def __init__(self, name: str, nearest: Sequence[str] = ()) -> None:
        self.name = name
        super().__init__(f"unknown model {name!r}" + (f"; did you mean {' or '.join(nearest)}?" if nearest else ""))


class NoPath(MappingError):
    """No conversion leads from *src* to *tgt* for this model."""

    exit_code = 2

    def __init__(self, model: str, src: str, tgt: str, known: str = "") -> None:
        self.model, self.src, self.tgt = model, src, tgt
        hint = f"; known: {known}" if known else ""
        if src == tgt == "hf":
            self.option = "src_fmt"
            hint += "; if the source is not a Hugging Face model, name its release"
        super().__init__(f"{model}: cannot convert {src} to {tgt}{hint}")


class UnmatchedKeys(MappingError):
    """Keys that no rule claims, all of them, each with the nearest rule."""

    option = "drop_unmatched_keys"

    def __init__(self, model: str, keys: Sequence[tuple[str, str]]) -> None:
        self.model = model
        self.keys = [key for key, _ in keys]
        shown = ", ".join(f"{key} (nearest: {near})" if near else key for key, near in keys[:8])
        more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
        noun = "key matches" if len(keys) == 1 else "keys match"
        super().__init__(f"{model}: {len(keys)} {noun} no rule: {shown}{more}")


class MissingKeys(MappingError):
    """Keys that a rule needs together, of which only some are there."""

    def __init__(self, model: str, keys: Sequence[str], why: str) -> None:
        self.model = model
        self.keys = list(keys)
        more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
        super().__init__(f"{model}: missing {', '.join(self.keys[:8])}{more}: {why}")


class ConfigError(CkptfsError):
    """The model config cannot be converted."""

    exit_code = 1
    errno = errno.EINVAL


class UnsupportedValue(ConfigError):
    """*field* has a value that the other side cannot express."""

    def __init__(self, model: str, field: str, value: object, allowed: str) -> None:
        self.model, self.field, self.value, self.allowed = model, field, value, allowed
        super().__init__(f"{model}: config field {field} is {value!r}, but {allowed}")


class MissingField(ConfigError):
    """A field that the conversion needs is absent."""

    def __init__(self, model: str, field: str, why: str) -> None:
        self.model, self.field = model, field
        super().__init__(f"{model}: config field {field} is missing: {why}")


class ShapeError(CkptfsError):
    """A tensor does not have the shape that a rule needs."""

    exit_code = 1
    errno = errno.EINVAL

    def __init__(self, key: str, got: Sequence[int], want: str) -> None:
        self.key, self.got, self.want = key, tuple(got), want
        super().__init__(f"{key}: shape {tuple(got)} does not fit: {want}")


class UsageError(CkptfsError):
    """The request is wrong: a name, an option, a file that does not exist."""

    exit_code = 2
    errno = errno.EINVAL


class MissingFile(UsageError, FileNotFoundError):
    """A file or folder that the request names is not there."""

    errno = errno.ENOENT
    strerror = os.strerror(errno)
    filename = property(lambda self: self.path)

    def __init__(self, path: object, what: str = "no such file or folder") -> None:
        self.path = str(path)
        super().__init__(f"{self.path}: {what}")


class WriteError(CkptfsError):
    """An output file cannot be written: the disk is full or fails. *number* is the system's errno."""

    exit_code = 4

    def __init__(self, path: object, number: int, what: str) -> None:
        self.path = str(path)
        self.errno = number
        super().__init__(f"{self.path}: {os.strerror(number)}: {what}. Nothing was left there")


class MountError(CkptfsError):
    """FUSE or the machine does not allow the mount."""

    exit_code = 4


class MountRefused(MountError):
    """An unmount that cannot be done now: no ckptfs mount is there, or it is in use."""

    exit_code = 1
    errno = errno.EBUSY
