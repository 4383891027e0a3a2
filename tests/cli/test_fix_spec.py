"""``ckptfs fix-checkpoint-spec``: recorded results of the public tool, and what it leaves half done."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401 - registers the LZ4 filter
import numpy as np
import pytest

import ckptfs as package
from ckptfs.cli.fix_checkpoint_spec import QUESTION
from tests.cli.conftest import Result
from tests.conftest import ROOT
from tests.formats.cerebras.legacy_specs import Class, leaf, spec_hex, spec_pickle, tree

DATA = ROOT / "tests/data/fix_spec"
CASES: dict[str, Any] = json.loads((DATA / "index.json").read_text())
FIXED = [name for name, case in CASES.items() if case["error"] is None and case["output"].endswith("_fixed.mdl")]
FAILED = [name for name, case in CASES.items() if case["error"] is not None]
Ckptfs = Callable[..., Result]


class Spec:
    """A node of the tree spec, as the pickle of ours or torch's sets it up."""

    type: Any
    context: Any
    children_specs: list[Any]
    num_nodes: int
    num_leaves: int
    num_children: int

    def text(self) -> str:
        """The recorded text on one line."""
        if self.type is None:
            return "*"
        return f"TreeSpec({self.type.__name__},{self.context},[{','.join(c.text() for c in self.children_specs)}])"

    def counts_are_right(self) -> bool:
        nodes = 1 + sum(child.num_nodes for child in self.children_specs)
        leaves = sum(child.num_leaves for child in self.children_specs) if self.type is not None else 1
        mine = (self.num_nodes, self.num_leaves, self.num_children)
        return mine == (nodes, leaves, len(self.children_specs)) and all(
            child.counts_are_right() for child in self.children_specs
        )


class Reader(pickle.Unpickler):
    """Python's own unpickler, as another reader of what we write; it knows what such a pickle may name."""

    def find_class(self, module: str, name: str) -> Any:
        return {
            "torch.utils._pytree.TreeSpec": Spec,
            "torch.utils._pytree.LeafSpec": Spec,
            "dill._dill._load_type": {"dict": dict, "list": list, "tuple": tuple, "set": set}.__getitem__,
            "collections.OrderedDict": OrderedDict,
            "my.own.Cls": type("Cls", (), {}),
        }[f"{module}.{name}"]


def spec_of(path: Path) -> Spec:
    with h5py.File(path) as file:
        found: Spec = Reader(io.BytesIO(bytes.fromhex(file.attrs["__spec__"]))).load()
    return found


def described(path: Path) -> dict[str, Any]:
    """The datasets of a file in the words of the recording."""
    with h5py.File(path) as file:
        at = {name: h5py.h5o.get_info(file[name].id).addr for name in file}
        return {name: described_dataset(file[name], name, at) for name in file}


def described_dataset(dataset: h5py.Dataset, name: str, at: dict[str, int]) -> dict[str, Any]:
    plist = dataset.id.get_create_plist()
    found: dict[str, Any] = {
        "dtype": str(dataset.dtype),
        "shape": None if dataset.shape is None else list(dataset.shape),
        "chunks": list(dataset.chunks) if dataset.chunks else None,
        "filters": [str(plist.get_filter(i)[0]) for i in range(plist.get_nfilters())],
        "attrs": {key: v.item() if isinstance(v, np.generic) else v for key, v in dataset.attrs.items()},
        "object_addr_shared_with": [other for other in at if other != name and at[other] == at[name]],
    }
    if dataset.shape == ():
        found["value"] = dataset[()].item()
    elif dataset.shape is not None:
        found["sha256"] = hashlib.sha256(dataset[()].tobytes()).hexdigest()
    return found


def check(path: Path, case: dict[str, Any]) -> None:
    """The file is what the public tool made of the same one."""
    after = case["after"]
    assert described(path) == after["datasets"]
    spec = spec_of(path)
    assert spec.text().replace(" ", "") == "".join(after["attrs"]["__spec__"]["repr"].split())
    assert spec.counts_are_right()
    with h5py.File(path) as file:
        assert {k: v for k, v in file.attrs.items() if k != "__spec__"} == {
            k: v for k, v in after["attrs"].items() if k != "__spec__"
        }
    with package.open(path) as source:
        assert list(source) == after["attrs"]["__spec__"]["tree_keys"]
        assert source.source.warnings == []


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in DATA.glob("*.mdl"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FIXED)
def test_recorded_copies(name: str, folder: Path, ckptfs: Ckptfs) -> None:
    case, before = CASES[name], (folder / f"{name}.mdl").read_bytes()
    done = ckptfs("fix-checkpoint-spec", f"{name}.mdl")
    assert (done.code, done.text, done.err) == (0, case["stdout"], "")
    check(folder / case["output"], case)
    assert (folder / f"{name}.mdl").read_bytes() == before


