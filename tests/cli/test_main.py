"""What holds for every command: exit codes, one line for an error, quick help."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptfs as package
from ckptfs.cli.main import COMMANDS
from ckptfs.errors import MountRefused
from ckptfs.mount import mount_table
from tests.cli.conftest import WEIGHT, Result, safetensors_bytes
from tests.conftest import Mounter
from tests.paths import FAMILIES

Run = Callable[..., Result]


def test_help_lists_every_command(ckptfs: Run) -> None:
    found = ckptfs("--help")
    assert found.code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", found.text, re.MULTILINE)
        assert ckptfs(name, "--help").text.startswith(f"Usage: ckptfs {name} ")


def test_version(ckptfs: Run) -> None:
    assert ckptfs("--version").text == f"ckptfs {package.__version__}\n"


def test_no_command_shows_the_help_page(ckptfs: Run) -> None:
    found = ckptfs()
    assert (found.code, found.err) == (2, "")
    assert found.out == ckptfs("--help").out


def test_the_help_page_cuts_nothing_off(ckptfs: Run) -> None:
    assert "..." not in ckptfs("--help").text.partition("Commands:")[2]


def test_help_loads_nothing_heavy() -> None:
    code = "import sys\nfrom ckptfs.cli.main import run\nrun(['--help'])\nprint(*sys.modules, file=sys.stderr)"
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


def on_a_terminal(*line: object, **env: str) -> tuple[int, str]:
    """Exit code and output of the command with a terminal as stdin, stdout and stderr."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ckptfs", *map(str, line)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **env})
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := terminal.read(4096):
            shown += piece
    return process.wait(), shown.decode()


def test_a_tensor_does_not_go_to_the_terminal(checkpoint: Path) -> None:
    code, shown = on_a_terminal("cat", checkpoint, "layer.weight")
    assert code == 2
    assert shown.startswith("ckptfs: layer.weight is binary data")


@pytest.mark.fuse
def test_colour_only_where_it_is_wanted(ckptfs: Run) -> None:
    plain = {"TERM": "xterm-256color", "NO_COLOR": ""}
    assert "\x1b[" in on_a_terminal("doctor", **plain)[1]
    assert "\x1b[" not in on_a_terminal("doctor", **{**plain, "NO_COLOR": "1"})[1]
    assert "\x1b[" not in on_a_terminal("doctor", **{**plain, "TERM": "dumb"})[1]
    assert b"\x1b[" not in ckptfs("doctor").out


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8:strict"])
def test_names_that_the_terminal_cannot_show(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "names.safetensors"
    path.write_bytes(safetensors_bytes({"a.π": ("F32", WEIGHT), "z": ("F32", WEIGHT)}))
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-m", "ckptfs", "ls", path], capture_output=True, env=env, check=True)
    assert done.stdout.splitlines()[-1].endswith(b" z")
    assert done.stderr == b""


def test_folders_that_hold_something_else(ckptfs: Run, tmp_path: Path) -> None:
    (tmp_path / "checkpoint_20.mdl").touch()
    found = ckptfs("info", tmp_path)
    assert (found.code, found.out) == (3, b"")
    assert "checkpoint_20.mdl" in found.err


def test_a_format_that_no_way_leads_to(ckptfs: Run, tmp_path: Path) -> None:
    golden = FAMILIES / "llama/cs2hf-gqa-fp32"
    how = ("--model", "llama", "--config", golden / "cs.yaml", "--src-fmt", "cs-2.10", "--tgt-fmt", "cs-1.6")
    for line in (("info", golden / "cs.mdl"), ("convert", golden / "cs.mdl", "--output-dir", tmp_path)):
        found = ckptfs(*line, *how)
        assert (found.code, found.out) == (2, b"")
        assert "known: " in found.err
    assert list(tmp_path.iterdir()) == []
    found = ckptfs("convert", golden / "hf", "--tgt-fmt", "hf", "--output-dir", tmp_path)
    assert found.code == 2
    assert "--src-fmt" in found.err


def test_the_mount_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "fusermount3"
    helper.write_text('#!/bin/sh\necho "$0: entry for /data/c not found in /etc/mtab" >&2\nexit 1\n')
    helper.chmod(0o755)
    monkeypatch.setattr(mount_table, "mount_at", lambda path: mount_table.Mount(path, mount_table.FSTYPE, 0))
    monkeypatch.setattr(mount_table, "find_fusermount", lambda: str(helper))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MountRefused, match="another user"):
        mount_table.unmount("/data/c")


@pytest.mark.fuse
def test_nothing_is_written_into_a_mount(ckptfs: Run, mounter: Mounter) -> None:
    shutil.copytree(FAMILIES / "llama/cs2hf-gqa-fp32/hf", mounter.folder / "model")
    mnt = mounter.mountpoint("mnt")
    assert mounter.ckptfs("mount", mounter.folder / "model", mnt).returncode == 0
    found = ckptfs("convert", mnt / "cs/checkpoint.mdl", "--tgt-fmt", "hf", "--config", mnt / "cs/params.yaml")
    assert found.code == 2
    assert "read-only" in found.err
    assert "--output-dir" in found.err
    assert "name its hf/" in ckptfs("info", mnt).err
    assert mounter.ckptfs("umount", mnt).returncode == 0


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(ckptfs: Run, tmp_path: Path, place: str) -> None:
    path = tmp_path / "broken"
    path.write_bytes(b"no checkpoint")
    line = ["--debug", "ls", path] if place == "before" else ["ls", path, "--debug"]
    found = ckptfs(*line)
    assert found.code == 3
    assert "Traceback" in found.err
    assert found.err.splitlines()[-1].startswith("ckptfs: ")
