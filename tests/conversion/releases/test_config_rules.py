"""Configs between Cerebras releases, change by change: what no recorded conversion shows."""

from __future__ import annotations

from typing import Any

import pytest

from ckptfs.conversion.format_names import Release
from ckptfs.conversion.releases.config import upgraded, upgraded_config
from ckptfs.conversion.releases.draft import About
from ckptfs.errors import ConfigError, MissingField, UnsupportedValue

Config = dict[str, Any]


def step(family: str, frm: Release, to: Release, **sections: Any) -> Config:
    """The sections of a flat config after one step."""
    return upgraded_config({"model": {}, **sections}, About(family, family, frm, to))


def model(family: str, frm: Release, to: Release, **fields: Any) -> Config:
    """The ``model`` section after one step."""
    found = step(family, frm, to, model=fields)["model"]
    assert isinstance(found, dict)
    return found


# ------------------------------------------------------------------------------------------------------- model section


@pytest.mark.parametrize("to", [(1, 8), (1, 9), (2, 0)])
def test_bert_gets_its_nonlinearities_with_1_8(to: Release) -> None:
    wanted = {"encoder_nonlinearity": "relu", "pooler_nonlinearity": "relu", "mlm_nonlinearity": "gelu"}
    assert model("bert-summarization", (1, 7), to, encoder_nonlinearity="relu") == wanted
    assert model("bert", (1, 6), (1, 7), encoder_nonlinearity="relu") == {"encoder_nonlinearity": "relu"}


def test_bert_going_down_keeps_the_fields() -> None:
    fields = {"encoder_nonlinearity": "relu", "pooler_nonlinearity": "relu", "mlm_nonlinearity": "gelu"}
    assert model("bert", (2, 0), (1, 6), **fields) == fields
    with pytest.raises(UnsupportedValue, match="mlm_nonlinearity is 'relu'"):
        model("bert", (1, 9), (1, 7), encoder_nonlinearity="gelu", mlm_nonlinearity="relu")


def test_norms_are_named_with_2_0() -> None:
    assert model("bloom", (1, 9), (2, 0)) == {"norm_type": "layernorm"}
    assert model("gptj", (1, 8), (2, 0)) == {}
    assert model("t5", (1, 9), (2, 0)) == {}
    assert model("t5", (1, 8), (2, 0), use_t5_layer_norm=False) == {"norm_type": "layernorm"}
    assert model("gpt-neox", (2, 0), (1, 8), norm_type="biasless-layernorm") == {"use_biasless_norm": True}
    assert model("llama", (2, 0), (1, 9), norm_type="layernorm") == {"use_rms_norm": False}
    assert model("bert", (1, 9), (2, 0), use_rms_norm=True) == {"use_rms_norm": True}
    with pytest.raises(UnsupportedValue, match=r"norm_type is 'biasless-layernorm'.*'rmsnorm' and 'layernorm'"):
        model("wizardlm", (2, 0), (1, 9), norm_type="biasless-layernorm")


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "t5", "transformer"])
def test_a_norm_without_bias_is_named_with_2_0_too(family: str) -> None:
    other = "use_t5_layer_norm" if family in ("t5", "transformer") else "use_rms_norm"
    biasless = {"norm_type": "biasless-layernorm"}
    assert model(family, (1, 9), (2, 0), use_biasless_norm=True) == biasless
    assert model(family, (1, 9), (2, 0), **{other: False}, use_biasless_norm=True) == biasless
    assert model(family, (1, 9), (2, 0), **{other: True}, use_biasless_norm=False) == {"norm_type": "rmsnorm"}
    with pytest.raises(UnsupportedValue, match="use_biasless_norm is True, but the config asks for rmsnorm"):
        model(family, (1, 9), (2, 0), **{other: True}, use_biasless_norm=True)
    with pytest.raises(UnsupportedValue, match="use_biasless_norm is 1"):
        model(family, (1, 9), (2, 0), use_biasless_norm=1)


def test_a_norm_switch_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedValue, match="use_rms_norm is 'yes'"):
        model("gpt2", (1, 9), (2, 0), use_rms_norm="yes")


