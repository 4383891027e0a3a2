"""The layout under ``trainer`` that release 2.3 brought: where each field goes."""

from __future__ import annotations

from typing import Any

import pytest

from ckptfs.conversion.releases.config import upgraded, upgraded_config
from ckptfs.conversion.releases.draft import About
from ckptfs.conversion.releases.schedulers import CLASSES
from ckptfs.errors import MissingField, UnsupportedValue

Config = dict[str, Any]
ABOUT = About("llama", "llama", (2, 2), (2, 3))


def trainer(**sections: Any) -> Config:
    """What stands under ``trainer``, without the model."""
    result = upgraded_config({"model": {"hidden_size": 8}, **sections}, ABOUT)
    assert result.keys() == {"trainer"}
    assert result["trainer"]["init"].pop("model")["hidden_size"] == 8
    found = result["trainer"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("model_dir", "model_dir"),
        ("seed", "seed"),
        ("target_device", "backend.backend_type"),
        ("compile_dir", "backend.compile_dir"),
        ("compile_only", "backend.compile_only"),
        ("validate_only", "backend.validate_only"),
        ("num_csx", "backend.cluster_config.num_csx"),
        ("num_wgt_servers", "backend.cluster_config.max_wgt_servers"),
        ("num_act_servers", "backend.cluster_config.max_act_per_csx"),
        ("mgmt_address", "backend.cluster_config.mgmt_address"),
        ("mgmt_namespace", "backend.cluster_config.mgmt_namespace"),
        ("mount_dirs", "backend.cluster_config.mount_dirs"),
        ("python_paths", "backend.cluster_config.python_paths"),
        ("num_workers_per_csx", "backend.cluster_config.num_workers_per_csx"),
        ("job_labels", "backend.cluster_config.job_labels"),
        ("job_priority", "backend.cluster_config.job_priority"),
        ("precision_opt_level", "precision.precision_opt_level"),
        ("num_steps", "loop.num_steps"),
        ("max_steps", "loop.max_steps"),
        ("num_epochs", "loop.num_epochs"),
        ("steps_per_epoch", "loop.steps_per_epoch"),
        ("eval_frequency", "loop.eval_frequency"),
        ("eval_steps", "loop.eval_steps"),
        ("grad_accum_steps", "loop.grad_accum_steps"),
        ("checkpoint_steps", "checkpoint.steps"),
        ("disable_strict_checkpoint_loading", "checkpoint.disable_strict_checkpoint_loading"),
        ("autoload_last_checkpoint", "checkpoint.autoload_last_checkpoint"),
        ("save_initial_checkpoint", "checkpoint.save_initial_checkpoint"),
        ("log_steps", "logging.log_steps"),
        ("logging", "logging.log_level"),
    ],
)
def test_runconfig(field: str, path: str) -> None:
    where: Any = trainer(runconfig={field: 7})
    assert where.keys() == {"init"}
    for name in ("init", *path.split(".")):
        assert len(where) == 1
        where = where[name]
    assert where == 7


def test_precision_comes_from_three_sections() -> None:
    found = trainer(
        model={"hidden_size": 8, "mixed_precision": False, "fp16_type": "float16", "precision_opt_level": 2},
        optimizer={"optimizer_type": "SGD", "initial_loss_scale": 2, "max_gradient_value": 3, "log_summaries": False},
        runconfig={"precision_opt_level": 1},
    )
    precision = {"enabled": False, "fp16_type": "float16", "precision_opt_level": 1}
    scaling = {"initial_loss_scale": 2, "max_gradient_value": 3, "log_loss_scale": False}
    assert found == {"init": {"precision": precision | scaling, "optimizer": {"SGD": {}}}}


