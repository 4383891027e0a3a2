"""``ckptfs info``"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from ckptfs.cli.advice import advised_reason
from ckptfs.cli.options import json_option, reading_options, source_argument, view_options
from ckptfs.cli.output import print_columns, print_json, size_text


@click.command("info")
@source_argument
@click.option("-l", "--list_objects", "--list-objects", "listed", is_flag=True, help="Also list all keys, as ls does.")
@json_option
@view_options
@reading_options
def command(source: str, listed: bool, as_json: bool, follow_links: bool, **view: Any) -> None:
    """Say what a checkpoint is.

    Format, release, step, model family, parameters, sizes, states.
    """
    from ckptfs.cli.ls import fields_of, print_items
    from ckptfs.cli.opening import describe, opened

    with opened(source, follow_links=follow_links) as src:
        about, reason = describe(src, **view)
    items = list(src.items.values()) if listed else []
    if as_json:
        print_json({**about, "objects": [fields_of(item) for item in items]} if listed else about)
    else:
        print_columns(_rows(about, reason))
        print_items(items)


def _rows(about: Mapping[str, Any], reason: str | None) -> Iterator[tuple[str, str]]:
    names = {
        "n_tensors": "tensors",
        "n_parameters": "parameters",
        "nbytes": "tensor bytes",
        "source_nbytes": "file bytes",
    }
    for name, value in about.items():
        if name in ("refused", "warnings") or value is None or value == {}:
            continue
        yield names.get(name, name.replace("_", " ")), _text(name, value)
    for item in about["refused"]:
        yield "refused", f"{item['key']}: {advised_reason(item['reason'])}"
    for line in about["warnings"]:
        yield "warning", line
    if reason:
        yield "no model view", advised_reason(reason) or reason


def _text(name: str, value: Any) -> str:
    if name == "views":
        return ", ".join(f"{view} with {_text('', about['n_tensors'])} tensors" for view, about in value.items())
    if name.endswith("nbytes"):
        return f"{value:,} ({size_text(value)})"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text('', v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
