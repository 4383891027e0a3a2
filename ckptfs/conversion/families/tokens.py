"""Tokens that transformers assumes for each model type."""

from __future__ import annotations

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
TOKENS_OF: dict[str, tuple[int | None, ...]] = {
    "bloom": (1, 2),
    "codegen": (50256, 50256),
    "falcon": (11, 11),
    "gemma2": (2, 1, 0),
    "gpt2": (50256, 50256),
    "gpt_bigcode": (50256, 50256),
    "gpt_neox": (0, 2),
    "gptj": (50256, 50256),
    "llama": (1, 2),
    "mistral": (1, 2),
    "mixtral": (1, 2),
    "t5": (None, 1, 0),
}
"""Model type to the first, last and padding token that transformers assumes where a config does not name them.

Needed because transformers 4 no longer derives them once there is a ``generation_config.json``."""
