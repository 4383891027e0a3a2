"""`ckptfs.mount`: a mount for the length of a ``with`` block."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

import ckptfs
from ckptfs.errors import MountError, SourceChanged, SourceClosed, UnknownFamily, UsageError
from ckptfs.mount.mount_table import mounts
from tests.conftest import Mounter
from tests.paths import FAMILIES

pytestmark = pytest.mark.fuse

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
WEIGHTS = (LLAMA / "hf/model-00001-of-00001.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def clean(mounter: Mounter, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a failed test leaves below the temporary folder is unmounted."""
    monkeypatch.setenv("XDG_STATE_HOME", str(mounter.folder / "state"))
    monkeypatch.setenv("TMPDIR", str(mounter.folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    mounter.clean()


def mounted() -> list[str]:
    return [mount.path for mount in mounts() if mount.fstype == "fuse.ckptfs"]


def test_a_mount_for_a_while(mounter: Mounter) -> None:
    folder = mounter.mountpoint()
    with ckptfs.mount(LLAMA / "cs.mdl", folder, model="llama", config=LLAMA / "cs.yaml") as path:
        assert path == folder
        assert (path / "hf/model.safetensors").read_bytes() == WEIGHTS
        assert ckptfs.open(path / "hf")["lm_head.weight"].shape == (37, 24)
    assert str(folder) not in mounted()
    assert os.listdir(folder) == []


def test_a_folder_of_its_own_and_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load((LLAMA / "cs.yaml").read_text())
    monkeypatch.chdir(LLAMA)
    with ckptfs.open("cs.mdl") as checkpoint, ckptfs.mount(checkpoint, model="llama", config=config) as path:
        assert json.loads((path / "checkpoint.json").read_text())["family"] == "llama"
        kept = load_file(path / "hf/model.safetensors")
        opened = open(path / "hf/model.safetensors", "rb")  # noqa: SIM115 - it is still open at the end
        assert opened.read(10) == WEIGHTS[:10]
    with opened:
        assert opened.read() == WEIGHTS[10:]
    assert kept["lm_head.weight"].shape == (37, 24)
    assert not path.exists()
    assert str(path) not in mounted()


def test_an_error_in_the_block_unmounts(mounter: Mounter) -> None:
    with pytest.raises(ZeroDivisionError), ckptfs.mount(LLAMA / "cs.mdl", mounter.mountpoint()):
        raise ZeroDivisionError
    assert str(mounter.mountpoint()) not in mounted()


def test_unmounted_meanwhile(mounter: Mounter) -> None:
    with ckptfs.mount(LLAMA / "cs.mdl", mounter.mountpoint()) as path:
        assert mounter.ckptfs("umount", path).returncode == 0


def test_errors_are_those_of_the_library(mounter: Mounter, tmp_path: Path) -> None:
    """They come out of another process."""
    folder = mounter.mountpoint()
    with pytest.raises(FileNotFoundError, match="absent"), ckptfs.mount(tmp_path / "absent.mdl", folder):
        pass
    with (
        pytest.raises(UnknownFamily) as caught,
        ckptfs.mount(LLAMA / "cs.mdl", folder, model="lama", config=LLAMA / "cs.yaml"),
    ):
        pass
    assert caught.value.name == "lama"
    alone = shutil.copy(LLAMA / "cs.mdl", tmp_path / "alone.mdl")
    with pytest.raises(UsageError, match="no model config"), ckptfs.mount(alone, folder, model="llama"):
        pass
    with ckptfs.open(LLAMA / "cs.mdl") as checkpoint:
        pass
    with pytest.raises(SourceClosed), ckptfs.mount(checkpoint, folder):
        pass
    (folder / "x").touch()
    with pytest.raises(MountError, match="is not empty"), ckptfs.mount(LLAMA / "cs.mdl", folder):
        pass
    assert str(folder) not in mounted()


def test_an_open_checkpoint_is_mounted_as_it_is(mounter: Mounter, tmp_path: Path) -> None:
    source = Path(shutil.copy(LLAMA / "cs.mdl", tmp_path))
    with ckptfs.open(source) as checkpoint:
        os.rename(shutil.copy(LLAMA / "cs.mdl", tmp_path / "new"), source)
        with pytest.raises(SourceChanged, match="is not the file"), ckptfs.mount(checkpoint, mounter.mountpoint()):
            pass


def test_a_process_with_threads_can_mount(mounter: Mounter) -> None:
    """The daemon is no fork of the caller: locks that other threads hold do not matter."""
    lock, held = threading.Lock(), threading.Event()
    thread = threading.Thread(target=lambda: [lock.acquire(), held.set()])
    thread.start()
    held.wait()
    with ckptfs.mount(LLAMA / "cs.mdl", mounter.mountpoint()) as path:
        assert (path / "README.txt").read_text()
    thread.join()


@pytest.mark.parametrize("first", ["import ckptfs", "import ckptfs, ckptfs.mount.daemon", "from ckptfs import mount"])
def test_under_every_name(mounter: Mounter, first: str) -> None:
    call = "mount" if first.startswith("from") else "ckptfs.mount"
    code = f"{first}\nwith {call}({str(LLAMA / 'cs.mdl')!r}, {str(mounter.mountpoint())!r}) as path: print(path)"
    done = subprocess.run([sys.executable, "-c", code], env=mounter.env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(mounter.mountpoint()), done.stderr
