"""``ckptfs doctor`` on machines that lack something."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs.mount import doctor, fuse
from ckptfs.native import library
from tests.cli.conftest import Result
from tests.paths import ROOT

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
    monkeypatch.setattr(doctor, "REQUIRED", {"numpy": ("1.24", None), "no-such-package": ("1.2", None)})
    found = json.loads(ckptfs("doctor", "--json").out)
    (packages,) = (f for f in found if f["name"] == "Python packages")
    assert packages == {
        "name": "Python packages",
        "ok": False,
        "detail": "no-such-package is missing",
        "remedy": f"{sys.executable} -m pip install 'no-such-package>=1.2'",
        "essential": True,
    }


@pytest.mark.parametrize(
    ("version", "fits"),
    [("3.9.0", False), ("3.10", True), ("3.10.0rc1", True), ("3.16.0", True), ("4.0", False), ("3", False)],
)
def test_versions_of_packages(version: str, fits: bool, ckptfs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", {"h5py": ("3.10", "4")})
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    (packages,) = (f for f in json.loads(ckptfs("doctor", "--json").out) if f["name"] == "Python packages")
    assert packages["ok"] is fits
    if not fits:
        assert packages["detail"] == f"h5py {version} does not fit >=3.10,<4"
        assert packages["remedy"].endswith("pip install 'h5py>=3.10,<4'")


def test_the_bounds_are_those_of_the_package() -> None:
    lines = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0].splitlines()
    declared = [line.split('"')[1] for line in lines if '"' in line]
    assert declared == [doctor.requirement(name) for name in doctor.REQUIRED]


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


class Installed:
    """What installers leave behind, for `importlib.metadata`."""

    def __init__(self, **files: str) -> None:
        self.files = {name.replace("__", "."): text for name, text in files.items()}

    def read_text(self, name: str) -> str | None:
        return self.files.get(name)


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [
        (Installed(INSTALLER="pip\n", METADATA=""), "PYTHON -m pip install ckptfs"),
        (Installed(INSTALLER="uv", METADATA=""), "uv pip install --python PYTHON ckptfs"),
        (
            Installed(METADATA="", direct_url__json='{"url": "file:///home/me/a%20b", "dir_info": {"editable": true}}'),
            "PYTHON -m pip install '/home/me/a b'",
        ),
        (
            Installed(METADATA="", direct_url__json='{"url": "https://x/y.git", "vcs_info": {"vcs": "git"}}'),
            "PYTHON -m pip install git+https://x/y.git",
        ),
        (None, f"PYTHON -m pip install {ROOT}"),
    ],
)
def test_advice_fits_how_it_was_installed(
    installed: Installed | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distribution(name: str) -> Installed:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    assert doctor.install_command(doctor._origin()) == wanted.replace("PYTHON", sys.executable)


def test_advice_for_an_environment_of_pipx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipx_metadata.json").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert doctor.install_command("'numpy>=1.24'") == "pipx runpip ckptfs install 'numpy>=1.24'"
