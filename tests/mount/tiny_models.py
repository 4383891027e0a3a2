"""Tiny random models of transformers 5, one or more for each family that it knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.mount.with_transformers import keep, keep_report, random_model

VOCABULARY = 37
"""Not a multiple of anything."""
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
WIDE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
GROUPS = {**WIDE, "num_key_value_heads": 2}
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


def theta(value: float, **rest: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value, **rest}}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
NEOX = {**WIDE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
BERT = {**WIDE, "tie_word_embeddings": True, "hidden_act": "relu", "layer_norm_eps": 1e-5}
LABELS = {**WIDE, "num_labels": 5, "problem_type": "single_label_classification", "hidden_act": "gelu_new"}
ESM = {**WIDE, "tie_word_embeddings": True, "mask_token_id": 3, "pad_token_id": 1, "layer_norm_eps": 1e-5}
ROTARY = {"position_embedding_type": "rotary", "token_dropout": True, "emb_layer_norm_before": False}
GEMMA2 = {**GROUPS, "tie_word_embeddings": True, "head_dim": 12, "query_pre_attn_scalar": 9, "sliding_window": 4}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 40,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "layer_norm_epsilon": 1e-5,
}
T5_1_1 = {**T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "GPT2", {**GPT, "n_inner": 40}),
    "gpt2-tied": ("gpt2", "GPT2", {**GPT, "tie_word_embeddings": True, "activation_function": "relu"}),
    "gptj": ("gptj", "GPTJ", {**GPT, "rotary_dim": 4}),
    "codegen": ("codegen", "CodeGen", {**GPT, "rotary_dim": 4, "n_inner": 40}),
    "gpt-neox": ("gpt-neox", "GPTNeoX", NEOX),
    "llama": ("llama", "Llama", {**GROUPS, **theta(500.0)}),
    "llama-heads": ("llama", "Llama", {**WIDE, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "llama-head-size": ("llama", "Llama", {**GROUPS, "head_dim": 12, **theta(500.0)}),
    "llama-biases": ("llama", "Llama", {**GROUPS, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", "Llama", {**GROUPS, **theta(500.0, **LLAMA3)}),
    "llama-linear": ("llama", "Llama", {**GROUPS, **theta(500.0, rope_type="linear", factor=2.0)}),
    "llama-yarn": (
        "llama",
        "Llama",
        {**GROUPS, **theta(500.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=8)},
    ),
    "mistral": ("mistral", "Mistral", {**GROUPS, "sliding_window": 4, **theta(500.0)}),
    "mistral-head-size": ("mistral", "Mistral", {**GROUPS, "head_dim": 6, "sliding_window": 4, **theta(500.0)}),
    "mistral-heads": ("mistral", "Mistral", {**WIDE, "num_key_value_heads": 4, "sliding_window": None}),
    "mixtral": ("mixtral", "Mixtral", {**GROUPS, "num_local_experts": 3, **theta(500.0)}),
    "mixtral-heads": ("mixtral", "Mixtral", {**WIDE, "num_key_value_heads": 4, "num_local_experts": 3}),
    "falcon-groups": ("falcon", "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-query": ("falcon", "Falcon", {**FALCON, "multi_query": True, "tie_word_embeddings": False}),
    "falcon-heads": ("falcon", "Falcon", {**FALCON, "multi_query": False, "bias": True}),
    "bloom": ("bloom", "Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "starcoder-query": ("starcoder", "GPTBigCode", {**GPT, "n_inner": 40}),
    "starcoder-heads": ("starcoder", "GPTBigCode", {**GPT, "multi_query": False}),
    "gemma2": ("gemma2", "Gemma2", {**GEMMA2, "hidden_activation": "gelu", **theta(500.0)}),
    "mpt": (
        "mpt",
        "Mpt",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16},
    ),
    "bert": ("bert", "BertForPreTraining", BERT),
    "bert-untied": ("bert", "BertForPreTraining", {**WIDE, "type_vocab_size": 2}),
    "bert-sequence": ("bert-sequence-classifier", "BertForSequenceClassification", LABELS),
    "bert-token": ("bert-token-classifier", "BertForTokenClassification", LABELS),
    "bert-qa": ("bert-qa", "BertForQuestionAnswering", WIDE),
    "roberta": ("roberta", "RobertaForMaskedLM", {**BERT, "hidden_act": "gelu", "pad_token_id": 4}),
    "roberta-untied": ("roberta", "RobertaForMaskedLM", {**WIDE, "pad_token_id": 1, "type_vocab_size": 1}),
    "esm-rotary": ("esm-2", "EsmForMaskedLM", {**ESM, **ROTARY}),
    "esm-learned": ("esm-2", "EsmForMaskedLM", {**ESM, "emb_layer_norm_before": True}),
    "t5": ("t5", "T5ForConditionalGeneration", T5),
    "t5-gated": ("t5", "T5ForConditionalGeneration", T5_1_1),
    "ul2": ("ul2", "T5ForConditionalGeneration", {**T5_1_1, "feed_forward_proj": "gated-silu", "num_layers": 3}),
    "flan-ul2": ("flan-ul2", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-silu"}),
    "transformer": ("transformer", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gelu"}),
    "gpt2-headless": ("gpt2-headless", "GPT2Model", {**GPT, "n_inner": 40}),
    "gptj-headless": ("gptj-headless", "GPTJModel", {**GPT, "rotary_dim": 4}),
    "codegen-headless": ("codegen-headless", "CodeGenModel", {**GPT, "rotary_dim": 4}),
    "gpt-neox-headless": ("gpt-neox-headless", "GPTNeoXModel", {**NEOX, "hidden_act": "relu"}),
    "llama-headless": ("llama-headless", "LlamaModel", {**GROUPS, **theta(500.0)}),
    "code-llama-headless": ("code-llama-headless", "LlamaModel", {**GROUPS, **theta(500.0, **LLAMA3)}),
    "mistral-headless": ("mistral-headless", "MistralModel", {**GROUPS, "sliding_window": 4, **theta(500.0)}),
    "mixtral-headless": ("mixtral-headless", "MixtralModel", {**GROUPS, "num_local_experts": 3}),
    "falcon-headless": ("falcon-headless", "FalconModel", {**FALCON, "multi_query": True}),
    "bloom-headless": (
        "bloom-headless",
        "BloomModel",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False},
    ),
    "starcoder-headless": ("starcoder-headless", "GPTBigCodeModel", {**GPT, "tie_word_embeddings": False}),
    "mpt-headless": (
        "mpt-headless",
        "MptModel",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16},
    ),
}
"""Name -> model family, class name (of decoders without its ending), config fields that are not the defaults."""

UNTIED = ("t5-gated", "ul2")
"""Models that transformers 5 ties when it makes them, while those that were trained have a head of their own."""


def save(name: str, path: Path) -> None:
    """Make a model of its own seed; its folder, and its logits beside it."""
    import torch
    import transformers

    def untie(model: Any) -> None:
        if name in UNTIED:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))

    _, kind, fields = MODELS[name]
    causal = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model_class = getattr(transformers, kind if "For" in kind or kind.endswith("Model") else causal)
    model = random_model(model_class, fields, [*MODELS].index(name), untie)
    model.save_pretrained(path)
    keep_logits(path, model)


def load(name: str, shown: Path, path: Path) -> None:
    """Load what is shown, as a user does."""
    import torch
    import transformers

    named = json.loads((shown / "config.json").read_text())["architectures"][0]
    headless = MODELS[name][1].endswith("Model")  # what the converter writes may name a head there
    if headless or named.endswith(("ForCausalLM", "LMHeadModel")):
        loader = transformers.AutoModel if headless else transformers.AutoModelForCausalLM
    else:
        loader = getattr(transformers, named)
    model, report = loader.from_pretrained(shown, dtype=torch.float32, output_loading_info=True)
    keep_report(path, report)
    keep_logits(path, model.eval())


def keep_logits(path: Path, model: Any) -> None:
    """For twelve tokens: more than the sliding windows and the lengths that scaled positions start from.

    Of models without a head, the last states.
    """
    import torch

    tokens = torch.arange(2, 14)[None]
    more = {"decoder_input_ids": tokens.flip(1)} if model.config.is_encoder_decoder else {}

    def pick(found: Any) -> list[Any]:
        return [x for name, x in found.items() if name.endswith("logits")] or [found.last_hidden_state]

    keep(path, model, tokens, pick=pick, **more)
