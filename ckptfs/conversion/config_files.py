"""The model config of a Cerebras checkpoint that lies beside it as a file of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from ckptfs.conversion.sections import model_section
from ckptfs.errors import ConfigError, UsageError

MAX_BYTES = 4 << 20
"""Size of a YAML file above which it is no model's config."""
_SUFFIXES = (".yaml", ".yml")
_WRITTEN = re.compile(r"_to_(cs-[\d.]+(?:-[a-z-]+)?)$")
"""The end of a name that the converter gives."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config that was found, and where."""

    path: str
    values: Mapping[str, Any]


def config_beside(checkpoint: str, read: Callable[[str], Mapping[str, Any]]) -> ConfigFile | None:
    """The model config in the folder of *checkpoint*; None where there is none.

    The surest name wins: that of the checkpoint itself, then that which the converter gives to the config of such a
    checkpoint (``X_to_cs-2.9.mdl`` has ``Y_to_cs-2.9.yaml``), then ``params*`` and ``config*``. A file counts if it
    has a ``model`` section. Raises `ConfigError` where equally sure files differ, and for one that cannot be read.
    """
    folder = os.path.dirname(os.path.abspath(checkpoint))
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIXES))
    except OSError:
        return None
    for patterns in _patterns(os.path.splitext(os.path.basename(checkpoint))[0]):
        chosen = [name for name in names if any(fnmatchcase(os.path.splitext(name)[0], p) for p in patterns)]
        found = [file for name in chosen if (file := _candidate(os.path.join(folder, name), read)) is not None]
        if any(file.values != found[0].values for file in found):
            listed = ", ".join(os.path.basename(file.path) for file in found)
            raise ConfigError(f"{checkpoint}: several configs lie beside it: {listed}; name one", option="config")
        if found:
            return found[0]
    return None


def config_format(path: str, config: Mapping[str, Any], tgt_fmt: str) -> str:
    """The format of a whole *config*, by its content and the name that the converter gives (``X_to_cs-2.9.yaml``).

    To Hugging Face, an unknown release counts as the current one, as it does for checkpoints. Raises `UsageError`
    where the release matters and is not told.
    """
    if not {"model", "trainer"} & config.keys():
        return "hf"
    written = _WRITTEN.search(os.path.splitext(os.path.basename(path))[0])
    if written:
        return written[1]
    if tgt_fmt == "hf":
        return "cs-current"
    raise UsageError(f"{path}: the config does not tell its release; name it", option="src_fmt")


def _patterns(stem: str) -> Iterator[tuple[str, ...]]:
    """Names of configs without their suffix, the surest first, for a checkpoint of that *stem*."""
    yield (escape(stem),)
    written = _WRITTEN.search(stem) or re.search("_folded$", stem)
    if written:
        yield (f"*{escape(written[0])}",)
    yield ("params", "params_*", "config", "config_*")


def _candidate(path: str, read: Callable[[str], Mapping[str, Any]]) -> ConfigFile | None:
    """The config at *path*, unless the file is something else."""
    if not os.path.isfile(path) or os.path.getsize(path) > MAX_BYTES:
        return None
    values = read(path)
    try:
        model_section(values)
    except ConfigError:
        return None
    return ConfigFile(path, values)
