"""``h5-to-tensorflow`` and ``tensorflow-to-h5``: there and back, whole or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest

import ckptfs as package
from ckptfs.formats.tensorflow.writer import bundle_files
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tools import write
from tests.cli.conftest import Result
from tests.factories import tensor_of
from tests.formats.reading import content
from tests.paths import DATA

Run = Callable[..., Result]
HERE = DATA / "tensorflow"


def same(ckptfs: Run, a: Path, b: Path) -> bool:
    found = ckptfs("diff", a, b)
    return found.code == 0 and "different" not in found.text


@pytest.mark.parametrize("compress", [[], ["--compress", "lz4"]])
@pytest.mark.parametrize("name", ["single.ckpt", "multi.ckpt", "grid.ckpt", "obj/ck-1"])
def test_there_and_back(ckptfs: Run, tmp_path: Path, name: str, compress: list[str]) -> None:
    h5, prefix = tmp_path / "x.h5", tmp_path / "back.ckpt"
    done = ckptfs("tensorflow-to-h5", HERE / name, h5, *compress)
    assert (done.code, done.text) == (0, f"{h5}\n"), done.err
    assert same(ckptfs, HERE / name, h5)
    done = ckptfs("h5-to-tensorflow", h5, prefix)
    assert done.code == 0, done.err
    names = ["back.ckpt.data-00000-of-00001", "back.ckpt.index", "checkpoint"]
    assert done.text.split() == [str(tmp_path / name) for name in names]
    assert same(ckptfs, HERE / name, prefix)
    assert same(ckptfs, HERE / name, tmp_path)  # by the state file


def test_every_element_type_there_and_back(ckptfs: Run, tmp_path: Path) -> None:
    tensors = {f"a/{name}": tensor_of(name, shape) for name in DTYPES for shape in [(3, 5)]}
    for name, file in bundle_files("m", tensors).items():
        (tmp_path / name).write_bytes(content(file))
    assert ckptfs("tensorflow-to-h5", tmp_path / "m", tmp_path / "m.h5").code == 0
    assert ckptfs("h5-to-tensorflow", tmp_path / "m.h5", tmp_path / "n").code == 0
    data = "data-00000-of-00001"
    assert (tmp_path / f"n.{data}").stat().st_size == (tmp_path / f"m.{data}").stat().st_size
    assert same(ckptfs, tmp_path / "m", tmp_path / "n")
    with package.open(tmp_path / "n") as source:
        assert {key: source[key].dtype for key in source} == {f"a/{name}": name for name in DTYPES}


def test_h5py_reads_the_layout(ckptfs: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    assert ckptfs("tensorflow-to-h5", HERE / "single.ckpt", path).code == 0
    with h5py.File(path) as file, package.open(HERE / "single.ckpt") as source:
        kernel = file["gpt2%2Fembedding%2Fkernel"]
        assert kernel.attrs["__H5_TYPE__"] == "NumpyArrayH5Type"
        assert np.array_equal(kernel[...], np.asarray(source["gpt2/embedding/kernel"]))
        assert file["brain"].dtype == np.int16 and file["brain"].attrs["is_bfloat16"]
        assert file["word"].attrs["string_value"] == "scalar string"
        assert file["global_step"].shape == ()


def test_one_data_file_for_each_part_of_a_name(ckptfs: Run, tmp_path: Path) -> None:
    assert ckptfs("tensorflow-to-h5", HERE / "single.ckpt", tmp_path / "x.h5").code == 0
    done = ckptfs("h5-to-tensorflow", tmp_path / "x.h5", tmp_path / "y", "--shard-by", "gpt2/([a-z]+)")
    assert done.code == 0 and len(done.text.split()) == 5
    assert same(ckptfs, HERE / "single.ckpt", tmp_path / "y")
    bad = ckptfs("h5-to-tensorflow", tmp_path / "x.h5", tmp_path / "z", "--shard-by", "(")
    assert bad.code == 2 and "not a regular expression" in bad.err


def test_the_data_of_a_bfloat16_checkpoint_of_pytorch(ckptfs: Run, tmp_path: Path) -> None:
    """An H5 file with a tree spec, too; its keys are the names."""
    source = next(iter(sorted((DATA / "v05").glob("dtypes*.mdl"))))
    done = ckptfs("h5-to-tensorflow", source, tmp_path / "y")
    assert done.code == 0, done.err
    with package.open(source) as a, package.open(tmp_path / "y") as b:
        tensors = [key for key in a if hasattr(a[key], "dtype")]
        assert tensors
        for key in tensors:
            assert np.asarray(a[key]).tobytes() == np.asarray(b[key]).tobytes(), key


def test_nothing_is_written_over(ckptfs: Run, tmp_path: Path) -> None:
    assert ckptfs("tensorflow-to-h5", HERE / "single.ckpt", tmp_path / "x.h5").code == 0
    assert ckptfs("tensorflow-to-h5", HERE / "single.ckpt", tmp_path / "x.h5").code == 2
    assert ckptfs("tensorflow-to-h5", HERE / "multi.ckpt", tmp_path / "x.h5", "--force").code == 0
    prefix = tmp_path / "y"
    assert ckptfs("h5-to-tensorflow", tmp_path / "x.h5", prefix).code == 0
    state = (tmp_path / "checkpoint").read_bytes()
    again = ckptfs("h5-to-tensorflow", tmp_path / "x.h5", prefix)
    assert (again.code, again.out) == (2, b"") and "exists already" in again.err
    assert same(ckptfs, prefix, HERE / "multi.ckpt")
    forced = ckptfs("h5-to-tensorflow", tmp_path / "x.h5", tmp_path / "z", "--force")
    assert forced.code == 0 and "was left as it is" in forced.err
    assert (tmp_path / "checkpoint").read_bytes() == state
    assert ckptfs("h5-to-tensorflow", tmp_path / "x.h5", prefix, "--force").code == 0
    assert same(ckptfs, prefix, HERE / "multi.ckpt")


@pytest.mark.parametrize("command", ["tensorflow-to-h5", "h5-to-tensorflow"])
def test_a_full_disk_is_one_line_and_leaves_nothing(ckptfs: Run, tmp_path: Path, command: str) -> None:
    assert ckptfs("tensorflow-to-h5", HERE / "single.ckpt", tmp_path / "x.h5").code == 0
    source = HERE / "single.ckpt" if command == "tensorflow-to-h5" else tmp_path / "x.h5"
    real, n_calls = os.pwrite, 0

    def full(fd: int, data: bytes, at: int) -> int:
        nonlocal n_calls
        n_calls += 1
        if n_calls > 1 or command == "tensorflow-to-h5":
            raise OSError(28, "No space left on device")
        return real(fd, data, at)

    with mock.patch.object(write.os, "pwrite", full):
        done = ckptfs(command, source, tmp_path / "out")
    assert (done.code, done.out) == (4, b"") and "No space left" in done.err and done.err.count("\n") <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_a_damaged_variable_ends_the_run_and_leaves_nothing(ckptfs: Run, tmp_path: Path) -> None:
    done = ckptfs("tensorflow-to-h5", HERE / "bad_data_crc.ckpt", tmp_path / "x.h5")
    assert done.code == 3 and "gpt2/embedding/kernel: its checksum is wrong" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (["tensorflow-to-h5", DATA / "v05/dtypes.mdl", "x.h5"], "is no TensorFlow checkpoint"),
        (["h5-to-tensorflow", HERE / "single.ckpt", "x"], "is no HDF5 file"),
        (["tensorflow-to-h5", "nothing", "x.h5"], "no such file"),
    ],
)
def test_wrong_inputs(
    ckptfs: Run, tmp_path: Path, line: list[object], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ckptfs(*line)
    assert done.code == 2 and what in done.err, done.err
    assert list(tmp_path.iterdir()) == []


def test_what_tensorflow_has_no_value_for_is_named(ckptfs: Run, tmp_path: Path) -> None:
    package.save({"a": np.ones(2), "b": None}, tmp_path / "x.mdl")
    done = ckptfs("h5-to-tensorflow", tmp_path / "x.mdl", tmp_path / "y")
    assert done.code == 2 and "'b': there is no value to write (none)" in done.err


@pytest.mark.parametrize("name", ["h5_to_tensorflow", "tensorflow_to_h5"])
def test_commands_of_their_own(name: str) -> None:
    code = f"import sys; from ckptfs.cli.main import {name}; sys.argv[1:] = ['--help']; {name}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"Usage: ckptfs {name.replace('_', '-')} ")


def test_an_old_bundle_is_whole_or_gone_when_a_forced_run_fails(ckptfs: Run, tmp_path: Path) -> None:
    shutil.copy(HERE / "single.ckpt.index", tmp_path / "y.index")
    shutil.copy(HERE / "single.ckpt.data-00000-of-00001", tmp_path / "y.data-00000-of-00001")
    assert ckptfs("tensorflow-to-h5", HERE / "multi.ckpt", tmp_path / "x.h5").code == 0
    with mock.patch.object(write.os, "pwrite", side_effect=OSError(5, "Input/output error")):
        assert ckptfs("h5-to-tensorflow", tmp_path / "x.h5", tmp_path / "y", "--force").code == 4
    assert same(ckptfs, tmp_path / "y", HERE / "single.ckpt")
