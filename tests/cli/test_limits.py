"""Limits on memory and processes end a command in one line."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import click
import pytest

from ckptfs.cli import ls
from ckptfs.cli.main import run
from tests.paths import FAMILIES, ROOT

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
FAILURES = {
    "memory": (MemoryError(), "not enough memory"),
    "threads": (RuntimeError("can't start new thread"), "cannot start a thread"),
    "library": (ImportError("numpy: x.so: failed to map segment from shared object"), "not enough memory to load"),
    "processes": (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "Resource temporarily unavailable"),
    "files": (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "f"), "f: Too many open files"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_one_line(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error, said = FAILURES[name]

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(ls, "command", click.Command("ls", callback=fail))
    assert run(["ls"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ckptfs: {said}")
    assert "ulimit -a" in line


@pytest.mark.parametrize("error", [RuntimeError("another"), ImportError("No module named 'x'")])
def test_mistakes_are_not_called_limits(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(ls, "command", click.Command("ls", callback=fail))
    with pytest.raises(type(error)):
        run(["ls"])


def test_a_real_limit() -> None:
    """40 MB of address space do not even hold the libraries."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptfs", "info", str(LLAMA / "cs.mdl")],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (40 << 20, 40 << 20)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4, done.stderr
    (line,) = done.stderr.splitlines()
    assert "not enough memory" in line
