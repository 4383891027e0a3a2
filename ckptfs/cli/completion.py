"""What the shell offers when the tab key is pressed: models, formats, keys of a checkpoint, mounts.

``eval "$(_CKPTFS_COMPLETE=bash_source ckptfs)"`` switches it on; zsh and fish have sources of their own.
"""

from __future__ import annotations

import os

import click

from ckptfs.errors import CkptfsError

MAX_KEYS = 200
"""More keys than a shell shows well."""


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Model names, in the case that the user began with."""
    from ckptfs.conversion.registry import FAMILIES

    return [name for name in FAMILIES if name.lower().startswith(incomplete.lower())]


def formats(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Formats that every model may have."""
    from ckptfs.conversion.format_names import RELEASES

    names = ["hf", "cs-auto", "cs-current", *("cs-{}.{}".format(*release) for release in reversed(RELEASES))]
    return [name for name in names if name.startswith(incomplete)]


def keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Keys of the checkpoint that stands before them; up to the next dot where there are many."""
    from ckptfs.cli.opening import opened

    try:
        with opened(str(ctx.params.get("source") or "")) as source:
            found = [key for key in source.items if key.startswith(incomplete)]
    except (CkptfsError, OSError):
        return []
    if len(found) <= MAX_KEYS:
        return found
    ends = (key.find(".", len(incomplete)) + 1 for key in found)
    return list(dict.fromkeys(key[: end or None] for key, end in zip(found, ends, strict=True)))


def mountpoints(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Where something of ckptfs is mounted."""
    from ckptfs.mount import mount_table

    found = [mount.path for mount in mount_table.mounts() if mount.fstype == mount_table.FSTYPE]
    if os.path.isabs(incomplete) or not incomplete:
        return [path for path in found if path.startswith(incomplete)]
    return [path for path in map(os.path.relpath, found) if path.startswith(incomplete)]
