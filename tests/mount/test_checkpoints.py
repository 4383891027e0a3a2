"""``ckptfs mount`` of real checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import CKPTFS, Mounter
from tests.paths import FAMILIES
from tests.waiting import MAX_SECONDS, wait_for

pytestmark = pytest.mark.fuse

GOLDEN = FAMILIES / "llama/cs2hf-gqa-fp32"
KEY = "model.transformer_decoder.layers.1.ffn.ffn.1.linear_layer.weight"
NPY = f"tensors/{KEY.replace('.', '/')}.npy"
MODEL = ("--model", "llama", "--config", GOLDEN / "cs.yaml")


def golden_weights() -> bytes:
    """What the original converter wrote."""
    return (GOLDEN / "hf/model-00001-of-00001.safetensors").read_bytes()


def test_a_cerebras_checkpoint_is_a_hugging_face_model(mounter: Mounter, source: Path) -> None:
    path = mounter.mountpoint()
    done = mounter.ckptfs("mount", source, path, *MODEL)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{path}/hf" in done.stdout
    assert f"ckptfs umount {path}" in done.stdout
    assert (path / "hf/model.safetensors").read_bytes() == golden_weights()
    code = (
        "import sys, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(type(model).__name__, sum(p.numel() for p in model.parameters()))"
    )
    loaded = subprocess.run([sys.executable, "-c", code, path / "hf"], capture_output=True, text=True)
    assert loaded.stdout == "LlamaForCausalLM 11112\n", loaded.stderr
    assert "ERROR" not in mounter.log


def test_tensors_facts_and_commands_agree(mounter: Mounter, source: Path) -> None:
    path = mounter.mountpoint()
    assert mounter.ckptfs("mount", source, path, *MODEL).returncode == 0
    array = np.load(path / NPY)
    mapped = np.load(path / NPY, mmap_mode="r")
    raw = path / "raw" / KEY
    assert array.shape == tuple(json.loads(os.getxattr(raw, "user.shape"))) == (24, 40)
    assert array.tobytes() == mapped.tobytes() == raw.read_bytes()
    assert os.getxattr(raw, "user.key") == KEY.encode()
    assert os.stat(raw).st_mtime_ns == os.stat(source).st_mtime_ns

    facts = json.loads((path / "checkpoint.json").read_text())
    assert facts == json.loads(mounter.ckptfs("info", source, "--json", *MODEL).stdout)
    assert (facts["family"], facts["step"], facts["release"]) == ("llama", 42, "2.10.0")
    listed = {i["key"]: i for i in json.loads(mounter.ckptfs("ls", source, "--json").stdout)}
    assert set(os.listdir(path / "raw")) == {k for k, i in listed.items() if i["kind"] == "tensor"}
    assert listed[KEY]["nbytes"] == raw.stat().st_size


def test_without_a_family_the_rest_is_there(mounter: Mounter, source: Path) -> None:
    path = mounter.mountpoint()
    done = mounter.ckptfs("mount", source, path)
    assert done.returncode == 0
    assert "--model" in done.stdout
    assert "hf" not in os.listdir(path)
    assert "--model" in (path / "README.txt").read_text()
    assert np.load(path / NPY).shape == (24, 40)


def test_a_relative_source_and_a_deleted_one(mounter: Mounter, source: Path) -> None:
    path = mounter.mountpoint()
    command = [sys.executable, *CKPTFS, "mount", source.name, path, *MODEL]
    subprocess.run(command, cwd=source.parent, env=mounter.env, check=True, capture_output=True)
    source.unlink()
    assert (path / "hf/model.safetensors").read_bytes() == golden_weights()


def test_a_folder_holds_no_mount_of_itself(mounter: Mounter, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "hf", folder)
    (folder / "mnt").mkdir()
    done = mounter.ckptfs("mount", folder, folder / "mnt")
    assert done.returncode == 4
    assert "inside the source" in done.stderr
    assert mounter.ckptfs("mount", folder, mounter.mountpoint()).returncode == 0


def test_broken_and_absent_sources(mounter: Mounter, tmp_path: Path) -> None:
    (tmp_path / "broken.mdl").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(600))
    path = mounter.mountpoint()
    done = mounter.ckptfs("mount", tmp_path / "broken.mdl", path)
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    done = mounter.ckptfs("mount", tmp_path / "absent.mdl", path)
    assert done.returncode in (2, 3)
    assert "absent.mdl" in done.stderr
    assert mounter.ckptfs("mount", tmp_path, path, "--model", "no-such-model").returncode != 0
    assert os.listdir(path) == []


def test_ctrl_c_in_the_foreground(mounter: Mounter, source: Path) -> None:
    path = mounter.mountpoint()
    process = mounter.start(*CKPTFS, "mount", "-f", source, path, *MODEL)
    wait_for("the mount", (path / "README.txt").exists)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=MAX_SECONDS)
    assert process.returncode == 0, err
    assert "Ctrl-C" in out
    assert os.listdir(path) == []


def test_options_reach_the_mount(mounter: Mounter, source: Path) -> None:
    path = mounter.mountpoint()
    log = mounter.folder / "own.log"
    options = (
        "--uid",
        "7",
        "--gid",
        "8",
        "--umask",
        "077",
        "--threads",
        "2",
        "--cache-size",
        "1MiB",
        "--log-file",
        log,
    )
    sharded = ("--shard-size", "10KB", "-o", "noexec,max_read=131072", "--log-level", "debug", "--allow-other")
    done = mounter.ckptfs("mount", source, path, *MODEL, *options, *sharded)
    assert done.returncode == 0, done.stderr
    st = os.stat(path / "README.txt")
    assert (st.st_uid, st.st_gid, st.st_mode & 0o777) == (7, 8, 0o400)
    assert len([name for name in os.listdir(path / "hf") if name.endswith(".safetensors")]) > 1
    assert "mounted on" in log.read_text()
    with open("/proc/self/mountinfo") as f:
        line = next(line for line in f if line.split()[4] == str(path))
    assert "noexec" in line
    assert "max_read=131072" in line
    assert "allow_other" in line


def test_the_daemon_is_small(mounter: Mounter, source: Path) -> None:
    path = mounter.mountpoint()
    assert mounter.ckptfs("mount", source, path, *MODEL).returncode == 0
    assert (path / "hf/model.safetensors").read_bytes() == golden_weights()
    pid = mounter.daemon_pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert not [name for name in ("h5py", "libhdf5", "torch", "libfuse.so.2") if name in maps]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        assert "/dev/fuse" not in [os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")]
