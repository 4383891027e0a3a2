"""Mounts a tree made by hand: ``python -m tests.mount.mount_tree [-f] MOUNTPOINT [FIELD=NUMBER…]``.

The tree is `trees.tree`; FIELDs are those of `MountOptions`. Errors and exit codes are the command line's.
"""

from __future__ import annotations

import os
import sys

from ckptfs.errors import CkptfsError
from ckptfs.mount.daemon import mount_in_background, mount_in_foreground
from ckptfs.mount.fuse import MountOptions
from ckptfs.mount.mount_table import check_mountpoint
from tests.mount.trees import SOURCE_NBYTES, tree


def main(args: list[str]) -> int:
    foreground = args[0] == "-f"
    mountpoint, *fields = args[foreground:]
    options = {name: int(value) for name, value in (field.split("=") for field in fields)}
    try:
        path = check_mountpoint(mountpoint, os.devnull)
        run = mount_in_foreground if foreground else mount_in_background
        run(tree(), path, MountOptions(source_nbytes=SOURCE_NBYTES, **options))
    except CkptfsError as exc:
        print(f"ckptfs: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
