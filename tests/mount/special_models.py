"""Tiny random models whose formats are special: Llama 3.2 Vision, and a Llama that is trained with DPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.mount.with_transformers import keep, keep_report, random_model

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


def save(family: str, path: Path) -> None:
    """Make a model of its own seed; norms and gates are random as well."""
    import transformers

    name, _, fields = MODELS[family]
    model = random_model(getattr(transformers, name), fields, [*MODELS].index(family))
    model.save_pretrained(path)
    keep_logits(path, model)


def load(family: str, shown: Path, path: Path) -> None:
    """Load what is shown, as a user does who does not know which model it is."""
    import torch
    import transformers

    loader = getattr(transformers, MODELS[family][1])
    model, report = loader.from_pretrained(shown, dtype=torch.float32, output_loading_info=True)
    keep_report(path, report)
    keep_logits(path, model.eval())


def keep_logits(path: Path, model: Any) -> None:
    """The logits of one input: text, and an image of two tiles for a model that takes one."""
    import torch

    ids = torch.arange(2, 14)[None]
    image = {
        "pixel_values": torch.linspace(-2, 2, 2 * 2 * 12 * 12).sin().reshape(1, 1, 2, 2, 12, 12),
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, ids.shape[1], 1, 2, dtype=torch.long),
    }
    keep(
        path, model, ids, pick=lambda found: [found.logits], **(image if hasattr(model.config, "vision_config") else {})
    )