def test_half_precision_is_named_with_2_1() -> None:
    assert model("gptj-headless", (2, 0), (2, 1), use_bfloat16=True) == {"fp16_type": "bfloat16"}
    assert model("gpt2", (2, 1), (2, 0), fp16_type="bfloat16") == {"use_bfloat16": True}


def test_cbfloat16_below_2_1_is_bfloat16_with_a_warning() -> None:
    config = {"model": {"fp16_type": "cbfloat16"}}
    found = upgraded(config, About("gpt2", "gpt2", (2, 1), (2, 0)))
    assert found.config == {"model": {"use_bfloat16": True}}
    assert found.warnings == ("fp16_type cbfloat16 cannot be expressed before 2.1; use_bfloat16 takes its place",)


def test_the_precision_level_moves_only_to_a_runconfig() -> None:
    assert step("gpt2", (2, 0), (2, 1), model={"precision_opt_level": 1})["model"] == {"precision_opt_level": 1}
    result = step("gpt2", (2, 0), (2, 1), model={"precision_opt_level": 0}, runconfig={"seed": 1})
    assert result == {"model": {}, "runconfig": {"seed": 1, "precision_opt_level": 0}}


def test_gpt2_loses_fields_both_ways_with_2_3() -> None:
    fields = {"use_position_embedding": True, "alibi_implementation": "expand", "weight_initialization_seed": 1}
    assert model("gpt2", (2, 3), (2, 2), hidden_size=8, **fields) == {"hidden_size": 8}
    assert model("gpt2", (2, 2), (2, 7), hidden_size=8, **fields) == {"hidden_size": 8}
    nested = {"trainer": {"init": {"model": {"hidden_size": 8, **fields}}}}
    result = upgraded_config(nested, About("gpt2", "gpt2", (2, 5), (2, 2)))
    assert result == {"trainer": {"init": {"model": {"hidden_size": 8}}}}


def test_dpr_temperatures_below_2_3() -> None:
    sizes = {"q_encoder": {"hidden_size": 100}}
    near = model("dpr", (2, 9), (2, 2), softmax_temperature=10.9, pooler_type="cls", **sizes)
    assert near == {"scale_similarity": True, "pooler_type": "cls", **sizes}
    config = {"model": {"softmax_temperature": 3.0, **sizes}}
    other = upgraded(config, About("dpr", "dpr", (2, 3), (2, 2)))
    assert other.config["model"] == {"scale_similarity": False, **sizes}
    assert "softmax_temperature 3.0" in other.warnings[0]
    with pytest.raises(MissingField, match=r"q_encoder\.hidden_size"):
        model("dpr", (2, 2), (2, 3), scale_similarity=True)


def test_names_come_with_2_4_also_in_the_flat_layout() -> None:
    about = About("bert-token-classifier", "bert/token_classifier", (2, 3), (2, 4))
    assert upgraded_config({"model": {}}, about) == {"model": {"name": "bert/token_classifier"}}
    given = {"trainer": {"init": {"model": {"name": "mine"}}}}
    assert upgraded_config(given, about) == given


def test_a_list_of_trainers_and_a_config_without_model_are_refused() -> None:
    for config in ({"trainer": [{"init": {}}]}, {"trainer": {"init": {}}}, {"optimizer": {}}, {"model": 3}):
        with pytest.raises(ConfigError):
            upgraded_config(config, About("gpt2", "gpt2", (2, 4), (2, 5)))


# ----------------------------------------------------------------------------------------------------------- runconfig


@pytest.mark.parametrize(("frm", "to"), [((1, 9), (1, 8)), ((1, 9), (2, 0)), ((2, 0), (1, 9)), ((2, 0), (2, 1))])
def test_runconfig_is_cleaned_by_where_it_comes_from(frm: Release, to: Release) -> None:
    gone = dict.fromkeys(("experimental_api", "multireplica", "save_losses", "use_appliance_data", "num_replicas"), 1)
    servers = {"service_dir": "x", "num_act_servers": 1, "num_wgt_servers": 2}
    checkpoints = {"is_pretrained_checkpoint": False, "keep_checkpoint_max": 5, "max_checkpoints": 2}
    run = {"seed": 1, **gone, **servers, **checkpoints}
    result = step("roberta", frm, to, runconfig=run, csconfig={"x": 1})
    assert result == {"model": {}, "runconfig": {"max_checkpoints": 2, "seed": 1}}


