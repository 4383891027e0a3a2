"""MPT in release 2.0, where positions and slopes had other names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptfs.conversion import registry
from ckptfs.conversion.apply import convert_tensors
from ckptfs.conversion.format_names import HF, parse_format
from ckptfs.conversion.hf import check_path, cs_config
from ckptfs.conversion.rules import Context, Side
from ckptfs.errors import NoPath
from ckptfs.tensors.ranges import to_numpy
from ckptfs.tensors.tensor import Tensor
from tests.factories import ArrayTensor

WORDS, POSITIONS = "embedding_layer.word_embeddings.weight", "embedding_layer.position_embeddings"
SLOPES = {"cs-2.0": "relative_pe_helper.slopes", "cs-2.1": "embedding_layer.position_embed_helper.slopes"}
NAMES = {"cs-2.0": f"{POSITIONS}.weight", "cs-2.1": f"{POSITIONS}.embed.weight"}


def convert(model: str, release: str, to: Side, *keys: str, **cs: Any) -> dict[str, np.ndarray[Any, Any]]:
    family = registry.family(model).at(parse_format(release))
    state: dict[str, Tensor] = {key: ArrayTensor(np.zeros((3, 2), np.float32)) for key in keys}
    context = Context(model, {"heads": 2}, {}, cs)
    return {k: to_numpy(t) for k, t in convert_tensors(family.table, state, to, context)[0].items()}


@pytest.mark.parametrize("release", NAMES)
@pytest.mark.parametrize(("model", "prefix"), [("mpt", "transformer."), ("mpt-headless", "")])
def test_positions(model: str, prefix: str, release: str) -> None:
    hf = [f"{prefix}wte.weight", f"{prefix}wpe.weight"]
    assert list(convert(model, release, "cs", *hf)) == [WORDS, "lm_head.weight", NAMES[release]]
    for name in NAMES.values():
        assert list(convert(model, release, "hf", WORDS, "lm_head.weight", name)) == hf


@pytest.mark.parametrize("release", SLOPES)
def test_slopes(release: str) -> None:
    found = convert("mpt", release, "cs", "transformer.wte.weight", position_embedding_type="alibi")
    assert list(found) == [WORDS, "lm_head.weight", SLOPES[release]]
    assert found[SLOPES[release]].tolist() == [[2.0**-4], [2.0**-8]]
    for name in SLOPES.values():
        assert list(convert("mpt", release, "hf", WORDS, name)) == ["transformer.wte.weight"]


def test_configs_say_that_there_are_positions_in_release_2_0_only() -> None:
    family = registry.family("mpt")
    for release, there in (("cs-2.0", True), ("cs-2.1", False), ("cs-2.3", False)):
        fmt = parse_format(release)
        check_path(family, HF, fmt)
        assert ("use_position_embedding" in cs_config(family.at(fmt), {}, fmt)["model"]) == there
    for release in ("cs-1.9", "cs-2.4"):
        with pytest.raises(NoPath, match=r"cs-2\.0 … cs-2\.3"):
            check_path(family, HF, parse_format(release))
