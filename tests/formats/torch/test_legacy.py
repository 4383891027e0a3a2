"""torch's format before 1.6."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptfs.errors import CkptfsError, CorruptHeader, UnknownFormat
from ckptfs.formats.torch import legacy
from ckptfs.formats.torch.legacy import is_torch_legacy, open_torch_legacy
from ckptfs.tensors.ranges import to_bytes
from tests.formats.samples import TORCH_TYPES, n_fds, random_tensor
from tests.formats.torch.test_reader import DATA, assert_same


def saved(path: Path, state: object) -> Path:
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def test_all_dtypes_and_views(tmp_path: Path) -> None:
    state = {f"t{i}": random_tensor(dtype, (3, 4)) for i, dtype in enumerate(TORCH_TYPES)}
    state |= {"empty": torch.empty(0, 2), "scalar": torch.tensor(5), "tied": state["t0"], "turned": state["t13"].t()}
    source = open_torch_legacy(saved(tmp_path / "x.bin", state))
    assert_same(source, state)
    assert source.items["tied"].tied_to == "t0"
    assert source.format == "torch-legacy"
    source.close()


def test_pickles_longer_than_the_first_look(tmp_path: Path) -> None:
    state = {f"{i:0300}": torch.full((1,), float(i)) for i in range(5000)}
    source = open_torch_legacy(saved(tmp_path / "x.bin", state))
    assert_same(source, state)
    source.close()


def test_recorded_file() -> None:
    source = open_torch_legacy(DATA / "legacy.bin")
    loaded = torch.load(DATA / "legacy.bin", weights_only=True)
    assert_same(source, {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)})
    source.close()


def test_any_cut_is_found(tmp_path: Path) -> None:
    whole = saved(tmp_path / "x.bin", {"a": torch.ones(3), "b": torch.ones(5, dtype=torch.int8)}).read_bytes()
    before = n_fds()
    for n in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:n])
        with pytest.raises(CorruptHeader):
            open_torch_legacy(tmp_path / "cut")
    assert n_fds() == before


def test_any_damaged_byte(tmp_path: Path) -> None:
    whole = saved(tmp_path / "x.bin", {"a": torch.ones(3), "s": "text", "n": 1}).read_bytes()
    n_refused = 0
    for at in range(len(whole)):
        (tmp_path / "x").write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            source = open_torch_legacy(tmp_path / "x")
        except CkptfsError:
            n_refused += 1
            continue
        for tensor in source.tensors().values():
            assert len(to_bytes(tensor)) <= len(whole)
        source.close()
    assert n_refused > len(whole) // 2


def test_big_endian_is_refused(tmp_path: Path) -> None:
    content = saved(tmp_path / "x.bin", {"a": torch.ones(3)}).read_bytes()
    at = content.index(b"little_endian")
    true = content.index(b"\x88", at)
    (tmp_path / "x.bin").write_bytes(content[:true] + b"\x89" + content[true + 1 :])
    with pytest.raises(UnknownFormat, match="big-endian"):
        open_torch_legacy(tmp_path / "x.bin")


def test_recognition(tmp_path: Path) -> None:
    head = saved(tmp_path / "x.bin", {}).read_bytes()[:14]
    assert is_torch_legacy(head)
    assert head == bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
    assert not is_torch_legacy(head[:13])
    assert not is_torch_legacy(b"PK\x03\x04")
    assert legacy.MAGIC == 0x1950A86A20F9469CFC6C
