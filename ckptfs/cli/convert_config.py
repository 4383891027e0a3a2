"""``ckptfs convert-config``"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from ckptfs.cli.options import format_option, json_option, model_option, path_type
from ckptfs.cli.output import print_columns, print_json, printable
from ckptfs.errors import UsageError


@click.command("convert-config")
@click.argument("file", type=path_type)
@model_option
@format_option("--src-fmt", help="Format of FILE: hf, cs-X.Y, cs-current (as the file tells).")
@format_option("--tgt-fmt", required=True, help="Format to write: hf, cs-X.Y, cs-current.")
@click.option("--output-dir", type=path_type, metavar="DIR", help="Where to write (the folder of FILE).")
@click.option("--force", is_flag=True, help="Write over the output of an earlier run.")
@click.option("--explain", is_flag=True, help="Print what happens to each field of FILE; write nothing.")
@json_option
def command(file: str, **options: Any) -> None:
    """Write a model config in another format.

    FILE is a config.json, or a trainer's YAML. The result is FILE_to_hf.json or FILE_to_cs-X.Y.yaml. A model of
    several components is a folder of such folders, and has a folder for each. With --explain a table instead: each
    field is renamed, transformed, required to have one value, ignored for a reason, or unknown and left out.
    """
    from ckptfs.conversion import resolve
    from ckptfs.conversion.config_files import config_format
    from ckptfs.tools.export import config_output, write_outputs

    config = resolve.read_config(file)
    src_fmt = options["src_fmt"] or config_format(file, config, options["tgt_fmt"])
    if options["explain"]:
        _explain(config, {**options, "src_fmt": src_fmt})
        return
    if options["as_json"]:
        raise UsageError("--json goes with --explain")
    warnings: list[str] = []
    view = resolve.config_view(config, src_fmt, options["tgt_fmt"], model=options["model"], warnings=warnings)
    folder = options["output_dir"] or os.path.dirname(os.path.abspath(file))
    for path in write_outputs({**config_output(view, file, folder=folder)}, folder, force=options["force"]):
        click.echo(f"Config saved to {os.path.join(path, 'config.json') if os.path.isdir(path) else path}")
    for warning in warnings:
        click.echo(f"ckptfs: {printable(warning)}", err=True)


def _explain(config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """The table of ``--explain``."""
    from ckptfs.conversion import resolve

    formats = options["src_fmt"], options["tgt_fmt"]
    model, src, tgt, uses = resolve.explain_config(config, *formats, model=options["model"])
    if options["as_json"]:
        print_json({"model": model, "src": src.name, "tgt": tgt.name, "fields": [asdict(use) for use in uses]})
        return
    rows = [(use.field, use.what, use.detail) for use in uses]
    print_columns([("FIELD", "WHAT HAPPENS", f"{model}, {src.name} to {tgt.name}"), *rows])
