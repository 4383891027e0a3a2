"""``ckptfs ls``, ``cat``, ``info`` and ``list``."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest

from ckptfs.cli import completion
from ckptfs.conversion import registry
from ckptfs.mount import mount_table
from tests.cli.conftest import BIAS, WEIGHT, Result, safetensors_bytes
from tests.paths import FAMILIES

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


def test_ls_by_a_part_of_the_name(ckptfs: Run, checkpoint: Path) -> None:
    assert [i["key"] for i in json.loads(ckptfs("ls", checkpoint, "bias", "--json").out)] == ["layer.bias"]
    assert [i["key"] for i in json.loads(ckptfs("ls", checkpoint, "layer.bias", "--json").out)] == ["layer.bias"]
    assert [i["key"] for i in json.loads(ckptfs("ls", checkpoint, "ayer.", "--json").out)] == [
        "layer.weight",
        "layer.bias",
    ]
    assert ckptfs("ls", checkpoint, "lm_head").code == 1


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


def test_cat_as_npy(ckptfs: Run, checkpoint: Path) -> None:
    found = np.load(io.BytesIO(ckptfs("cat", checkpoint, "layer.weight", "--npy").out))
    assert (found.dtype, found.tolist()) == (WEIGHT.dtype, WEIGHT.tolist())
    wrong = ckptfs("cat", FAMILIES / "llama/cs2hf-gqa-fp32/cs.mdl", "optimizer.param_groups.0.eps", "--npy")
    assert (wrong.code, wrong.out) == (2, b"")


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


def test_info_with_all_keys(ckptfs: Run, checkpoint: Path) -> None:
    """``cszoo checkpoint info -l``"""
    for option in ("-l", "--list_objects"):
        text = ckptfs("info", checkpoint, option).text
        assert text.endswith(ckptfs("ls", checkpoint).text)
    assert json.loads(ckptfs("info", checkpoint, "-l", "--json").out)["objects"][1]["key"] == "layer.bias"


def test_info_of_views_is_readable(ckptfs: Run) -> None:
    about = ckptfs("info", FAMILIES / "gpt2/hf2cs-untied-fp32/hf").text
    assert re.search(r"^views +cs-2\.10 with \d+ tensors$", about, re.MULTILINE)


def test_the_only_checkpoint_of_a_folder_is_opened(ckptfs: Run, tmp_path: Path) -> None:
    shutil.copy(FAMILIES / "llama/cs2hf-gqa-fp32/cs.mdl", tmp_path / "checkpoint_7.mdl")
    shutil.copy(FAMILIES / "llama/cs2hf-gqa-fp32/cs.yaml", tmp_path / "params.yaml")
    about = json.loads(ckptfs("info", tmp_path, "--json").out)
    assert (about["source"], about["family"]) == ("checkpoint_7.mdl", "llama")
    assert any("only checkpoint" in line for line in about["warnings"])
    assert any("params.yaml" in line for line in about["warnings"])
    shutil.copy(tmp_path / "checkpoint_7.mdl", tmp_path / "checkpoint_8.mdl")
    refused = ckptfs("info", tmp_path)
    assert refused.code == 3
    assert "2 Cerebras checkpoints; name one" in refused.err


def test_list_as_the_converter_does(ckptfs: Run) -> None:
    assert ckptfs("list", "all").out == ckptfs("list").out
    assert ckptfs("list", "bert-q&a").out == ckptfs("list", "BERT-QA").out == ckptfs("list", "bert-qa").out
    shown = ckptfs("list", "falcon", "--hide-notes").text
    assert "NOTES" not in shown
    assert ckptfs("list", "falcon").text.startswith(shown.splitlines()[0])


def complete(line: str, last: str) -> list[str]:
    """What bash is offered for the word *last* after *line*."""
    env = {**os.environ, "_CKPTFS_COMPLETE": "bash_complete", "COMP_WORDS": f"{line} {last}"}
    env["COMP_CWORD"] = str(len(line.split()))
    done = subprocess.run([sys.executable, "-m", "ckptfs"], env=env, capture_output=True, text=True)
    assert done.stderr == ""
    return [text.removeprefix("plain,") for text in done.stdout.splitlines() if text]


def test_completion(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert complete("ckptfs convert --model", "gptj") == ["gptj", "gptj-headless"]
    assert complete("ckptfs list", "LLAMAv") == ["llamaV2", "llamaV2-headless"]
    assert complete("ckptfs convert --tgt-fmt", "cs-2.1") == ["cs-2.10", "cs-2.1"]
    assert complete(f"ckptfs cat {checkpoint}", "layer.b") == ["layer.bias"]
    assert complete(f"ckptfs ls {checkpoint}", "") == ["layer.weight", "layer.bias"]
    assert complete("ckptfs cat /nowhere", "lay") == []
    found = [mount_table.Mount("/mnt/a", "fuse.ckptfs", 1), mount_table.Mount("/mnt/b", "ext4", 2)]
    monkeypatch.setattr(mount_table, "mounts", lambda: found)
    context, param = click.Context(click.Command("umount")), click.Option(["--x"])
    assert completion.mountpoints(context, param, "") == completion.mountpoints(context, param, "/mnt/") == ["/mnt/a"]
    monkeypatch.chdir(tmp_path)
    assert completion.mountpoints(context, param, "..") == [os.path.relpath("/mnt/a")]


def test_many_keys_are_offered_in_steps(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    path.write_bytes(safetensors_bytes({f"layers.{i}.{x}": ("F32", WEIGHT) for i in range(150) for x in "ab"}))
    context = click.Context(click.Command("cat"))
    context.params["source"] = str(path)
    param = click.Option(["--x"])
    assert completion.keys(context, param, "lay") == ["layers."]
    assert len(completion.keys(context, param, "layers.")) == 150
    assert completion.keys(context, param, "layers.7.") == ["layers.7.a", "layers.7.b"]


def test_list(ckptfs: Run) -> None:
    entries = json.loads(ckptfs("list", "--json").out)
    assert {"gpt2", "llama"} <= {entry["model"] for entry in entries}
    assert all(entry["source"] and entry["target"] for entry in entries)
    text = ckptfs("list").text
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in registry.FAMILIES)
    rows = [line.split()[:5] for line in ckptfs("list", "llama").text.splitlines()]
    assert rows[1:] == [["llama", "hf,", "cs-1.9", "…", "cs-2.10"]]
    assert json.loads(ckptfs("list", "llama", "--json").out)["model"] == "llama"
