"""Tiny random models whose formats are special: Llama 3.2 Vision, and a Llama that is trained with DPO.

``python -m tests.mount.special_models save FOLDER`` saves each as FOLDER/<family>/, and its logits as
FOLDER/<family>.npy. ``… load FOLDER OUTPUT`` does the latter for FOLDER/<family>/hf, and writes what the loader
complained of.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEXT = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    "tie_word_embeddings": False,
    "pad_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 4,
    "intermediate_size": 36,
    "vision_output_dim": 40,
    "num_channels": 2,
    "image_size": 12,
    "patch_size": 4,
    "max_num_tiles": 2,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    "norm_eps": 1e-4,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mllama": (
        "MllamaForConditionalGeneration",
        "AutoModelForImageTextToText",
        {"text_config": {**TEXT, "cross_attention_layers": [1]}, "vision_config": IMAGE},
    ),
    "dpo": ("LlamaForCausalLM", "AutoModelForCausalLM", TEXT),
}
"""Family -> the class, the class that loads what is shown, fields of the config that are not the defaults."""


def save(folder: Path) -> None:
    """Make all models, each from its own seed; norms and gates are random as well."""
    import torch
    import transformers

    for seed, (family, (name, _, fields)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**fields)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder / family)
        keep_logits(model, folder / f"{family}.npy")


def load(folder: Path, output: Path) -> None:
    """Load what is shown in *folder*, as a user does who does not know which model it is."""
    import torch
    import transformers

    for family, (_, loader, _) in MODELS.items():
        model, report = getattr(transformers, loader).from_pretrained(
            folder / family / "hf", dtype=torch.float32, output_loading_info=True
        )
        (output / f"{family}.json").write_text(json.dumps({k: sorted(map(str, v)) for k, v in report.items() if v}))
        keep_logits(model.eval(), output / f"{family}.npy")


def keep_logits(model: Any, path: Path) -> None:
    """The logits of one input: text, and an image of two tiles for a model that takes one."""
    import numpy as np
    import torch

    ids = torch.arange(2, 14)[None]
    image = {
        "pixel_values": torch.linspace(-2, 2, 2 * 2 * 12 * 12).sin().reshape(1, 1, 2, 2, 12, 12),
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, ids.shape[1], 1, 2, dtype=torch.long),
    }
    with torch.no_grad():
        for parameter in model.parameters():  # to memory aligned alike: sums of a single row depend on it
            parameter.data = parameter.data.clone()
        np.save(path, model(ids, **(image if hasattr(model.config, "vision_config") else {})).logits.numpy())


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](*map(Path, sys.argv[2:]))