def test_saved_iterators_leave_the_config() -> None:
    assert step("gpt2", (1, 9), (2, 0), cerebras={"save_iter_state_path": "x"}).keys() == {"model"}
    assert step("gpt2", (1, 9), (2, 0), cerebras={"other": 1})["cerebras"] == {"other": 1}


def test_micro_batches_instead_of_a_switch() -> None:
    train = {"train_input": {"micro_batch_size": 4}}
    on = step("gpt2", (2, 1), (2, 2), runconfig={"use_cs_grad_accum": True, "autogen_policy": 1}, **train)
    wanted = {"train_input": {"micro_batch_size": 4}, "eval_input": {"micro_batch_size": "auto"}}
    assert on == {"model": {}, "runconfig": {}, **wanted}
    off = step("gpt2", (2, 1), (2, 2), runconfig={"use_cs_grad_accum": False}, **train)
    assert off["train_input"] == off["eval_input"] == {"micro_batch_size": None}
    assert step("gpt2", (2, 1), (2, 2), **train) == {"model": {}, **train}


# ----------------------------------------------------------------------------------------------- optimizers, schedulers


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("Rprop", {"eta1": 0.5, "eta2": 1.2}, {"etas": [0.5, 1.2]}),
        ("rprop", {"step_size_min": 1e-6, "step_size_max": 50}, {"step_sizes": [1e-6, 50]}),
        ("Rprop", {"weight_decay_rate": 1}, {"weight_decay_rate": 1}),
        ("Rprop", {"eps1": 1, "eps2": 2}, {"eps1": 1, "eps2": 2}),
        ("RMSprop", {"eps1": 1, "eps2": 2, "eta1": 1, "eta2": 2}, {"eps": [1, 2], "eta1": 1, "eta2": 2}),
        ("LAMB", {"beta1": 0.9, "beta2": 0.99}, {"betas": [0.9, 0.99]}),
        ("lion", {"beta1": 0.9, "beta2": 0.99, "eps1": 1, "eps2": 2}, {"betas": [0.9, 0.99], "eps1": 1, "eps2": 2}),
        ("Adafactor", {"beta1": 0.9}, {"beta1": 0.9}),
        ("AdamW", {"beta1": 0.9}, {"beta1": 0.9}),
        ("AdamW", {"weight_decay_rate": 1, "weight_decay": 2}, {"weight_decay_rate": 1, "weight_decay": 2}),
    ],
)
def test_optimizer_fields(kind: str, before: Config, after: Config) -> None:
    result = step("llama", (2, 0), (2, 1), optimizer={"optimizer_type": kind, **before})
    assert result["optimizer"] == {"optimizer_type": kind, **after}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("ConstantLR", {"steps": 5, "learning_rate": 1}, {"total_iters": 5, "learning_rate": 1}),
        ("Polynomial", {"learning_rate": 1, "decay_steps": 5}, {"initial_learning_rate": 1, "total_iters": 5}),
        ("exponential", {"base_lr": 1}, {"initial_learning_rate": 1}),
        ("InverseExponentialTimeDecay", {"decay_steps": 5}, {"total_iters": 5}),
        ("Step", {"steps": 5, "base_lr": 1}, {"steps": 5, "initial_learning_rate": 1}),
        ("PiecewiseConstant", {"values": [1], "boundaries": [2]}, {"learning_rates": [1], "milestones": [2]}),
        ("PiecewiseConstant", {"base_lr": 1}, {"base_lr": 1}),
        ("MultiStepLR", {"boundaries": [2], "values": [1]}, {"milestones": [2], "values": [1]}),
        ("CosineAnnealing", {"t_max": 3}, {"T_max": 3}),
        ("CosineAnnealingWarmRestarts", {"t_0": 3, "t_mult": 2}, {"T_0": 3, "T_mult": 2}),
        ("CyclicLR", {"learning_rate": 1}, {"base_lr": 1}),
        ("Cyclic", {"initial_learning_rate": 1}, {"base_lr": 1}),
        ("Linear", {"steps": 5, "total_iters": 6}, {"steps": 5, "total_iters": 6}),
    ],
)
def test_scheduler_fields(kind: str, before: Config, after: Config) -> None:
    for one in (lambda entry: entry, lambda entry: [entry, 0.1]):
        optimizer = {"optimizer_type": "SGD", "learning_rate": one({"scheduler": kind, **before})}
        result = step("llama", (2, 0), (2, 1), optimizer=optimizer)["optimizer"]
        assert result["learning_rate"] == one({"scheduler": kind, **after})


