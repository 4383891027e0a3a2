"""The rooms in order: a room imports what stands below it, and heavy libraries stay where they are needed."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ckptfs

ROOT = Path(ckptfs.__file__).parent
ROOMS = [
    "cli",
    "api",
    "mount",
    "tools",
    "vfs",
    "conversion",
    "formats",
    "tensors",
    "native",
    "errors",
]
"""Top to bottom; a room may import itself and what stands below it."""
CONVERTER = "convert_checkpoint"
"""The one module beside the rooms: scripts call the public converter by this name."""
CHILDREN = ["formats.hdf5.index_worker", "formats.hdf5.decode_worker", "formats.hdf5.libhdf5", "tools.repair.child"]
"""What runs in a child process; the daemon never loads it."""
ONLY_IN = {
    "torch": ["api.to_torch"],
    "transformers": [],
    "safetensors": [],
    "h5py": CHILDREN,
    "hdf5plugin": CHILDREN,
    "mfusepy": ["mount.fuse"],
    "rich": ["cli*"],
    "click": ["cli*"],
}
PACKAGES_OF_FORMATS: list[tuple[str, str, set[str]]] = [
    ("hdf5", "cerebras", set()),
    ("hdf5", "torch", set()),
    ("torch", "hdf5", set()),
    ("torch", "cerebras", set()),
    ("cerebras", "hdf5", {"dataset", "index", "writer"}),
]
"""(package of `formats`, another one, what it may import of that): Cerebras knows nothing of HDF5's structures."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
STANDARD_LIBRARY_ONLY = ["index_worker", "object_headers", "messages", "superblock", "header_cache", "summary"]
UPWARDS = {"mount": {"api"}}
"""The package `mount` can be called: ``ckptfs.mount`` is both a room and the function of `api.mount`, to which it hands
the call. Whichever of the two came first would hide the other."""
"""Modules of `formats.hdf5` that the indexing process imports: it starts without site-packages."""


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Full names of the modules that a file imports, wherever in the file."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("ckptfs.") in MODULES else str(node.module)


def test_every_entry_is_a_room() -> None:
    entries = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert entries - {"__init__", "__main__"} == {*ROOMS, CONVERTER}


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("__")])
def test_dependencies_point_one_way(module: str) -> None:
    room = module.partition(".")[0]
    below = ["cli"] if room == CONVERTER else ROOMS[ROOMS.index(room) :]
    ours = {name.split(".")[1] for name in imported(MODULES[module]) if name.startswith("ckptfs.")}
    assert not ours - set(below) - UPWARDS.get(module, set())


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions and for type checkers count, too."""
    names = {module: {name.removeprefix("ckptfs.") for name in imported(path)} for module, path in MODULES.items()}
    TopologicalSorter({module: (found & set(MODULES)) - {module} for module, found in names.items()}).prepare()


@pytest.mark.parametrize(("package", "other", "known"), PACKAGES_OF_FORMATS)
def test_packages_of_formats_keep_apart(package: str, other: str, known: set[str]) -> None:
    ours = {m: path for m, path in MODULES.items() if m.startswith(f"formats.{package}.")}
    prefix = f"ckptfs.formats.{other}."
    found = {name.removeprefix(prefix) for path in ours.values() for name in imported(path) if name.startswith(prefix)}
    assert ours and found <= known


@pytest.mark.parametrize("room", ROOMS[:-1])
def test_a_package_is_a_docstring(room: str) -> None:
    """Re-exports would make the indexing process import numpy. `cli` has the command group; `mount` see `UPWARDS`."""
    for path in (ROOT / room).rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert isinstance(body[0], ast.Expr), path
        if room == "mount" and path.parent == ROOT / room:
            kinds = [type(node) for node in body[1:]]
            assert kinds == [ast.Import, ast.ImportFrom, ast.ImportFrom, ast.ClassDef, ast.Assign]
        else:
            assert len(body) == 1 or room == "cli", path


def test_the_room_mount_can_be_called() -> None:
    """Before and after one of its modules is imported, however it is named; and it stays a package."""
    first = "assert callable(mount), mount\nassert mount.__name__ == 'ckptfs.mount'"
    for lines in (
        ("import ckptfs; mount = ckptfs.mount", first),
        ("from ckptfs import mount", first),
        ("import ckptfs, ckptfs.mount.daemon; mount = ckptfs.mount", first),
        ("import ckptfs.mount.stats as stats", "from ckptfs import mount", first, "assert mount.stats is stats"),
        (
            "from ckptfs import mount",
            "import ckptfs.mount.stats",
            "import ckptfs",
            "assert ckptfs.mount is mount",
            first,
        ),
    ):
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
        assert done.returncode == 0, (lines, done.stderr)


@pytest.mark.parametrize("library", ONLY_IN)
def test_heavy_libraries_stay_where_they_are_needed(library: str) -> None:
    users = {m for m, path in MODULES.items() if any(n.split(".")[0] == library for n in imported(path))}
    assert not {user for user in users if not any(fnmatch(user, pattern) for pattern in ONLY_IN[library])}


def test_importing_loads_nothing_heavy() -> None:
    heavy = {"torch", "h5py", "hdf5plugin", "mfusepy", "rich"}
    light = [m for m in MODULES if not any(fnmatch(m, pattern) for pattern in [*CHILDREN, "*__main__"])]
    code = "import sys, importlib\nfor m in sys.argv[1:]: importlib.import_module(m)\nprint(*sys.modules)"
    names = [f"ckptfs.{module}".removesuffix(".__init__") for module in light]
    found = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert not heavy & set(found.stdout.split())


@pytest.mark.parametrize("module", STANDARD_LIBRARY_ONLY)
def test_the_indexing_process_needs_the_standard_library_only(module: str) -> None:
    code = f"import sys; sys.path.append({str(ROOT.parent)!r}); import ckptfs.formats.hdf5.{module}"
    found = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
