"""muP's fields before release 2.3, as those of 2.3: multipliers become the sizes of the base model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ckptfs.conversion.folding import mup
from ckptfs.conversion.releases.draft import Draft, Section


def renew_mup(draft: Draft) -> None:
    """State the base model's sizes, and fold the width into the initializers, which 2.3 scales itself.

    The width is what the learning rate of the decoder's kernels was divided by; 1 where it was left alone.
    ``embeddings_scale`` and ``scale_qk_dot_by_d`` stay. An incomplete set of the old fields is refused.
    """
    model = draft.model()
    if mup.style(draft.about.family, model) != "old":
        return
    width = 1 / _kernel(draft)
    if "hidden_size" not in model:
        draft.lacks("hidden_size", "muP's base size is worked out from it")
    model["mup_base_hidden_size"] = model["hidden_size"] / width
    if "filter_size" in model:
        model["mup_base_filter_size"] = model["filter_size"] / width
    model["output_logits_alpha"] = model.pop("output_logits_scale") * width
    layers = model.get("num_hidden_layers", 1)
    for name, factor in (
        ("initializer", math.sqrt(width)),
        ("output_layer_initializer", math.sqrt(width) * math.sqrt(2 * layers)),
    ):
        if isinstance(model.get(name), Mapping):
            model[name] = _scaled(model[name], factor)


def _kernel(draft: Draft) -> float:
    optimizer = draft.section("optimizer")
    adjust = optimizer.pop("adjust_learning_rate", None) if optimizer is not None else None
    return float(adjust.get("decoder_kernel", 1)) if isinstance(adjust, Mapping) else 1.0


def _scaled(initializer: Mapping[str, float], factor: float) -> Section:
    """An initializer with a *factor* times the spread; a truncated one is cut at two deviations unless it says so."""
    result: Section = dict(initializer)
    if "std" in result:
        std = result["std"]
        if result.get("name") == "truncated_normal":
            result |= {"a": result.get("a", -2 * std) * factor, "b": result.get("b", 2 * std) * factor}
        result["std"] = std * factor
    return result
