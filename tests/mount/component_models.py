"""Tiny random vision models, and models of several components, made by transformers 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.mount.with_transformers import keep, keep_report, random_model

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
IMAGES = {**SIZES, "hidden_size": 24, "image_size": 12, "patch_size": 4, "layer_norm_eps": 1e-3}
VIT = {**IMAGES, "encoder_stride": 4, "hidden_act": "gelu_pytorch_tanh", "num_channels": 2}
BERT = {**SIZES, "hidden_size": 32, "vocab_size": 37, "max_position_embeddings": 32, "layer_norm_eps": 1e-3}
LLAMA = {**SIZES, "hidden_size": 32, "vocab_size": 37, "num_key_value_heads": 2, "tie_word_embeddings": False}
MULTIMODAL = {"mm_projector_type": "mlp2x_gelu", "mm_hidden_size": 24, "mm_vision_select_layer": -2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", {**VIT, "num_labels": 2}),
    "vit-headless": ("ViTModel", VIT),
    "clip-vit": ("CLIPVisionModelWithProjection", {**IMAGES, "projection_dim": 10}),
    "dpr/q_encoder": ("DPRQuestionEncoder", BERT),
    "dpr/ctx_encoder": ("DPRContextEncoder", {**BERT, "hidden_size": 16}),
    "dragon/q_encoder": ("BertModel", BERT),
    "dragon/ctx_encoder": ("BertModel", {**BERT, "hidden_act": "relu"}),
    "llava/image_model": ("CLIPVisionModel", IMAGES),
    "llava/text_model": (
        "LlamaForCausalLM",
        {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "mmsimple-llava/image_model": ("CLIPVisionModel", {**IMAGES, "hidden_act": "gelu"}),
    "mmsimple-llava/text_model": ("LlamaForCausalLM", LLAMA),
}
"""Family, or family and component, to the class and the fields of the config that are not the defaults."""


def save(name: str, path: Path) -> None:
    """Make a model of its own seed; norms and biases are random as well."""
    import transformers

    kind, fields = MODELS[name]
    model = random_model(getattr(transformers, kind), fields, [*MODELS].index(name))
    model.save_pretrained(path)
    if name.endswith("text_model"):
        config = path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **MULTIMODAL}))
    keep_outputs(name, path, model)


def load(name: str, shown: Path, path: Path) -> None:
    """Load what is shown, as a user does."""
    import torch
    import transformers

    kind = getattr(transformers, MODELS[name][0])
    config = kind.config_class.from_pretrained(shown)
    model, report = kind.from_pretrained(shown, config=config, dtype=torch.float32, output_loading_info=True)
    keep_report(path, report)
    keep_outputs(name, path, model.eval())


def keep_outputs(name: str, path: Path, model: Any) -> None:
    """What the model makes of one example: the last states, and what its head makes of them."""
    import torch

    dropped = ("pooler_output",) if name.startswith(("dragon/", "vit-headless")) else ()

    def pick(found: Any) -> list[Any]:
        return [x for key, x in found.items() if key not in dropped and isinstance(x, torch.Tensor)]

    example = torch.arange(2, 14)[None]
    if hasattr(model.config, "image_size"):
        size = (1, model.config.num_channels, model.config.image_size, model.config.image_size)
        example = torch.linspace(-2, 2, 1000).sin()[: torch.Size(size).numel()].reshape(size)
    keep(path, model, example, pick=pick)
