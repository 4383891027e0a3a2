"""The ``sparsity`` section of release 2.1, as 2.2 wants it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ckptfs.conversion.releases.draft import Draft, Section


def rewrite_sparsity(draft: Draft) -> None:
    """``sparsity`` with the names of 2.2. A number stays one; blocks for groups of parameters become a list."""
    found = draft.whole.get("sparsity")
    if isinstance(found, Mapping):
        draft.whole["sparsity"] = _blocks(draft, found)
    elif isinstance(found, list):
        draft.whole["sparsity"] = [_blocks(draft, b) if isinstance(b, Mapping) else b for b in found]


def _blocks(draft: Draft, block: Mapping[str, Any]) -> Any:
    base = dict(block)
    patterns = base.pop("param_name_patterns", None)
    if isinstance(patterns, Mapping):
        return [_own_block(draft, base, pattern, fields) for pattern, fields in patterns.items()]
    renamed = _renamed(draft, base)
    if patterns is not None:
        renamed["param_filter"] = _filter(patterns)
    return renamed["sparsity"] if list(renamed) == ["sparsity"] else renamed


def _own_block(draft: Draft, base: Section, pattern: str, fields: object) -> Section:
    """The block of one group: what all groups share, and the group's own *fields* over it."""
    own = {} if fields is None else fields
    if not isinstance(own, Mapping):
        draft.refuse(f"sparsity.param_name_patterns.{pattern}", fields, "only a mapping can be converted")
    block = {**_renamed(draft, base), **_renamed(draft, dict(own)), "param_filter": _filter(pattern)}
    return deepcopy(block)  # nothing that YAML writes as a reference


def _renamed(draft: Draft, block: Section) -> Section:
    result = dict(block)
    if "type" in result:
        result["algorithm"] = result.pop("type")
    if result.get("algorithm") == "static":
        del result["algorithm"]
    if "schedule" in result:
        result["update"] = result.pop("schedule")
    if "update" in result:
        result |= _update(result.pop("update"))
    value = result.get("sparsity")
    if value is not None and not isinstance(value, int | float):
        result["schedule"] = result.pop("sparsity")
    if "sparsity_schedule" in result:
        result |= _steps(draft, result.pop("sparsity_schedule"))
    return result


def _update(when: object) -> Section:
    """When masks are worked out anew: every step is what happens anyway, every n steps has a name."""
    if isinstance(when, int) and not isinstance(when, bool):
        return {} if when == 1 else {"update": {"freq": when}}
    return {"update": when}


def _steps(draft: Draft, schedule: Any) -> Section:
    """``[[step, value], …]`` as values and the steps at which they begin."""
    pairs = schedule if isinstance(schedule, list) else [schedule]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        draft.refuse("sparsity.sparsity_schedule", schedule, "only a list of [step, sparsity] can be converted")
    return {"schedule": [value for _, value in pairs], "update": {"steps": [step for step, _ in pairs]}}


def _filter(patterns: Any) -> Any:
    """Regular expressions as the globs that 2.2 uses."""
    if isinstance(patterns, str):
        return patterns.replace(".*", "*")
    return [_filter(pattern) for pattern in patterns] if isinstance(patterns, list) else patterns
