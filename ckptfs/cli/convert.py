"""``ckptfs convert``"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.options import (
    compress_option,
    format_option,
    model_option,
    path_type,
    progress_option,
    reading_options,
    size,
)
from ckptfs.cli.output import printable
from ckptfs.cli.progress import progress_bar
from ckptfs.errors import UsageError

if TYPE_CHECKING:
    from ckptfs.cli.main import Settings
    from ckptfs.vfs.tree import Entry


@click.command("convert")
@click.argument("checkpoint", type=path_type)
@model_option
@format_option("--src-fmt", help="Format of CHECKPOINT: hf, cs-X.Y, cs-auto, cs-current.")
@format_option("--tgt-fmt", required=True, help="Format to write: hf, cs-X.Y, cs-current.")
@click.option("--config", type=path_type, metavar="FILE", help="Config of CHECKPOINT (YAML or JSON).")
@click.option("--output-dir", type=path_type, metavar="DIR", help="Where to write (each output beside its input).")
@click.option("--hf-shard-size", type=size, default="10GB", show_default=True, help="Size of one weight file.")
@click.option("--export-safetensors/--export-pickle", "safetensors", help="Kind of Hugging Face weight files (pickle).")
@click.option(
    "--tokenizer", type=path_type, metavar="DIR", help="Folder whose tokenizer and other small files go to hf, too."
)
@compress_option
@click.option("--drop-unmatched-keys", is_flag=True, help="Leave out keys that the model family does not know.")
@progress_option
@click.option("--force", is_flag=True, help="Write over outputs of an earlier run.")
@reading_options
@click.pass_obj
def command(settings: Settings, /, checkpoint: str, **options: Any) -> None:
    """Write a checkpoint in another format.

    CHECKPOINT is a file, an index or a folder. To hf: a folder CHECKPOINT_to_hf with numbered weight files, their index
    and config.json. To cs-X.Y: CHECKPOINT_to_cs-X.Y.mdl and CONFIG_to_cs-X.Y.yaml; from another release with
    optimizer, step and all. The bytes are those that 'ckptfs mount' shows. Memory use does not grow with the model; an
    interrupted run leaves nothing behind. With --debug, each key is printed with what it becomes.
    """
    from ckptfs.cli.opening import opened
    from ckptfs.conversion import resolve
    from ckptfs.tools.export import in_place, nbytes, outputs, write_outputs
    from ckptfs.vfs.components import unknown_end

    with key_mapping_shown(settings.debug), opened(checkpoint, follow_links=options["follow_links"]) as source:
        names = ("tgt_fmt", "model", "config", "src_fmt")
        view = resolve.plan_view(source, **{n: options[n] for n in names}, drop=options["drop_unmatched_keys"])
        _check_target(view.tgt, options)
        beside = _tokenizer(options["tokenizer"])
        folder = options["output_dir"] or os.path.dirname(os.path.abspath(checkpoint))
        files = outputs(
            view,
            checkpoint,
            options["config"],
            shard_bytes=options["hf_shard_size"],
            safetensors=options["safetensors"],
            compress=options["compress"],
            folder=folder,
            beside=beside,
        )
        if not options["output_dir"]:
            files = in_place(files, checkpoint, options["config"])
        with progress_bar(nbytes(files), not options["no_progress_bar"]) as progress:
            written = write_outputs(files, folder, force=options["force"], progress=progress, check=source.check)
        warnings = [*view.warnings, *unknown_end(view, beside)]
    for path in written:
        print_saved(path)
    for warning in warnings:
        click.echo(f"ckptfs: {printable(warning)}", err=True)


def _check_target(tgt: str, options: dict[str, Any]) -> None:
    if options["compress"] and tgt == "hf":
        raise UsageError("--compress goes with a Cerebras target; Hugging Face files have no compression")
    if options["tokenizer"] and tgt != "hf":
        raise UsageError("--tokenizer adds files to a Hugging Face model, not to a Cerebras checkpoint; leave it out")


def _tokenizer(folder: str | None) -> dict[str, Entry]:
    """The small files of the tokenizer's folder."""
    from ckptfs.vfs.tokenizer import small_files

    return {} if folder is None else {**small_files(folder)}


def print_saved(path: str) -> None:
    """Say what was written where, in the words of the public converter."""
    if os.path.isdir(path):
        click.echo(f"Checkpoint saved to {path}")
        path = os.path.join(path, "config.json")
    is_checkpoint = path.endswith(".mdl")
    click.echo(f"{'Checkpoint' if is_checkpoint else 'Config'} saved to {path}")


@contextlib.contextmanager
def key_mapping_shown(wanted: bool) -> Iterator[None]:
    """Print on stderr, if it is *wanted*, what each key becomes."""
    log = logging.getLogger("ckptfs.conversion.keys")
    if not wanted:
        yield
        return
    handler, level = logging.StreamHandler(), log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
