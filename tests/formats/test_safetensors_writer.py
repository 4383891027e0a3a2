"""Our safetensors files against the reference writer, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from ckptfs.errors import UsageError
from ckptfs.formats.safetensors import safetensors_file
from ckptfs.tensors.dtypes import DTYPES
from tests.factories import ArrayTensor, tensor_of
from tests.formats.reading import content

NAMES = [name for name, dtype in DTYPES.items() if dtype.safetensors]


def torch_of(tensor: ArrayTensor) -> torch.Tensor:
    """The same bits as a torch tensor."""
    kind: Any = getattr(torch, tensor.dtype.name)
    data = bytearray(tensor.bytes)
    flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
    return flat.reshape(tensor.shape)


def reference(tensors: dict[str, ArrayTensor], metadata: dict[str, str] | None) -> bytes:
    return bytes(save({key: torch_of(t) for key, t in tensors.items()}, metadata=metadata))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)])
def test_one_tensor(name: str, shape: tuple[int, ...]) -> None:
    tensors = {"model.weight": tensor_of(name, shape)}
    assert content(safetensors_file(tensors)) == reference(tensors, {"format": "pt"})


def test_all_dtypes_together_in_the_reference_order() -> None:
    tensors = {f"{i % 3}.{name}": tensor_of(name, (i % 4 + 1,), i) for i, name in enumerate(NAMES)}
    tensors |= {f"{i % 2}.again.{name}": tensor_of(name, (2, i % 3), i) for i, name in enumerate(reversed(NAMES))}
    assert content(safetensors_file(tensors)) == reference(tensors, {"format": "pt"})


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"note": 'a "b" \\ \n\x01é'}])
def test_no_tensors_and_metadata(metadata: dict[str, str] | None) -> None:
    assert content(safetensors_file({}, metadata)) == reference({}, metadata)


def test_empty_metadata() -> None:
    tensors = {"w": tensor_of("float32", (3,))}
    assert content(safetensors_file(tensors, {})) == reference(tensors, {})


KEYS = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda key: key != "__metadata__")


@settings(deadline=None)
@given(
    st.dictionaries(
        KEYS,
        st.builds(tensor_of, st.sampled_from(NAMES), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
        max_size=6,
    )
)
def test_any_keys_and_shapes(tensors: dict[str, ArrayTensor]) -> None:
    assert content(safetensors_file(tensors)) == reference(tensors, {"format": "pt"})


@pytest.mark.parametrize(
    ("key", "tensor", "says"),
    [
        ("w", tensor_of("complex128", (2,)), "w: safetensors has no element type for complex128"),
        ("__metadata__", tensor_of("int8", (2,)), "__metadata__"),
        ("a\ud800", tensor_of("int8", (2,)), "valid Unicode"),
    ],
)
def test_refusals_name_the_key(key: str, tensor: ArrayTensor, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        safetensors_file({key: tensor})


def test_no_data_is_read_for_the_size() -> None:
    tensor = ArrayTensor(np.zeros((100, 100), np.float32))
    assert safetensors_file({"w": tensor}).size > 40_000
    assert tensor.reads == 0
