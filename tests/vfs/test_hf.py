"""The small files of `hf/`, with transformers as the judge."""

from __future__ import annotations

from pathlib import Path

from ckptfs.conversion.conversion import Conversion
from ckptfs.vfs.hf import model_files
from tests.formats.reading import content


def test_transformers_reads_both_files(tmp_path: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "eos_token_id": 5}
    for name, file in model_files(Conversion("llama", "cs-2.9", "hf", {}, {**config, "top_k": 7}), {}, {}).items():
        (tmp_path / name).write_bytes(content(file))
    assert AutoConfig.from_pretrained(tmp_path).hidden_size == 64
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert (generation.eos_token_id, generation.top_k) == (5, 7)
