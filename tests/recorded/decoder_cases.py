"""Recorded conversions: what the public converter made of real checkpoints, hashed tensor by tensor.

Each folder ``<family>/<case>`` has ``case.json`` (model, formats), the input (``cs.mdl`` + ``cs.yaml``, or ``hf/``) and
``expected_hf.json`` / ``expected_cs.json`` (dtype, shape and sha256 of every tensor, and the whole config).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.paths import FAMILIES

EXTRA_FIELDS = ("architectures", "torch_dtype")
"""Fields of ``config.json`` that ckptfs adds, because loaders want them, where the converter writes none."""


@dataclass(frozen=True)
class Case:
    folder: Path

    def __str__(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def facts(self) -> dict[str, Any]:
        return self.json("case.json")

    @property
    def model(self) -> str:
        return str(self.facts["model_arg"])

    def json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found

    @property
    def mdl(self) -> Path:
        return (self.folder / self.facts.get("cs_mdl", "cs.mdl")).resolve()


def cases(direction: str) -> list[Case]:
    """All cases whose name starts with *direction* (``cs2hf`` or ``hf2cs``)."""
    return [Case(p.parent) for p in sorted(FAMILIES.glob(f"*/{direction}*/case.json"))]


def refusals() -> list[tuple[str, dict[str, Any]]]:
    """(family folder, entry) of every recorded config that was tried at the edge of what can be converted."""
    return [
        (p.parent.name, entry) for p in sorted(FAMILIES.glob("*/refused.json")) for entry in json.loads(p.read_text())
    ]


def differences(
    found: Mapping[str, tuple[str, tuple[int, ...], bytes]], expected: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What distinguishes tensors (key -> dtype, shape, bytes) from the recorded ones; empty when nothing does."""
    wrong = [f"missing {key}" for key in expected if key not in found]
    wrong += [f"unexpected {key}" for key in found if key not in expected]
    for key, want in expected.items():
        if key not in found:
            continue
        dtype, shape, data = found[key]
        if (dtype, list(shape)) != (want["dtype"], want["shape"]):
            wrong.append(f"{key}: {dtype} {shape}, recorded {want['dtype']} {want['shape']}")
        elif not want.get("random") and hashlib.sha256(data).hexdigest() != want["sha256"]:
            wrong.append(f"{key}: other bytes")
    return wrong


def config_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What distinguishes a ``config.json`` from the recorded one, apart from `EXTRA_FIELDS`."""
    return [
        f"{key}: {found.get(key, 'absent')!r}, recorded {expected.get(key, 'absent')!r}"
        for key in {**found, **expected}
        if not (key in EXTRA_FIELDS and key not in expected)
        and (key in found, found.get(key)) != (key in expected, expected.get(key))
    ]
