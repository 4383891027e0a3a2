"""Cutting into shards, the index, and sizes in words."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from ckptfs.formats.huggingface import hf_files, index_file, named_shards, shards
from tests.factories import ArrayTensor, tensor_of
from tests.formats.reading import content


def sized(*sizes: int) -> dict[str, ArrayTensor]:
    return {f"t{i}": tensor_of("uint8", (size,), i) for i, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "limit", "want"),
    [
        ((), 10, [[]]),
        ((4, 6), 10, [["t0", "t1"]]),
        ((4, 6, 1), 10, [["t0", "t1"], ["t2"]]),
        ((6, 6, 2, 6, 2, 2), 10, [["t0"], ["t1", "t2"], ["t3", "t4", "t5"]]),
        ((11, 1), 10, [["t0"], ["t1"]]),
        ((1, 11, 1, 9), 10, [["t0"], ["t1"], ["t2", "t3"]]),
        ((10, 0, 0), 10, [["t0", "t1", "t2"]]),
    ],
)
def test_fills_in_key_order(sizes: tuple[int, ...], limit: int, want: list[list[str]]) -> None:
    assert [list(part) for part in shards(sized(*sizes), limit)] == want


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_laws_of_shards(sizes: list[int], limit: int) -> None:
    tensors = sized(*sizes)
    parts = shards(tensors, limit)
    assert [pair for part in parts for pair in part.items()] == list(tensors.items())
    for part in parts:
        assert len(part) <= 1 or sum(t.shape[0] for t in part.values()) <= limit
    for part, after in pairwise(parts):
        assert sum(t.shape[0] for t in part.values()) + next(iter(after.values())).shape[0] > limit


def test_one_shard_has_no_number() -> None:
    assert list(hf_files(sized(3, 4), 100)) == ["model.safetensors"]
    assert list(hf_files({}, 100)) == ["model.safetensors"]


def test_several_shards_hold_everything_and_the_index_says_where() -> None:
    tensors = sized(6, 6, 2, 6)
    files = hf_files(tensors, 10)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert list(files) == [*names, "model.safetensors.index.json"]
    index = json.loads(content(files["model.safetensors.index.json"]))
    assert index["metadata"] == {"total_size": 20}
    for name in names:
        held = load(content(files[name]))
        assert {key for key, where in index["weight_map"].items() if where == name} == set(held)
        assert all(held[key].tobytes() == tensors[key].bytes for key in held)


def test_spelling_of_the_index() -> None:
    part = {"b": tensor_of("int8", (1,)), "a": tensor_of("int8", (2,))}
    sorted_index = {"metadata": {"total_size": 3}, "weight_map": {"a": "m", "b": "m"}}
    assert content(index_file({"m": part})).decode() == json.dumps(sorted_index, indent=2, sort_keys=True) + "\n"
    unsorted_index = {"metadata": {"total_size": 3}, "weight_map": {"b": "m", "a": "m"}}
    assert content(index_file({"m": part}, numbering="always")).decode() == json.dumps(unsorted_index, indent=4)


def test_numbers_and_index_even_for_one_shard_when_always() -> None:
    files = hf_files(sized(3), 100, numbering="always")
    assert list(files) == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    named = named_shards(sized(3), 100, stem="pytorch_model", suffix=".bin", numbering="always")
    assert list(named) == ["pytorch_model-00001-of-00001.bin"]