# ------------------------------------------------------------------------------------------------------------ sparsity


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.5, 0.5),
        ({"type": "static", "sparsity": 0.5}, 0.5),
        ({"type": "static", "sparsity": 0.5, "init_method": "topk"}, {"sparsity": 0.5, "init_method": "topk"}),
        ({"sparsity": 0.5, "update": 1}, 0.5),
        ({"sparsity": 0.5, "update": 3}, {"sparsity": 0.5, "update": {"freq": 3}}),
        ({"type": "sideband", "sparsity": 0.5}, {"algorithm": "sideband", "sparsity": 0.5}),
        ({"type": "rigl", "schedule": {"start": 1}}, {"algorithm": "rigl", "update": {"start": 1}}),
        ({"sparsity": 0.5, "param_name_patterns": "a.*.b"}, {"sparsity": 0.5, "param_filter": "a*.b"}),
        (
            {"type": "set", "param_name_patterns": {"a": {"type": "gmp", "schedule": 1}, "b": None}},
            [{"algorithm": "gmp", "param_filter": "a"}, {"algorithm": "set", "param_filter": "b"}],
        ),
    ],
)
def test_sparsity(before: Any, after: Any) -> None:
    assert step("gpt2", (2, 1), (2, 2), sparsity=before)["sparsity"] == after


def test_sparsity_that_makes_no_sense_is_refused() -> None:
    for broken in ({"sparsity_schedule": [1, 2]}, {"param_name_patterns": {"a": 3}}):
        with pytest.raises(UnsupportedValue, match="sparsity"):
            step("gpt2", (2, 1), (2, 2), sparsity=broken)


# ----------------------------------------------------------------------------------------------------- muP, before 2.3

MUP = {"scale_qk_dot_by_d": True, "embeddings_scale": 10.0, "output_logits_scale": 0.5, "hidden_size": 64}


def renewed(fields: Config, **sections: Any) -> Config:
    found = step("llama", (2, 2), (2, 3), model=fields, **sections)["trainer"]["init"]
    assert isinstance(found, dict)
    return found


def test_mup_truncation_has_defaults() -> None:
    adjust = {"optimizer_type": "SGD", "adjust_learning_rate": {"decoder_kernel": 0.25}}
    init = renewed({**MUP, "initializer": {"name": "truncated_normal", "std": 0.02}}, optimizer=adjust)
    assert init["model"]["initializer"] == {"name": "truncated_normal", "std": 0.04, "a": -0.08, "b": 0.08}
    assert init["model"]["mup_base_hidden_size"] == 16 and init["model"]["output_logits_alpha"] == 2
    assert "output_logits_scale" not in init["model"] and "mup_base_filter_size" not in init["model"]
    assert "optimizer" in init and "adjust_learning_rate" not in init["optimizer"]["SGD"]


def test_mup_without_an_adjusted_learning_rate_has_width_one() -> None:
    fields = renewed(MUP)["model"]
    assert fields["mup_base_hidden_size"] == 64 and fields["output_logits_alpha"] == 0.5


def test_incomplete_mup_is_refused() -> None:
    with pytest.raises(UnsupportedValue, match="output_logits_scale"):
        renewed({"output_logits_scale": 0.5, "hidden_size": 64})
    with pytest.raises(MissingField, match="hidden_size"):
        renewed({name: value for name, value in MUP.items() if name != "hidden_size"})
    with pytest.raises(ConfigError):
        renewed(MUP, optimizer={"optimizer_type": "SGD", "adjust_learning_rate": {"decoder_kernel": 0}})
