"""What a mount needs from the machine, checked one by one: the findings of ``ckptfs doctor``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ckptfs.errors import MountError
from ckptfs.mount import fuse
from ckptfs.mount.mount_table import FSTYPE, find_fusermount, is_alive, mounts
from ckptfs.native import library

REQUIRED: dict[str, tuple[str, str | None]] = {
    "click": ("8.1", None),
    "h5py": ("3.10", None),
    "hdf5plugin": ("7.0", None),
    "lz4": ("4.0", None),
    "mfusepy": ("3.1", "4"),
    "ml-dtypes": ("0.4", None),
    "numpy": ("1.24", None),
    "PyYAML": ("6.0", None),
    "rich": ("13.0", None),
}
"""Package to the first version that works and the first that may not; as in pyproject.toml."""
_FUSE_CONF = "/etc/fuse.conf"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check. One that is not *essential* costs speed or a feature when it fails."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    essential: bool = True


def check() -> list[Finding]:
    """All findings, the most basic first."""
    return [run() for run in _CHECKS]


def _kernel() -> Finding:
    with open("/proc/filesystems") as f:
        known = "fuse" in f.read().split()
    remedy = "load it as root: modprobe fuse"
    return Finding("kernel", known, f"Linux {os.uname().release}, FUSE {'known' if known else 'not loaded'}", remedy)


def _device() -> Finding:
    path = "/dev/fuse"
    try:
        is_device = stat.S_ISCHR(os.stat(path).st_mode)
        os.close(os.open(path, os.O_RDWR))
    except FileNotFoundError:
        return Finding(path, False, "missing", "as root: modprobe fuse; in a container: docker run --device /dev/fuse")
    except OSError as exc:
        return Finding(
            path, False, exc.strerror or str(exc), f"as root: chmod 666 {path}; in a container: --device {path}"
        )
    return Finding(path, is_device, "can be opened" if is_device else "no device", "as root: modprobe fuse")


def _may_mount() -> Finding:
    name = "right to mount"
    if os.geteuid() == 0:
        with open("/proc/self/status") as f:
            bits = next(int(line.split()[1], 16) for line in f if line.startswith("CapEff"))
        capable = bool(bits >> 21 & 1)
        return Finding(
            name, capable, f"root {'with' if capable else 'without'} CAP_SYS_ADMIN", "docker run --cap-add SYS_ADMIN"
        )
    helper = find_fusermount()
    setuid = helper is not None and bool(os.stat(helper).st_mode & stat.S_ISUID) and os.stat(helper).st_uid == 0
    return Finding(name, setuid, f"{helper or 'fusermount3 missing'}", f"{fuse.INSTALL_HINT}; it must be setuid root")


def _library() -> Finding:
    try:
        soname = fuse.find_libfuse()
    except MountError as exc:
        return Finding("libfuse 3", False, str(exc).partition(";")[0], fuse.INSTALL_HINT)
    return Finding("libfuse 3", True, f"{soname}, version {'.'.join(map(str, fuse.libfuse_version(soname)))}")


def _helper() -> Finding:
    helper = find_fusermount()
    setuid = helper is not None and bool(os.stat(helper).st_mode & stat.S_ISUID)
    detail = f"{helper}, {'setuid' if setuid else 'not setuid'}" if helper else "missing"
    remedy = f"as root: chmod u+s {helper}" if helper else fuse.INSTALL_HINT
    return Finding("fusermount3", setuid, detail, f"{remedy} (plain users need it)", essential=False)


def _allow_other() -> Finding:
    try:
        with open(_FUSE_CONF) as f:
            allowed = any(line.strip() == "user_allow_other" for line in f)
    except OSError:
        allowed = False
    detail = "plain users may use --allow-other" if allowed else "only root may use --allow-other"
    remedy = f"as root: echo user_allow_other >> {_FUSE_CONF}"
    return Finding("user_allow_other", allowed or os.geteuid() == 0, detail, remedy, essential=False)


def _read_ahead() -> Finding:
    writable = os.geteuid() == 0 and os.path.isdir("/sys/class/bdi") and not os.statvfs("/sys").f_flag & os.ST_RDONLY
    detail = "can be raised at each mount" if writable else "stays at 128 KiB: large reads run at about a third"
    remedy = "mount as root, or let root write 4096 to /sys/class/bdi/MAJOR:MINOR/read_ahead_kb after each mount"
    return Finding("read-ahead", writable, detail, remedy, essential=False)


def _packages() -> Finding:
    wrong = {name: said for name, bounds in REQUIRED.items() if (said := _unfit(name, *bounds))}
    wanted = [f"'{requirement(name)}'" for name in wrong]
    detail = ", ".join(f"{name} {said}" for name, said in wrong.items()) or f"{len(REQUIRED)} there, versions fit"
    return Finding("Python packages", not wrong, detail, install_command(*wanted))


def requirement(name: str) -> str:
    """*name* with its bounds, as pip takes it."""
    low, high = REQUIRED[name]
    return f"{name}>={low}" + (f",<{high}" if high else "")


def _unfit(name: str, low: str, high: str | None) -> str | None:
    """What is wrong with the installed version of a package, None when nothing is."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is missing"
    if _release(found) < _release(low) or (high and _release(found) >= _release(high)):
        return f"{found} does not fit {requirement(name).removeprefix(name)}"
    return None


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``2.10.0rc1`` is (2, 10, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _loops() -> Finding:
    built = library.LIBRARY is not None
    detail = "compiled" if built else "not compiled: numpy does their work, and reading takes more processor time"
    remedy = f"install a C compiler (gcc), then: {install_command('--force-reinstall', '--no-deps', _origin())}"
    if os.environ.get("CKPTFS_PURE_PYTHON"):
        remedy = "unset CKPTFS_PURE_PYTHON"
    return Finding("C loops", built, detail, remedy, essential=False)


def install_command(*what: str) -> str:
    """The command that installs *what* into the environment that ckptfs runs in, as ckptfs itself was installed."""
    python = shlex.quote(sys.executable)
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return " ".join(("pipx runpip ckptfs install", *what))
    if _recorded("INSTALLER") == "uv":
        return " ".join(("uv pip install --python", python, *what))
    return " ".join((python, "-m pip install", *what))


def _origin() -> str:
    """What to give to pip to install ckptfs again: the folder that it came from, else its name."""
    recorded = json.loads(_recorded("direct_url.json") or "{}")
    url = str(recorded.get("url") or "")
    if url.startswith("file://"):
        return shlex.quote(unquote(url.removeprefix("file://")))
    if url:
        return shlex.quote(f"git+{url}" if "vcs_info" in recorded else url)
    if _recorded("METADATA") is None:  # it runs from a checkout
        return shlex.quote(str(Path(__file__).resolve().parents[2]))
    return "ckptfs"


def _recorded(name: str) -> str | None:
    """A file that the installer of ckptfs left behind; None where there is none."""
    try:
        text = importlib.metadata.distribution("ckptfs").read_text(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return text.strip() if text is not None else None


def _stale_mounts() -> Finding:
    dead = [m.path for m in mounts() if m.fstype == FSTYPE and not is_alive(m.path)]
    detail = f"dead: {', '.join(dead)}" if dead else "none is dead"
    return Finding("mounts", not dead, detail, "; ".join(f"ckptfs umount {path}" for path in dead), essential=False)


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _kernel,
    _device,
    _library,
    _may_mount,
    _helper,
    _allow_other,
    _read_ahead,
    _packages,
    _loops,
    _stale_mounts,
)
