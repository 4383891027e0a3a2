"""``ckptfs umount``"""

from __future__ import annotations

import click

from ckptfs.cli.completion import mountpoints
from ckptfs.cli.options import path_type


@click.command("umount")
@click.argument("mountpoint", type=path_type, shell_complete=mountpoints)
@click.option("--lazy", is_flag=True, help="Detach it now; it ends when its last user is done.")
def command(mountpoint: str, lazy: bool) -> None:
    """Unmount and wait until the mount is gone.

    It also works for a mount whose daemon died.
    """
    from ckptfs.mount.daemon import unmount_and_wait

    unmount_and_wait(mountpoint, lazy=lazy)
