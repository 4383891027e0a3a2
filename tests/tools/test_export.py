"""`ckptfs.tools.export`: recorded conversions as files, under the converter's names, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

import ckptfs
from ckptfs.conversion import resolve
from ckptfs.errors import UsageError, WriteError
from ckptfs.tools.export import nbytes, outputs, stem, write_outputs
from tests.paths import FAMILIES
from tests.recorded.cases import Run, run_named, runs
from tests.recorded.compare import config_differences, differences, tensors_in, tensors_of

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
DECODERS = [r for r in runs("hf", refused=False) if "output_files" not in r.step]
"""The rest is written by command lines, in `tests.cli.test_recorded`."""
TO_HF = [r for r in DECODERS if r.tgt == "hf" and "roundtrip" not in r.step["id"]]


def convert(run: Run, folder: Path, **options: object) -> list[str]:
    """The run's conversion, written below *folder*."""
    source, config = run.input, None if run.src == "hf" else run.config_path
    with ckptfs.open(source) as checkpoint:
        view = resolve.plan_view(checkpoint.source, run.tgt, model=run.model, config=config, src_fmt=run.src)
        shape = {"shard_bytes": 10**10, "safetensors": False, **options}
        files = outputs(view, str(source), str(config) if config else None, **shape)  # type: ignore[arg-type]
        return write_outputs(files, str(folder))


@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
@pytest.mark.parametrize("run", TO_HF, ids=str)
def test_to_hugging_face(run: Run, kind: str, tmp_path: Path) -> None:
    (path,) = convert(run, tmp_path, safetensors=kind == "safetensors")
    assert path == str(tmp_path / f"{stem(str(run.input))}_to_hf")
    folder = Path(path)
    suffix = "safetensors" if kind == "safetensors" else "bin"
    assert differences(tensors_in(folder, f".{suffix}"), run.state) == []
    assert list(tmp_path.iterdir()) == [folder]
    assert config_differences(json.loads((folder / "config.json").read_text()), run.expected["config"]) == []
    index = json.loads(next(folder.glob(f"*.{suffix}.index.json")).read_text())
    assert list(index["weight_map"]) == list(run.state)
    assert set(index["weight_map"].values()) == {p.name for p in folder.glob(f"*.{suffix}")}


@pytest.mark.parametrize("run", [r for r in TO_HF if (r.folder / "hf").exists()], ids=str)
def test_the_same_bytes_as_the_converter(run: Run, tmp_path: Path) -> None:
    """Recorded weight files and indexes, byte for byte; ``config.json`` has two fields more."""
    (path,) = convert(run, tmp_path, safetensors=True)
    for recorded in (run.folder / "hf").iterdir():
        if recorded.name != "config.json":
            assert (Path(path) / recorded.name).read_bytes() == recorded.read_bytes(), recorded.name


@pytest.mark.parametrize("run", [r for r in DECODERS if r.src == "hf"], ids=str)
def test_to_cerebras(run: Run, tmp_path: Path) -> None:
    mdl, params = convert(run, tmp_path)
    assert (os.path.basename(mdl), os.path.basename(params)) == (f"hf_to_{run.tgt}.mdl", f"config_to_{run.tgt}.yaml")
    if "state_same_as" not in run.expected:
        assert Path(params).read_bytes() == (run.folder / "cs.yaml").read_bytes()
    with ckptfs.open(mdl) as written:
        assert written.source.tree is not None
        assert list(written.source.tree.keys or ()) == ["model", "__metadata__"]
        assert differences(tensors_of(written), run.state) == []


def test_compressed_to_cerebras(tmp_path: Path) -> None:
    """The same tensors in LZ4 chunks, which take less room where there are zeros."""
    run = run_named("llama/hf2cs-gqa-bf16/hf_to_cs-2.9")
    mdl, _ = convert(run, tmp_path, compress="lz4")
    with ckptfs.open(mdl) as written:
        assert differences(tensors_of(written), run.state) == []
    with h5py.File(mdl) as file:
        filters = file["model.lm_head.weight"].id.get_create_plist().get_filter(0)
    assert filters[0] == 32004


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/x/pytorch_model.bin.index.json", "pytorch_model"),
        ("checkpoint_10000.mdl", "checkpoint_10000"),
        ("a/checkpoint_1.7.mdl", "checkpoint_1.7"),
        ("a/model-00001.safetensors", "model-00001"),
        ("folder/", "folder"),
        ("noextension", "noextension"),
        (".hidden", ".hidden"),
    ],
)
def test_stem(path: str, name: str) -> None:
    assert stem(path) == name


@pytest.fixture
def hf(tmp_path: Path) -> Iterator[dict[str, object]]:
    with ckptfs.open(LLAMA / "cs.mdl") as checkpoint:
        view = resolve.plan_view(checkpoint.source, "hf", model="llama", config=LLAMA / "cs.yaml")
        yield dict(outputs(view, "c.mdl", None, shard_bytes=20_000, safetensors=True))


def test_an_existing_output_is_kept_without_force(hf: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "c_to_hf").mkdir()
    (tmp_path / "c_to_hf/mine").write_text("x")
    with pytest.raises(UsageError, match="exists already"):
        write_outputs(hf, str(tmp_path))  # type: ignore[arg-type]
    assert (tmp_path / "c_to_hf/mine").exists()
    write_outputs(hf, str(tmp_path), force=True)  # type: ignore[arg-type]
    names = {p.name for p in (tmp_path / "c_to_hf").iterdir()}
    assert "mine" not in names
    assert "model-00001-of-00003.safetensors" in names
    assert [p.name for p in tmp_path.iterdir()] == ["c_to_hf"]


def test_an_interrupt_leaves_nothing(hf: dict[str, object], tmp_path: Path) -> None:
    seen: list[int] = []

    def interrupt(n: int) -> None:
        seen.append(n)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_outputs(hf, str(tmp_path / "new"), progress=interrupt)  # type: ignore[arg-type]
    assert list((tmp_path / "new").iterdir()) == []


def test_progress_adds_up(hf: dict[str, object], tmp_path: Path) -> None:
    seen: list[int] = []
    write_outputs(hf, str(tmp_path), progress=seen.append)  # type: ignore[arg-type]
    assert sum(seen) == nbytes(hf)  # type: ignore[arg-type]


def test_a_full_disk_is_said_before_the_first_byte(
    hf: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize, f_flag = 3, real.f_frsize, real.f_flag

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(WriteError, match="No space left"):
        write_outputs(hf, str(tmp_path))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
