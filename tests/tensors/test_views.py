"""Row orders against the reshapes that define them."""

from __future__ import annotations

import numpy as np
import pytest

from ckptfs.tensors.views import heads_to_parts, inverse, rope_pairs


@pytest.mark.parametrize(("heads", "dim", "rotary"), [(1, 4, 4), (3, 8, 8), (2, 10, 6), (5, 6, 2)])
def test_rope_pairs(heads: int, dim: int, rotary: int) -> None:
    x = np.arange(heads * dim).reshape(heads, dim)
    turned = x[:, :rotary].reshape(heads, 2, rotary // 2).swapaxes(1, 2).reshape(heads, rotary)
    want = np.concatenate([turned, x[:, rotary:]], axis=1).reshape(-1)
    order = rope_pairs(heads, dim, rotary)
    assert (x.reshape(-1)[order] == want).all()
    assert (order[inverse(order)] == np.arange(heads * dim)).all()


def test_heads_to_parts_equal() -> None:
    x = np.arange(2 * 3 * 4)
    q, k, v = (x.reshape(2, 3, 4)[:, i].reshape(-1) for i in range(3))
    assert (x[heads_to_parts(2, (1, 1, 1), 4)] == np.concatenate([q, k, v])).all()


def test_heads_to_parts_grouped() -> None:
    x = np.arange(2 * 5 * 4)  # two groups of three q heads, one k, one v
    view = x.reshape(2, 5, 4)
    want = np.concatenate([view[:, :3].reshape(-1), view[:, 3].reshape(-1), view[:, 4].reshape(-1)])
    assert (x[heads_to_parts(2, (3, 1, 1), 4)] == want).all()
