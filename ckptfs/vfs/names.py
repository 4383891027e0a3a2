"""File names for the keys of a state dict: one rule, which `unescape` turns back.

1. Every dot of a key is a folder level: ``model.h.0.bias`` is ``model/h/0/bias.npy``. The 64th level keeps the
   rest of the key, dots and all.
2. In each part the percent sign, the slash, control characters (U+0000-1F, U+007F-9F) and lone surrogates are
   percent-encoded, byte by byte of their UTF-8: ``a/b`` is ``a%2Fb``, ``100%`` is ``100%25``.
3. A part that is ``.`` or ``..`` has its dots encoded (``%2E``), an empty part is a single ``%``.
4. A name that would be longer than 255 bytes is cut and gets ``%~`` and 16 hex digits of a hash of the whole part.
   Only this step cannot be turned back; the attribute ``user.key`` of a file always holds the real key.

Two keys never share a path: folder names have no dot, file names end in their suffix, and steps 2 and 3 are
reversible.
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import unquote_to_bytes

from ckptfs.errors import UsageError

MAX_NAME = 255
"""Bytes in a file name (Linux's NAME_MAX)."""
MAX_LEVELS = 64
"""Folder levels of one key; keeps every path usable, also with the keys of a damaged file."""

_BAD = re.compile("[%/\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_CUT = "%~"


def components(key: str) -> list[str]:
    """The parts of a flattened key, one a folder level (at most `MAX_LEVELS`), not yet escaped."""
    return key.split(".", MAX_LEVELS - 1)


def escape(component: str, suffix: str = "") -> str:
    """The file name for one part of a key, ending in *suffix* ("" for folders)."""
    if component in ("", ".", ".."):
        name = component.replace(".", "%2E") or "%"
    else:
        name = _BAD.sub(_percent, component) if _BAD.search(component) else component
    if len(name) * 4 + len(suffix) > MAX_NAME and len(name.encode()) + len(suffix) > MAX_NAME:
        name = _cut(name, MAX_NAME - len(suffix))
    return name + suffix


def unescape(name: str) -> str:
    """The part of a key that `escape` turned into *name* (without its suffix).

    Raises `UsageError` for a cut name, which cannot be turned back, and for what `escape` never makes.
    """
    if name == "%":
        return ""
    try:
        part = unquote_to_bytes(name.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        part = None
    if part is None or escape(part) != name:
        raise UsageError(f"{name!a} is a shortened or foreign name; the file's attribute user.key has the real key")
    return part


def _percent(bad: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in bad[0].encode("utf-8", "surrogatepass"))


def _cut(name: str, limit: int) -> str:
    """The longest beginning of *name* that fits with the mark and the hash, without half characters or escapes."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    head = name.encode()[: limit - len(_CUT) - len(digest)].decode("utf-8", "ignore")
    return re.sub(r"%.?$", "", head) + _CUT + digest
