"""Configs between Cerebras releases: every recorded step, and the laws of all steps."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.conversion.format_names import RELEASES, Release, parse_format
from ckptfs.conversion.releases.config import upgraded, upgraded_config
from ckptfs.conversion.releases.draft import About
from ckptfs.errors import CkptfsError, ConfigError
from tests.recorded.cases import Run, runs

NOT_THE_CONFIG = ("not found in the ModelZoo registry", "in checkpoint", "DataLoader state")
"""Refusals that are not about the config."""
STEPS: list[tuple[Release, Release]] = [
    *((a, b) for old, new in pairwise(RELEASES) for a, b in ((old, new), (new, old))),
    *(((1, 6), (1, 8)), ((1, 7), (2, 0)), ((2, 0), (1, 6)), ((1, 8), (2, 0)), ((2, 2), (2, 9)), ((2, 9), (2, 2))),
]
FAMILIES = ["bert", "t5", "gpt2", "gptj", "llama", "dpr", "esm-2"]


def recorded() -> list[Run]:
    """Recorded steps between releases of the usual layout."""
    found = [r for kind in ("releases", "config") for r in runs(kind) if "hf" not in (r.src, r.tgt)]
    others = ("auto", "current", "dpo", "backbone")
    return [r for r in found if not r.src.endswith(others) and not r.tgt.endswith(others)]


def about(run: Run) -> About:
    src, tgt = parse_format(run.src).release, parse_format(run.tgt).release
    assert src and tgt
    return About(run.model, run.model, src, tgt)


def text(config: object) -> str:
    """A config as text that tells 1 from 1.0 and from true."""
    return json.dumps(config, sort_keys=True, indent=1)


@pytest.mark.parametrize("run", [r for r in recorded() if not r.refused], ids=str)
def test_recorded_steps(run: Run) -> None:
    before = copy.deepcopy(run.config)
    config = run.config
    assert text(upgraded_config(config, about(run))) == text(run.expected["config"])
    assert config == before


@pytest.mark.parametrize("run", [r for r in recorded() if r.refused], ids=str)
def test_recorded_refusals(run: Run) -> None:
    if any(words in run.step["error"].get("message", "") for words in NOT_THE_CONFIG):
        upgraded_config(run.config, about(run))
        return
    with pytest.raises(ConfigError) as refusal:
        upgraded_config(run.config, about(run))
    assert "\n" not in str(refusal.value)


def test_recorded_warning_of_servers() -> None:
    run = next(r for r in recorded() if any("num_act_servers" in w for w in r.step.get("warnings", ())))
    assert any("num_act_servers" in line for line in upgraded(run.config, about(run)).warnings)


# ---------------------------------------------------------------------------------------------------------------- laws

WORDS = st.sampled_from(
    [
        *("use_rms_norm", "use_biasless_norm", "use_t5_layer_norm", "norm_type", "use_bfloat16", "fp16_type"),
        *("encoder_nonlinearity", "pooler_nonlinearity", "mlm_nonlinearity", "use_pre_encoder_decoder_layer_norm"),
        *("scale_qk_dot_by_d", "embeddings_scale", "output_logits_scale", "hidden_size", "filter_size", "initializer"),
        *("output_layer_initializer", "num_hidden_layers", "std", "name", "q_encoder", "softmax_temperature"),
        *("scale_similarity", "optimizer_type", "learning_rate", "scheduler", "adjust_learning_rate", "decoder_kernel"),
        *("beta1", "beta2", "steps", "main_scheduler", "type", "schedule", "sparsity_schedule", "param_name_patterns"),
        *("use_cs_grad_accum", "micro_batch_size", "max_steps", "mgmt_address", "wandb", "summary_dir", "init"),
        *("precision_opt_level", "keep_checkpoint_max", "add_summaries", "save_iter_state_path", "checkpoint_path"),
    ]
)
SECTIONS = st.sampled_from(
    ["model", "optimizer", "runconfig", "train_input", "eval_input", "sparsity", "trainer", "cerebras", "wandb"]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(width=16),
    st.sampled_from(["gelu", "layernorm", "AdamW", ""]),
)
ANYTHING = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=12
)


@given(st.dictionaries(SECTIONS, ANYTHING), st.sampled_from(FAMILIES), st.sampled_from(STEPS))
def test_any_config_is_converted_or_refused(config: dict[str, Any], family: str, step: tuple[Release, Release]) -> None:
    before = repr(config)
    try:
        upgraded_config(config, About(family, family, *step))
    except CkptfsError as e:
        assert isinstance(e, ConfigError) and "\n" not in str(e)
    assert repr(config) == before


ROUND_TRIPS: list[tuple[str, Release, Release, dict[str, Any]]] = [
    ("bert", (1, 7), (2, 0), {"encoder_nonlinearity": "gelu"}),
    ("t5", (1, 6), (1, 8), {"use_pre_encoder_decoder_layer_norm": True}),
    ("transformer", (1, 9), (2, 0), {"use_t5_layer_norm": False}),
    ("bloom", (1, 9), (2, 0), {"use_rms_norm": True}),
    ("code-llama", (1, 9), (2, 0), {"use_rms_norm": False}),
    ("codegen", (1, 8), (2, 0), {"use_biasless_norm": True}),
    ("gpt-neox", (1, 9), (2, 0), {"use_biasless_norm": False}),
    ("falcon", (2, 0), (2, 1), {"use_bfloat16": True}),
    ("roberta", (2, 0), (2, 1), {"use_bfloat16": False}),
    ("dpr", (2, 2), (2, 4), {"scale_similarity": True, "q_encoder": {"hidden_size": 768}}),
    ("dpr", (2, 2), (2, 4), {"scale_similarity": False, "q_encoder": {"hidden_size": 768}}),
]


@pytest.mark.parametrize(("family", "old", "new", "model"), ROUND_TRIPS)
def test_there_and_back(family: str, old: Release, new: Release, model: dict[str, Any]) -> None:
    up = upgraded_config({"model": model}, About(family, family, old, new))
    down = upgraded_config(up, About(family, family, new, old))["model"]
    assert {name: down[name] for name in model} == model


def test_sections_that_yaml_shares_part_company() -> None:
    config = yaml.safe_load(
        "model: {hidden_size: 8}\ntrain_input: &x {batch_size: 1, micro_batch_size: 2}\neval_input: *x"
    )
    result = upgraded_config(config, About("llama", "llama", (2, 2), (2, 3)))
    assert result["trainer"]["init"]["callbacks"] == [
        {"ScopedTrainFlags": {"csx.performance.micro_batch_size": 2}},
        {"ScopedValidateFlags": {"csx.performance.micro_batch_size": 2}},
    ]
    assert "&" not in yaml.safe_dump(result)
