"""The ``model`` section of a Cerebras config: in the trainer layout (2.3 and later), or in the flat one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptfs.errors import ConfigError


def model_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``model`` section of a Cerebras config, of the trainer layout or the older flat one."""
    where: Any = config
    path = ("trainer", "init", "model") if "trainer" in config else ("model",)
    for name in path:
        if isinstance(where, Sequence) and not isinstance(where, str):
            raise ConfigError("the config has a list of trainers; give the config of one of them")
        if not isinstance(where, Mapping) or name not in where:
            raise ConfigError(f"the config has no {'.'.join(path)} section; is it the config of this checkpoint?")
        where = where[name]
    if not isinstance(where, Mapping):
        raise ConfigError(f"{'.'.join(path)} in the config is not a mapping")
    return where


def with_model_section(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """The whole *config* with another ``model`` section."""
    if "trainer" not in config:
        return {**config, "model": section}
    trainer = config["trainer"]
    return {**config, "trainer": {**trainer, "init": {**trainer["init"], "model": section}}}
