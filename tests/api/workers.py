"""Lazy tensors in worker processes: ``python -m tests.api.workers METHOD FOLDER``.

A process of its own, for a pool that hangs must not hang the tests. Prints OK.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptfs
from ckptfs.errors import MissingKey, SourceClosed

N_WORKERS = 2


class Rows(torch.utils.data.Dataset[Any]):
    """The rows of two tensors of a checkpoint and one of its view, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = ckptfs.open(folder / "cs.mdl")
        view = ckptfs.view(self.checkpoint, model="llama", config=folder / "cs.yaml")
        self.tensors = [
            self.checkpoint["model.lm_head.weight"],
            self.checkpoint["model"]["embedding_layer.word_embeddings.weight"],
            view["model.layers.0.self_attn.q_proj.weight"],  # rows in another order
        ]

    def __len__(self) -> int:
        return sum(map(len, self.tensors))

    def __getitem__(self, i: int) -> torch.Tensor:
        for tensor in self.tensors:
            if i < len(tensor):
                return torch.from_numpy(tensor[i].astype(np.float32))
            i -= len(tensor)
        raise IndexError(i)


def ask(checkpoint: ckptfs.Checkpoint, key: str) -> float:
    return float(checkpoint[key].numpy().sum())


def main(method: str, folder: Path) -> None:
    rows = Rows(folder)
    want = [row for tensor in rows.tensors for row in tensor.numpy().astype(np.float32)]
    loader = torch.utils.data.DataLoader(
        rows, batch_size=None, num_workers=N_WORKERS, multiprocessing_context=method, shuffle=False
    )
    for _ in range(2):  # the second round has new workers
        got = [row.numpy() for row in loader]
        assert len(got) == len(want)
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    others = [ckptfs.open(folder / "cs.mdl") for _ in range(5)]  # take numbers of descriptors
    with multiprocessing.get_context(method).Pool(N_WORKERS) as pool:
        keys = ["model.lm_head.weight", "model.nothing"]
        assert pool.apply(ask, (rows.checkpoint, keys[0])) == ask(rows.checkpoint, keys[0])
        try:
            pool.apply(ask, (rows.checkpoint, keys[1]))
        except MissingKey as error:
            assert error.key == keys[1]
        else:
            raise AssertionError("no error came back")
    rows.checkpoint.close()
    try:
        rows[0]
    except SourceClosed:
        print("OK")
    del others


if __name__ == "__main__":
    print(json.dumps(sys.argv[1:]))
    main(sys.argv[1], Path(sys.argv[2]))
