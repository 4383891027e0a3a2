"""Every recorded conversion between Cerebras releases: the config and the whole state, leaf by leaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptfs
from ckptfs.conversion import registry
from ckptfs.conversion.format_names import parse_format
from ckptfs.conversion.plan import config_as, make_view
from ckptfs.conversion.releases.paths import steps_of
from ckptfs.conversion.releases.steps import find_path
from ckptfs.errors import CkptfsError
from ckptfs.tools.export import outputs, write_outputs
from tests.conftest import Mounter
from tests.paths import FAMILIES
from tests.recorded.cases import RIGHT_HERE, Run, runs
from tests.recorded.compare import leaves, state_differences
from tests.reference.test_cstorch import PYTHON, loaded


def states(keys: dict[str, Any]) -> list[str]:
    """The keys at the top and of each entry's config, in order."""
    parts = [key.split(".") for key in keys]
    return list(dict.fromkeys(".".join(p[:4] if p[2:3] == ["params"] else p[:1]) for p in parts))


def converted(run: Run, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> ckptfs.View:
    monkeypatch.chdir(run.folder)  # the folder of the input state is named relative to it
    checkpoint = ckptfs.open(run.checkpoint(tmp))
    return ckptfs.view(checkpoint, run.tgt, model=run.model, src_fmt=run.src, config=run.folder / "cs.yaml")


WHOLE = [r for r in runs("releases") if r.step["input"]]


@pytest.mark.parametrize("run", [r for r in WHOLE if not r.refused], ids=str)
def test_from_release_to_release(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = converted(run, tmp_path, monkeypatch)
    assert view.config == run.expected["config"]
    assert view.state is not None
    with view.state as state:
        found = leaves(state.source)
        assert state_differences(found, run.state) == []
        assert states(found) == states(run.state)
        model = [key for key in found if key.startswith("model.")]
        assert model == [key for key in run.state if key.startswith("model.")]
        assert list(view) == [key.removeprefix("model.") for key in model if "sha256" in found[key]]


@pytest.mark.parametrize("run", [r for r in WHOLE if r.refused], ids=str)
def test_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if run.folder.name in RIGHT_HERE:
        assert len(converted(run, tmp_path, monkeypatch))
        return
    with pytest.raises(CkptfsError) as refusal:
        converted(run, tmp_path, monkeypatch)
    assert "\n" not in str(refusal.value)


SHOWN = ("t5/1.6_to_1.8", "gpt2/1.9_to_2.0_dataloader_iterable", "gpt2/auto_to_2.5")
"""A few that go all the way to a file."""
TO_FILES = [r for r in WHOLE if r.case in SHOWN]


def options(run: Run) -> list[object]:
    return ["--model", run.model, "--src-fmt", run.src, "--tgt-fmt", run.tgt, "--config", run.folder / "cs.yaml"]


@pytest.mark.fuse
@pytest.mark.parametrize("run", TO_FILES, ids=str)
def test_mounted_and_converted(run: Run, tmp_path: Path, mounter: Mounter) -> None:
    mnt, source = mounter.mountpoint(), run.checkpoint(tmp_path)
    done = mounter.ckptfs("mount", source, mnt, *options(run))
    assert done.returncode == 0, done.stderr
    with ckptfs.open(mnt / "cs/checkpoint.mdl") as shown:
        assert state_differences(leaves(shown.source), run.state) == []
        assert shown.source.release == f"{run.tgt[3:]}.0"
    assert yaml.safe_load((mnt / "cs/params.yaml").read_text()) == run.expected["config"]
    done = mounter.ckptfs("convert", source, *options(run), "--output-dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    names = [tmp_path / "out" / name for name in run.step["output_files"]]
    assert done.stdout.splitlines() == [
        f"{what} saved to {name}" for what, name in zip(("Checkpoint", "Config"), names, strict=True)
    ]
    assert [n.read_bytes() for n in names] == [
        (mnt / f"cs/{n}").read_bytes() for n in ("checkpoint.mdl", "params.yaml")
    ]
    assert ("ckptfs:" in done.stderr) == (run.src in ("cs-1.6", "cs-1.9"))  # something is left out


@pytest.mark.reference
@pytest.mark.skipif(not PYTHON, reason="CKPTFS_CSTORCH_PYTHON names no Python with cerebras_pytorch")
@pytest.mark.parametrize("compress", [None, "lz4"])
@pytest.mark.parametrize("run", TO_FILES, ids=str)
def test_the_reference_loads_it(
    run: Run, compress: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = converted(run, tmp_path, monkeypatch)
    files = outputs(view.plan, "cs.mdl", "cs.yaml", shard_bytes=10**9, safetensors=False, compress=compress)
    (path, _) = write_outputs(files, str(tmp_path / "out"))
    (found,) = loaded(Path(path))
    read: dict[str, Any] = {}
    flat(found, "", read, {})
    expected = {key: want for key, want in run.state.items() if "empty" not in want}
    assert read == {key: want.get("sha256", repr(want.get("value"))) for key, want in expected.items()}


CHAINS = {
    "bert/1.6_to_2.0": "cs-2.10",
    "bert/1.9_to_2.0_head_none_prefix": "cs-2.10",
    "gpt2/1.8_to_2.0_untied_none": "cs-2.10",
    "gpt2/2.4_to_2.5": "cs-1.8",
    "t5/1.6_to_1.7_gated_abs_pe": "cs-2.4",
    "t5/2.1_to_2.2": "cs-1.6",
}
"""A recorded checkpoint and a release that is several steps away."""
FAR = [(r, CHAINS[r.case]) for r in WHOLE if r.case in CHAINS]


@pytest.mark.parametrize(("run", "tgt"), FAR, ids=str)
def test_a_chain_does_what_its_steps_do(run: Run, tgt: str, tmp_path: Path) -> None:
    """All but ``__metadata__``, which gets one entry for all of them."""
    family, src, end = registry.family(run.model), parse_format(run.src), parse_format(tgt)
    with ckptfs.open(run.checkpoint(tmp_path)) as checkpoint:
        whole = make_view(checkpoint.source, family, run.config, src, end)
        path = find_path(family.name, steps_of(family), src, end)
        assert len(path) > 1
        source, config = checkpoint.source, run.config
        for move in path:
            view = make_view(source, family, config, move.frm, move.to)
            assert view.state is not None
            source, config = view.state, dict(view.config)
        assert whole.state is not None
        assert config == whole.config == config_as(family, run.config, src, end)
        ours, steps = ({k: v for k, v in leaves(s).items() if k[:2] != "__"} for s in (whole.state, source))
        assert ours == steps
        notes = [key for key in leaves(whole.state) if key.startswith("__metadata__") and key.endswith(".version")]
        assert len(notes) == (len(checkpoint.metadata) + 1 if tgt != "cs-1.6" else 0)


@pytest.mark.reference
@pytest.mark.skipif(not PYTHON, reason="CKPTFS_CSTORCH_PYTHON names no Python with cerebras_pytorch")
@pytest.mark.parametrize(("run", "tgt"), FAR, ids=str)
def test_the_reference_loads_the_end_of_a_chain(run: Run, tgt: str, tmp_path: Path) -> None:
    with ckptfs.open(run.checkpoint(tmp_path)) as checkpoint:
        view = ckptfs.view(checkpoint, tgt, model=run.model, src_fmt=run.src, config=run.config)
        files = outputs(view.plan, "cs.mdl", "cs.yaml", shard_bytes=10**9, safetensors=False)
        (path, _) = write_outputs(files, str(tmp_path / "out"))
        assert view.state is not None
        expected = {key: want for key, want in leaves(view.state.source).items() if "empty" not in want}
    read: dict[str, Any] = {}
    flat(loaded(Path(path))[0], "", read, {})
    assert read == {key: want.get("sha256", repr(want.get("value"))) for key, want in expected.items()}


def flat(described: Any, path: str, found: dict[str, Any], seen: dict[str, Any]) -> None:
    """Key to hash or printed value, of what the reference's script describes."""
    kind, what, *rest = described
    if kind in ("dict", "OrderedDict"):
        for key, value in what:
            flat(value, f"{path}.{key}" if path else str(key), found, seen)
    elif kind in ("list", "tuple"):
        for i, value in enumerate(what):
            flat(value, f"{path}.{i}", found, seen)
    else:
        found[path] = seen[f".{path}"] = seen[what] if kind == "same" else rest[-1] if rest else what


OLD = [
    ("gpt2", "cs-1.8", "gpt2/hf2cs-untied-fp32"),
    ("llama", "cs-1.9", "llama/hf2cs-gqa-bf16"),
    ("t5", "cs-1.6", "t5/gated_silu"),
    ("bert", "cs-1.8", "bert/pretrain"),
]


@pytest.mark.parametrize(("model", "old", "folder"), OLD)
def test_hugging_face_and_old_releases(model: str, old: str, folder: str, tmp_path: Path) -> None:
    """To an old release, up to the newest, and back: the tensors that the tables give for the newest one alone."""

    def written(view: ckptfs.View) -> tuple[Path, dict[str, Any]]:
        files = outputs(view.plan, f"{view.plan.tgt}.mdl", "x.yaml", shard_bytes=10**9, safetensors=True)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return Path(write_outputs(files, str(folder))[0]), dict(view.config)

    def tensors(view: ckptfs.View) -> dict[str, tuple[str, bytes]]:
        return {key: (tensor.dtype, tensor.tobytes()) for key, tensor in view.items()}

    hf = FAMILIES / folder / "hf"
    new, config = written(ckptfs.view(hf, "cs-2.10", model=model))
    direct = ckptfs.view(new, "hf", model=model, src_fmt="cs-2.10", config=config)
    assert tensors(direct)
    past, config = written(ckptfs.view(hf, old, model=model))
    assert tensors(ckptfs.view(past, "hf", model=model, src_fmt=old, config=config)) == tensors(direct)
    upgraded = ckptfs.view(past, "cs-2.10", model=model, src_fmt=old, config=config)
    path, _ = written(upgraded)
    again = ckptfs.view(path, "hf", model=model)  # release and config as the upgrade noted them
    assert tensors(again) == tensors(direct)
    assert again.config == direct.config
    down, config = written(ckptfs.view(path, old, model=model))
    assert tensors(ckptfs.view(down, "hf", model=model, src_fmt=old, config=config)) == tensors(direct)
