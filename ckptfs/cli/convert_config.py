"""``ckptfs convert-config``"""

from __future__ import annotations

import os
from typing import Any

import click

from ckptfs.cli.options import path_type
from ckptfs.cli.output import printable


@click.command("convert-config")
@click.argument("file", type=path_type)
@click.option("--model", metavar="NAME", help="Model family; 'ckptfs list' shows all names.")
@click.option("--src-fmt", metavar="FORMAT", required=True, help="Format of FILE: hf, cs-X.Y, cs-current.")
@click.option("--tgt-fmt", metavar="FORMAT", required=True, help="Format to write: hf, cs-X.Y, cs-current.")
@click.option("--output-dir", type=path_type, metavar="DIR", help="Where to write (the folder of FILE).")
@click.option("--force", is_flag=True, help="Write over the output of an earlier run.")
def command(file: str, **options: Any) -> None:
    """Write a model config in another format.

    FILE is a config.json, or a trainer's YAML. The result is FILE_to_hf.json or FILE_to_cs-X.Y.yaml. A model of
    several components is a folder of such folders, and has a folder for each.
    """
    from ckptfs.conversion import resolve
    from ckptfs.tools.export import config_output, write_outputs

    config = resolve.read_config(file)
    warnings: list[str] = []
    view = resolve.config_view(
        config, options["src_fmt"], options["tgt_fmt"], model=options["model"], warnings=warnings
    )
    folder = options["output_dir"] or os.path.dirname(os.path.abspath(file))
    for path in write_outputs({**config_output(view, file, folder=folder)}, folder, force=options["force"]):
        click.echo(path)
    for warning in warnings:
        click.echo(f"ckptfs: {printable(warning)}", err=True)
