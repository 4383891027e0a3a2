"""Llama: Hugging Face LlamaForCausalLM / LlamaModel <-> Cerebras GPT2LMHeadModel as Llama, releases 2.1 and later."""

from __future__ import annotations

from ckptfs.conversion.config import SideTable
from ckptfs.conversion.families.llama_like import HF_DEFAULTS, LAYER, llama_like, sizes, tables
from ckptfs.conversion.family import Family

TENSORS, HEADLESS = tables(LAYER)
CONFIG = llama_like(SideTable(constants={"model_type": "llama"}), defaults=HF_DEFAULTS, biases=True)

LLAMA = Family(
    name="llama",
    table=TENSORS,
    config=CONFIG,
    sizes=sizes,
    cs_name="llama",
    hf_type="llama",
    architecture="LlamaForCausalLM",
    mup="fold",
    notes="all rows of a head are rotary",
)
LLAMA_HEADLESS = LLAMA.derived(name="llama-headless", mup="config", table=HEADLESS, architecture="LlamaModel")
FAMILIES = (LLAMA, LLAMA_HEADLESS)