@pytest.mark.parametrize("flag", ["--fixed_checkpoint_path", "--fixed-checkpoint-path"])
def test_a_named_output(flag: str, folder: Path, ckptfs: Ckptfs) -> None:
    case = CASES["explicit_out"]  # its input was not kept
    done = ckptfs("fix-checkpoint-spec", flag, "explicit_target.mdl", "no_milestones.mdl")
    assert (done.code, done.text) == (0, case["stdout"])
    check(folder / "explicit_target.mdl", CASES["no_milestones"])


@pytest.mark.parametrize("name", FAILED)
def test_recorded_failures_leave_nothing(name: str, folder: Path, ckptfs: Ckptfs) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = ckptfs("fix-checkpoint-spec", f"{name}.mdl")
    assert (done.code, done.out, done.err.count("\n")) == (1, b"", 1)
    assert "model.other.weight" in done.err if name == "unknown_missing" else "model.lm_head.weight" in done.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("flag", ["--fix_inplace", "--fix-inplace"])
@pytest.mark.parametrize("said", ["y\n", "Y", "--yes"])
def test_in_place(said: str, flag: str, folder: Path, ckptfs: Ckptfs, monkeypatch: pytest.MonkeyPatch) -> None:
    case, name = CASES["inplace_yes"], "inplace_yes_inplace.mdl"
    (folder / "inplace_yes.mdl").rename(name)
    os.chmod(name, 0o640)
    os.symlink(name, "latest.mdl")
    answer(monkeypatch, "" if said == "--yes" else said)
    done = ckptfs("fix-checkpoint-spec", flag, "latest.mdl", *(["--yes"] if said == "--yes" else []))
    assert (done.code, done.err) == (0, "")
    question = "" if said == "--yes" else QUESTION
    lines = case["stdout"].replace(QUESTION, "").replace(name, "latest.mdl")
    assert done.text == question + lines
    check(folder / name, case)
    assert ((folder / name).stat().st_mode & 0o777, (folder / "latest.mdl").is_symlink()) == (0o640, True)


@pytest.mark.parametrize("said", ["N\n", "\n", "", "yes\n", " y\n"])
def test_another_answer_changes_nothing(
    said: str, folder: Path, ckptfs: Ckptfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "inplace_no.mdl"
    before, status = path.read_bytes(), path.stat()
    answer(monkeypatch, said)
    done = ckptfs("fix-checkpoint-spec", "--fix_inplace", path)
    assert (done.code, done.text) == (0, CASES["inplace_no"]["stdout"])
    assert (path.read_bytes(), path.stat().st_ino) == (before, status.st_ino)


def test_a_failure_in_place_leaves_the_original(folder: Path, ckptfs: Ckptfs) -> None:
    """The original tool fixes the spec first and fails then."""
    path = folder / "both_missing.mdl"
    before = path.read_bytes()
    assert ckptfs("fix-checkpoint-spec", "--fix_inplace", "--yes", path).code == 1
    assert path.read_bytes() == before


def test_an_output_is_written_over_only_with_force(folder: Path, ckptfs: Ckptfs) -> None:
    out = folder / "milestones_fixed.mdl"
    out.write_bytes(b"mine")
    done = ckptfs("fix-checkpoint-spec", "milestones.mdl")
    assert (done.code, out.read_bytes()) == (2, b"mine")
    assert ckptfs("fix-checkpoint-spec", "milestones.mdl", "--force").code == 0
    check(out, CASES["milestones"])


def old_checkpoint(path: Path, values: dict[str, Any], root: dict[str, Any] | None = None) -> Path:
    """A file of format 0.3 with one dataset a key; its spec is a flat dict unless *root* is given."""
    with h5py.File(path, "w") as file:
        file.attrs["__spec__"] = spec_hex(root or tree("dict", list(values), *[leaf() for _ in values]))
        file.attrs["__version__"] = 0.3
        for name, value in values.items():
            if value is not None:
                file[name] = value
                file[name].attrs["__H5_TYPE__"] = "ScalarH5Type" if np.ndim(value) == 0 else "NumpyArrayH5Type"
    return path


def test_epochs_of_other_names(tmp_path: Path, ckptfs: Ckptfs) -> None:
    """Milestones by number, not by name; whatever their dtype; names outside of the spec; before the milestone."""
    milestones = {f"lr_scheduler._milestones.{i}": np.int32(10 * i) for i in range(11)}
    epochs = dict.fromkeys(
        ["lr_scheduler.last_epoch", *(f"lr_scheduler._schedulers.{i}.last_epoch" for i in (0, 1, 3, 11))], np.float64(9)
    )
    other = {"optimizer.last_epoch": np.int64(4), "lr_scheduler.base": np.int64(5)}
    path = old_checkpoint(tmp_path / "a.mdl", {**milestones, **epochs, **other, "global_step": np.int64(25)})
    with h5py.File(path, "a") as file:
        file["lr_schedulers.0.last_epoch"] = np.int64(9)
    assert ckptfs("fix-checkpoint-spec", path).code == 0
    with h5py.File(tmp_path / "a_fixed.mdl") as file:
        found = {name: file[name][()].item() for name in file if "milestones" not in name}
        assert file["lr_scheduler.last_epoch"].dtype == np.float64
    steps = {"last_epoch": 25, "_schedulers.0.last_epoch": 25, "_schedulers.1.last_epoch": 25}
    steps |= {"_schedulers.3.last_epoch": 5, "_schedulers.11.last_epoch": 0, "base": 5}
    assert found == {
        **{f"lr_scheduler.{name}": value for name, value in steps.items()},
        "optimizer.last_epoch": 4,
        "lr_schedulers.0.last_epoch": 25,
        "global_step": 25,
    }


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr_scheduler.milestones.0": 1, "lr_scheduler.2.last_epoch": 1, "global_step": 5}, "milestone 1"),
        ({"lr_scheduler.milestones": np.arange(3), "lr_scheduler.last_epoch": 1, "global_step": 5}, "milestones.0"),
        ({"lr_scheduler.last_epoch": 1, "global_step": np.arange(2)}, "global_step"),
    ],
    ids=["beyond", "no_list", "no_number"],
)
def test_steps_that_cannot_be_told(values: dict[str, Any], said: str, tmp_path: Path, ckptfs: Ckptfs) -> None:
    done = ckptfs("fix-checkpoint-spec", old_checkpoint(tmp_path / "a.mdl", values))
    assert done.code in (1, 3)
    assert (done.err.count("\n"), said in done.err) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mdl"]


