"""Recorded runs of the public converter: what it was given, and what came out. README.md describes the files."""

from __future__ import annotations

import functools
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import ckptfs
from ckptfs.tools.write import write_file
from ckptfs.vfs.cerebras import checkpoint_file
from tests.paths import FAMILIES, RELEASES

CORRECTED = {("esm-2", "model_type", "bert"): "esm"}
"""(model, field, recorded value of ``config.json``): what is right instead, as docs/differences.md says."""
ADDED = {"mllama": {"model_type": "mllama", "vision_config": {"max_num_tiles": 2}}}
"""By model, what a recorded ``config.json`` lacks, so that loaders fail or take another model."""
RIGHT_HERE = {
    "2.4_to_current_refused": "the newest release can be written here",
    "dpo_to_no_dpo": "the converter cannot parse the version of its own format",
    "no_dpo_to_dpo": "as above",
}
"""Cases that the converter refuses, and that work here."""
KEPT_HERE = "gpt_backbone/from-backbone-swa-configonly"
"""The converter loses what stands in a list of layers; `tests.conversion.families.test_gpt_backbone` has the case."""
NOT_REACHED = "not found in the ModelZoo registry"
"""The converter's refusal of names that it lists; they work here."""
ONE_PREFIX = "t5/1.7_to_1.8_prefix"
"""The converter puts a second ``model.`` in front of keys that have one; no loader finds such keys."""


@dataclass(frozen=True)
class Run:
    """One run of the converter: a step of a case."""

    folder: Path
    model: str
    """The name that was asked for; the command line may have an alias of it."""
    step: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.case}/{self.step['id']}"

    @property
    def case(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def src(self) -> str:
        return str(self.step["src"])

    @property
    def tgt(self) -> str:
        return str(self.step["tgt"])

    @property
    def kind(self) -> str:
        """``config`` alone, ``hf`` (from or to Hugging Face) or ``releases`` (between Cerebras formats)."""
        if self.step["argv"][0] == "convert-config":
            return "config"
        return "hf" if "hf" in (self.src, self.tgt) else "releases"

    @property
    def refused(self) -> bool:
        """Whether the converter refused the run."""
        return self.step["result"] == "refused"

    @property
    def works_here(self) -> bool:
        """Whether the converter refused nothing but the model's name or the release, which ckptfs knows."""
        unknown = NOT_REACHED in self.step["error"].get("message", "") or self.folder.name.endswith("not_in_registry")
        return self.folder.name in RIGHT_HERE or unknown or self.tgt == "cs-2.10"

    @property
    def edited(self) -> bool:
        """Whether the config is the named file with fields changed."""
        return bool({"changes", "removes"} & self.step.keys())

    def json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found

    @property
    def config_path(self) -> Path:
        argv = self.step["argv"]
        return self.folder / (argv[argv.index("--config") + 1] if "--config" in argv else argv[1])

    @property
    def config(self) -> dict[str, Any]:
        """The config that the run was given; for several components, the configs by component."""
        path = self.config_path
        if path.is_dir():
            return {p.parent.name: json.loads(p.read_text()) for p in sorted(path.glob("*/config.json"))}
        text = path.read_text()
        found: dict[str, Any] = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        model = found.get("model", found)
        model |= self.step.get("changes", {})
        for name in self.step.get("removes", ()):
            model.pop(name, None)
        return found

    @property
    def input(self) -> Path:
        return (self.folder / self.step["input"]).resolve()

    @property
    def has_input(self) -> bool:
        """Some ways back are recorded without their checkpoint, which is what the way there wrote."""
        return not self.step.get("input") or self.input.exists()

    def checkpoint(self, tmp: Path) -> Path:
        """The checkpoint that the run was given: unpacked into *tmp*, or written there anew where none is recorded."""
        if self.input.exists():
            return unpacked(self.input, tmp)
        there = next(r for r in all_runs() if r.folder == self.folder and (r.src, r.tgt) == ("hf", self.src))
        with ckptfs.open(there.input) as checkpoint:
            plan = ckptfs.view(checkpoint, there.tgt, model=there.model).plan
            write_file(checkpoint_file(plan), tmp / "cs.mdl")
        return tmp / "cs.mdl"

    @property
    def expected(self) -> dict[str, Any]:
        """``config`` and ``state`` that came out (for several components: one such entry each)."""
        if "output_config" in self.step:
            return {"config": self.step["output_config"]}
        if self.tgt == "hf":
            found: dict[str, Any] = self.json("expected_hf.json")[self.step["id"].rsplit("_", 1)[1]]
            return found
        by_format = self.json("expected_cs.json")
        found = by_format[self.tgt]
        if found and "state_same_as" in found:
            return {**by_format[found["state_same_as"]], **found}
        return found

    @property
    def state(self) -> dict[str, Any]:
        """The leaves that came out, as they should be.

        The converter leaves the model's name in the entry of the conversion empty; ckptfs writes it.
        """
        state: dict[str, Any] = self.expected["state"]
        named = [key for key in state if key.startswith("__metadata__") and key.endswith(".model_name")]
        state = {**state, **{key: {"value": self.model} for key in named[-1:]}}
        if self.case == ONE_PREFIX:
            return {key.replace("model.model.model.", "model.model."): value for key, value in state.items()}
        return state

    def corrected(self, config: dict[str, Any]) -> dict[str, Any]:
        """A recorded ``config.json`` as it should be."""
        right = {
            name: CORRECTED.get((self.model, name, value), value) if isinstance(value, str) else value
            for name, value in config.items()
        }
        for name, value in ADDED.get(self.model, {}).items():
            right[name] = {**right[name], **value} if isinstance(value, dict) else value
        return right


@functools.cache
def all_runs() -> tuple[Run, ...]:
    """Every step of every case, in the order of their folders."""
    found = []
    for path in sorted([*FAMILIES.glob("*/*/case.json"), *RELEASES.glob("*/*/case.json")]):
        case = json.loads(path.read_text())
        found += [Run(path.parent, step.get("model", case["model"]), step) for step in case["steps"]]
    return tuple(found)


def runs(kind: str, *, refused: bool | None = None) -> list[Run]:
    """All runs of a `Run.kind`, or those of them that the converter refused, or did not."""
    return [run for run in all_runs() if run.kind == kind and refused in (None, run.refused)]


def run_named(name: str) -> Run:
    """The run of this name: ``<family>/<case>/<id>``."""
    (found,) = (run for run in all_runs() if str(run) == name)
    return found


def unpacked(path: Path, tmp: Path) -> Path:
    """*path*, or a gzipped file unpacked into *tmp*."""
    if path.suffix != ".gz":
        return path
    target = tmp / path.stem
    target.write_bytes(gzip.decompress(path.read_bytes()))
    return target
