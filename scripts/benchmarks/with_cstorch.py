"""A Hugging Face model made with nothing but the public cerebras_pytorch, as the public converter makes it.

Run by a Python that has cerebras_pytorch: ``with_cstorch.py SOURCE FOLDER JSON``; the JSON has ``names`` (key of the
``model`` state to Hugging Face name), ``config`` and ``head`` (rows of one head of the rotary projections).
"""

import json
import os
import sys


def main(source: str, folder: str, text: str) -> None:
    """Load lazily, rename, order rotary rows, save ``pytorch_model.bin``: what the converter does to the tensors."""
    import cerebras.pytorch as cstorch
    import torch

    given = json.loads(text)
    tensors = {}
    for key, tensor in cstorch.load(source)["model"].items():
        name = given["names"].get(key)
        if name and ("q_proj" in name or "k_proj" in name):
            cols = tensor.shape[1]
            tensor = tensor.reshape(-1, given["head"] // 2, 2, cols).transpose(1, 2).reshape(-1, cols)
        if name:
            tensors[name] = tensor
    os.makedirs(folder, exist_ok=True)
    torch.save(tensors, os.path.join(folder, "pytorch_model.bin"))
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(given["config"], file)


if __name__ == "__main__":
    main(*sys.argv[1:])
