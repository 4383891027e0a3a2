"""Release 2.3 put the whole config under ``trainer``, and gave most of ``runconfig`` another place.

The tables below say where each field goes; what no table names is left out with a warning. The way back does not
exist. Source of the facts: recorded conversions of release 2.10, and the arguments of the classes that the new
layout names.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from ckptfs.conversion.releases.draft import Draft, Section
from ckptfs.conversion.releases.schedulers import schedulers_of

_CLUSTER = "backend.cluster_config."
RUNCONFIG = {
    **{name: name for name in ("model_dir", "seed")},
    "target_device": "backend.backend_type",
    **{name: f"backend.{name}" for name in ("compile_dir", "compile_only", "validate_only")},
    "num_wgt_servers": f"{_CLUSTER}max_wgt_servers",
    "num_act_servers": f"{_CLUSTER}max_act_per_csx",
    **{name: _CLUSTER + name for name in ("num_csx", "num_workers_per_csx", "mount_dirs", "python_paths")},
    **{name: _CLUSTER + name for name in ("credentials_path", "disable_version_check", "cbcore_image")},
    **{
        name: f"backend.{name}"
        for name in ("enable_distributed", "main_process_id", "dist_backend", "init_method", "sync_batchnorm")
    },
    "precision_opt_level": "precision.precision_opt_level",
    **{
        name: f"loop.{name}"
        for name in ("num_steps", "max_steps", "num_epochs", "steps_per_epoch", "eval_frequency", "eval_steps")
    },
    "grad_accum_steps": "loop.grad_accum_steps",
    "checkpoint_steps": "checkpoint.steps",
    **{
        name: f"checkpoint.{name}"
        for name in ("disable_strict_checkpoint_loading", "autoload_last_checkpoint", "save_initial_checkpoint")
    },
    "logging": "logging.log_level",
    **{name: f"logging.{name}" for name in ("log_steps", "wsc_log_level", "enable_act_frequency")},
}
"""Field of ``runconfig`` to its place in ``trainer.init``."""
CLUSTER_PREFIXES = ("mgmt_", "job_")
"""Fields of ``runconfig`` that begin so go to the cluster's section."""
MODEL = {
    "mixed_precision": "precision.enabled",
    "fp16_type": "precision.fp16_type",
    "precision_opt_level": "precision.precision_opt_level",
}
"""Field of ``model`` to its place in ``trainer.init``."""
_SCALING = ("loss_scaling_factor", "initial_loss_scale", "steps_per_increase", "min_loss_scale", "max_loss_scale")
_LIMITS = ("overflow_tolerance", "max_gradient_norm", "max_gradient_value")
OPTIMIZER = {name: f"precision.{name}" for name in (*_SCALING, *_LIMITS)} | {
    "grad_accum_steps": "loop.grad_accum_steps"
}
"""Field of ``optimizer`` to its place in ``trainer.init``."""
_MEMORY = tuple(f"{who}_memory_gi" for who in ("compile_crd", "execute_crd", "wrk", "act", "cmd", "wgt", "chf"))
_DEBUG = ("drop_data", "lazy_initialization", "log_initialization", "retrace_every_iteration", "fabric_type_blacklist")
FLAGS = {
    "transfer_processes": "csx.performance.transfer_processes",
    **{name: f"csx.debug.{name}" for name in (*_MEMORY, *_DEBUG, "ini", "debug_args")},
}
"""Field of ``runconfig`` to the global flag of cerebras_pytorch that it sets."""
MICRO_BATCH = "csx.performance.micro_batch_size"
_ALL = "*"
"""The argument of a callback that takes the fields of its section as they are."""
IGNORED = ("mode",)
"""Fields of ``runconfig`` that say nothing about the model or its training."""


@dataclass(frozen=True, slots=True)
class Callback:
    """A callback that a field stands for, with the field's value as *argument*; without one, the field is a switch.

    With ``*``, the field's own fields are the arguments.
    """

    name: str
    section: str
    field: str
    argument: str = ""


