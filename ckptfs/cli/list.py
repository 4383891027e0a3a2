"""``ckptfs list``"""

from __future__ import annotations

from dataclasses import asdict

import click

from ckptfs.cli.completion import models
from ckptfs.cli.options import json_option
from ckptfs.cli.output import print_columns, print_json


@click.command("list")
@click.argument("model", required=False, shell_complete=models)
@click.option("--hide-notes", is_flag=True, help="Leave out the notes.")
@json_option
def command(model: str | None, hide_notes: bool, as_json: bool) -> None:
    """List model families and their formats.

    The formats of one model convert into each other. With MODEL that one only, unless it is 'all'; with --json also its
    tables.
    """
    from ckptfs.conversion import registry

    model = None if model is not None and model.lower() == "all" else model
    if as_json:
        print_json(registry.describe(model) if model else [asdict(entry) for entry in registry.entries()])
        return
    rows: dict[str, tuple[str, ...]] = {}
    for entry in registry.entries(model):  # the first of a model has all of its formats
        formats = ", ".join(dict.fromkeys((entry.source, entry.target)))
        rows.setdefault(entry.model, (entry.model, formats, entry.architecture, entry.notes))
    table = [("MODEL", "FORMATS", "ARCHITECTURE", "NOTES"), *rows.values()]
    print_columns(row[:-1] if hide_notes else row for row in table)
