"""The small files of `hf/`, with transformers as the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptfs.vfs.hf import TOKENS_OF, config_files, generation_config
from tests.formats.reading import content


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"architectures": ["BertForMaskedLM"], "pad_token_id": 0}, None),
        ({"architectures": None, "bos_token_id": 0, "top_k": 50}, {"bos_token_id": 0}),
        ({"model_type": "gpt_neox"}, {"bos_token_id": 0, "eos_token_id": 2}),
        ({"model_type": "gpt_neox", "bos_token_id": None, "eos_token_id": 5}, {"eos_token_id": 5}),
        (
            {"architectures": ["T5ForConditionalGeneration"], "top_k": 5, "max_length": 20, "eos_token_id": [1, 2]},
            {"top_k": 5, "eos_token_id": [1, 2]},
        ),
    ],
)
def test_generation_config(config: dict[str, Any], want: dict[str, Any] | None) -> None:
    assert generation_config(config) == (None if want is None else {"_from_model_config": True, **want})


@pytest.mark.parametrize("model_type", TOKENS_OF)
def test_assumed_tokens_are_those_of_transformers(model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert (*TOKENS_OF[model_type], None)[:3] == tuple(getattr(config, name, None) for name in names)


def test_transformers_reads_both_files(tmp_path: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "top_k": 7}
    for name, file in config_files(config).items():
        (tmp_path / name).write_bytes(content(file))
    assert AutoConfig.from_pretrained(tmp_path).hidden_size == 64
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert (generation.eos_token_id, generation.top_k) == (2, 7)
