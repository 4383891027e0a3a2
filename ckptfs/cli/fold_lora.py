"""``ckptfs fold-lora``"""

from __future__ import annotations

import os
from typing import Any

import click

from ckptfs.cli.options import path_type, progress_option, reading_options
from ckptfs.cli.output import printable
from ckptfs.cli.progress import progress_bar


@click.command("fold-lora")
@click.option("--model", metavar="NAME", help="Model name, for messages (the config's).")
@click.option("-p", "--params", type=path_type, metavar="YAML", required=True, help="Config with lora_params.")
@click.option("--checkpoint_path", type=path_type, metavar="MDL", required=True, help="Checkpoint with adapters.")
@click.option("--output-dir", type=path_type, metavar="DIR", help="Where to write (beside the inputs).")
@progress_option
@click.option("--force", is_flag=True, help="Write over outputs of an earlier run.")
@reading_options
def command(checkpoint_path: str, params: str, **options: Any) -> None:
    """Add LoRA adapters to the weights they belong to.

    Writes MDL_folded.mdl, which has the model state only, and YAML_folded.yaml. 'ckptfs mount' and 'convert' do the
    same on the way to hf, without this step.
    """
    from ckptfs.cli.opening import opened
    from ckptfs.conversion import hf, resolve
    from ckptfs.tools.export import folded_outputs, nbytes, write_outputs

    config = resolve.read_config(params)
    with opened(checkpoint_path, follow_links=options["follow_links"]) as source:
        folded, tensors, warnings = hf.fold_lora(source, config, model=options["model"])
        files = folded_outputs(folded, tensors, params, checkpoint_path, release=source.release)
        beside = [os.path.dirname(os.path.abspath(path)) for path in (checkpoint_path, params)]
        folder = options["output_dir"] or beside[0]
        if not options["output_dir"]:  # each beside its input: absolute names overrule the folder
            files = {os.path.join(place, name): file for place, (name, file) in zip(beside, files.items(), strict=True)}
        with progress_bar(nbytes({**files}), not options["no_progress_bar"]) as progress:
            written = write_outputs({**files}, folder, force=options["force"], progress=progress, check=source.check)
    for warning in warnings:
        click.echo(f"ckptfs: {printable(warning)}", err=True)
    for kind, path in zip(("checkpoint", "config"), written, strict=True):
        click.echo(f"Saved folded {kind} to: {path}")
