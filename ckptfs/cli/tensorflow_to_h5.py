"""``ckptfs tensorflow-to-h5``"""

from __future__ import annotations

from typing import Any

import click

from ckptfs.cli.options import path_type, progress_option, reading_options
from ckptfs.cli.output import printable
from ckptfs.cli.progress import progress_bar


@click.command("tensorflow-to-h5")
@click.argument("saver_path", type=path_type)
@click.argument("h5_path", type=path_type)
@click.option("--compress", type=click.Choice(["lz4"]), help="Compress the chunks of the HDF5 file.")
@progress_option
@click.option("--force", is_flag=True, help="Write over a file that exists.")
@reading_options
def command(saver_path: str, h5_path: str, **options: Any) -> None:
    """Write a TensorFlow checkpoint as an HDF5 file.

    SAVER_PATH is a prefix such as out/model.ckpt, its .index, or a folder with a file 'checkpoint'. Each variable
    becomes a dataset under its percent-quoted name. Memory use does not grow with the model; an interrupted run leaves
    nothing behind.
    """
    from ckptfs.cli.opening import opened
    from ckptfs.tools.tensorflow import write_h5

    with opened(saver_path, follow_links=options["follow_links"]) as source:
        for warning in source.warnings:
            click.echo(f"ckptfs: {printable(warning)}", err=True)
        how = {name: options[name] for name in ("compress", "force")}
        with progress_bar(source.nbytes, not options["no_progress_bar"]) as progress:
            write_h5(source, h5_path, progress=progress, **how)
    click.echo(h5_path)
