"""``ckptfs convert``"""

from __future__ import annotations

import os
from typing import Any

import click

from ckptfs.cli.options import compress_option, path_type, progress_option, reading_options, size
from ckptfs.cli.output import printable
from ckptfs.cli.progress import progress_bar


@click.command("convert")
@click.argument("checkpoint", type=path_type)
@click.option("--model", metavar="NAME", help="Model family; 'ckptfs list' shows all names.")
@click.option("--src-fmt", metavar="FORMAT", help="Format of CHECKPOINT: hf, cs-X.Y, cs-auto, cs-current.")
@click.option("--tgt-fmt", metavar="FORMAT", required=True, help="Format to write: hf, cs-X.Y, cs-current.")
@click.option("--config", type=path_type, metavar="FILE", help="Config of CHECKPOINT (YAML or JSON).")
@click.option("--output-dir", type=path_type, metavar="DIR", help="Where to write (the folder of CHECKPOINT).")
@click.option("--hf-shard-size", type=size, default="10GB", show_default=True, help="Size of one weight file.")
@click.option("--export-safetensors/--export-pickle", "safetensors", help="Kind of Hugging Face weight files (pickle).")
@compress_option
@click.option("--drop-unmatched-keys", is_flag=True, help="Leave out keys that the model family does not know.")
@progress_option
@click.option("--force", is_flag=True, help="Write over outputs of an earlier run.")
@reading_options
def command(checkpoint: str, **options: Any) -> None:
    """Write a checkpoint in another format.

    CHECKPOINT is a file, an index or a folder. To hf: a folder CHECKPOINT_to_hf with numbered weight files, their index
    and config.json. To cs-X.Y: CHECKPOINT_to_cs-X.Y.mdl and CONFIG_to_cs-X.Y.yaml; from another release with
    optimizer, step and all. The bytes are those that 'ckptfs mount' shows. Memory use does not grow with the model; an
    interrupted run leaves nothing behind.
    """
    from ckptfs.cli.opening import opened
    from ckptfs.conversion import resolve
    from ckptfs.errors import UsageError
    from ckptfs.tools.export import nbytes, outputs, write_outputs

    with opened(checkpoint, follow_links=options["follow_links"]) as source:
        view = resolve.plan_view(
            source,
            options["tgt_fmt"],
            model=options["model"],
            config=options["config"],
            src_fmt=options["src_fmt"],
            drop=options["drop_unmatched_keys"],
        )
        if options["compress"] and view.tgt == "hf":
            raise UsageError("--compress goes with a Cerebras target; Hugging Face files have no compression")
        folder = options["output_dir"] or os.path.dirname(os.path.abspath(checkpoint))
        files = outputs(
            view,
            checkpoint,
            options["config"],
            shard_bytes=options["hf_shard_size"],
            safetensors=options["safetensors"],
            compress=options["compress"],
            folder=folder,
        )
        with progress_bar(nbytes(files), not options["no_progress_bar"]) as progress:
            written = write_outputs(files, folder, force=options["force"], progress=progress, check=source.check)
    for path in written:
        click.echo(path)
    for warning in view.warnings:
        click.echo(f"ckptfs: {printable(warning)}", err=True)
