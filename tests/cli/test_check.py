"""``ckptfs check``: what is damaged is named, down to the chunk; everything else is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import ckptfs as package
from ckptfs.errors import CorruptChunk
from ckptfs.formats.source import Item
from ckptfs.tensors.scan import count_nan_inf
from ckptfs.tensors.tensor import Elements
from ckptfs.tools import check
from ckptfs.tools.check import Report, check_data, check_layers, check_structure
from tests.cli.conftest import Result
from tests.conftest import ROOT
from tests.factories import ArrayTensor, source_of
from tests.paths import FAMILIES

DAMAGED = ROOT / "tests/data/h5/damaged"
LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
Ckptfs = Callable[..., Result]


def found(ckptfs: Ckptfs, *line: object) -> tuple[int, dict[str, Any]]:
    done = ckptfs("check", *line, "--json")
    assert done.err == ""
    return done.code, json.loads(done.out)


def test_a_sound_checkpoint(tmp_path: Path, ckptfs: Ckptfs) -> None:
    weight = np.ones((30, 20), "f4")
    package.save({"w": weight, "tied": weight, "n": 3, "empty": np.zeros((0, 4))}, tmp_path / "a.mdl")
    done = ckptfs("check", tmp_path / "a.mdl")
    assert (done.code, done.text, done.err) == (0, "2 tensors, 2.3 KiB read: sound\n", "")
    code, report = found(ckptfs, tmp_path / "a.mdl", "--values")
    assert (code, report["sound"], report["problems"], report["n_keys"]) == (0, True, [], 4)
    assert (report["n_tensors"], report["nbytes"], report["format_version"]) == (2, 2400, "0.5")


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_every_damaged_chunk_is_named(dimensions: int, tmp_path: Path, ckptfs: Ckptfs) -> None:
    path = tmp_path / "a.mdl"
    shape = {1: (400_000,), 2: (500, 800), 3: (50, 80, 100)}[dimensions]
    package.save({"model": {"w": np.ones(shape, "f4"), "x": np.ones(9)}}, path, compress="lz4")
    with h5py.File(path) as file:
        dataset = file["model.w"].id
        assert dataset.get_num_chunks() > 5
        places = [dataset.get_chunk_info(i).byte_offset for i in (1, 4)]
    with path.open("r+b") as raw:
        for place in places:
            raw.seek(place)
            raw.write(bytes(8))
    code, report = found(ckptfs, path)
    assert (code, report["n_tensors"]) == (1, 2)
    assert sorted(p["offset"] for p in report["problems"]) == sorted(places)
    assert all(p["key"] == "model.w" and "chunk" in p["what"] for p in report["problems"])
    text = ckptfs("check", path)
    assert (text.code, text.text.splitlines()[-1].endswith("read: 2 problems")) == (1, True)


class Holed(ArrayTensor):
    """Reading fails wherever one of *holes* (rows) is asked for."""

    holes: tuple[int, ...] = ()

    def read_block(self, row: int, col: int, out: Elements) -> None:
        hit = [hole for hole in self.holes if row <= hole < row + len(out)]
        if hit:
            raise CorruptChunk("file", "source key", hit[0] * 10, f"row {hit[0]}")
        super().read_block(row, col, out)


def test_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PIECE", 64)
    tensor = Holed(np.arange(70 * 4, dtype="f4").reshape(70, 4), preferred_block=(3, 2))
    tensor.holes = (10, 69)
    report, read = Report(), []
    check_data(report, {"w": tensor, "again": tensor}, view="hf", progress=read.append)
    assert [(p.key, p.offset, p.block, p.view) for p in report.problems] == [
        ("w", 100, (9, 0, 3, 2), "hf"),
        ("w", 690, (69, 0, 1, 2), "hf"),
    ]
    assert sum(read) == (70 - 3 - 1) * 4 * 4, "all rows but those of the two blocks"


def test_many_damaged_parts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_SHOWN", 3)
    tensor = Holed(np.zeros((20, 2)), preferred_block=(2, 1))
    tensor.holes = tuple(range(20))
    report = Report()
    check_data(report, {"w": tensor})
    assert [p.what for p in report.problems] == [
        *(f"source key: row {i} (at byte {10 * i})" for i in (0, 2, 4)),
        "and 7 more parts that cannot be read",
    ]


def test_nan_and_infinity() -> None:
    words = {
        "float32": ([1.5, np.nan, np.inf, -np.inf, -np.nan], "f4", (2, 2)),
        "float64": ([np.inf, 0, np.nan], "f8", (1, 1)),
        "float16": ([np.nan, 65504, -np.inf], "f2", (1, 1)),
        "complex64": ([1, complex(np.nan, np.inf)], "c8", (1, 1)),
        "complex128": ([1, complex(np.nan, 1), complex(0, -np.inf)], "c16", (1, 1)),
        "bfloat16": ([0x3F80, 0x7F80, 0xFF80, 0x7F81, 0xFFFF], "u2", (2, 2)),
        "float8_e5m2": ([0x7B, 0x7C, 0xFC, 0x7D], "u1", (1, 2)),
        "float8_e4m3fn": ([0x7E, 0x7F, 0xFF, 0x78], "u1", (2, 0)),
        "int32": ([-1, 2**31 - 1], "i4", (0, 0)),
    }
    for name, (values, kind, want) in words.items():
        tensor = ArrayTensor(np.array(values, kind), name)
        assert count_nan_inf(tensor.dtype, np.frombuffer(tensor.bytes, tensor.dtype.storage_dtype)) == want, name


def test_values_are_problems_when_asked_for(tmp_path: Path, ckptfs: Ckptfs) -> None:
    package.save({"w": np.array([1, np.nan, np.inf, np.nan], "f4"), "x": np.ones(3)}, tmp_path / "a.mdl")
    assert ckptfs("check", tmp_path / "a.mdl").code == 0
    code, report = found(ckptfs, tmp_path / "a.mdl", "--values")
    assert (code, report["problems"]) == (1, [{"key": "w", "what": "2 NaN and 1 infinite of 4 values"}])


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("good", 0, "sound"),
        ("evil_object_bytes", 0, "note: obj: io.open"),
        ("missing_dataset", 1, "its dataset is missing"),
        ("dtype_mismatch", 1, "float64"),
        ("shape_mismatch", 1, "its metadata give the shape"),
        ("tied_missing", 1, "does not exist"),
        ("link_absolute", 1, "outside of the checkpoint's folder"),
        ("lz4_zeroed", 1, "chunk 0"),
        ("no_success", 3, "never finished"),
        ("trunc_90", 3, "truncated"),
        ("not_hdf5", 3, "none of these"),
    ],
)
def test_damaged_files(name: str, code: int, said: str, ckptfs: Ckptfs) -> None:
    done = ckptfs("check", DAMAGED / f"{name}.mdl")
    assert (done.code, said in done.text + done.err) == (code, True)


def test_warnings_and_reasons_are_told_once() -> None:
    items = {
        "a": 1,
        "b": Item("b", "object", reason="is broken"),
        "c": Item("c", "object", reason="is a pickle", class_name="x.Y"),
    }
    source = source_of(items)
    source.warnings += ["b: is broken", "c: is a pickle", "a: has another shape", "nothing: is known of this"]
    report = Report()
    check_structure(report, source)
    assert [(p.key, p.what) for p in report.problems] == [
        *(("b", "is broken"), ("a", "has another shape"), (None, "nothing: is known of this"))
    ]
    assert report.notes == ["c: x.Y: is a pickle"]


def test_checksums_of_torch_files(tmp_path: Path, ckptfs: Ckptfs) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a": torch.arange(100.0), "b": torch.full((50,), 0.125)}, path)
    assert ckptfs("check", path).code == 0
    data = path.read_bytes()
    place = data.index(np.full(50, 0.125, "f4").tobytes())
    path.write_bytes(data[: place + 40] + b"\1" + data[place + 41 :])
    code, report = found(ckptfs, path)
    (problem,) = report["problems"]
    assert (code, problem["key"], problem["offset"]) == (1, "b", place)
    assert "checksum" in problem["what"]


def test_whether_it_converts(tmp_path: Path, ckptfs: Ckptfs) -> None:
    how = ["--tgt-fmt", "hf", "--model", "llama", "--config", LLAMA / "cs.yaml"]
    code, report = found(ckptfs, LLAMA / "cs.mdl", *how)
    alone = found(ckptfs, LLAMA / "cs.mdl")[1]
    assert (code, report["problems"]) == (0, [])
    assert report["nbytes"] > alone["nbytes"] > 0, "the result is read too"
    text, config = (LLAMA / "cs.yaml").read_text(), tmp_path / "other.yaml"
    for said, other, message in (
        ("norm_type: rmsnorm", "norm_type: layernorm", "cannot be shown as hf: "),
        ("num_hidden_layers: 2", "num_hidden_layers: 4", "the config says 4 layers: model.layers.{2, 3} "),
    ):
        assert said in text
        config.write_text(text.replace(said, other))
        code, report = found(ckptfs, LLAMA / "cs.mdl", *how[:-1], config)
        assert (code, len(report["problems"])) == (1, 1)
        assert report["problems"][0]["what"].startswith(message)
    assert ckptfs("check", LLAMA / "cs.mdl", "--tgt-fmt", "hf", "--model", "nobody").code == 2
    assert ckptfs("check", LLAMA / "cs.mdl", "--model", "llama").code == 2


def test_layers_are_those_of_the_longest_list() -> None:
    report = Report()
    keys = [f"h.{i}.experts.{j}.w" for i in (0, 1, 3) for j in range(9)] + ["head.0.w", "head.3.w", "wte.weight"]
    check_layers(report, keys, {"n_layer": 4})
    assert [p.what for p in report.problems] == ["the config says 4 layers: h.{2} are missing or too many"]
    for config in ({}, {"n_layer": "4"}):
        check_layers(report, keys, config)
    check_layers(report, [key for key in keys if not key.startswith("h.3")], {"num_hidden_layers": 2})
    check_layers(report, ["wte.weight"], {"n_layer": 4})
    assert len(report.problems) == 1


def test_damage_is_told_by_key_of_the_view(tmp_path: Path, ckptfs: Ckptfs) -> None:
    bad = tmp_path / "cs.mdl"
    shutil.copy(LLAMA / "cs.mdl", bad)
    with h5py.File(bad) as file:
        chunk = file["model.embedding_layer.word_embeddings.weight"].id.get_chunk_info(0)
    with bad.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(bytes(12))
    code, report = found(ckptfs, bad, "--tgt-fmt", "hf", "--model", "llama", "--config", LLAMA / "cs.yaml")
    assert code == 1
    assert [(p["key"], p.get("view")) for p in report["problems"]] == [
        ("model.embedding_layer.word_embeddings.weight", None),
        ("model.embed_tokens.weight", "hf"),
    ]
