"""Row orders, as pure integer maths: ``new[i] = old[order[i]]``.

All from MAPPINGS facts about the layouts of attention projections: a projection's rows are grouped by head, and
releases and model families differ in how rows are ordered inside a head and in which order heads are packed.
"""

from __future__ import annotations

import numpy as np

from ckptfs.tensors.expr import Order


def rope_pairs(n_heads: int, head_dim: int, rotary_dim: int) -> Order:
    """Half-split rotary rows (Hugging Face) to interleaved pairs (Cerebras), in the first *rotary_dim* rows of a head.

    Pair j of a head is (row j, row j + rotary_dim / 2) of the half-split order; the other rows stay.
    """
    head = np.arange(head_dim)
    head[:rotary_dim] = np.arange(rotary_dim).reshape(2, rotary_dim // 2).T.reshape(-1)
    return (np.arange(n_heads)[:, None] * head_dim + head).reshape(-1)


def inverse(order: Order) -> Order:
    """The order that undoes *order*."""
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return back


def heads_to_parts(n_groups: int, parts: tuple[int, ...], head_dim: int) -> Order:
    """Rows packed group by group to rows packed part by part.

    Each group holds ``sum(parts)`` heads of *head_dim* rows: first ``parts[0]`` heads of part 0 (say q), then
    ``parts[1]`` of part 1 (k) … The result has all heads of part 0, then all of part 1, and so on.
    """
    packed = np.arange(n_groups * sum(parts) * head_dim).reshape(n_groups, sum(parts), head_dim)
    cuts = np.cumsum(parts)[:-1]
    return np.concatenate([part.reshape(-1) for part in np.split(packed, cuts, axis=1)])
