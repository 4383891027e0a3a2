"""Types of options, and options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from ckptfs.cli.completion import formats, models

_F = TypeVar("_F", bound=Callable[..., Any])
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNITS |= {f"{unit}ib": n for unit, n in _UNITS.items() if unit}
_UNITS |= {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def size(text: str) -> int:
    """A number of bytes: ``4096``, ``4MiB`` or ``4M`` (powers of 1024), ``10GB`` (powers of 1000)."""
    found = re.fullmatch(r"\s*(\d{1,18})(?:\.(\d{1,9}))?\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(found[3].lower()) if found else None
    if found is None or unit is None:
        raise click.BadParameter(f"{text!r} is not a size; write for example 4096, 512KiB, 4MiB or 10GB")
    part = found[2] or "0"
    return int(found[1]) * unit + int(int(part) * unit // 10 ** len(part))


def octal(text: str) -> int:
    """Permission bits from octal digits."""
    if not re.fullmatch(r"[0-7]{1,4}", text):
        raise click.BadParameter(f"{text!r} is not a umask; write octal digits such as 022")
    return int(text, 8)


path_type = click.Path(readable=False)  # the code that opens it says what is wrong
source_argument = click.argument("source", type=path_type)
model_option = click.option(
    "--model", metavar="NAME", shell_complete=models, help="Model family; 'ckptfs list' shows all names."
)
format_option = partial(click.option, metavar="FORMAT", shell_complete=formats)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
progress_option = click.option("--no-progress-bar", is_flag=True, help="Show no progress.")
compress_option = click.option(
    "--compress", type=click.Choice(["lz4"]), help="Compress the chunks of the Cerebras checkpoint."
)


def reading_options(command: _F) -> _F:
    """Options of every command that opens a checkpoint."""
    return click.option(
        "--follow-links", is_flag=True, help="Follow links that lead out of the checkpoint's own folder."
    )(command)


def view_options(command: _F) -> _F:
    """Options that say how a checkpoint is seen as another format."""
    for option in (
        click.option("--drop-unmatched-keys", is_flag=True, help="Leave out keys that the model family does not know."),
        format_option("--tgt-fmt", help="Format to show: hf, cs-X.Y, cs-current."),
        format_option("--src-fmt", help="Format of SOURCE: hf, cs-X.Y, cs-auto, cs-current."),
        click.option("--config", type=path_type, metavar="FILE", help="Model config (YAML or JSON)."),
        model_option,
    ):
        command = option(command)
    return command
