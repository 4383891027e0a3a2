"""The life of a mount: in the foreground, or in a daemon that reports to the terminal when it is ready."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, NoReturn, TextIO

from ckptfs.errors import CkptfsError, MountError
from ckptfs.mount import fuse
from ckptfs.mount.fuse import MountOptions
from ckptfs.mount.mount_table import (
    WAIT_S,
    Claim,
    Mount,
    detach,
    mount_at,
    raise_read_ahead,
    read_ahead_file,
    resolve,
    unmount,
)
from ckptfs.mount.signals import handled
from ckptfs.mount.state_files import clean_up, daemon_log, daemon_pid, forget_pid, open_log, pid_file, reopen_log
from ckptfs.mount.stats import log_stats
from ckptfs.native.scratch import keep_freed_memory
from ckptfs.vfs.tree import Tree

log = logging.getLogger(__name__)

START_S = 60.0
"""How long a daemon may take until its mount answers."""
ENDING = (signal.SIGINT, signal.SIGTERM)
LEAVE_S = 1.0
"""How long reads in progress may take after a signal."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"

_READY = b"ready\n"


def mount_in_foreground(
    tree: Tree,
    mountpoint: str,
    options: MountOptions,
    *,
    log_file: str | None = None,
    log_level: str = "info",
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Mount *tree* and serve it until it is unmounted or a signal ends it; the log goes to stderr or *log_file*."""
    _log_to(open_log(log_file) if log_file else sys.stderr, log_level)
    keep_freed_memory()
    with Claim(mountpoint) as claim:

        def ready() -> None:
            claim.release()
            if on_ready is not None:
                on_ready()

        _serve(tree, mountpoint, options, ready, os.path.abspath(log_file) if log_file else None)


def mount_in_background(
    tree: Tree, mountpoint: str, options: MountOptions, *, log_file: str | None = None, log_level: str = "info"
) -> str | None:
    """Mount *tree* from a daemon; returns the daemon's log file once the mount answers.

    *mountpoint* is absolute and has been checked. The files that *tree* reads from stay open in the daemon. Without
    *log_file* the log is in the user's state folder; where that cannot be written there is no log, and None is
    returned. Raises `MountError` (or what the daemon itself raised, by its message and exit code) when the daemon ends
    before the mount answers, or when another mount is made on *mountpoint* at the same time.
    """
    fuse.load_binding()  # here, so that its errors go to the terminal
    with Claim(mountpoint) as claim:
        return _start_daemon(tree, mountpoint, options, claim, log_file, log_level)


def _start_daemon(
    tree: Tree, mountpoint: str, options: MountOptions, claim: Claim, log_file: str | None, log_level: str
) -> str | None:
    before = os.stat(mountpoint).st_dev
    path, log_out = daemon_log(mountpoint, log_file)
    with log_out:
        start = log_out.seek(0, os.SEEK_END)
        receive, send = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(receive)
            claim.close()  # the parent holds it until the mount is confirmed
            report = os.fdopen(send, "wb", buffering=0)
            _daemon(tree, mountpoint, options, log_out, log_level, report, log_path=path)
        os.close(send)
        with open(receive, "rb", buffering=0) as reports:
            message = _wait_for_report(reports, pid)
        if message != _READY:
            raise _failure(pid, message, mountpoint, path, log_out, start)
    _confirm(mountpoint, before)
    return path


def unmount_and_wait(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount, and wait for the daemon to end too (a lazy unmount may keep it as long as files are open)."""
    pid = daemon_pid(resolve(mountpoint))
    unmount(mountpoint, lazy=lazy)
    end = time.monotonic() + (0 if lazy or pid is None else WAIT_S)
    while pid is not None and time.monotonic() < end and daemon_pid(resolve(mountpoint)) == pid:
        time.sleep(0.01)
    clean_up(resolve(mountpoint))


def _daemon(
    tree: Tree,
    mountpoint: str,
    options: MountOptions,
    out: TextIO,
    log_level: str,
    report: BinaryIO,
    *,
    log_path: str | None,
) -> NoReturn:
    """The child process, from its start to its exit. It never returns into the parent's code.

    Without *log_path* it logs nothing once the mount answers.
    """
    code = MountError.exit_code

    def ready() -> None:
        _report(report, _READY)
        if log_path is None:
            _log_nowhere()

    try:
        os.setsid()
        _detach_terminal(out)
        _log_to(sys.stderr, log_level)
        keep_freed_memory()
        _serve(tree, mountpoint, options, ready, log_path or os.devnull)
        log.info("unmounted %s", mountpoint)
        code = 0
    except (CkptfsError, OSError) as exc:
        log.error("%s", exc)
        code = exc.exit_code if isinstance(exc, CkptfsError) else code
        _report(report, str(exc).encode("utf-8", "surrogateescape"))
    finally:
        if sys.exc_info()[1] is not None:
            log.critical("the daemon failed", exc_info=True)
        logging.shutdown()
        os._exit(code)


@dataclass(slots=True)
class _MountLifetime:
    """What is needed to end a mount."""

    mountpoint: str
    mount: Mount | None = None
    """Its line in the mount table, once the kernel has made it."""
    ended: threading.Event = field(default_factory=threading.Event)


def _serve(
    tree: Tree, mountpoint: str, options: MountOptions, on_ready: Callable[[], None] | None, log_path: str | None
) -> None:
    """Mount and answer requests until it is unmounted; a signal unmounts it.

    SIGHUP opens the log at *log_path* again. Without a log file it unmounts, because the terminal is gone.
    """
    life = _MountLifetime(mountpoint)
    actions: dict[int, Callable[[], None]] = dict.fromkeys(ENDING, partial(_end_mount, life))
    actions[signal.SIGHUP] = partial(reopen_log, log_path) if log_path else partial(_end_mount, life)
    actions[signal.SIGUSR1] = partial(log_stats, options.stats) if options.stats else _without_stats
    with pid_file(mountpoint), handled(actions):
        try:
            fuse.serve(tree, mountpoint, options, lambda: _wait_ready(life, options, on_ready))
        finally:
            life.ended.set()


def _without_stats() -> None:
    """The action of SIGUSR1 without statistics; a process without a handler would end."""
    log.debug("SIGUSR1: this mount keeps no statistics; mount it with --stats")


def _end_mount(life: _MountLifetime) -> None:
    """Unmount. If files are open or a read waits for its source, the process does not end by itself: end it."""
    threading.Thread(target=_detach_mount, args=(life,), daemon=True).start()  # fusermount3 may wait for an answer
    if life.ended.wait(LEAVE_S):
        return
    log.info("unmounted %s; some files were still open", life.mountpoint)
    forget_pid(life.mountpoint)
    logging.shutdown()
    os._exit(0)


def _detach_mount(life: _MountLifetime) -> None:
    mount = life.mount or mount_at(life.mountpoint)  # the kernel may have made it a moment ago
    problem = detach(mount) if mount is not None else "it was not mounted yet"
    if problem:
        log.info("%s: %s", life.mountpoint, problem)


def _wait_ready(life: _MountLifetime, options: MountOptions, on_ready: Callable[[], None] | None) -> None:
    """Wait until the mount answers, raise its read-ahead, report that it is ready. End a mount that fails at that."""
    mountpoint = life.mountpoint
    life.mount = mount_at(mountpoint)
    try:
        device = os.stat(mountpoint).st_dev
    except OSError as exc:
        if mount_at(mountpoint) is not None:  # else it was unmounted meanwhile
            log.error("the mount does not answer: %s", exc)
            os.kill(os.getpid(), signal.SIGTERM)
        return
    try:
        if options.read_ahead and os.major(device) == 0:  # not the folder below, after a quick unmount
            raise_read_ahead(device, options.read_ahead)
    except OSError as exc:
        kib = options.read_ahead >> 10
        log.info("read-ahead stays low (%s); as root: echo %d > %s", exc, kib, read_ahead_file(device))
    log.info("mounted on %s%s", mountpoint, f": {options.source}" if options.source else "")
    if on_ready is not None:
        on_ready()


def _detach_terminal(out: TextIO) -> None:
    """Detach from the terminal: empty stdin, output to the log, inherited files closed.

    Files that ckptfs opened itself have the flag close-on-exec, inherited ones do not.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd > 2 and not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(fd)


def _log_to(out: TextIO, level: str) -> None:
    logging.raiseExceptions = False  # a full disk must not fill stderr with tracebacks
    logging.basicConfig(stream=out, level=level.upper(), format=LOG_FORMAT, force=True)


def _log_nowhere() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def _report(out: BinaryIO, message: bytes) -> None:
    """Send the parent its one message; later ones are dropped."""
    if not out.closed:
        with contextlib.suppress(OSError):  # the parent may have been stopped meanwhile
            out.write(message)
            out.close()


def _wait_for_report(reports: BinaryIO, pid: int) -> bytes:
    """The daemon's message; empty when it ended without one. A daemon that does not report in time is stopped."""
    try:
        if select.select([reports], [], [], START_S)[0]:
            return reports.read(1 << 16) or b""
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        raise
    os.kill(pid, signal.SIGTERM)
    raise MountError(f"the mount did not answer within {START_S:.0f} s and was stopped; -f shows what it does")


def _failure(
    pid: int, message: bytes, mountpoint: str, log_path: str | None, log_out: TextIO, start: int
) -> CkptfsError:
    """The error of a daemon that ended too soon: its own message, with what libfuse and its helper printed."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    lines = os.pread(log_out.fileno(), 1 << 16, start).decode(errors="replace").splitlines()
    printed = "; ".join(line for line in lines if line.startswith(("fuse", "mount")))
    said = message.decode("utf-8", "surrogateescape") or f"{mountpoint}: the daemon ended before the mount answered"
    if printed:
        said = f"{mountpoint}: {printed}; 'ckptfs doctor' checks the machine"
    error = MountError(f"{said} (log: {log_path})" if log_path else said)
    error.exit_code = code if code in (1, 2, 3) and message else MountError.exit_code
    return error


def _confirm(mountpoint: str, before: int) -> None:
    """Check that the parent sees the mount: another device than before, and a root that can be listed."""
    try:
        if os.stat(mountpoint).st_dev != before and os.listdir(mountpoint) is not None:
            return
        why = "it shows the folder below"
    except OSError as exc:
        why = str(exc)
    raise MountError(
        f"{mountpoint}: the daemon runs but its mount cannot be seen from here ({why}); 'ckptfs doctor' checks"
    )
