"""Recorded conversions of encoders, seq2seq, vision and multimodal models, and between Cerebras releases.

Each folder ``<family>/<case>`` has ``case.json`` (one entry a run of the converter), the inputs (``hf/``, ``cs.mdl.gz``
+ ``cs.yaml``, ``cs_rand.mdl.gz`` + ``cs_rand.yaml``) and what came out: ``expected_cs.json`` by target format,
``expected_hf.json`` for the way back (``roundtrip``, from ``cs.mdl``) and for random weights (``random``).
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.paths import FAMILIES, RELEASES

CORRECTED = {("esm-2", "model_type", "bert"): "esm"}
"""(model, field, recorded value of ``config.json``): what is right instead, as docs/differences.md says."""
ADDED = {"mllama": {"model_type": "mllama", "vision_config": {"max_num_tiles": 2}}}
"""By model, what a recorded ``config.json`` lacks, so that loaders fail or take another model."""


@dataclass(frozen=True)
class Run:
    """One run of the converter."""

    folder: Path
    step: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}/{self.step['id']}"

    @property
    def model(self) -> str:
        """The name that was asked for; cases recorded under an alias name say so in their facts."""
        return str(self.json("case.json")["model"])

    @property
    def src(self) -> str:
        return str(self.step["src"])

    @property
    def tgt(self) -> str:
        return str(self.step["tgt"])

    @property
    def refused(self) -> bool:
        return self.step["result"] == "refused"

    def json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found

    @property
    def has_input(self) -> bool:
        """Some ways back are recorded without their checkpoint, which is what the way there wrote."""
        return not self.step.get("input") or (self.folder / self.step["input"]).exists()

    @property
    def config(self) -> dict[str, Any]:
        """The config that the run was given; for several components, the configs by component."""
        argv = self.step["argv"]
        path = self.folder / (argv[argv.index("--config") + 1] if "--config" in argv else argv[1])
        if path.is_dir():
            return {p.parent.name: json.loads(p.read_text()) for p in sorted(path.glob("*/config.json"))}
        text = path.read_text()
        found: dict[str, Any] = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        return found

    def checkpoint(self, tmp: Path) -> Path:
        """The checkpoint that the run was given; gzipped ones are unpacked into *tmp*."""
        return unpacked(self.folder / self.step["input"], tmp)

    @property
    def expected(self) -> dict[str, Any]:
        """``config`` and ``state`` that came out (for several components: one such entry each)."""
        if self.tgt == "hf":
            found: dict[str, Any] = self.json("expected_hf.json")[self.step["id"].rsplit("_", 1)[1]]
            return found
        by_format = self.json("expected_cs.json")
        found = by_format[self.tgt]
        if found and "state_same_as" in found:
            return {**by_format[found["state_same_as"]], **found}
        return found


def corrected(run: Run, config: dict[str, Any]) -> dict[str, Any]:
    """A recorded ``config.json`` as it should be."""
    right = {
        name: CORRECTED.get((run.model, name, value), value) if isinstance(value, str) else value
        for name, value in config.items()
    }
    for name, value in ADDED.get(run.model, {}).items():
        right[name] = {**right[name], **value} if isinstance(value, dict) else value
    return right


def unpacked(path: Path, tmp: Path) -> Path:
    if path.suffix != ".gz":
        return path
    target = tmp / path.stem
    target.write_bytes(gzip.decompress(path.read_bytes()))
    return target


def runs(kind: str) -> list[Run]:
    """All runs of a kind: ``config`` alone, ``hf`` (from or to Hugging Face) or ``upgrade`` (between releases)."""
    found = []
    for path in sorted([*FAMILIES.glob("*/*/case.json"), *RELEASES.glob("*/*/case.json")]):
        for step in json.loads(path.read_text()).get("steps", []):
            run = Run(path.parent, step)
            of = "config" if step["argv"][0] == "convert-config" else "hf" if "hf" in (run.src, run.tgt) else "upgrade"
            found += [run] if of == kind and run.has_input else []
    return found
