"""`Family`: everything that is specific to one model name, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from ckptfs.conversion.config import ConfigTable
from ckptfs.conversion.folding.mup import DECODER, Rules
from ckptfs.conversion.format_names import CURRENT, ModelFormat, Release
from ckptfs.conversion.rules import Context, Side, Table
from ckptfs.tensors.tensor import Tensor

Mup: TypeAlias = Literal["fold", "config", "refuse", "own"]
"""muP is folded into the weights, refused, or a feature of the Hugging Face model itself (``own``).

``config``: a config alone loses its muP fields, as with the converter, but a checkpoint is refused.
"""
AddMissing: TypeAlias = Callable[[Context, Mapping[str, Tensor]], Mapping[str, Tensor]]


def no_files(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """For families that have only weights and configs."""
    return {}


def nothing_more(context: Context, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """For families whose Cerebras tensors all come from the table."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model name: its tensors, its config, the formats that it has, and how it is recognised."""

    name: str
    table: Table
    config: ConfigTable
    sizes: Callable[[str, Mapping[str, Any]], dict[str, int]]
    """The numbers that ops need, from the model's name and a filled Cerebras ``model`` section."""
    cs_name: str
    """``model.name`` in Cerebras configs from release 2.4 on."""
    hf_type: str
    """``model_type`` in ``config.json``."""
    architecture: str
    """The transformers class that loads the result."""
    mup: Mup
    """What happens to muP; see `Mup`. There is no default, so that every model states it: see `derived`."""
    since: Release = (2, 1)
    until: Release = CURRENT
    variant: str = ""
    """The variant of the Cerebras formats, such as ``dpo``; empty for the usual layout."""
    mup_since: Release = (0, 0)
    """First release whose muP checkpoints can be folded."""
    mup_rules: Rules = DECODER
    """Which keys take which multipliers when muP is folded."""
    flavours: tuple[tuple[Callable[[Mapping[str, Any]], bool], ConfigTable], ...] = ()
    """Older kinds of ``config.json``, each with a test that recognises it. They are read only; *config* is written."""
    resolve: Callable[[Mapping[str, Any], Side], Family] | None = None
    """Makes the family from a config (``config.json``, or the ``model`` section), for a name that covers several."""
    newest_config: bool = False
    """Whether Cerebras configs of all releases are written as those of the newest release."""
    writes_name: bool = True
    """Whether ``model.name`` is written to Cerebras configs."""
    cs_prefix: bool = True
    """Whether Cerebras keys may carry a leading ``model.``."""
    components: tuple[str, ...] = ()
    """The folders of a Hugging Face side that is several models; see `ckptfs.conversion.components`."""
    sections: tuple[str, ...] = ()
    """Nested parts of the ``model`` section whose fields the tables know, such as ``q_encoder``."""
    hf_sections: tuple[str, ...] = ()
    """The same for ``config.json``, such as ``text_config``."""
    files: Callable[[Mapping[str, Any]], Mapping[str, Mapping[str, Any]]] = no_files
    """JSON files beside the configs, by path, for the configs by component."""
    paths: tuple[str, ...] = ()
    """Fields of the configs (``folder/field``) that hold the path of another component."""
    add_missing: AddMissing = nothing_more
    """Generates a whole part that a Cerebras result lacks, such as a projector, from the tensors that it has."""
    older: tuple[Family, ...] = ()
    """This family in older releases that differ, oldest first; the first that covers a release counts."""
    notes: str = ""
    """What a user should know before converting, in a few words: what is lost, refused, or possible one way only."""
    alias_of: str = ""
    """The name of the family that this one is another name of."""
    cs_discriminator: Mapping[str, Any] = field(default_factory=dict)
    """Fields that distinguish its Cerebras configs from those of another model with the same *cs_name*."""
    hf_side: bool = True
    """Whether there is a Hugging Face model. Without one, a family converts between Cerebras releases only."""

    def derived(self, *, name: str, mup: Mup, **changes: Any) -> Family:
        """Another model that is like this one but for *changes*."""
        return replace(self, name=name, mup=mup, **changes)

    def covers(self, cerebras: ModelFormat) -> bool:
        """Whether this family holds for that Cerebras format."""
        release = cerebras.release
        known = release is not None and self.since <= release <= self.until and cerebras.variant == self.variant
        return known and self.hf_side

    def at(self, cerebras: ModelFormat) -> Family:
        """The layout of this family in that Cerebras format."""
        return next((family for family in self.older if family.covers(cerebras)), self)

    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of config fields, one for each component; an empty string for a family without components."""
        return tuple(f"{folder}/" for folder in self.components) or ("",)

    def of(self, config: Mapping[str, Any], side: Side) -> Family:
        """This family, or the one that `resolve` makes for *config* (a ``model`` section, for Cerebras)."""
        return self.resolve(config, side) if self.resolve else self

    def hf_config(self, values: Mapping[str, Any]) -> ConfigTable:
        """The table for this kind of ``config.json``."""
        return next((table for applies, table in self.flavours if applies(values)), self.config)

    def known(self) -> str:
        """The formats that are connected, for messages."""
        return f"hf <-> {self.span()}" if self.hf_side else "between Cerebras releases only, no Hugging Face model"

    def span(self) -> str:
        """The first and the last Cerebras format that this family holds for."""
        return f"{ModelFormat(self.since, self.variant).name} … {ModelFormat(self.until, self.variant).name}"
