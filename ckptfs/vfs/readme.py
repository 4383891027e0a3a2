"""The text of `README.txt` at the top of a mount."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any


def readme(about: Mapping[str, Any], entries: Iterable[tuple[str, str]], *, no_hf_reason: str | None = None) -> str:
    """The page, from the facts *about* the checkpoint and the (name, purpose) of each of the mount's *entries*."""
    parts = [_headline(about), "\n".join(f"  {name:16} {purpose}" for name, purpose in entries)]
    if no_hf_reason:
        parts.append(_paragraph(f"There is no hf/: {no_hf_reason}"))
    parts.append(
        _paragraph(
            "Everything is read-only and made while it is read: no byte of the model was copied or converted. "
            "In names, %XX stands for a character that a file name cannot hold; the attribute user.key has "
            "the real key (getfattr -n user.key FILE, of the package attr)."
        )
    )
    shown = [*about["warnings"][:20], *(f"not shown: {r['key']}: {r['reason']}" for r in about["refused"][:20])]
    if about["refused"]:
        shown.append("in torch/, what is not shown is a text that says why")
    if shown:
        parts.append("Worth knowing:\n" + "\n".join(f"  - {' '.join(line.split())}" for line in shown))
    return "\n\n".join(parts) + "\n"


def _headline(about: Mapping[str, Any]) -> str:
    version = f" {about['format_version']}" if about["format_version"] else ""
    traits = [f"{about['format']}{version}"]
    traits += [f"release {about['release']}"] if about["release"] else []
    model = about["family"] or about["model_name"]
    traits += [f"model {model}"] if model else []
    traits += [f"step {about['step']}"] if about["step"] is not None else []
    traits.append(f"{about['n_tensors']:,} tensors, {about['n_parameters']:,} parameters, {about['nbytes']:,} bytes")
    return f"{about['source']}, mounted by ckptfs\n{'; '.join(traits)}"


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100)
