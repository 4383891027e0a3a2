"""``ckptfs mount``"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.options import octal, path_type, reading_options, size, source_argument, view_options
from ckptfs.cli.output import print_columns, printable
from ckptfs.errors import UsageError

if TYPE_CHECKING:
    from ckptfs.cli.main import Settings
    from ckptfs.formats.source import Source
    from ckptfs.mount.fuse import MountOptions
    from ckptfs.mount.stats import Stats
    from ckptfs.vfs.tree import Entry, Tree

_LEVELS = ("debug", "info", "warning", "error")
_FLAGS = frozenset({"allow_other", "nonempty", "ro", "nosuid", "nodev", "noexec", "noatime", "default_permissions"})
"""What ``-o`` takes without a value."""


@click.command("mount")
@source_argument
@click.argument("mountpoint", type=path_type)
@view_options
@click.option("--shard-size", type=size, help="Size above which weights are split into files (10GB).")
@click.option(
    "--tokenizer", type=path_type, metavar="DIR", help="Folder whose tokenizer and other small files go into hf/."
)
@click.option("--cache-size", type=size, help="Memory for decoded data (128MiB).")
@click.option("--threads", type=click.IntRange(1, 64), help="Threads that answer reads (as processors allow: 1 to 4).")
@click.option("--read-ahead", type=size, help="Read-ahead of the mount, 0 for the kernel's default (4MiB; needs root).")
@click.option("--allow-other", is_flag=True, help="Let other users read the mount.")
@click.option("--uid", type=click.IntRange(0), help="Owner of all files (you).")
@click.option("--gid", type=click.IntRange(0), help="Group of all files (yours).")
@click.option("--umask", type=octal, help="Permission bits to take away from 0444 and 0555.")
@click.option(
    "-o",
    "fuse_options",
    multiple=True,
    metavar="OPT[,OPT…]",
    help=f"Mount options: {', '.join(sorted(_FLAGS))}, max_read=SIZE.",
)
@click.option("-f", "--foreground", is_flag=True, help="Stay; Ctrl-C unmounts.")
@click.option("--stats", is_flag=True, help="Count requests: .ckptfs/stats.json in the mount; SIGUSR1 logs it.")
@click.option("--log-file", type=path_type, metavar="FILE", help="Log of the daemon.")
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True)
@reading_options
@click.pass_obj
def command(settings: Settings, /, source: str, mountpoint: str, **options: Any) -> None:
    """Show a checkpoint as a folder.

    SOURCE is a file, an index or a folder, MOUNTPOINT an empty directory. Returns when the mount answers.
    """
    from ckptfs.formats.hdf5.workers import start_early

    if settings.is_process:
        _absolute_command_line(source, mountpoint)
    gc.disable()  # what is imported and made until the mount answers stays as long as the mount
    with start_early(source):
        shown = _mount(source, mountpoint, options)
    settings.leave()
    del shown


def _absolute_command_line(source: str, mountpoint: str) -> None:
    """A daemon leaves the working directory: in ``ps``, relative names would lead nowhere."""
    from ckptfs.mount.title import set_command_line

    words = [os.path.abspath(word) if word in (source, mountpoint) else word for word in sys.orig_argv]
    if words != sys.orig_argv:
        set_command_line(words)


def _mount(source: str, mountpoint: str, options: dict[str, Any]) -> object:
    """Mount it; what was made for that, which is better not freed."""
    from ckptfs.cli.opening import opened
    from ckptfs.mount import daemon, fuse
    from ckptfs.mount.mount_table import check_mountpoint
    from ckptfs.mount.stats import Stats, with_stats

    flags = fuse_flags(options["fuse_options"])
    fuse.load_binding()
    path = check_mountpoint(mountpoint, source, nonempty="nonempty" in flags)
    with opened(source, follow_links=options["follow_links"], cache_size=options["cache_size"]) as src:
        tree, reason = _tree(src, options, path)
        gc.freeze()
        gc.enable()
        stats = Stats() if options["stats"] else None
        mount_options = _mount_options(options, flags, src, stats)
        shown = tree if stats is None else with_stats(tree, stats)
        logging = {"log_file": options["log_file"], "log_level": options["log_level"]}
        if options["foreground"]:
            daemon.mount_in_foreground(
                shown,
                path,
                mount_options,
                on_ready=lambda: _announce(source, mountpoint, tree, reason, None, in_background=False),
                **logging,
            )
        else:
            log_file = daemon.mount_in_background(shown, path, mount_options, **logging)
            _announce(source, mountpoint, tree, reason, log_file, in_background=True)
        return src, tree


def fuse_flags(given: Iterable[str]) -> dict[str, str]:
    """The ``-o`` options by name; `UsageError` for those that make no sense here."""
    flags = dict(flag.partition("=")[::2] for text in given for flag in text.split(",") if flag)
    for name, value in flags.items():
        if name == "rw":
            raise UsageError("-o rw: a checkpoint is mounted read-only")
        if not ((name == "max_read" and value.isdecimal()) or (name in _FLAGS and not value)):
            raise UsageError(f"-o {name}: not known; known are {', '.join(sorted(_FLAGS))}, max_read=BYTES")
    return flags


def _tree(source: Source, options: dict[str, Any], mountpoint: str) -> tuple[Tree, str | None]:
    """The tree to mount and, where there is no model folder in it, the reason."""
    from ckptfs.cli.advice import advised_reason
    from ckptfs.conversion import resolve
    from ckptfs.vfs import views
    from ckptfs.vfs.hf import DEFAULT_SHARD_BYTES

    names = ("model", "config", "src_fmt", "tgt_fmt", "drop_unmatched_keys")
    view, reason = resolve.prepare(source, **{name: options[name] for name in names})
    beside = _tokenizer(options["tokenizer"], cs=view is not None and view.tgt != "hf")
    reason = advised_reason(reason)
    shard_bytes = options["shard_size"] or DEFAULT_SHARD_BYTES
    tree = views.build(source, view, reason=reason, shard_bytes=shard_bytes, beside=beside, where=mountpoint)
    return tree, reason


def _tokenizer(folder: str | None, *, cs: bool) -> dict[str, Entry]:
    """What ``--tokenizer`` adds."""
    from ckptfs.vfs.tokenizer import small_files

    if folder is None:
        return {}
    if cs:
        raise UsageError("--tokenizer adds files to hf/, but this mount shows a Cerebras checkpoint; leave it out")
    return {**small_files(folder)}


def _mount_options(options: dict[str, Any], flags: dict[str, str], source: Source, stats: Stats | None) -> MountOptions:
    from ckptfs.mount.fuse import MountOptions

    given = {n: options[n] for n in ("threads", "uid", "gid", "umask", "read_ahead") if options[n] is not None}
    if "max_read" in flags:
        given["request"] = max(4096, min(int(flags["max_read"]), 1 << 20))
    return MountOptions(
        allow_other=options["allow_other"] or "allow_other" in flags,
        source=source.path,
        source_nbytes=source.nbytes,
        stats=stats,
        extra=tuple(name for name in ("noexec", "noatime") if name in flags),
        **given,
    )


def _announce(
    source: str, mountpoint: str, tree: Tree, reason: str | None, log_file: str | None, *, in_background: bool
) -> None:
    """What is where, and how to end it."""
    from ckptfs.vfs.views import listing

    click.echo(f"{printable(source)} is mounted on {printable(mountpoint)}:")
    print_columns((f"  {printable(mountpoint.rstrip('/'))}/{name}", about) for name, about in listing(tree))
    if reason:
        click.echo(f"There is no model folder: {printable(reason)}")
    if log_file:
        click.echo(f"Log: {printable(log_file)}")
    elif in_background:
        click.echo("Log: none, no state folder can be written; --log-file FILE keeps one")
    if in_background:
        click.echo(f"Unmount with: ckptfs umount {shlex.quote(mountpoint)}")
    else:
        click.echo("Unmount with Ctrl-C")
