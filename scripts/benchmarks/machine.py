"""Where figures come from, and where they go: the machine, a folder for the checkpoints, JSON files."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ckptfs
from ckptfs.mount.fuse import find_libfuse, libfuse_version


def about() -> dict[str, Any]:
    """What a figure depends on besides ckptfs."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cores": os.cpu_count(),
        "processor": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "libfuse": ".".join(map(str, libfuse_version(find_libfuse()))),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("numpy", "lz4", "h5py", "torch", "transformers", "ckptfs")},
        "load": os.getloadavg()[0],
    }


@contextlib.contextmanager
def work_folder(given: str | None, keep: bool) -> Iterator[str]:
    """The folder for checkpoints, mount points and logs; a temporary one is removed unless *keep*."""
    # /tmp may be memory, which would make the cold figures warm and the memory short.
    base = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
    folder = os.path.abspath(given) if given else tempfile.mkdtemp(prefix="ckptfs-bench-", dir=base)
    os.makedirs(folder, exist_ok=True)
    # Installed packages are compiled; those of a checkout may not be, where PYTHONDONTWRITEBYTECODE is set.
    compileall.compile_dir(Path(ckptfs.__file__).parent, quiet=2)
    os.environ["XDG_STATE_HOME"] = os.path.join(folder, "state")  # logs of the mounts
    try:
        yield folder
    finally:
        if keep and not given:
            print(f"kept: {folder}")
        elif not given:
            shutil.rmtree(folder)


def write(path: str, found: Any) -> None:
    """*found* as a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=2, allow_nan=False)
        file.write("\n")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
