"""``ckptfs convert-data-iter-state``: recorded results of the public tool, and what it breaks on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs as package
from ckptfs.formats.cerebras.dataloader import dataloader_state
from ckptfs.formats.nested import nested_state
from tests.cli.conftest import Result
from tests.conftest import ROOT

DATA = ROOT / "tests/data/data_iter"
OLD = DATA / "old_r19.mdl"
CASES = json.loads((DATA / "index.json").read_text())
Ckptfs = Callable[..., Result]


def plain(value: dict[str, Any]) -> Any:
    """A recorded tree without its notes on types."""
    if value["kind"] == "dict":
        return {key["key"]: plain(child) for key, child in value["items"]}
    return [plain(child) for child in value["items"]] if value["kind"] == "list" else value["value"]


@pytest.mark.parametrize("compress", [[], ["--compress", "lz4"]], ids=["plain", "lz4"])
@pytest.mark.parametrize("name", CASES)
def test_recorded_results(name: str, compress: list[str], tmp_path: Path, ckptfs: Ckptfs) -> None:
    case, out = CASES[name], tmp_path / "new.mdl"
    flags = [part for key, value in case["args"].items() for part in (f"--{key}", value)]
    done = ckptfs("convert-data-iter-state", "-c", OLD, "-w", DATA / case["dir"], "-o", out, *flags, *compress)
    assert (done.code, done.text, done.err) == (0, f"{out}\n", "")
    with package.open(out) as new:
        assert list(new) == list(case["flat"])
        for key, leaf in case["flat"].items():
            if leaf["kind"] == "tensor":
                assert hashlib.sha256(new[key].tobytes()).hexdigest() == leaf["sha256"]
            else:
                assert (type(new[key]).__name__, new[key]) == (leaf["py"], leaf["value"])
        assert nested_state(new.source)["dataloader"] == plain(case["tree_dataloader"][1])


def test_short_and_dashed_options(tmp_path: Path, ckptfs: Ckptfs) -> None:
    short = ["-c", OLD, "-w", DATA / "state", "-o", tmp_path / "a", "-d", "map", "-s", 7]
    dashed = ["--old-checkpoint", OLD, "--worker-data-iter-files-dir", DATA / "state", "--output-file", tmp_path / "b"]
    assert ckptfs("convert-data-iter-state", *short).code == 0
    assert ckptfs("convert-data-iter-state", *dashed, "--dataloader-type", "map", "--shuffle-seed", 7).code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("folder", "code", "said"),
    [
        ("no_global", 2, "data_iter_checkpoint_state_file_global"),
        ("nothing_here", 2, "not a folder"),
        ("bad_content", 3, "data_iter_state_file_worker_0_step_300.txt"),
        ("bad_step", 3, "data_iter_checkpoint_state_file_global"),
    ],
)
def test_refusals_leave_nothing(folder: str, code: int, said: str, tmp_path: Path, ckptfs: Ckptfs) -> None:
    done = ckptfs("convert-data-iter-state", "-c", OLD, "-w", DATA / folder, "-o", tmp_path / "new.mdl")
    assert (done.code, done.err.count("\n"), list(tmp_path.iterdir())) == (code, 1, [])
    assert said in done.err


def test_an_output_is_written_over_only_with_force(tmp_path: Path, ckptfs: Ckptfs) -> None:
    out = tmp_path / "new.mdl"
    out.write_bytes(b"mine")
    line = ["convert-data-iter-state", "-c", OLD, "-w", DATA / "state", "-o", out]
    assert ckptfs(*line).code == 2
    assert out.read_bytes() == b"mine"
    assert ckptfs(*line, "--force").code == 0
    again = ckptfs("convert-data-iter-state", "-c", out, *line[3:], "--force", "-s", 9)
    assert again.code == 0, "the input may be the output, and its old state makes room"
    with package.open(out) as new:
        assert list(new) == ["model.w", "global_step", "dataloader.samples_streamed", "dataloader.seed"]
        assert new["dataloader.seed"] == 9


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    """Names of any kind, folders, other steps; shards are in the order of their numbers."""
    folder = tmp_path / "state"
    shutil.copytree(DATA / "state", folder)
    for name in ("readme.txt", "a_b_c.txt", "data_iter_state_file_worker_x_step_300.txt", "worker_9_step_300.txt.bak"):
        (folder / name).write_text("nonsense")
    (folder / "data_iter_state_file_worker_3_step_3000.txt").write_text("1")
    (folder / "folder.txt").mkdir()
    assert dataloader_state(folder, "map", 4) == {"samples_streamed": 14417, "seed": 4}
    states = dataloader_state(folder, "iterable")["all_worker_states"]
    assert [(s["shard_index"], s["samples_streamed"]) for s in states] == [(0, 4800), (1, 4801), (2, 4799), (10, 17)]


def test_a_value_tied_to_the_replaced_state_stays(tmp_path: Path, ckptfs: Ckptfs) -> None:
    seed = np.arange(3)
    package.save({"dataloader": {"seed": seed}, "other": seed, "step": 4}, tmp_path / "old.mdl")
    with package.open(tmp_path / "old.mdl") as old:
        assert old.item("other").tied_to == "dataloader.seed"
    line = ["-c", tmp_path / "old.mdl", "-w", DATA / "state", "-o", tmp_path / "new.mdl"]
    assert ckptfs("convert-data-iter-state", *line).code == 0
    with package.open(tmp_path / "new.mdl") as new:
        assert list(new) == ["dataloader.samples_streamed", "dataloader.seed", "other", "step"]
        assert (new["dataloader.seed"], np.asarray(new["other"]).tolist()) == (0, [0, 1, 2])


def test_a_list_has_no_place_for_it(tmp_path: Path, ckptfs: Ckptfs) -> None:
    package.save([1, 2], tmp_path / "list.mdl")
    line = ["-c", tmp_path / "list.mdl", "-w", DATA / "state", "-o", tmp_path / "new.mdl"]
    done = ckptfs("convert-data-iter-state", *line)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "list" in done.err
