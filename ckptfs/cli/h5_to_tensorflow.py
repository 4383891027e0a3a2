"""``ckptfs h5-to-tensorflow``"""

from __future__ import annotations

from typing import Any

import click

from ckptfs.cli.options import path_type, progress_option, reading_options
from ckptfs.cli.output import printable
from ckptfs.cli.progress import progress_bar


@click.command("h5-to-tensorflow")
@click.argument("h5_path", type=path_type)
@click.argument("saver_path", type=path_type)
@click.option(
    "--shard-by",
    metavar="REGEX",
    help="One data file for each text that REGEX (or its first group) finds in the names of variables.",
)
@progress_option
@click.option("--force", is_flag=True, help="Write over a checkpoint that exists.")
@reading_options
def command(h5_path: str, saver_path: str, **options: Any) -> None:
    """Write an HDF5 checkpoint for TensorFlow.

    SAVER_PATH is a prefix such as out/model.ckpt: it gets an .index and .data files, and the folder a file 'checkpoint'
    if it has none. Memory use does not grow with the model; an interrupted run leaves nothing behind.
    """
    from ckptfs.cli.opening import opened
    from ckptfs.tools.tensorflow import bundle_of, write_bundle

    with opened(h5_path, follow_links=options["follow_links"]) as source:
        for warning in source.warnings:
            click.echo(f"ckptfs: {printable(warning)}", err=True)
        files = bundle_of(source, saver_path, options["shard_by"])
        with progress_bar(sum(file.size for file in files.values()), not options["no_progress_bar"]) as progress:
            written, has_state = write_bundle(files, saver_path, force=options["force"], progress=progress)
    for path in written:
        click.echo(path)
    if not has_state:
        click.echo(
            "ckptfs: the file 'checkpoint' of the folder was left as it is; name the prefix to TensorFlow", err=True
        )
