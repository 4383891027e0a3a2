"""docs/tools.md, run: its console blocks, in order, in a folder with small real checkpoints."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

import ckptfs as package
from ckptfs.cli.main import COMMANDS
from tests.cli.conftest import Result
from tests.conftest import ROOT
from tests.documents import blocks, commands, pattern, read
from tests.paths import FAMILIES

PAGE = read("docs/tools.md")
LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
HEAD = "model.lm_head.weight"


def test_every_command_does_what_it_shows(
    tmp_path: Path, ckptfs: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(LLAMA / "cs.yaml", "params.yaml")
    shutil.copytree(LLAMA / "hf", "model")
    with package.open(LLAMA / "cs.mdl") as source:
        package.save(source, "checkpoint.mdl", compress="lz4")
        package.save(source, "copy.mdl")
    with h5py.File("copy.mdl", "a") as file:
        file[HEAD][0, 2] += 1
    shutil.copy("checkpoint.mdl", "damaged.mdl")
    with h5py.File("damaged.mdl") as file:
        place = file[HEAD].id.get_chunk_info(0).byte_offset
    with open("damaged.mdl", "r+b") as raw:
        raw.seek(place)
        raw.write(bytes(8))
    shutil.copy(ROOT / "tests/data/fix_spec/milestones.mdl", "checkpoint_300.mdl")
    shutil.copytree(ROOT / "tests/data/data_iter/state", "data_iter_state")
    console = blocks(PAGE, "console")
    assert len(console) == 4
    for command, output in (found for _, block in console for found in commands(block)):
        tool, *line = shlex.split(command)
        done = ckptfs(*line)
        assert tool == "ckptfs"
        assert re.fullmatch(pattern(output), done.text + done.err), f"{command}\n{done.text}{done.err}"


def test_every_option_of_the_page_exists(ckptfs: Callable[..., Result]) -> None:
    for section in PAGE.split("\n## ")[1:]:
        found = re.match(r"`([\w-]+)`", section)
        assert found is not None
        assert found[1] in COMMANDS
        page = ckptfs(found[1], "--help").text
        missing = {flag for flag in re.findall(r"--[a-z][\w-]+", section) if flag not in page}
        assert not missing