CALLBACKS = (
    Callback("ScopedTrainFlags", "train_input", "micro_batch_size", MICRO_BATCH),
    Callback("ScopedValidateFlags", "eval_input", "micro_batch_size", MICRO_BATCH),
    Callback("DebugArgsPath", "runconfig", "debug_args_path", "debug_args_path"),
    Callback("Lora", "model", "lora_params", "lora_params"),
    Callback("LogInputSummaries", "runconfig", "log_input_summaries"),
    Callback("CheckLoss", "runconfig", "check_loss_values"),
    Callback("ComputeNorm", "optimizer", "log_summaries"),
    Callback("LoadCheckpointStates", "runconfig", "load_checkpoint_states", "load_checkpoint_states"),
    Callback("KeepNCheckpoints", "runconfig", "max_checkpoints", "n"),
    Callback("LogSparsity", "sparsity", "add_summaries"),
    Callback("WeightCompression", "model", "compression", "compressions"),
    Callback("SelectiveGrad", "model", "selective_grad", "selective_grads"),
    Callback("OpProfiler", "runconfig", "op_profiler_config", _ALL),
    Callback("DumpActivations", "runconfig", "dump_activations"),
    Callback("HFCacheDir", "runconfig", "hf_cache_dir", "cache_dir"),
)
"""In the order in which the callbacks run."""
INIT = ("model_dir", "seed", "backend", "model", "optimizer", "schedulers", "precision", "sparsity", "loop")
"""The order inside ``trainer.init``; all else follows."""
_SECTIONS = ("model", "optimizer", "runconfig", "train_input", "eval_input", "wandb")


def nest_under_trainer(draft: Draft) -> None:
    """The flat config of 2.2 in the layout of 2.3; one that has it already stays. Empty sections are left out."""
    if draft.nested:
        return
    draft.model()
    flat = {name: draft.section(name) or {} for name in _SECTIONS}
    sparsity = draft.whole.pop("sparsity", None)
    flat["sparsity"] = _sparsity(sparsity)
    run = flat["runconfig"]
    init: Section = {}
    for section, places in (("model", MODEL), ("optimizer", OPTIMIZER), ("runconfig", _runconfig(run))):
        for name, place in places.items():
            if name in flat[section]:
                _put(init, place, flat[section].pop(name))
    if "log_summaries" in flat["optimizer"]:
        _put(init, "precision.log_loss_scale", flat["optimizer"]["log_summaries"])
    callbacks = _callbacks(flat)
    schedulers = schedulers_of(draft, flat["optimizer"])
    init |= {"model": flat["model"], "optimizer": _optimizer(draft, flat["optimizer"]), "schedulers": schedulers}
    init |= {"sparsity": flat["sparsity"] or (None if isinstance(sparsity, Mapping) else _without_summaries(sparsity))}
    init |= {"callbacks": callbacks, "loggers": _loggers(flat)}
    init = {name: init.get(name) for name in INIT} | init
    trainer = {"init": _filled(init), **_tasks(flat, run.pop("checkpoint_path", None))}
    _warn_of_the_rest(draft, run)
    draft.whole.clear()
    draft.whole["trainer"] = trainer


def _runconfig(run: Section) -> dict[str, str]:
    return RUNCONFIG | {name: _CLUSTER + name for name in run if str(name).startswith(CLUSTER_PREFIXES)}


def _put(init: Section, place: str, value: object) -> None:
    *path, name = place.split(".")
    for part in path:
        init = init.setdefault(part, {})
    init[name] = value


def _callbacks(flat: Mapping[str, Section]) -> list[Section]:
    """The callbacks that fields stand for; the fields are taken out of *flat*."""
    flags = {flag: flat["runconfig"].pop(name) for name, flag in FLAGS.items() if name in flat["runconfig"]}
    callbacks: list[Section] = [{"GlobalFlags": flags}] if flags else []
    for callback in CALLBACKS:
        section = flat[callback.section]
        if callback.field in section:
            value = section.pop(callback.field)
            # No micro batches is a setting of its own, which differs from the default.
            if (value is not None and value is not False) or callback.argument == MICRO_BATCH:
                callbacks.append({callback.name: _arguments(callback, value)})
    return callbacks + _listeners(flat["runconfig"])