@pytest.mark.parametrize(
    ("section", "fields", "callback"),
    [
        ("runconfig", {"retrace_every_iteration": True}, {"GlobalFlags": {"csx.debug.retrace_every_iteration": True}}),
        ("train_input", {"micro_batch_size": None}, {"ScopedTrainFlags": {"csx.performance.micro_batch_size": None}}),
        ("eval_input", {"micro_batch_size": 2}, {"ScopedValidateFlags": {"csx.performance.micro_batch_size": 2}}),
        ("runconfig", {"debug_args_path": "d"}, {"DebugArgsPath": {"debug_args_path": "d"}}),
        ("model", {"lora_params": {"r": 4}}, {"Lora": {"lora_params": {"r": 4}}}),
        ("runconfig", {"log_input_summaries": True}, {"LogInputSummaries": {}}),
        ("runconfig", {"check_loss_values": True}, {"CheckLoss": {}}),
        (
            "runconfig",
            {"load_checkpoint_states": "model"},
            {"LoadCheckpointStates": {"load_checkpoint_states": "model"}},
        ),
        ("runconfig", {"max_checkpoints": 3}, {"KeepNCheckpoints": {"n": 3}}),
        ("sparsity", {"add_summaries": True}, {"LogSparsity": {}}),
        ("model", {"compression": [1]}, {"WeightCompression": {"compressions": [1]}}),
        ("model", {"selective_grad": [1]}, {"SelectiveGrad": {"selective_grads": [1]}}),
        (
            "runconfig",
            {"load_checkpoint_states": ["model"]},
            {"LoadCheckpointStates": {"load_checkpoint_states": ["model"]}},
        ),
        ("runconfig", {"op_profiler_config": {"start_step": 1}}, {"OpProfiler": {"start_step": 1}}),
        ("runconfig", {"dump_activations": True}, {"DumpActivations": {}}),
        ("runconfig", {"hf_cache_dir": "c"}, {"HFCacheDir": {"cache_dir": "c"}}),
        ("runconfig", {"experimental": {"listeners": [{"listener_type": "Norms", "k": 1}]}}, {"Norms": {"k": 1}}),
    ],
)
def test_callbacks(section: str, fields: Config, callback: Config) -> None:
    sections = {"model": {"hidden_size": 8, **fields}} if section == "model" else {section: fields}
    assert trainer(**sections) == {"init": {"callbacks": [callback]}}


def test_switches_that_are_off_make_no_callback() -> None:
    run = {"check_loss_values": False, "log_input_summaries": False, "max_checkpoints": None}
    assert trainer(runconfig=run) == {"init": {}}


@pytest.mark.parametrize(
    ("rate", "schedulers", "kept"),
    [
        (0.1, [{"ConstantLR": {"learning_rate": 0.1}}], {"learning_rate": 0.1}),
        ("1e-4", [{"ConstantLR": {"learning_rate": "1e-4"}}], {"learning_rate": "1e-4"}),
        ({"scheduler": "LinearLR", "total_iters": 1}, [{"LinearLR": {"total_iters": 1}}], {}),
        ([{"scheduler": "LinearLR", "total_iters": 1}], [{"LinearLR": {"total_iters": 1}}], {}),
        (
            [{"scheduler": "StepLR", "main_scheduler": "Chained"}, {"scheduler": "LinearLR", "total_iters": 1}],
            [{"ChainedScheduler": {"schedulers": [{"StepLR": {}}, {"LinearLR": {"total_iters": 1}}]}}],
            {},
        ),
        ([], [], {}),
    ],
)
def test_learning_rates(rate: Any, schedulers: list[Config], kept: Config) -> None:
    init = trainer(optimizer={"optimizer_type": "SGD", "learning_rate": rate})["init"]
    assert init.get("schedulers", []) == schedulers
    assert init["optimizer"] == {"SGD": kept}
    adjust = {"adjust_learning_rate": {"embedding": 2}}
    init = trainer(optimizer={"optimizer_type": "SGD", "learning_rate": rate, **adjust})["init"]
    assert init.get("schedulers", []) == [{"ScalePerParamLR": {"scheduler": one}} for one in schedulers]
    assert init["optimizer"] == {"SGD": {**kept, **adjust}}


@pytest.mark.parametrize("name", CLASSES)
def test_schedulers_get_the_names_of_their_classes(name: str) -> None:
    for short in {name, name.lower(), name.upper(), name.removesuffix("LR"), name.removesuffix("LR").lower()}:
        init = trainer(optimizer={"optimizer_type": "SGD", "learning_rate": {"scheduler": short, "gamma": 1}})["init"]
        assert init["schedulers"] == [{name: {"gamma": 1}}], short


def test_schedulers_inside_of_others_get_them_too() -> None:
    linear, cosine = {"scheduler": "Linear", "total_iters": 1}, {"scheduler": "COSINEDECAY"}
    rate = [{"scheduler": "Sequential", "schedulers": [linear, {"cosinedecay": {}}]}, cosine]
    init = trainer(optimizer={"optimizer_type": "SGD", "learning_rate": rate})["init"]
    inner = [{"LinearLR": {"total_iters": 1}}, {"CosineDecayLR": {}}]
    chain = [{"SequentialLR": {"schedulers": inner}}, {"CosineDecayLR": {}}]
    assert init["schedulers"] == [{"SequentialLR": {"schedulers": chain}}]


def test_schedulers_that_the_trainer_does_not_know_are_refused() -> None:
    with pytest.raises(UnsupportedValue, match=r"learning_rate.scheduler is 'Warm', but only ConstantLR, "):
        trainer(optimizer={"optimizer_type": "SGD", "learning_rate": [{"scheduler": "Warm"}]})
    mixed = [{"scheduler": "Step", "main_scheduler": name} for name in ("Chained", "Sequential")]
    with pytest.raises(UnsupportedValue, match="main_scheduler"):
        trainer(optimizer={"optimizer_type": "SGD", "learning_rate": mixed})


