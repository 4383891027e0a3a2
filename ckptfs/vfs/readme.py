"""The text of `README.txt` at the top of a mount."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

ABOUT = {
    "README.txt": "this page",
    "checkpoint.json": "facts about the checkpoint: release, step, family, sizes",
    "tensors": "the state dict as folders; numpy.load reads a .npy, a .json holds a plain value",
    "raw": "the same tensors as bare little-endian bytes; attributes user.dtype, user.shape, user.key",
    "hf": "a Hugging Face model: AutoModel.from_pretrained takes this folder",
    "hf-bin": "the same model as pytorch_model.bin",
    "cs": "a Cerebras checkpoint with its model config",
    "torch": "files for torch.load: checkpoint.pt is the whole state dict, model.pt the model only",
}
"""One line on each top-level entry that a mount may have."""


def readme(about: Mapping[str, Any], entries: Iterable[str], *, no_hf_reason: str | None = None) -> str:
    """What is mounted and what each of *entries* is for, from the facts *about* it."""
    parts = [_headline(about), "\n".join(f"  {name:16} {ABOUT.get(name, '')}".rstrip() for name in entries)]
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
