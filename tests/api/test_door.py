"""The Python door: groups, facts, arrays of other libraries, notebooks, and the work of commands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file as save_torch

import ckptfs
from ckptfs.api.checkpoint import Checkpoint, Group
from ckptfs.cli.main import Settings, cli
from ckptfs.errors import MissingCodec, MissingKey, UsageError
from tests.factories import ArrayTensor, array_of, source_of
from tests.paths import FAMILIES

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
HF = FAMILIES / "llama/hf2cs-gqa-bf16/hf"
MODEL = {"model": "llama", "config": LLAMA / "cs.yaml"}


@pytest.fixture
def checkpoint() -> Checkpoint:
    return ckptfs.open(LLAMA / "cs.mdl")


def test_groups_are_mappings_of_the_keys_below(checkpoint: Checkpoint) -> None:
    model = checkpoint["model"]
    assert isinstance(model, Group) and isinstance(model, Mapping)
    want = [key.removeprefix("model.") for key in checkpoint if key.startswith("model.")]
    assert list(model) == want and len(model) == len(want)
    assert all(model[key].shape == checkpoint[f"model.{key}"].shape for key in model)
    assert model["lm_head"]["weight"].tobytes() == checkpoint["model.lm_head.weight"].tobytes()
    assert "lm_head.weight" in model and "lm_head" in model and "model" in checkpoint and "nothing" not in model
    assert checkpoint["optimizer.param_groups"]["0.lr"].shape == ()
    assert dict(model.items()).keys() == set(want)
    assert "nothing" not in checkpoint and 7 not in checkpoint and 7 not in model
    with pytest.raises(MissingKey, match=r"model\.lm_head\.wieght"):
        model["lm_head.wieght"]
    with pytest.raises(KeyError):
        checkpoint["mod"]


def test_a_key_comes_before_a_group_of_its_name() -> None:
    opened = Checkpoint(source_of({"a": 1, "a.b": 2}))
    assert opened["a"] == 1


def test_facts(checkpoint: Checkpoint) -> None:
    found = CliRunner().invoke(cli, ["info", str(LLAMA / "cs.mdl"), "--json"], catch_exceptions=False)
    assert checkpoint.info() == json.loads(found.output)
    assert checkpoint.step == checkpoint.info()["step"] == 42
    assert (checkpoint.family, checkpoint.config) == (None, None)  # the recorded file names none
    with ckptfs.open(HF) as other:
        assert other.family == "llama"
        assert other.config == json.loads((HF / "config.json").read_text())
        assert other.step is None
    noted = {"model_name": "gpt2", "params": {"model": {"hidden_size": 3}}}
    trained = Checkpoint(source_of({}, metadata=[{"model_name": "llama"}, noted]))
    assert (trained.family, trained.config) == ("gpt2", noted["params"])


NAMES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "uint8", "bool", "complex64")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(5, 3, 2), (), (4, 0)])
def test_arrays_of_other_libraries(name: str, shape: tuple[int, ...]) -> None:
    array = array_of(name, shape)
    tensor = ckptfs.LazyTensor(ArrayTensor(array, name))
    assert (tensor.ndim, tensor.size, tensor.shape) == (array.ndim, array.size, array.shape)
    assert tensor.numpy().dtype == array.dtype and tensor.numpy().tobytes() == array.tobytes()
    found = tensor.torch()
    assert (str(found.dtype), tuple(found.shape)) == (f"torch.{name}", shape)
    assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes() if array.size else True
    assert tensor.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int64", "uint8", "complex64"])
def test_dlpack(name: str) -> None:
    array = array_of(name, (5, 3))
    tensor = ckptfs.LazyTensor(ArrayTensor(array, name))
    found = torch.from_dlpack(tensor)
    assert (str(found.dtype), tuple(found.shape)) == (f"torch.{name}", (5, 3))
    assert found.view(torch.uint8).numpy().tobytes() == array.tobytes()
    if name != "bfloat16":
        assert np.from_dlpack(tensor).tobytes() == array.tobytes()
    with pytest.raises(BufferError, match="copy"):
        tensor.__dlpack__(copy=False)
    with pytest.raises(BufferError, match="CPU"):
        tensor.__dlpack__(dl_device=(2, 0))


def test_torch_is_asked_for_by_name() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport ckptfs\n"
    code += f"t = ckptfs.open({str(HF)!r})['lm_head.weight']\n"
    code += "try: t.torch()\nexcept ckptfs.CkptfsError as error: print(type(error).__name__, error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith(MissingCodec.__name__), done.stderr
    assert "pip install 'ckptfs[torch]'" in done.stdout


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_notebooks_get_tables_in_which_nothing_is_code(checkpoint: Checkpoint) -> None:
    evil = "<img src=x onerror=alert(1)>&amp;\ud800"
    odd = Checkpoint(
        source_of({evil: np.zeros((2, 3)), "b": evil, "<script>.a": 1, **{f"k{i}": i for i in range(100)}})
    )
    view = ckptfs.view(checkpoint, **MODEL)
    for shown in (odd, odd[evil], odd["<script>"], checkpoint, checkpoint["model"], view, view["lm_head.weight"]):
        parser = Tags()
        parser.feed(shown._repr_html_())
        assert set(parser.tags) <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td"}
    parser = Tags()
    parser.feed(odd._repr_html_())
    assert "<img src=x onerror=alert(1)>&amp;\\ud800" in parser.texts
    assert "2 × 3" in parser.texts and "and 63 more" in parser.texts


def test_reprs(checkpoint: Checkpoint) -> None:
    view = ckptfs.view(checkpoint, **MODEL)
    assert repr(view) == f"<View of {LLAMA / 'cs.mdl'} as hf (llama, {len(view)} keys)>"
    assert repr(checkpoint["model"]).startswith(f"<Group model of {LLAMA / 'cs.mdl'} (")


def test_load_takes_what_is_open(checkpoint: Checkpoint) -> None:
    view = ckptfs.view(checkpoint, **MODEL)
    state = ckptfs.load(view)
    assert list(state) == list(view)
    assert state["lm_head.weight"].numpy().tobytes() == view["lm_head.weight"].tobytes()
    nested = ckptfs.load(checkpoint, lazy=False)
    weight = nested["model"]["lm_head.weight"] if "lm_head.weight" in nested["model"] else nested["model"]["lm_head"]
    assert torch.equal(weight, checkpoint["model.lm_head.weight"].torch())
    assert not checkpoint.closed


def test_convert_writes_what_the_command_writes(tmp_path: Path) -> None:
    flags = ["--model", "llama", "--config", str(LLAMA / "cs.yaml"), "--tgt-fmt", "hf", "--export-safetensors"]
    line = ["convert", str(LLAMA / "cs.mdl"), *flags, "--output-dir", str(tmp_path / "a"), "--no-progress-bar"]
    assert CliRunner().invoke(cli, line, obj=Settings(), catch_exceptions=False).exit_code == 0
    seen: list[int] = []
    written = ckptfs.convert(
        LLAMA / "cs.mdl", **MODEL, output_dir=tmp_path / "b", export_safetensors=True, progress=seen.append
    )
    assert written == [tmp_path / "b/cs_to_hf"]
    one, other = (sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()) for name in "ab")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]
    assert len(one) == 3 and sum(seen) == sum(path.stat().st_size for path in other)
    with pytest.raises(UsageError, match="exists already"):
        ckptfs.convert(LLAMA / "cs.mdl", **MODEL, output_dir=tmp_path / "b")
    with pytest.raises(UsageError, match="compress"):
        ckptfs.convert(LLAMA / "cs.mdl", **MODEL, output_dir=tmp_path / "c", compress="lz4")
    copied = Path(shutil.copytree(HF, tmp_path / "hf"))
    mdl, params = ckptfs.convert(copied, "cs-2.9", force=True)
    assert (mdl.parent, mdl.suffix, params.suffix) == (tmp_path, ".mdl", ".yaml")


def test_diff(tmp_path: Path, checkpoint: Checkpoint) -> None:
    assert ckptfs.diff(LLAMA / "cs.mdl", checkpoint).equal
    (folder,) = ckptfs.convert(checkpoint, **MODEL, output_dir=tmp_path, export_safetensors=True)
    view = ckptfs.view(checkpoint, **MODEL)
    assert ckptfs.diff(view, folder).equal
    state = view["lm_head.weight"].torch()
    state[3, 4] += 1
    save_torch({"lm_head.weight": state}, tmp_path / "other.safetensors")
    found = ckptfs.diff(view, tmp_path / "other.safetensors", keys=["lm_head.*"])
    assert [(d.key, d.what, d.index) for d in found.different] == [("lm_head.weight", "value", (3, 4))]
    assert ckptfs.diff(view, tmp_path / "other.safetensors", keys=["lm_head.*"], atol=2.0).equal
    with pytest.raises(UsageError, match="no keys are left"):
        ckptfs.diff(view, view, keys=["nothing"])
    assert not checkpoint.closed


def test_check(tmp_path: Path, checkpoint: Checkpoint) -> None:
    report = ckptfs.check(checkpoint)
    assert report.sound and report.n_tensors == len(set(checkpoint.source.tensors()))
    assert ckptfs.check(ckptfs.view(checkpoint, **MODEL)).sound
    damaged = Path(shutil.copy(LLAMA / "cs.mdl", tmp_path))
    data = bytearray(damaged.read_bytes())
    at = data.find(checkpoint["model.lm_head.weight"].tobytes()[:64])
    data[at - 16 : at] = b"\xff" * 16  # the head of its only chunk
    damaged.write_bytes(data)
    assert [problem.key for problem in ckptfs.check(damaged).problems] == ["model.lm_head.weight"]
    save_torch({"a": torch.tensor([1.0, torch.nan])}, tmp_path / "x.safetensors")
    assert ckptfs.check(tmp_path / "x.safetensors").sound
    assert not ckptfs.check(tmp_path / "x.safetensors", values=True).sound


def test_names_come_without_what_they_need() -> None:
    """``import ckptfs``, and asking for an error class, load neither numpy nor click."""
    code = "import sys, ckptfs; ckptfs.CkptfsError; ckptfs.mount; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "click", "torch", "mfusepy"} & set(done.stdout.split())
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckptfs", "--help"], capture_output=True, text=True, check=True
    )
    assert not re.search(r"\| +(numpy|torch|mfusepy)$", done.stderr, re.M)
    assert set(ckptfs.__all__) <= set(dir(ckptfs))


def test_types_are_published() -> None:
    assert (Path(ckptfs.__file__).parent / "py.typed").exists()


def test_bfloat16_is_ml_dtypes(checkpoint: Checkpoint) -> None:
    with ckptfs.open(HF) as source:
        assert source["lm_head.weight"].numpy().dtype == ml_dtypes.bfloat16