def test_all_lost_keys_are_named_and_optimizer_states_have_no_alias(tmp_path: Path, ckptfs: Ckptfs) -> None:
    values = {
        "a.lm_head.weight": np.ones(2),
        "a.embedding_layer.word_embeddings.weight": None,
        "s.lm_head.weight.exp_avg": None,
        "s.embedding_layer.word_embeddings.weight.exp_avg": np.ones(2),
        "a.ln_f.bias": None,
        "b.transformer_decoder.norm.bias": np.ones(3),
    }
    done = ckptfs("fix-checkpoint-spec", old_checkpoint(tmp_path / "a.mdl", values))
    assert done.code == 1
    assert "s.lm_head.weight.exp_avg" in done.err
    assert "a.ln_f.bias" in done.err
    assert "a.embedding_layer" not in done.err


def test_keys_with_slashes_and_all_kinds_of_attributes(tmp_path: Path, ckptfs: Ckptfs) -> None:
    """The public tool loses track of quoted names. What it says nothing about is copied as it is."""
    path = tmp_path / "a.b.mdl"
    root = tree("dict", ["a/b", "c"], leaf(), leaf())
    with h5py.File(path, "w") as file:
        file.attrs["__spec__"], file.attrs["__version__"] = spec_hex(root), 0.4
        file.attrs["words"] = ["ä", "b"]
        data = np.arange(100_000, dtype="<f2").reshape(10, 100, 100)
        made = file.create_dataset("a%2Fb", data=data, chunks=(3, 40, 60), compression="gzip", shuffle=True)
        made.attrs.update({"fixed": np.bytes_(b"xyz"), "flag": True, "none": h5py.Empty("f4"), "n": np.arange(3)})
        made.attrs["raw"] = np.void(b"\0\x01pickle")
        file["tied"] = made
        file["soft"] = h5py.SoftLink("/a%2Fb")
        file["bool"], file["empty"], file["null"] = np.array([True, False]), np.zeros((3, 0)), h5py.Empty("f4")
        file["c"] = 2.5
        file["group/inner"] = np.arange(4)
    done = ckptfs("fix-checkpoint-spec", path)
    assert (done.code, done.err) == (0, "")
    with h5py.File(tmp_path / "a.b_fixed.mdl") as new, h5py.File(path) as old:
        assert list(new) == list(old)
        assert list(new.attrs["words"]) == ["ä", "b"]
        for name in ("a%2Fb", "bool", "empty", "null", "c", "group/inner"):
            assert new[name].id.get_type() == old[name].id.get_type()
            assert new[name].shape == old[name].shape
            assert new[name].shape is None or np.array_equal(new[name][()], old[name][()])
        there, here = old["a%2Fb"].attrs, new["a%2Fb"].attrs
        for key in there:
            assert here.get_id(key).get_type() == there.get_id(key).get_type()
            assert str(here[key]) == str(there[key])
        assert (new["a%2Fb"].chunks, new["tied"].id) == (None, new["a%2Fb"].id)
        assert isinstance(new.get("soft", getlink=True), h5py.SoftLink)


