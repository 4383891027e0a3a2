"""How commands print: JSON, columns, sizes."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import click


def print_json(value: Any) -> None:
    """JSON on stdout, indented."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_columns(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Rows of text in aligned columns; those in *right* are flush right. The last column is not padded."""
    table = [[printable(cell) for cell in row] for row in rows]
    if not table:
        return
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        click.echo("  ".join(cells).rstrip())


def printable(text: str) -> str:
    """*text* without control characters: names from a checkpoint must not drive the terminal."""
    return "".join(c if unicodedata.category(c)[0] != "C" else f"\\x{ord(c):02x}" for c in text)


def with_color() -> bool | None:
    """For click: False where the user wants no colour or the terminal has none, else None (if it is a terminal)."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def size_text(nbytes: int) -> str:
    """A size for people, such as ``1.5 GiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def shape_text(shape: Sequence[int]) -> str:
    """A shape for people, such as ``32000x2048``; a 0-d one is ``()``."""
    return "x".join(map(str, shape)) or "()"
