"""Config fields that many model classes share, and that mean the same in each: which may only be off, which do not
change the model's results. A family's own tables come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.conversion.config import one_of
from ckptfs.conversion.rules import Side

_GENERATION = "a setting of text generation"
_TOKEN = "a token of the tokenizer"
_OUTPUT = "which outputs the class returns"
_LABELS = "names of labels"
_RECORD = "a record of how the file was made"
_TASK = "a setting of other tasks' heads"
_TRAINING = "a setting of training"
_SPEED = "how the result is computed, not what it is"

HF_IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("architectures", "auto_map", "_name_or_path", "transformers_version", "model_name"), _RECORD),
    **dict.fromkeys(("finetuning_task", "_commit_hash", "custom_pipelines"), _RECORD),
    **dict.fromkeys(("dtype", "torch_dtype"), "the tensors have their own dtype"),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "return_dict"), _OUTPUT),
    **dict.fromkeys(("return_dict_in_generate", "keys_to_ignore_at_inference"), _OUTPUT),
    **dict.fromkeys(("id2label", "label2id"), _LABELS),
    **dict.fromkeys(("problem_type", "num_labels", "classifier_dropout"), _TASK),
    **dict.fromkeys(("use_cache", "torchscript", "chunk_size_feed_forward", "pretraining_tp"), _SPEED),
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"), _SPEED),
    **dict.fromkeys(("gradient_checkpointing", "tf_legacy_loss", "init_device", "initializer_factor"), _TRAINING),
    **dict.fromkeys(
        (
            *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
            *("tokenizer_class", "tokenizer_name", "prefix", "task_specific_params"),
        ),
        _TOKEN,
    ),
    **dict.fromkeys(
        (
            *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
            *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
            *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
            *("num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
            *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "n_special"),
        ),
        _GENERATION,
    ),
    "is_decoder": "the class decides it",
}
"""Fields of any ``config.json`` that do not change the model's results, with the reason."""

HF_REQUIRED: Mapping[str, Any] = {
    "quantization_config": None,
    "pruned_heads": one_of({}, None),
    "is_encoder_decoder": one_of(False, None),
    "add_cross_attention": one_of(False, None),
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": one_of(False, None),
}
"""Fields of any ``config.json`` that change the model unless they have these values."""

HF_READ = ("use_bfloat16",)
"""Fields that the conversion reads for every family: half precision."""

CS_IGNORED: Mapping[str, str] = {
    "name": "the model's name",
    "model_name": "the model's name",
    "lora_params": "adapters are folded into the weights",
    **dict.fromkeys(("mixed_precision", "fp16_type", "dtype", "boundary_casting", "use_bfloat16"), _TRAINING),
    **dict.fromkeys(
        ("loss_scaling", "loss_weight", "label_smoothing", "z_loss_eps", "compute_eval_metrics"), _TRAINING
    ),
    **dict.fromkeys(
        (
            *("initializer", "embedding_initializer", "output_layer_initializer", "ffn_initializer"),
            *("ffn_output_layer_initializer", "weight_initialization_seed", "initializer_range"),
            *("lr_adjustment_groups", "mup_verification", "dropout_seed", "freeze"),
        ),
        _TRAINING,
    ),
    **dict.fromkeys(("attention_kernel", "fold_rope_consts", "alibi_implementation", "to_float16"), _SPEED),
    **dict.fromkeys(("attention_softmax_fp32", "softmax_dtype_fp32", "use_cs_kernel"), _SPEED),
}
"""Fields of any Cerebras ``model`` section that do not change the model's results, with the reason."""


def ignored(side: Side) -> Mapping[str, str]:
    """The fields of that side that no family needs to mention, with the reason."""
    return HF_IGNORED if side == "hf" else CS_IGNORED


def required(side: Side) -> Mapping[str, Any]:
    """The fields of that side that may only have these values, unless a family says otherwise."""
    return HF_REQUIRED if side == "hf" else {}
