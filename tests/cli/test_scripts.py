"""The command lines of the public tools: ``convert_checkpoint.py`` and the scripts beside it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfs.cli import main
from ckptfs.cli.main import ALIASES, COMMANDS
from tests.paths import DATA, FAMILIES, ROOT

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"


def converter(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptfs.convert_checkpoint", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_the_converters_module(tmp_path: Path) -> None:
    """The documented lines, with all options that the public tool has."""
    out = ("--output-dir", tmp_path)
    fmt = ("--model", "LLAMA", "--src-fmt", "cs-2.9", "--tgt-fmt", "hf")
    listed = converter("list", "all", "--hide-notes")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert re.search("^gpt2-headless ", listed.stdout, re.MULTILINE)
    made = converter(
        *("convert", *fmt, "--config", LLAMA / "cs.yaml", *out, "--hf-shard-size", "10GB", "--export-safetensors"),
        *("--drop-unmatched-keys", "--no-progress-bar", "--debug", LLAMA / "cs.mdl"),
    )
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "cs_to_hf"
    assert made.stdout.splitlines() == [
        f"Checkpoint saved to {folder}",
        f"Config saved to {folder}/config.json",
    ]
    config = converter("convert-config", *fmt, *out, "--debug", LLAMA / "cs.yaml")
    assert config.stdout == f"Config saved to {tmp_path}/cs_to_hf.json\n"
    assert (tmp_path / "cs_to_hf.json").read_bytes() == (folder / "config.json").read_bytes().replace(
        b',\n    "torch_dtype": "float32"', b""
    )
    same = converter("diff", "--tensor_comparison_op", "allclose", folder, folder)
    assert same.returncode == 0, same.stderr


def test_a_line_that_makes_no_sense() -> None:
    done = converter("convert", "--model", "llama", "x.mdl")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


SCRIPTS = dict(
    re.findall(r'^(\w+) = "(ckptfs\.cli\.scripts:\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
)


def test_the_installed_commands_are_the_public_scripts() -> None:
    assert sorted(SCRIPTS) == ["data_iter_state_conversion", "fix_checkpoint_spec", "fold_lora_checkpoint"]


def script(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Runs the function that is installed as *name*."""
    module, _, function = SCRIPTS[name].partition(":")
    code = f"import sys; sys.argv[0] = {name!r}; import {module} as m; m.{function}()"
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, cwd=ROOT)


def test_data_iter_state_conversion(tmp_path: Path) -> None:
    old, folder = DATA / "data_iter/old_r19.mdl", DATA / "data_iter/state"
    out = tmp_path / "new.mdl"
    done = script("data_iter_state_conversion", "-c", old, "-w", folder, "-o", out, "-d", "map", "-s", "3")
    assert done.returncode == 0, done.stderr
    assert out.exists()


def test_fix_checkpoint_spec(tmp_path: Path) -> None:
    old = next(DATA.glob("fix_spec/*.mdl"))
    out = tmp_path / "fixed.mdl"
    done = script("fix_checkpoint_spec", old, "--fixed_checkpoint_path", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"Fixed checkpoint saved to: {out}\n")


def test_fold_lora_checkpoint(tmp_path: Path) -> None:
    done = script("fold_lora_checkpoint", "--help")
    assert {"--model", "--params", "--checkpoint_path"} <= set(re.findall(r"--\w+", done.stdout))


@pytest.mark.parametrize("name", [*ALIASES, "fold_lora_checkpoint", "fix_checkpoint_spec"])
def test_they_are_subcommands_too(name: str) -> None:
    assert main.run([name, "--help"]) == 0


def test_aliases_lead_to_commands() -> None:
    assert set(ALIASES.values()) <= set(COMMANDS)
    assert importlib.import_module("ckptfs.convert_checkpoint").__doc__
