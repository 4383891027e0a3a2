"""What releases changed in ``runconfig`` and the data sections beside it."""

from __future__ import annotations

from ckptfs.conversion.releases.draft import Draft

_GONE = ("experimental_api", "multireplica", "num_replicas", "save_losses", "service_dir", "use_appliance_data")
_SERVERS = ("num_act_servers", "num_wgt_servers")


def clean_runconfig(draft: Draft) -> None:
    """Fields that releases after 1.9 and 2.0 do not know go, or get their newer names."""
    draft.whole.pop("csconfig", None)
    run = draft.section("runconfig")
    if run is None:
        return
    for name in _GONE:
        run.pop(name, None)
    servers = [name for name in _SERVERS if run.pop(name, None) is not None]
    if servers:
        draft.warnings.append(f"runconfig: without {' and '.join(servers)}; newer releases choose them")
    if run.pop("is_pretrained_checkpoint", False):
        run.setdefault("load_checkpoint_states", ["model", "dataloader"])
    if "keep_checkpoint_max" in run:
        run.setdefault("max_checkpoints", run.pop("keep_checkpoint_max"))
        run.pop("keep_checkpoint_max", None)


def drop_saved_iterators(draft: Draft) -> None:
    """Where older releases kept the position in the data: since then it is part of the checkpoint."""
    saved = draft.section("cerebras")
    if saved is not None and "save_iter_state_path" in saved:
        del draft.whole["cerebras"]


def move_precision_level(draft: Draft) -> None:
    """``precision_opt_level`` moves from the model to ``runconfig``, unless one is there."""
    run = draft.section("runconfig")
    if run is not None:
        model = draft.model()
        if "precision_opt_level" in model:
            run.setdefault("precision_opt_level", model.pop("precision_opt_level"))
            model.pop("precision_opt_level", None)


def set_micro_batches(draft: Draft) -> None:
    """One switch for both data sections becomes a ``micro_batch_size`` in each."""
    run = draft.section("runconfig")
    if run is None:
        return
    run.pop("autogen_policy", None)
    if "use_cs_grad_accum" not in run:
        return
    on = run.pop("use_cs_grad_accum")
    for name in ("train_input", "eval_input"):
        data = draft.make(name)
        if on:
            data.setdefault("micro_batch_size", "auto")
        else:
            data["micro_batch_size"] = None
