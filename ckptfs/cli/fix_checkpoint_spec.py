"""``ckptfs fix-checkpoint-spec``"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from ckptfs.cli.options import path_type, progress_option
from ckptfs.cli.progress import progress_bar

if TYPE_CHECKING:
    from ckptfs.tools.repair.fix import Fix

QUESTION = "Are you sure you want to fix the checkpoint inplace? [y/N]: "


@click.command("fix-checkpoint-spec")
@click.argument("checkpoint_path", type=path_type, metavar="CHECKPOINT")
@click.option(
    *("--fixed_checkpoint_path", "--fixed-checkpoint-path"),
    type=path_type,
    metavar="FILE",
    help="Where to write (CHECKPOINT with _fixed before the extension).",
)
@click.option(
    "--fix_inplace", "--fix-inplace", is_flag=True, help="Put the repaired checkpoint in the place of CHECKPOINT."
)
@click.option("--yes", is_flag=True, help="Do not ask before that.")
@progress_option
@click.option("--force", is_flag=True, help="Write over an output that exists.")
def command(
    checkpoint_path: str,
    fixed_checkpoint_path: str | None,
    fix_inplace: bool,
    yes: bool,
    no_progress_bar: bool,
    force: bool,
) -> None:
    """Repair a checkpoint of releases 1.7 to 1.9.

    Takes a class out of the tree spec that later releases do not have, gives shared weights that are stored once their
    other name, and sets the last_epoch of schedulers by global_step. The result is of the same format. An interrupted
    or failed run changes nothing, also in place.
    """
    from ckptfs.errors import UsageError
    from ckptfs.tools.repair.fix import fix_in_place, plan_fix, write_fixed

    if fix_inplace and fixed_checkpoint_path is not None:
        raise UsageError("--fixed_checkpoint_path and --fix_inplace exclude each other")
    fix = plan_fix(checkpoint_path)
    if fix_inplace and not yes and not _confirmed():
        click.echo("Aborting...")
        return
    target = (
        checkpoint_path
        if fix_inplace
        else fixed_checkpoint_path or "{}_fixed{}".format(*os.path.splitext(checkpoint_path))
    )
    with progress_bar(fix.nbytes, not no_progress_bar) as progress:
        if fix_inplace:
            fix_in_place(fix, progress=progress)
        else:
            write_fixed(fix, target, force=force, progress=progress)
    _report(fix, target, copied=not fix_inplace)


def _confirmed() -> bool:
    click.echo(QUESTION, nl=False)
    sys.stdout.flush()
    return sys.stdin.readline().rstrip("\r\n") in ("y", "Y")


def _report(fix: Fix, target: str, *, copied: bool) -> None:
    """What was done, in the lines of the public tool."""
    click.echo("Fixing spec...")
    if copied:
        click.echo("Copying keys...")
    click.echo("Fixing duplicate weights...")
    click.echo("Fixing last_epochs...")
    if not fix.has_step:
        click.echo("Cannot fix last epoch(s) without a global_step key. Skipping...")
    click.echo(f"Fixed checkpoint saved to: {target}")
