"""What holds for every command: exit codes, one line for an error, quick help."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptfs as package
from ckptfs.cli import COMMANDS
from tests.cli.conftest import Result

Run = Callable[..., Result]


def test_help_lists_every_command(ckptfs: Run) -> None:
    found = ckptfs("--help")
    assert found.code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", found.text, re.MULTILINE)
        assert ckptfs(name, "--help").text.startswith(f"Usage: ckptfs {name} ")


def test_version(ckptfs: Run) -> None:
    assert ckptfs("--version").text == f"ckptfs {package.__version__}\n"


def test_help_loads_nothing_heavy() -> None:
    code = "import sys\nfrom ckptfs.cli import run\nrun(['--help'])\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert not {"numpy", "h5py", "rich", "mfusepy", "yaml", "torch"} & set(done.stderr.split())


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ckptfs", "--version"], capture_output=True, text=True)
    assert done.stdout == f"ckptfs {package.__version__}\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["nothing"], 2),
        (["ls"], 2),
        (["ls", "--nothing"], 2),
        (["mount", "a", "b", "--umask", "9"], 2),
        (["mount", "a", "b", "--read-ahead", "many"], 2),
        (["mount", "a", "b", "-o", "rw"], 2),
        (["mount", "a", "b", "-o", "nothing"], 2),
        (["mount", "a", "b", "--threads", "0"], 2),
        (["list", "no-such-model"], 2),
        (["umount", "/no/such/mount"], 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line(ckptfs: Run, line: list[str], code: int) -> None:
    found = ckptfs(*line)
    assert (found.code, found.out) == (code, b"")
    assert found.err.startswith("ckptfs: ")
    assert found.err.count("\n") == 1


def test_broken_input(ckptfs: Run, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{broken} ")
    for command in ("ls", "info"):
        found = ckptfs(command, path)
        assert (found.code, found.out) == (3, b"")
        assert str(path) in found.err
        assert found.err.count("\n") == 1


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(ckptfs: Run, tmp_path: Path, place: str) -> None:
    path = tmp_path / "broken"
    path.write_bytes(b"no checkpoint")
    line = ["--debug", "ls", path] if place == "before" else ["ls", path, "--debug"]
    found = ckptfs(*line)
    assert found.code == 3
    assert "Traceback" in found.err
    assert found.err.splitlines()[-1].startswith("ckptfs: ")
