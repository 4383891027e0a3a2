"""`ckptfs.save`: states of torch, numpy and plain values, read back by h5py and by `ckptfs.open`."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch

import ckptfs
from ckptfs.errors import UsageError
from tests.factories import NUMPY_TYPES, array_of
from tests.paths import DATA

V05 = DATA / "v05"
TORCH = ("bool", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, by torch alone."""
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def saved(state: object, path: Path) -> ckptfs.Checkpoint:
    ckptfs.save(state, path)
    return ckptfs.open(path)


@pytest.mark.parametrize("name", TORCH)
def test_torch_tensors(name: str, tmp_path: Path) -> None:
    values = torch.tensor([[0.0, 1.0, -2.5], [3.0, 100.0, 7.0]])
    tensor = (values > 0) if name == "bool" else values.abs().to(getattr(torch, name))
    state = {
        "whole": tensor,
        "turned": tensor.t(),
        "part": tensor[:, 1:],
        "flipped": tensor[:, ::2],
        "zero": tensor[1, 1],
    }
    with saved({"model": state}, tmp_path / "t.mdl") as found:
        for key, want in state.items():
            lazy = found[f"model.{key}"]
            assert (lazy.dtype, lazy.shape) == (name, tuple(want.shape))
            assert lazy.tobytes() == bits(want)


@pytest.mark.parametrize("name", [n for n in NUMPY_TYPES if not n.startswith("float8")])
def test_numpy_arrays(name: str, tmp_path: Path) -> None:
    array = array_of(name, (4, 3, 2))
    with saved({"c": array, "f": array.transpose(2, 0, 1), "back": array[::-1, 1:]}, tmp_path / "n.mdl") as found:
        assert found["c"].tobytes() == array.tobytes()
        assert found["f"].tobytes() == array.transpose(2, 0, 1).tobytes()
        assert found["back"].tobytes() == array[::-1, 1:].tobytes()
        assert found.item("c").kind == "array"
        assert found["c"].dtype == name


def test_big_endian_and_0d_arrays(tmp_path: Path) -> None:
    with saved({"be": np.arange(5, dtype=">f4"), "zero": np.array(2.5)}, tmp_path / "b.mdl") as found:
        assert np.asarray(found["be"]).tolist() == [0, 1, 2, 3, 4]
        assert np.asarray(found["zero"]).tolist() == 2.5


def test_pieces_of_rows_that_do_not_lie_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfs.tools.write.PIECE", 1000)
    tensor = torch.arange(3 * 50 * 40).reshape(3, 50, 40).transpose(1, 2)
    with saved({"x": tensor}, tmp_path / "p.mdl") as found:
        assert found["x"].tobytes() == bits(tensor)


def test_plain_values_and_containers(tmp_path: Path) -> None:
    state = {
        "step": 10**30,
        "lr": 1e-4,
        "nan": float("nan"),
        "done": False,
        "name": "gpt\ud800",
        "nothing": None,
        "groups": [{"betas": (0.9, 0.95), "params": [0, 1]}],
        "o": OrderedDict(b=1, a=2),
        "d": defaultdict(int, {"x": 1}),
        7: {"inner": 1},
    }
    with saved(state, tmp_path / "v.mdl") as found:
        assert {k: v for k, v in found.items() if k != "nan"} == {
            "step": 10**30,
            "lr": 1e-4,
            "done": False,
            "name": "gpt\ud800",
            "nothing": None,
            "groups.0.betas.0": 0.9,
            "groups.0.betas.1": 0.95,
            "groups.0.params.0": 0,
            "groups.0.params.1": 1,
            "o.b": 1,
            "o.a": 2,
            "d.x": 1,
            "7.inner": 1,
        }
        assert np.isnan(found["nan"])
        assert type(found["done"]) is bool
        assert found.source.tree is not None
        assert found.source.tree.keys == tuple(state)


