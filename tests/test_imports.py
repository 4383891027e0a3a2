"""Who may import whom: dependencies point one way, and heavy libraries stay in the files that need them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

import ckptfs

ROOT = Path(ckptfs.__file__).parent
BASE = ["errors", "dtypes", "ahead"]
EVERYTHING_BELOW = [*BASE, "cache", "native", "nodes", "formats*", "tensors*", "mappings*", "layouts*", "legacy*"]
MAY_IMPORT = {
    "errors": [],
    "dtypes": [],
    "ahead": [],
    "cache": BASE,
    "native": ["cache"],
    "nodes": ["ahead", "native"],
    "formats.h5_graph": [*BASE, "formats.source", "tensors.elementwise"],  # a reader that has to compute
    "formats*": [*BASE, "cache", "native", "nodes", "formats*"],
    "tensors*": [*BASE, "cache", "native", "nodes", "tensors*", "formats.source", "formats.spans"],
    "mappings*": [*BASE, "tensors*", "mappings*", "formats.source"],
    "layouts.reader": ["errors", "nodes", "formats.spans", "layouts.extent"],
    "layouts*": [*BASE, "cache", "tensors*", "layouts*", "formats.source"],
    "tree*": [*BASE, "cache", "tensors*", "mappings*", "layouts*", "formats*", "tree*"],
    "legacy*": EVERYTHING_BELOW,
    "api": [*EVERYTHING_BELOW, "tree*", "dataiter"],
    "convert": [*EVERYTHING_BELOW, "tree*", "write"],
    "write": ["errors", "layouts.extent"],
    "dataiter": EVERYTHING_BELOW,
    "compare": EVERYTHING_BELOW,
    "check": EVERYTHING_BELOW,
    "fixspec*": [*EVERYTHING_BELOW, "write", "fixspec*"],
    "loading": [*EVERYTHING_BELOW, "api"],
    "saving": [*EVERYTHING_BELOW, "api", "write"],
    "stats": ["cache", "layouts.extent", "tree.node"],
    "callbacks": ["errors", "cache", "native", "stats"],
    "helpers": ["native"],
    "fuse": ["errors", "native", "callbacks", "helpers", "stats", "tree*", "layouts.extent", "layouts.reader"],
    "environment": ["errors", "fuse", "mounts", "native"],
    "mounts": ["errors"],
    "signals": [],
    "daemon": ["errors", "cache", "tree*", "fuse", "mounts", "environment", "signals", "stats"],
    "cli*": ["*"],
    "__main__": ["cli*"],
    "__init__": ["*"],
}
"""Module (below ckptfs) to the modules that it may import; the first pattern that fits counts."""
HDF5 = ["formats.h5_child*", "formats.h5_library*", "fixspec.child"]
"""What runs in a child process; the daemon never loads it."""
ONLY_IN = {
    "torch": ["loading"],
    "transformers": [],
    "safetensors": [],
    "h5py": HDF5,
    "hdf5plugin": HDF5,
    "mfusepy": ["fuse"],
    "rich": ["cli*"],
    "click": ["cli*"],
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("ckptfs.") in MODULES else str(node.module)


@pytest.mark.parametrize("module", MODULES)
def test_dependencies_point_one_way(module: str) -> None:
    allowed = next((names for pattern, names in MAY_IMPORT.items() if fnmatch(module, pattern)), None)
    assert allowed is not None, f"say in MAY_IMPORT what {module} may import"
    ours = {name.removeprefix("ckptfs.") for name in imported(MODULES[module]) if name.startswith("ckptfs.")}
    assert not {name for name in ours if not any(fnmatch(name, pattern) for pattern in allowed)}


@pytest.mark.parametrize("library", ONLY_IN)
def test_heavy_libraries_stay_where_they_are_needed(library: str) -> None:
    users = {m for m, path in MODULES.items() if any(n.split(".")[0] == library for n in imported(path))}
    assert not {user for user in users if not any(fnmatch(user, pattern) for pattern in ONLY_IN[library])}


def test_importing_loads_nothing_heavy() -> None:
    heavy = {"torch", "h5py", "hdf5plugin", "mfusepy", "rich"}
    light = [m for m in MODULES if not any(fnmatch(m, pattern) for pattern in [*HDF5, "*__main__"])]
    code = "import sys, importlib\nfor m in sys.argv[1:]: importlib.import_module(m)\nprint(*sys.modules)"
    names = [f"ckptfs.{module}".removesuffix(".__init__") for module in light]
    found = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert not heavy & set(found.stdout.split())