def _arguments(callback: Callback, value: Any) -> Section:
    if callback.argument == _ALL:
        return dict(value) if isinstance(value, Mapping) else {}
    return {callback.argument: value} if callback.argument else {}


def _listeners(run: Section) -> list[Section]:
    """The callbacks that ``experimental.listeners`` lists, each under the name of its type."""
    experimental = run.get("experimental")
    found = experimental.get("listeners") if isinstance(experimental, Mapping) else None
    if not isinstance(experimental, Mapping) or not isinstance(found, list):
        return []
    if not all(isinstance(one, Mapping) and "listener_type" in one for one in found):
        return []
    rest = {name: value for name, value in experimental.items() if name != "listeners"}
    del run["experimental"]
    run |= {"experimental": rest} if rest else {}
    return [{str(one["listener_type"]): {k: v for k, v in one.items() if k != "listener_type"}} for one in found]


def _sparsity(sparsity: Any) -> Section:
    """The fields of a ``sparsity`` section; of a list of blocks ``add_summaries``, if one of them has it."""
    if isinstance(sparsity, Mapping):
        return dict(sparsity)
    blocks = [block for block in sparsity if isinstance(block, Mapping)] if isinstance(sparsity, list) else []
    return {"add_summaries": True} if any(block.get("add_summaries") for block in blocks) else {}


def _without_summaries(sparsity: Any) -> Any:
    """A list of blocks without the field that became a callback; anything else as it is."""
    if not isinstance(sparsity, list):
        return sparsity
    return [{k: v for k, v in b.items() if k != "add_summaries"} if isinstance(b, Mapping) else b for b in sparsity]


def _optimizer(draft: Draft, optimizer: Section) -> Section:
    if not optimizer:
        return {}
    kind = optimizer.pop("optimizer_type", None)
    if not isinstance(kind, str):
        draft.lacks("optimizer.optimizer_type", "the trainer's config names optimizers by it")
    return {kind: optimizer}


def _loggers(flat: Mapping[str, Section]) -> list[Section]:
    run = flat["runconfig"]
    tensorboard = _filled({name: run.pop(name, None) for name in ("summary_dir", "legacy_event_dirs")})
    own = run.pop("wandb", None)
    wandb = flat["wandb"] | (dict(own) if isinstance(own, Mapping) else {})
    loggers: list[Section] = [{"TensorBoardLogger": tensorboard}] if tensorboard else []
    return loggers + ([{"WandbLogger": wandb}] if wandb else [])


def _tasks(flat: Mapping[str, Section], checkpoint: object) -> Section:
    """The sections ``fit``, ``validate`` and ``validate_all``, as far as there are data for them."""
    train, val = flat["train_input"], flat["eval_input"]
    path, paths = ({} if checkpoint is None else {key: checkpoint} for key in ("ckpt_path", "ckpt_paths"))
    tasks: Section = {}
    if train:
        tasks["fit"] = _filled({"train_dataloader": train, "val_dataloader": val}) | path
    if val:  # copies, which YAML would otherwise write as references to the first
        tasks["validate"] = {"val_dataloader": deepcopy(val)} | path
        tasks["validate_all"] = {"val_dataloaders": deepcopy(val)} | paths
    return tasks


def _filled(section: Section) -> Section:
    return {name: value for name, value in section.items() if value is not None and value not in ({}, [])}


def _warn_of_the_rest(draft: Draft, run: Section) -> None:
    left = [f"runconfig.{name}" for name in run if name not in IGNORED]
    left += [str(name) for name in draft.whole if name not in (*_SECTIONS, "sparsity")]
    if left:
        draft.warnings.append(f"the layout of 2.3 has no place for {', '.join(left)}; left out")
