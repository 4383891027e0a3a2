"""Recorded conversions through real mounts: the recorded tensors and configs, and the bytes that ``convert`` writes.

Every checkpoint of every case is mounted once: where several runs convert the same one, as the first of them does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

import ckptfs
from tests.conftest import Mounter
from tests.mount.forks import Command
from tests.paths import FAMILIES
from tests.recorded.cases import Run, runs
from tests.recorded.command_lines import laid_out, model_differences, models
from tests.recorded.compare import config_differences, differences, lasting, leaves, state_differences, tensors_in

pytestmark = pytest.mark.fuse

RECORDED = [r for kind in ("hf", "releases") for r in runs(kind, refused=False) if r.has_input]
MOUNTED = sorted({(r.folder, r.step["input"]): r for r in reversed(RECORDED)}.values(), key=str)
SHARDED = "gpt2/cs2hf-shards10KB-safetensors-bf16"
TO_HF = [r for r in MOUNTED if r.tgt == "hf" and r.case != SHARDED]
KINDS = [
    ("hf", "--export-safetensors", "model.safetensors", "model-00001-of-00001.safetensors"),
    ("hf-bin", "--export-pickle", "pytorch_model.bin", "pytorch_model-00001-of-00001.bin"),
]
"""Folder of a mount, what makes ``convert`` write the same, and the name of the weight file here and there."""
REFUSED = [
    r for r in runs("config", refused=True) if r.edited and r.folder.parent.name in ("gpt2", "llama") and r.src != "hf"
]


@dataclass(frozen=True)
class Mounted:
    """A run's input, mounted."""

    mnt: Path
    folder: Path
    args: list[str]
    command: Command

    def converted(self, *options: str) -> Path:
        """The folder with what ``convert`` makes of it."""
        out = self.folder / "OUT"
        code, _, err = self.command(self.folder, "convert", *self.args, "--output-dir", out, "--force", *options)
        assert code == 0, err
        return out


@pytest.fixture
def mounted(run: Run, command: Command, tmp_path: Path, mounter: Mounter) -> Iterator[Mounted]:
    folder, mnt = tmp_path / "case", mounter.mountpoint()
    folder.mkdir()
    argv = laid_out(run, folder)
    args = argv[1 : argv.index("--output-dir")]
    code, _, err = command(folder, "mount", args[0], mnt, *args[1:])
    assert code == 0, err
    yield Mounted(mnt, folder, args, command)
    assert command(folder, "umount", mnt) == (0, "", "")


@pytest.mark.parametrize("run", TO_HF, ids=str)
def test_to_hugging_face(run: Run, mounted: Mounted) -> None:
    for shown, option, here, there in KINDS:
        out, mnt = mounted.converted(option), mounted.mnt / shown
        for name, model in models(run).items():
            folder, written = mnt / name, out / name if name else next(out.iterdir())
            assert model_differences(run, model, folder, out=str(mnt)) == []
            assert json.loads((folder / "config.json").read_text())["architectures"]
            small = {"config.json", *(file for file in model.get("files", ()) if file.endswith("config.json"))}
            assert {p.name for p in folder.iterdir()} - {"generation_config.json"} == {here, *small}
            assert (folder / here).read_bytes() == (written / there).read_bytes()
            for file in small:  # a mount's configs name paths in the mount
                assert (folder / file).read_text() == (written / file).read_text().replace(str(out), str(mnt))
            if shown == "hf":
                with safe_open(folder / here, "np") as file:
                    assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("run", [r for r in MOUNTED if r.case == SHARDED], ids=str)