def test_ties(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.rand(6, 4))
    array = np.arange(4.0)
    state = {
        "model": {"embedding": weight, "lm_head": weight.data, "turned": weight.t(), "copy": weight.clone()},
        "arrays": [array, array, array.copy()],
        "one": [1, 1],
    }
    with saved(state, tmp_path / "tied.mdl") as found:
        ties = {key: item.tied_to for key, item in found.source.items.items() if item.tied_to is not None}
        assert ties == {"model.lm_head": "model.embedding", "arrays.1": "arrays.0"}
        assert found["model.turned"].tobytes() == bits(weight.t())
    with h5py.File(tmp_path / "tied.mdl") as file:
        assert sorted(file) == ["arrays.0", "arrays.2", "model.copy", "model.embedding", "model.turned"]


def test_checkpoints_and_their_tensors(tmp_path: Path) -> None:
    with ckptfs.open(V05 / "trainer_like.mdl") as source:
        ckptfs.save(source, tmp_path / "whole.mdl")
        keys = [key for key in source if key.startswith("model.")]
        ckptfs.save({"model": {key[6:]: source[key] for key in keys}}, tmp_path / "model.mdl")
        with ckptfs.open(tmp_path / "whole.mdl") as whole, ckptfs.open(tmp_path / "model.mdl") as model:
            assert whole.source.tree == source.source.tree
            assert whole.metadata == source.metadata
            assert list(model) == keys
            assert {key: model[key].tobytes() for key in keys} == {key: whole[key].tobytes() for key in keys}


def test_checkpoints_of_flat_formats(tmp_path: Path) -> None:
    with ckptfs.open(V05 / "st.safetensors") as source:
        ckptfs.save(source, tmp_path / "st.mdl")
        with ckptfs.open(tmp_path / "st.mdl") as found:
            assert {key: found[key].tobytes() for key in found} == {key: source[key].tobytes() for key in source}


REFUSED: dict[str, Any] = {
    "complex64": torch.zeros(2, dtype=torch.complex64),
    "float8_e5m2": np.zeros(2, ml_dtypes.float8_e5m2),
    "int8": torch.zeros(2, dtype=torch.int8),
    "sparse_coo": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "numpy.float32": np.float32(1),
    "dtype": torch.float32,
    "<U1": np.array(["a"]),
    "bytes": b"raw",
    "frozenset": frozenset(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_come_before_anything_is_written(what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"a\.bad.*{what}"):
        ckptfs.save({"good": torch.rand(3), "a": {"bad": REFUSED[what]}}, tmp_path / "r.mdl")
    assert os.listdir(tmp_path) == []


def test_compression(tmp_path: Path) -> None:
    state = {"zeros": torch.zeros(500, 300), "noise": torch.rand(500, 300), "scalar": torch.tensor(1.5), "step": 3}
    seen: list[int] = []
    ckptfs.save(state, tmp_path / "c.mdl", compress="lz4", progress=seen.append)
    assert sum(seen) == 2 * 600_000 + 4
    assert (tmp_path / "c.mdl").stat().st_size < 700_000
    with ckptfs.open(tmp_path / "c.mdl") as found:
        assert found["step"] == 3
        for key in ("zeros", "noise", "scalar"):
            assert found[key].tobytes() == state[key].numpy().tobytes()  # type: ignore[union-attr]


def test_unknown_compression(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compress='zip' is not known"):
        ckptfs.save({"x": 1}, tmp_path / "c.mdl", compress="zip")


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_an_interrupt_leaves_nothing(compress: str | None, tmp_path: Path) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptfs.save({"x": torch.rand(9)}, tmp_path / "i.mdl", compress=compress, progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_existing_files_are_kept_unless_forced(tmp_path: Path) -> None:
    with saved({"x": 1}, tmp_path / "x.mdl"):
        pass
    with pytest.raises(UsageError, match="exists already"):
        ckptfs.save({"x": 2}, tmp_path / "x.mdl")
    ckptfs.save({"x": 2}, tmp_path / "x.mdl", force=True, release="2.9.0")
    with ckptfs.open(tmp_path / "x.mdl") as found:
        assert (found["x"], found.source.release) == (2, "2.9.0")


def test_a_checkpoint_may_be_saved_over_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.mdl"
    tensor = torch.rand(300, 400)
    ckptfs.save({"w": tensor}, path)
    with ckptfs.open(path) as found:
        ckptfs.save({"w": found["w"], "new": 1}, path, force=True)
    with ckptfs.open(path) as found:
        assert found["w"].tobytes() == tensor.numpy().tobytes()
