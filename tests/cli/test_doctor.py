"""``ckptfs doctor`` on machines that lack something."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from ckptfs.mount import doctor, fuse
from ckptfs.native import library
from tests.cli.conftest import Result

Run = Callable[..., Result]


def test_without_libfuse(ckptfs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "SONAMES", ("libno-such-library.so.3",))
    found = ckptfs("doctor")
    assert found.code == 4
    assert "✗ libfuse 3" in found.text
    assert "apt install fuse3" in found.text
    mounted = ckptfs("mount", "/dev/null", "/tmp")
    assert mounted.code == 4
    assert "apt install fuse3" in mounted.err


def test_without_a_package(ckptfs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", ("numpy", "no-such-package"))
    found = json.loads(ckptfs("doctor", "--json").out)
    (packages,) = (f for f in found if f["name"] == "Python packages")
    assert packages == {
        "name": "Python packages",
        "ok": False,
        "detail": "missing: no-such-package",
        "remedy": "pip install no-such-package",
        "essential": True,
    }


def test_without_a_compiler(ckptfs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", None)
    monkeypatch.delenv("CKPTFS_PURE_PYTHON", raising=False)
    found = json.loads(ckptfs("doctor", "--json").out)
    (loops,) = (f for f in found if f["name"] == "C loops")
    assert (loops["ok"], loops["essential"]) == (False, False)
    assert "gcc" in loops["remedy"]


@pytest.mark.fuse
def test_a_fit_machine(ckptfs: Run) -> None:
    found = ckptfs("doctor")
    assert found.code == 0
    assert "✓ libfuse 3" in found.text
    assert all(f["ok"] for f in json.loads(ckptfs("doctor", "--json").out) if f["essential"])