def test_shards(run: Run, mounter: Mounter, command: Command) -> None:
    mnt, fmt = mounter.mountpoint(), run.step["argv"][2:8]
    args = [run.input, *fmt, "--config", run.config_path]
    code, _, err = command(run.folder, "mount", *args, mnt, "--shard-size", "10KB")
    assert code == 0, err
    index = json.loads((mnt / "hf/model.safetensors.index.json").read_text())
    assert index["weight_map"] == run.expected["weight_map"]
    assert index["metadata"]["total_size"] == run.expected["total_size"]
    assert differences(tensors_in(mnt / "hf"), run.state) == []
    assert config_differences(json.loads((mnt / "hf/config.json").read_text()), run.expected["config"]) == []
    for shown, option, *_ in KINDS:
        out = mounter.folder / shown
        code, _, err = command(run.folder, "convert", *args, "--hf-shard-size", "10KB", option, "--output-dir", out)
        assert code == 0, err
        names = sorted(p.name for p in (mnt / shown).iterdir() if p.suffix in (".safetensors", ".bin"))
        assert len(names) == 2
        for name in names:
            assert (mnt / shown / name).read_bytes() == next(out.glob(f"*/{name}")).read_bytes()


@pytest.mark.parametrize("run", [r for r in MOUNTED if r.tgt != "hf"], ids=str)
def test_to_cerebras(run: Run, mounted: Mounted) -> None:
    cs, out = mounted.mnt / "cs", mounted.converted()
    mdl, config = sorted(out.iterdir(), key=lambda path: path.suffix)
    assert (cs / "checkpoint.mdl").read_bytes() == mdl.read_bytes()
    assert (cs / "params.yaml").read_bytes() == config.read_bytes()
    assert yaml.safe_load(config.read_text()) == run.expected["config"]
    with ckptfs.open(cs / "checkpoint.mdl") as shown:
        found, expected = leaves(shown.source), {key: lasting(what) for key, what in run.state.items()}
        if run.src == "hf":  # the converter writes no metadata there
            found = {key: what for key, what in found.items() if not key.startswith("__metadata__.")}
        assert state_differences(found, expected) == []
        assert [k for k in found if k.startswith("model.")] == [k for k in expected if k.startswith("model.")]
        if run.src == "hf":
            assert (cs / "params.yaml").read_bytes() == (run.folder / "cs.yaml").read_bytes()


@pytest.mark.parametrize("run", REFUSED, ids=str)
def test_refused_config(run: Run, mounter: Mounter) -> None:
    """It leaves the rest of the mount working."""
    params = mounter.folder / "params.yaml"
    params.write_text(yaml.safe_dump(run.config))
    mnt, mdl = mounter.mountpoint(), run.config_path.parent / "cs.mdl"
    done = mounter.ckptfs("mount", mdl, mnt, "--model", run.model, "--config", params)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "Traceback" not in said + mounter.log
    assert "hf" not in os.listdir(mnt)
    reason = (mnt / "README.txt").read_text()
    for field in (*run.step["changes"], *run.step.get("removes", ())):
        assert field in said or "extra_attention_params" in said or "pos_scaling_type" in said
        assert field in reason or "extra_attention_params" in reason or "pos_scaling_type" in reason
    expected = json.loads((mdl.parent / "expected_cs.json").read_text())["cs-2.9"]["state"]
    raw = {key: (mnt / "raw" / key).read_bytes() for key in os.listdir(mnt / "raw")}
    assert (
        differences({k: (want["dtype"], tuple(want["shape"]), raw[k]) for k, want in expected.items()}, expected) == []
    )


def test_the_checkpoint_alone_is_enough_where_it_tells_its_family(mounter: Mounter) -> None:
    """No ``__metadata__`` in the recorded files, so there is no model folder, and the mount says how to get one."""
    mnt, alone = mounter.mountpoint(), mounter.folder / "alone.mdl"
    shutil.copy(FAMILIES / "llama/cs2hf-gqa-fp32/cs.mdl", alone)
    done = mounter.ckptfs("mount", alone, mnt)
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout
    assert "--config" in done.stdout
    assert sorted(os.listdir(mnt)) == ["README.txt", "checkpoint.json", "raw", "tensors", "tf", "torch"]
    assert json.loads((mnt / "checkpoint.json").read_text())["states"] == [
        "model",
        "global_step",
        "optimizer",
        "lr_scheduler",
    ]
