"""Every recorded conversion between Cerebras releases: the config and the whole state, leaf by leaf."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.errors import CkptfsError
from ckptfs.formats.source import Node, Source
from ckptfs.tensors.read import to_bytes
from tests.others.cases import Run, runs

RIGHT_HERE = {
    "cs_current_refused": "the newest release can be written here",
}
"""Cases that the converter refuses, and that work here."""
ONE_PREFIX = "t5-upgrades/1.7_to_1.8_prefix"
"""The converter puts a second ``model.`` in front of keys that have one; no loader finds such keys."""


def recorded(run: Run) -> dict[str, Any]:
    state: dict[str, Any] = run.expected["state"]
    if ONE_PREFIX in str(run):
        return {key.replace("model.model.model.", "model.model."): value for key, value in state.items()}
    return state


def entries(source: Source) -> dict[str, dict[str, Any]]:
    """A whole state as it is recorded: tensors by hash, other leaves by value, containers that are empty as such."""
    assert source.tree is not None
    found: dict[str, dict[str, Any]] = {}

    def walk(node: Node | str, path: str) -> None:
        if isinstance(node, str):
            item = source.items[node]
            if item.tensor is None:
                found[path] = {"value": item.value}
            else:
                found[path] = {
                    "dtype": item.tensor.dtype.name,
                    "shape": list(item.tensor.shape),
                    "sha256": hashlib.sha256(to_bytes(item.tensor)).hexdigest(),
                }
            return
        if not node.children and path:
            found[path] = {"empty": {"list": "list", "tuple": "tuple"}.get(node.type, "dict")}
        for i, child in enumerate(node.children):
            part = str(node.keys[i]) if node.keys is not None else str(i)
            walk(child, f"{path}.{part}" if path else part)

    walk(source.tree, "")
    return found


def unlike(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What distinguishes two states."""
    wrong = [f"missing {key}" for key in expected if key not in found]
    wrong += [f"unexpected {key}" for key in found if key not in expected]
    for key, want in expected.items():
        got = found.get(key)
        if got is not None and "empty" in want and "empty" in got:
            continue
        if got is not None and any(got.get(k) != v for k, v in want.items() if k in ("value", "shape", "sha256")):
            wrong.append(f"{key}: {got}, recorded {want}")
    return wrong


def converted(run: Run, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> ckptfs.View:
    monkeypatch.chdir(run.folder)  # the folder of the input state is named relative to it
    checkpoint = ckptfs.open(run.checkpoint(tmp))
    return ckptfs.view(checkpoint, run.tgt, model=run.model, src_fmt=run.src, config=run.folder / "cs.yaml")


WHOLE = [r for r in runs("upgrade") if r.step["input"]]


@pytest.mark.parametrize("run", [r for r in WHOLE if not r.refused], ids=str)
def test_upgrade(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = converted(run, tmp_path, monkeypatch)
    assert view.config == run.expected["config"]
    assert view.state is not None
    with view.state as state:
        found = entries(state.source)
        assert unlike(found, recorded(run)) == []
        model = [key for key in found if key.startswith("model.")]
        assert model == [key for key in recorded(run) if key.startswith("model.")]
        assert list(view) == [key.removeprefix("model.") for key in model if "sha256" in found[key]]


@pytest.mark.parametrize("run", [r for r in WHOLE if r.refused], ids=str)
def test_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if run.folder.name in RIGHT_HERE:
        assert converted(run, tmp_path, monkeypatch).plan.tgt == "cs-2.10"
        return
    with pytest.raises(CkptfsError) as refusal:
        converted(run, tmp_path, monkeypatch)
    assert "\n" not in str(refusal.value)
