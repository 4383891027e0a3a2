"""``ckptfs list``"""

from __future__ import annotations

from dataclasses import asdict

import click

from ckptfs.cli.options import json_option
from ckptfs.cli.output import print_columns, print_json


@click.command("list")
@click.argument("model", required=False)
@json_option
def command(model: str | None, as_json: bool) -> None:
    """List model families and their formats.

    With MODEL that one only; with --json also its tables.
    """
    from ckptfs.mappings import registry

    if as_json:
        print_json(registry.describe(model) if model else [asdict(entry) for entry in registry.entries()])
        return
    rows = [(e.model, e.source, e.target, e.architecture, e.notes) for e in registry.entries(model)]
    print_columns([("MODEL", "FORMAT", "FORMAT", "ARCHITECTURE", "NOTES"), *rows])
