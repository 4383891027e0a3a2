"""What is wrong in a checkpoint of releases 1.7 to 1.9, and what is right.

A weight that two parts of a model share may be stored once: the other name becomes a second name of the dataset. The
``last_epoch`` of schedulers is too large where training was resumed: it follows from ``global_step``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from ckptfs.errors import MissingKeys

ALIASES = (
    ("embedding_layer.word_embeddings.weight", "lm_head.weight"),
    ("ln_f.weight", "transformer_decoder.norm.weight"),
    ("ln_f.bias", "transformer_decoder.norm.bias"),
)
"""Ends of keys that name one weight."""
STEP = "global_step"
_NUMBERED = re.compile(r"(\d{1,18})\.last_epoch", re.ASCII)
_LAST_NUMBER = re.compile(r"(?:.*\.)?(\d{1,18})", re.ASCII | re.DOTALL)


def aliases(path: str, keys: Iterable[str], stored: Collection[str]) -> dict[str, str]:
    """Each of *keys* that is not *stored* to the key whose weight it shares.

    Raises `MissingKeys`, naming all of them, for those that share with none.
    """
    found = {key: _alias(key) for key in keys if key not in stored}
    lost = [f"{key} (nor {other})" if other else key for key, other in found.items() if other not in stored]
    if lost:
        raise MissingKeys(path, lost, "they have no data, and no stored weight is known to be the same")
    return {key: other for key, other in found.items() if other}


def _alias(key: str) -> str | None:
    """The other name of the weight; None where it has only one."""
    for pair in ALIASES:
        for this, other in (pair, pair[::-1]):
            if key.endswith(this):
                return key.removesuffix(this) + other
    return None


def last_epochs(path: str, names: Collection[str], number: Callable[[str], int]) -> dict[str, int]:
    """Each of *names* that is a scheduler's last epoch to its value; *number* reads the value of a name.

    The scheduler with the number i of a sequence counts from milestone i - 1 on; the others from the start. Raises
    `MissingKeys` for a scheduler beyond the milestones or a milestone without a number.
    """
    step = number(STEP)
    milestones = _milestones(path, names, number)
    found = {}
    for name in names:
        if "lr_scheduler" in name and "last_epoch" in name:
            place = _NUMBERED.search(name)
            i = int(place[1]) if place and milestones else 0
            if i > len(milestones):
                raise MissingKeys(path, [f"milestone {i - 1}"], f"{name} counts from it")
            found[name] = max(step - milestones[i - 1], 0) if i else step
    return found


def _milestones(path: str, names: Iterable[str], number: Callable[[str], int]) -> list[int]:
    """Steps at which a sequence of schedulers changes, in their order."""
    found = []
    for name in names:
        if "lr_scheduler" in name and "milestones" in name:
            place = _LAST_NUMBER.fullmatch(name)
            if place is None:
                raise MissingKeys(path, [f"{name}.0"], f"{name} is not a list of milestones")
            found.append((int(place[1]), name))
    return [number(name) for _, name in sorted(found)]
