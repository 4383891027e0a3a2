"""`ckptfs.load` against what the original package loaded, and in the hands of torch."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.api.load import LazyDict
from ckptfs.errors import SourceError
from tests.formats.samples import TORCH_TYPES, bytes_of, n_fds, random_tensor
from tests.torch_states import WRITTEN, bits, check_state, recorded

NESTED = {"model": OrderedDict([("w", torch.arange(6.0)), ("b", torch.ones(2))]), "lists": [torch.ones(3), 1], "n": 7}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small nested state dict of torch."""
    torch.save(NESTED, tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_same_as_the_original_package(path: Path) -> None:
    check_state(ckptfs.load(path, lazy=False), recorded(path))
    lazy = ckptfs.load(path)
    check_state(copy.deepcopy(lazy), recorded(path))


def test_every_dtype(tmp_path: Path) -> None:
    want = {f"{dtype}{shape}": random_tensor(dtype, shape) for dtype in TORCH_TYPES for shape in ((), (0, 3), (3, 5))}
    torch.save(want, tmp_path / "x.pt")
    found = ckptfs.load(tmp_path / "x.pt")
    for key, tensor in want.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[key]) == bytes_of(tensor)


@pytest.mark.parametrize("lazy", [True, False])
def test_tied_tensors_are_one_tensor(lazy: bool, tmp_path: Path) -> None:
    tied = torch.randn(3, 4)
    torch.save({"model": {"a": tied, "b": tied}, "c": [tied], "d": tied.clone()}, tmp_path / "x.pt")
    found = ckptfs.load(tmp_path / "x.pt", lazy=lazy)
    assert found["model"]["a"] is found["model"]["b"] is found["c"][0]
    assert found["d"].data_ptr() != found["c"][0].data_ptr()
    found["d"][0, 0] = 5  # memory of its own, that may be written
    assert found["model"]["a"][0, 0] == tied[0, 0]


def test_entries_are_read_when_touched_and_kept(saved: Path) -> None:
    state = ckptfs.load(saved)
    model = state["model"]
    assert (state.pending, model.pending) == (("lists",), ("w", "b"))
    assert "not read" in repr(model)
    first = model["w"]
    assert model["w"] is first and model.pending == ("b",)
    assert list(model) == list(model.keys()) == ["w", "b"] and len(model) == 2 and "b" in model
    assert model.pending == ("b",)
    assert state["lists"][0].tolist() == [1, 1, 1]
    assert state["n"] == 7 and state.pending == ()


TOUCHES: dict[str, Any] = {
    "values": lambda d: list(d.values()),
    "items": lambda d: [value for _, value in d.items()],
    "get": lambda d: [d.get("w"), d.get("b")],
    "dict": lambda d: list(dict(d).values()),
    "OrderedDict": lambda d: list(OrderedDict(d).values()),
    "unpacked": lambda d: list({**d}.values()),
    "keywords": lambda d: (lambda w, b: [w, b])(**d),
    "union": lambda d: list((d | {}).values()),
    "reverse union": lambda d: list(({} | d).values()),
    "update": lambda d: [made := {}, made.update(d)] and list(made.values()),
    "copy": lambda d: list(d.copy().values()),
    "copy.copy": lambda d: list(copy.copy(d).values()),
    "deepcopy": lambda d: list(copy.deepcopy(d).values()),
    "pickle": lambda d: list(pickle.loads(pickle.dumps(d)).values()),
    "setdefault": lambda d: [d.setdefault("w", 1), d.setdefault("b", 1)],
    "pop": lambda d: [d.pop("w"), d.pop("b")],
    "popitem": lambda d: [d.popitem()[1], d.popitem()[1]][::-1],
}


@pytest.mark.parametrize("how", TOUCHES)
def test_no_way_leads_past_reading(how: str, saved: Path) -> None:
    found = TOUCHES[how](ckptfs.load(saved)["model"])
    assert [type(value) for value in found] == [torch.Tensor] * 2
    assert [value.tolist() for value in found] == [[0, 1, 2, 3, 4, 5], [1, 1]]


def test_it_is_a_dict(saved: Path) -> None:
    state = ckptfs.load(saved)
    assert isinstance(state, dict) and isinstance(state["model"], LazyDict)
    assert state.get("x") is None and state.get("x", 3) == 3 and state.pop("x", 4) == 4
    with pytest.raises(KeyError):
        state["x"]
    with pytest.raises(KeyError):
        state.pop("x")
    state["x"] = 5
    del state["model"]
    assert list(state) == ["lists", "n", "x"] and state.popitem() == ("x", 5)
    with pytest.raises(KeyError):
        LazyDict().popitem()
    assert type(state.copy()) is dict and type(ckptfs.load(saved)["model"].copy()) is OrderedDict
    with pytest.raises(TypeError):
        hash(state)


def test_equality(saved: Path) -> None:
    del saved
    assert LazyDict(a=1) == {"a": 1} == LazyDict(a=1) == LazyDict({"a": 1})
    assert LazyDict(a=1) != {"a": 2} and LazyDict(a=1) != 1


def test_modules_and_optimizers_take_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    state = ckptfs.load(tmp_path / "x.pt")
    other = torch.nn.Linear(3, 2)
    other_optimizer = torch.optim.AdamW(other.parameters())
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    assert torch.equal(other.weight, model.weight)
    assert repr(other_optimizer.state_dict()) == repr(optimizer.state_dict())


def test_torch_saves_it(saved: Path, tmp_path: Path) -> None:
    torch.save(ckptfs.load(saved), tmp_path / "again.pt")
    found = torch.load(tmp_path / "again.pt", weights_only=True)
    assert repr(dict(found, model=dict(found["model"]))) == repr(dict(NESTED, model=dict(NESTED["model"])))


def test_a_written_checkpoint_loads_again(saved: Path, tmp_path: Path) -> None:
    ckptfs.save(ckptfs.load(saved), tmp_path / "x.mdl")
    found = ckptfs.load(tmp_path / "x.mdl", lazy=False)
    assert list(found) == ["model", "lists", "n"]
    assert torch.equal(found["model"]["w"], NESTED["model"]["w"])


def test_the_file_is_closed_when_nothing_is_pending(saved: Path) -> None:
    before = n_fds()
    state = ckptfs.load(saved)
    model = state["model"]
    del state
    gc.collect()
    assert n_fds() > before
    assert model["w"].sum() == 15 and model["b"].sum() == 2
    gc.collect()
    assert n_fds() == before
    ckptfs.load(saved, lazy=False)
    assert n_fds() == before


def test_damage_is_an_error_at_the_touch() -> None:
    path = WRITTEN[0].parents[1] / "h5" / "damaged" / "lz4_total_huge.mdl"
    state = ckptfs.load(path)
    with pytest.raises(SourceError):
        copy.deepcopy(state)


def test_without_torch(saved: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import ckptfs\n"
        "try: ckptfs.load(sys.argv[1])\n"
        "except ckptfs.errors.MissingCodec as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True)
    assert "pip install 'ckptfs[torch]'" in done.stdout, done.stderr


def test_the_function_is_not_hidden_by_a_module() -> None:
    code = "import sys, ckptfs, ckptfs.api.load\nassert callable(ckptfs.load) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
