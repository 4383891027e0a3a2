"""What one step between two Cerebras releases is told about itself."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.mappings.formats import Release


@dataclass(frozen=True, slots=True)
class About:
    """One step of a model family. *frm* is older than *to* for an upgrade, newer for a downgrade."""

    family: str
    """The model name, such as ``bert-summarization``."""
    cs_name: str
    """``model.name`` in Cerebras configs from release 2.4 on."""
    frm: Release
    to: Release
    variants: tuple[str, str] = ("", "")
    """The variants of the two formats; they differ in steps between layouts of one release."""

    @property
    def up(self) -> bool:
        """Whether the step leads to a newer release."""
        return self.to > self.frm
