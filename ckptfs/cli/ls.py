"""``ckptfs ls``"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.advice import advised_reason
from ckptfs.cli.completion import keys
from ckptfs.cli.options import json_option, reading_options, source_argument
from ckptfs.cli.output import print_columns, print_json, shape_text, size_text

if TYPE_CHECKING:
    from ckptfs.formats.source import Item


@click.command("ls")
@source_argument
@click.argument("pattern", required=False, shell_complete=keys)
@click.option("-l", "long", is_flag=True, help="Also kinds, exact sizes, values and reasons.")
@json_option
@reading_options
def command(source: str, pattern: str | None, long: bool, as_json: bool, follow_links: bool) -> None:
    """List keys with dtype, shape and size.

    All keys of SOURCE, or those that match PATTERN: a part of the key, or the whole with *, ? and [a-z].
    """
    from ckptfs.cli.opening import opened
    from ckptfs.errors import MissingKey

    with opened(source, follow_links=follow_links) as src:
        items = matching(src.items, pattern)
        if pattern is not None and not items:
            raise MissingKey(src.path, pattern, pattern=True)
        if as_json:
            print_json([fields_of(item) for item in items])
        elif long:
            print_columns(map(_long, items), right=(3,))
        else:
            print_items(items)


def print_items(items: Iterable[Item]) -> None:
    """Dtype, shape, size and key of each item, in columns."""
    print_columns(map(_short, items), right=(2,))


def matching(items: Mapping[str, Item], pattern: str | None) -> list[Item]:
    """The items whose keys match *pattern*; without a wildcard, those with it as a part of their names."""
    if pattern is None or pattern in items:
        return list(items.values()) if pattern is None else [items[pattern]]
    if not set(pattern) & set("*?["):
        return [item for item in items.values() if pattern in item.key]
    return [item for item in items.values() if fnmatchcase(item.key, pattern)]


def fields_of(item: Item) -> dict[str, Any]:
    """What ``--json`` shows of an item."""
    from ckptfs.tensors.tensor import nbytes

    tensor = item.tensor
    return {
        "key": item.key,
        "kind": item.kind,
        "dtype": tensor.dtype.name if tensor is not None else None,
        "shape": list(tensor.shape) if tensor is not None else None,
        "nbytes": nbytes(tensor) if tensor is not None else None,
    }


def _short(item: Item) -> tuple[str, ...]:
    fields = fields_of(item)
    if item.tensor is None:
        return item.kind, "", "", item.key
    return fields["dtype"], shape_text(fields["shape"]), size_text(fields["nbytes"]), item.key


def _long(item: Item) -> tuple[str, ...]:
    fields = fields_of(item)
    shown = (
        (fields["dtype"], shape_text(fields["shape"]), f"{fields['nbytes']:,}")
        if item.tensor is not None
        else ("",) * 3
    )
    return item.kind, *shown, " ".join([item.key, *_remarks(item)])


def _remarks(item: Item) -> Iterator[str]:
    if item.tied_to is not None:
        yield f"(the same as {item.tied_to})"
    if item.kind in ("scalar", "string"):
        text = json.dumps(item.value, ensure_ascii=False)
        yield f"= {text if len(text) <= 60 else text[:57] + '...'}"
    if item.reason is not None:
        yield f"({item.class_name or item.target or 'not shown'}: {advised_reason(item.reason)})"
