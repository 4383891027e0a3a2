"""How notebooks show checkpoints, views and tensors. Every text comes from a file, so all of it is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from itertools import islice
from typing import Any

from ckptfs.tensors.tensor import Tensor, nbytes

MAX_ROWS = 40
"""Keys that a table shows."""
MAX_TEXT = 200
_HEAD = ("key", "dtype", "shape", "bytes")


def table(title: str, entries: Iterable[tuple[str, Any]], n: int) -> str:
    """A caption, and the first of *n* entries: keys with tensors or plain values."""
    rows = "".join(_row(key, value) for key, value in islice(entries, MAX_ROWS))
    more = f"<p>and {n - MAX_ROWS:,} more</p>" if n > MAX_ROWS else ""
    head = "".join(f"<th>{name}</th>" for name in _HEAD)
    return f"<div><p>{_text(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}</div>"


def tensor(key: str, of: Tensor) -> str:
    """One tensor, without its data."""
    return table("LazyTensor", [(key, of)], 1)


def _row(key: str, value: Any) -> str:
    if isinstance(value, Tensor):
        cells = [key, value.dtype.name, " × ".join(map(str, value.shape)) or "()", f"{nbytes(value):,}"]
    else:
        cells = [key, "", "", repr(dict(value) if isinstance(value, Mapping) else value)]
    return f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"


def _text(text: str) -> str:
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return escape(shown.encode("utf-8", "backslashreplace").decode())
