"""``ckptfs convert-data-iter-state``"""

from __future__ import annotations

from typing import Any

import click

from ckptfs.cli.options import compress_option, path_type, progress_option, reading_options
from ckptfs.cli.output import printable
from ckptfs.cli.progress import progress_bar


@click.command("convert-data-iter-state")
@click.option(
    *("-c", "--old_checkpoint", "--old-checkpoint"),
    type=path_type,
    metavar="FILE",
    required=True,
    help="Checkpoint without the state of its data loader.",
)
@click.option(
    *("-w", "--worker_data_iter_files_dir", "--worker-data-iter-files-dir"),
    type=path_type,
    metavar="DIR",
    required=True,
    help="Folder with data_iter_checkpoint_state_file_global and the files of the workers.",
)
@click.option(
    *("-o", "--output_file", "--output-file"),
    type=path_type,
    metavar="FILE",
    required=True,
    help="Checkpoint to write.",
)
@click.option(
    *("-d", "--dataloader_type", "--dataloader-type"),
    type=click.Choice(["map", "iterable"]),
    default="map",
    show_default=True,
    help="Kind of the data set: samples by number, or shards that are streamed.",
)
@click.option(
    *("-s", "--shuffle_seed", "--shuffle-seed"),
    type=int,
    default=0,
    show_default=True,
    help="Seed of the shuffling; goes with map.",
)
@compress_option
@progress_option
@click.option("--force", is_flag=True, help="Write over an output that exists.")
@reading_options
def command(old_checkpoint: str, worker_data_iter_files_dir: str, output_file: str, **options: Any) -> None:
    """Add an old trainer's input state to a checkpoint.

    Writes the whole checkpoint again, with the state of the data loader as releases from 2.0 on keep it, under
    'dataloader' (in the place of one that is there). Files of other steps and other files of the folder do not matter.
    """
    from ckptfs.api.save import save_state
    from ckptfs.cli.opening import opened
    from ckptfs.formats.cerebras.dataloader import dataloader_state, with_dataloader
    from ckptfs.formats.cerebras.writer import RELEASE

    state = dataloader_state(worker_data_iter_files_dir, options["dataloader_type"], options["shuffle_seed"])
    with opened(old_checkpoint, follow_links=options["follow_links"]) as source:
        for warning in source.warnings:
            click.echo(f"ckptfs: {printable(warning)}", err=True)
        how = {name: options[name] for name in ("compress", "force")}
        with progress_bar(source.nbytes, not options["no_progress_bar"]) as progress:
            nested, release = with_dataloader(source, state), source.release or RELEASE
            save_state(nested, output_file, release=release, progress=progress, **how)
    click.echo(output_file)