def test_other_containers_stay(tmp_path: Path, ckptfs: Ckptfs) -> None:
    gone = Class("cerebras_pytorch.utils.tensor_scalar_dict", "TensorScalarDict")
    mine, ordered = Class("my.own", "Cls"), Class("collections", "OrderedDict")
    inner = [tree(gone, ["x", 3], leaf(), leaf()), tree("list", None), tree(mine, ["y"], leaf())]
    root = tree(ordered, ["a", "b", "c", "d"], *inner, tree("tuple", None, leaf()))
    path = old_checkpoint(tmp_path / "a.mdl", dict.fromkeys(["a.x", "a.3", "c.y", "d.0"], 1), root)
    assert ckptfs("fix-checkpoint-spec", path).code == 0
    text = spec_of(tmp_path / "a_fixed.mdl").text()
    assert text == (
        "TreeSpec(OrderedDict,['a', 'b', 'c', 'd'],"
        "[TreeSpec(dict,['x', 3],[*,*]),TreeSpec(list,None,[]),TreeSpec(Cls,['y'],[*]),TreeSpec(tuple,None,[*])])"
    )


def test_what_is_no_old_checkpoint(tmp_path: Path, ckptfs: Ckptfs) -> None:
    package.save({"a": 1}, tmp_path / "new.mdl")
    (tmp_path / "text.mdl").write_text("nothing")
    with h5py.File(tmp_path / "flat.mdl", "w") as file:
        file["a"] = 1
    for name, code, said in (("new", 2, "0.5"), ("text", 3, "text.mdl"), ("flat", 2, "__spec__"), ("none", 2, "none")):
        done = ckptfs("fix-checkpoint-spec", tmp_path / f"{name}.mdl")
        assert (done.code, done.err.count("\n"), said in done.err) == (code, 1, True), name
    assert not list(tmp_path.glob("*_fixed*"))
    done = ckptfs("fix-checkpoint-spec", "--fix_inplace", "--fixed_checkpoint_path", "b", tmp_path / "new.mdl")
    assert done.code == 2


def test_a_spec_that_calls_something_is_refused(tmp_path: Path, ckptfs: Ckptfs) -> None:
    path = old_checkpoint(tmp_path / "a.mdl", {"a": 1})
    with h5py.File(path, "a") as file:
        file.attrs["__spec__"] = b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.".hex()
    done = ckptfs("fix-checkpoint-spec", path)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "os.system" in done.err


def test_a_spec_that_repeats_itself_is_refused(tmp_path: Path, ckptfs: Ckptfs) -> None:
    """A list of one list over and over, as what a container says of itself: a million texts in a few thousand bytes."""
    path = old_checkpoint(tmp_path / "a.mdl", {"0": 1})
    text, parts = b"X\1\0\0\0aq\1", b"](" + b"h\1" * 1000 + b"eq\2"
    context = b"](" + text + parts + b"h\2" * 1000 + b"e"
    node = spec_pickle(tree("list", None, leaf()))
    hostile = node.replace(b"X\7\0\0\0contextN", b"X\7\0\0\0context" + context, 1)
    assert len(hostile) > len(node)
    with h5py.File(path, "a") as file:
        file.attrs["__spec__"] = hostile.hex()
    done = ckptfs("fix-checkpoint-spec", path)
    assert (done.code, "again and again" in done.err) == (3, True)


def test_a_full_disk_leaves_nothing(tmp_path: Path, ckptfs: Ckptfs) -> None:
    """The limit on a file's size stands for it: it ends the child that writes, and the command says so."""
    path = old_checkpoint(tmp_path / "a.mdl", {"w": np.zeros(300_000)})
    code = (
        "import resource, signal, sys; from ckptfs.cli.main import run; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)); sys.exit(run(sys.argv[1:]))"
    )
    for line in (["--fix_inplace", "--yes", path], [path]):
        before = path.read_bytes()
        command = [sys.executable, "-c", code, "fix-checkpoint-spec", *map(str, line)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
        assert "too large" in done.stderr
        assert ([p.name for p in tmp_path.iterdir()], path.read_bytes()) == (["a.mdl"], before)


def test_damaged_data_leave_nothing(tmp_path: Path, ckptfs: Ckptfs) -> None:
    path = tmp_path / "a.mdl"
    with h5py.File(path, "w") as file:
        file.attrs["__spec__"], file.attrs["__version__"] = spec_hex(tree("dict", ["w"], leaf())), 0.3
        made = file.create_dataset("w", data=np.zeros((64, 64)), chunks=(16, 16), compression="gzip")
        offset, size = (info := made.id.get_chunk_info(5)).byte_offset, info.size
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(bytes(size))
    done = ckptfs("fix-checkpoint-spec", path)
    assert (done.code, done.err.count("\n"), "w: " in done.err) == (3, 1, True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.mdl"]
