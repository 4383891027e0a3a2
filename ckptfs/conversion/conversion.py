"""The plan of a conversion: a checkpoint as another format has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfs.formats.source import Source
from ckptfs.tensors.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors and config of a checkpoint in another format. Its tensors are lazy: nothing is read before they are."""

    model: str
    src: str
    tgt: str
    """``hf`` or ``cs-X.Y``, as *src*."""
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """``config.json`` for hf (by component, where there are several); ``{"model": {…}}`` for a Cerebras release."""
    dropped: tuple[str, ...] = ()
    """Source keys that have no place in the target."""
    generated: tuple[str, ...] = ()
    """Target keys that no source key corresponds to."""
    warnings: tuple[str, ...] = ()
    """What a user should know about the result, one line each."""
    state: Source | None = None
    """The whole checkpoint, of which *tensors* are the model's; None where the model is all there is."""
    components: tuple[str, ...] = ()
    """The folders of a Hugging Face side that is several models; their keys are ``folder/key``."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON files that belong to the result beside configs, by path."""
    paths: tuple[str, ...] = ()
    """Fields of *config* (``folder/field``) that hold the path of a component: its name, until that is known."""
