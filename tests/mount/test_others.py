"""Recorded conversions through real mounts: the recorded tensors and configs, and the bytes that ``convert`` writes.

Every checkpoint of every case is mounted once: where several runs convert the same one, as the first of them does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import ckptfs
from tests.cli.recorded import laid_out, lasting, models, unlike_model
from tests.conftest import Mounter
from tests.mount.forks import Command
from tests.recorded.cases import Run, runs
from tests.recorded.test_releases import entries, recorded, unlike

pytestmark = pytest.mark.fuse

FIRST = {(r.folder, r.step["input"]): r for r in reversed(runs("hf") + runs("upgrade")) if not r.refused}
MOUNTED = sorted(FIRST.values(), key=str)
KINDS = [
    ("hf", "--export-safetensors", "model.safetensors", "model-00001-of-00001.safetensors"),
    ("hf-bin", "--export-pickle", "pytorch_model.bin", "pytorch_model-00001-of-00001.bin"),
]
"""Folder of a mount, what makes ``convert`` write the same, and the name of the weight file here and there."""


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


@pytest.mark.parametrize("run", [r for r in MOUNTED if r.tgt == "hf"], ids=str)
def test_to_hugging_face(run: Run, mounted: Mounted) -> None:
    for shown, option, here, there in KINDS:
        out, mnt = mounted.converted(option), mounted.mnt / shown
        for name, model in models(run).items():
            folder = mnt / name if len(models(run)) > 1 else mnt
            assert unlike_model(run, model, folder, out=str(mnt)) == []
            small = {file for file in model["files"] if file.endswith("config.json")}
            assert {p.name for p in folder.iterdir()} - {"generation_config.json"} == {here, *small}
            assert (folder / here).read_bytes() == (out / name / there).read_bytes()
            for file in small:  # a mount's configs name paths in the mount
                written = (out / name / file).read_text().replace(str(out), str(mnt))
                assert (folder / file).read_text() == written


@pytest.mark.parametrize("run", [r for r in MOUNTED if r.tgt != "hf"], ids=str)
def test_to_cerebras(run: Run, mounted: Mounted) -> None:
    cs, out = mounted.mnt / "cs", mounted.converted()
    mdl, config = sorted(out.iterdir(), key=lambda path: path.suffix)
    assert (cs / "checkpoint.mdl").read_bytes() == mdl.read_bytes()
    assert (cs / "params.yaml").read_bytes() == config.read_bytes()
    assert yaml.safe_load(config.read_text()) == run.expected["config"]
    with ckptfs.open(cs / "checkpoint.mdl") as shown:
        expected = {key: lasting(what) for key, what in recorded(run).items()}
        assert unlike(entries(shown.source), expected) == []