@pytest.mark.parametrize(("frm", "to"), [((2, 2), (2, 3)), ((2, 3), (2, 4)), ((2, 9), (2, 10))])
def test_schedulers_of_the_layout_get_them_too(frm: tuple[int, int], to: tuple[int, int]) -> None:
    old = [{"sequential": {"schedulers": [{"Linear": {}}, {"cosineDecayLR": {}}]}}, {"LinearWD": {"end_val": 1}}]
    new = [{"SequentialLR": {"schedulers": [{"LinearLR": {}}, {"CosineDecayLR": {}}]}}, {"LinearWD": {"end_val": 1}}]
    scaled = [{"ScalePerParam": {"scheduler": {"constant": {}}}}]
    for before, after in ((old, new), (scaled, [{"ScalePerParamLR": {"scheduler": {"ConstantLR": {}}}}])):
        config = {"trainer": {"init": {"model": {"name": "llama"}, "schedulers": before}}}
        found = upgraded_config(config, About("llama", "llama", frm, to))
        assert found["trainer"]["init"]["schedulers"] == after
        assert config["trainer"]["init"]["schedulers"] is before


def test_steps_of_accumulation_stood_with_the_optimizer_too() -> None:
    found = trainer(optimizer={"optimizer_type": "SGD", "grad_accum_steps": 4})
    assert found == {"init": {"optimizer": {"SGD": {}}, "loop": {"grad_accum_steps": 4}}}


def test_optimizers_and_schedulers_need_names() -> None:
    with pytest.raises(MissingField, match="optimizer_type"):
        trainer(optimizer={"learning_rate": 0.1})
    with pytest.raises(MissingField, match="scheduler"):
        trainer(optimizer={"optimizer_type": "SGD", "learning_rate": [{"total_iters": 1}]})


@pytest.mark.parametrize("where", ["runconfig", "top"])
def test_loggers(where: str) -> None:
    wandb = {"wandb": {"project": "p"}}
    sections = {"runconfig": {"summary_dir": "s", **(wandb if where == "runconfig" else {})}}
    found = trainer(**sections, **({} if where == "runconfig" else wandb))
    loggers = [{"TensorBoardLogger": {"summary_dir": "s"}}, {"WandbLogger": {"project": "p"}}]
    assert found == {"init": {"loggers": loggers}}


@pytest.mark.parametrize("sparsity", [0.5, [{"sparsity": 0.1, "param_filter": "a"}], {"algorithm": "gmp"}])
def test_sparsity(sparsity: Any) -> None:
    assert trainer(sparsity=sparsity) == {"init": {"sparsity": sparsity}}


def test_summaries_of_sparsity_may_stand_in_one_block() -> None:
    blocks = [{"sparsity": 0.1, "add_summaries": True}, {"sparsity": 0.2}]
    found = trainer(sparsity=blocks)["init"]
    assert found == {"sparsity": [{"sparsity": 0.1}, {"sparsity": 0.2}], "callbacks": [{"LogSparsity": {}}]}


def test_tasks_need_their_data() -> None:
    data, run = {"batch_size": 2}, {"checkpoint_path": "c"}
    fit = {"train_dataloader": data, "ckpt_path": "c"}
    assert trainer(train_input=data, runconfig=run) == {"init": {}, "fit": fit}
    validate = {"validate": {"val_dataloader": data}, "validate_all": {"val_dataloaders": data}}
    assert trainer(eval_input=data) == {"init": {}, **validate}
    assert trainer(runconfig=run) == {"init": {}}


def test_what_has_no_place_is_left_out_with_a_warning() -> None:
    config = {"model": {"hidden_size": 8}, "runconfig": {"mode": "train", "odd": 1}, "extra": {}}
    result = upgraded(config, ABOUT)
    assert result.config == {"trainer": {"init": {"model": {"hidden_size": 8}}}}
    assert result.warnings == ("the layout of 2.3 has no place for runconfig.odd, extra; left out",)


def test_only_this_very_step_changes_the_layout() -> None:
    flat, nested = {"model": {"hidden_size": 8}}, {"trainer": {"init": {"model": {"hidden_size": 8}}}}
    assert upgraded_config(flat, About("gpt2", "gpt2", (2, 2), (2, 4))) == flat
    assert upgraded_config(nested, ABOUT) == nested
    assert upgraded_config(nested, About("llama", "llama", (2, 3), (2, 2))) == nested
