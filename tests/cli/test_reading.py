"""``ckptfs ls``, ``cat``, ``info`` and ``list``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ckptfs.conversion import registry
from tests.cli.conftest import BIAS, WEIGHT, Result, safetensors_bytes

Run = Callable[..., Result]


def test_ls_json(ckptfs: Run, checkpoint: Path) -> None:
    assert json.loads(ckptfs("ls", checkpoint, "--json").out) == [
        {"key": "layer.weight", "kind": "tensor", "dtype": "float32", "shape": [3, 4], "nbytes": 48},
        {"key": "layer.bias", "kind": "tensor", "dtype": "bfloat16", "shape": [5], "nbytes": 10},
    ]


def test_ls_shows_keys_dtypes_shapes_and_sizes(ckptfs: Run, checkpoint: Path) -> None:
    lines = [line.split() for line in ckptfs("ls", checkpoint).text.splitlines()]
    assert lines == [["float32", "3x4", "48", "B", "layer.weight"], ["bfloat16", "5", "10", "B", "layer.bias"]]
    lines = [line.split() for line in ckptfs("ls", "-l", checkpoint).text.splitlines()]
    assert lines == [
        ["tensor", "float32", "3x4", "48", "layer.weight"],
        ["tensor", "bfloat16", "5", "10", "layer.bias"],
    ]


def test_ls_pattern(ckptfs: Run, checkpoint: Path) -> None:
    assert [i["key"] for i in json.loads(ckptfs("ls", checkpoint, "*.b?as", "--json").out)] == ["layer.bias"]
    found = ckptfs("ls", checkpoint, "*.none")
    assert (found.code, found.out) == (1, b"")


def test_ls_keeps_control_characters_from_the_terminal(ckptfs: Run, tmp_path: Path) -> None:
    path = tmp_path / "evil.safetensors"
    path.write_bytes(safetensors_bytes({"a\x1b[31mb\nc": ("F32", WEIGHT)}))
    assert b"a\\x1b[31mb\\x0ac" in ckptfs("ls", path).out


def test_cat(ckptfs: Run, checkpoint: Path) -> None:
    assert ckptfs("cat", checkpoint, "layer.weight").out == WEIGHT.tobytes()
    assert ckptfs("cat", checkpoint, "layer.bias").out == BIAS.tobytes()
    found = ckptfs("cat", checkpoint, "layer.wieght")
    assert (found.code, found.out) == (1, b"")
    assert "layer.weight" in found.err


def test_cat_of_more_than_one_piece(ckptfs: Run, tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 255, (2049, 4099), np.uint8)
    path = tmp_path / "large.safetensors"
    path.write_bytes(safetensors_bytes({"x": ("U8", array)}))
    assert ckptfs("cat", path, "x").out == array.tobytes()


def test_cat_is_quiet_when_nobody_reads_on(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    path.write_bytes(safetensors_bytes({"x": ("U8", np.zeros((16 << 20,), np.uint8))}))
    command = f'{sys.executable} -m ckptfs cat "{path}" x | head -c 5 | wc -c'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("5", "")


def test_info(ckptfs: Run, checkpoint: Path) -> None:
    about = json.loads(ckptfs("info", checkpoint, "--json").out)
    assert about["format"] == "safetensors"
    assert (about["n_tensors"], about["n_parameters"], about["nbytes"]) == (2, 17, 58)
    assert about["dtypes"] == {"float32": 1, "bfloat16": 1}
    lines = dict(line.split("  ", 1) for line in ckptfs("info", checkpoint).text.splitlines())
    assert lines["format"].strip() == "safetensors"
    assert lines["parameters"].strip() == "17"


def test_list(ckptfs: Run) -> None:
    entries = json.loads(ckptfs("list", "--json").out)
    assert {"gpt2", "llama"} <= {entry["model"] for entry in entries}
    assert all(entry["source"] and entry["target"] for entry in entries)
    text = ckptfs("list").text
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in registry.FAMILIES)
    rows = [line.split()[:5] for line in ckptfs("list", "llama").text.splitlines()]
    assert rows[1:] == [["llama", "hf,", "cs-1.9", "…", "cs-2.10"]]
    assert json.loads(ckptfs("list", "llama", "--json").out)["model"] == "llama"
