"""Tiny random vision models, and models of several components, made by transformers 5.

``python -m tests.mount.component_models save FOLDER`` saves each as FOLDER/<path>/, and what it makes of an example as
FOLDER/<path>.npy. ``… load FOLDER OUTPUT`` does the latter for every model in a FOLDER/<name>/hf, and writes what the
loader complained of.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def save(folder: Path) -> None:
    """Make all models, each from its own seed; norms and biases are random as well."""
    import torch
    import transformers

    for seed, (path, (name, fields)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**fields)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder / path)
        if path.endswith("text_model"):
            config = folder / path / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), **MULTIMODAL}))
        keep(model, folder / f"{path}.npy")


def load(folder: Path, output: Path) -> None:
    """Load what is shown in *folder*, as a user does."""
    import torch
    import transformers

    for path, (name, _) in MODELS.items():
        family, _, component = path.partition("/")
        kind, where = getattr(transformers, name), folder / family / "hf" / component
        config = kind.config_class.from_pretrained(where)
        model, report = kind.from_pretrained(where, config=config, dtype=torch.float32, output_loading_info=True)
        (output / family).mkdir(exist_ok=True)
        (output / f"{path}.json").write_text(json.dumps({k: sorted(map(str, v)) for k, v in report.items() if v}))
        keep(model.eval(), output / f"{path}.npy")


def keep(model: Any, path: Path) -> None:
    """What the model makes of one example: the last states, and what its head makes of them."""
    import numpy as np
    import torch

    with torch.no_grad():
        for parameter in model.parameters():  # to memory aligned alike: sums of a single row depend on it
            parameter.data = parameter.data.clone()
        if hasattr(model.config, "image_size"):
            size = (1, model.config.num_channels, model.config.image_size, model.config.image_size)
            found = model(torch.linspace(-2, 2, 1000).sin()[: torch.Size(size).numel()].reshape(size))
        else:
            found = model(torch.arange(2, 14)[None])
    dropped = ("pooler_output",) if path.match("dragon/*") or path.match("vit-headless*") else ()
    kept = [x.numpy().reshape(-1) for key, x in found.items() if key not in dropped and isinstance(x, torch.Tensor)]
    np.save(path, np.concatenate(kept))


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](*map(Path, sys.argv[2:]))
