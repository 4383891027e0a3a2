"""The pickle machine: plain data comes out, nothing else happens."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import gc
import os
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.errors import CkptfsError, CorruptHeader, Unsafe
from ckptfs.formats.torch.globals import GLOBALS, Box, Global, Storage, StoredTensor
from ckptfs.formats.torch.unpickler import unpickle


def plain(value: object) -> object:
    """Python's own containers for boxes; dicts as lists of pairs."""
    if isinstance(value, Box) and value.keys is not None:
        return [(plain(key), plain(item)) for key, item in zip(value.keys, value.values, strict=True)]
    if isinstance(value, Box):
        return (value.type, [plain(item) for item in value.values])
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


def expected(value: object) -> object:
    """The same form, made of the original value."""
    if isinstance(value, dict):
        return [(expected(key), expected(item)) for key, item in value.items()]
    if isinstance(value, (list, deque)):
        return (type(value).__name__, [expected(item) for item in value])
    if isinstance(value, tuple):
        return tuple(expected(item) for item in value)
    return value


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(allow_nan=False), st.text(), st.binary()
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(deque),
        st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(value=values, protocol=st.integers(2, 5))
def test_plain_data_round_trips(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    result = unpickle(b"junk" + data + b"rest", "p", 4)
    assert plain(result.value) == expected(value)
    assert result.stop == 4 + len(data)


def test_types_of_containers() -> None:
    value = [{}, OrderedDict(), defaultdict(list, a=1), {1}, frozenset({2}), deque([3])]
    for protocol in range(2, 6):
        made = unpickle(pickle.dumps(value, protocol), "p").value
        assert isinstance(made, Box)
        assert [box.type for box in made.values if isinstance(box, Box)] == [
            "dict", "OrderedDict", "dict", "set", "set", "deque"
        ]  # fmt: skip


def test_a_shared_value_stays_shared() -> None:
    shared = [1]
    made = unpickle(pickle.dumps([shared, shared], 2), "p").value
    assert isinstance(made, Box)
    assert made.values[0] is made.values[1]


class Evil:
    """Pickles as a call of *function*."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Plain:
    pass


def attacks(marker: Path) -> dict[str, bytes]:
    """Pickles that create *marker* (or do worse) when Python loads them."""
    command = f"touch {marker}"
    code = f"open({str(marker)!r}, 'w').close()"
    path = str(marker).encode()
    made: dict[str, bytes] = {}
    for protocol in (2, 4, 5):
        for name, value in {
            "system": Evil(os.system, command),
            "eval": Evil(eval, code),
            "exec": Evil(exec, code),
            "nested": {"model": OrderedDict(weight=[(Evil(os.system, command),)])},
            "partial": functools.partial(os.system, command),
            "getattr": Evil(getattr, "", "join"),
            "import": Evil(__import__, "os"),
            "copyreg": Evil(copyreg._reconstructor, Plain, object, None),  # type: ignore[attr-defined]
            "instance": Plain(),
            "counter": Counter(a=1),
        }.items():
            made[f"{name}{protocol}"] = pickle.dumps(value, protocol)
    text = command.encode()
    made |= {
        "dotted": b"\x80\x04\x8c\x0bcollections\x8c\x20OrderedDict.__init__.__globals__\x93.",
        "reduce of a reduce": b"\x80\x02ccollections\nOrderedDict\n)Rcos\nsystem\n(" + _x(text) + b"tRs.",
        "inst": b"\x80\x02(S'" + text + b"'\nios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\n" + _x(text) + b"o.",
        "newobj_ex": b"\x80\x02cos\nsystem\n" + _x(text) + b"\x85}\x92.",
        "build on a global": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\0\0\0aK\x01sb.",
        "setattr by build": b"\x80\x02ccollections\nOrderedDict\nN}X\x06\0\0\0__call__K\x01s\x86b.",
        "build on a storage": b"\x80\x02" + STORAGE + b"}b.",
        "build on a tensor": b"\x80\x02" + TENSOR + b"(K\x01K\x02tb.",
        "call of a text": b"\x80\x02X\x01\0\0\0a)R.",
        "call of a list": b"\x80\x02])R.",
        "call of a tensor": b"\x80\x02" + TENSOR + b")R.",
        "call of a storage class": b"\x80\x02ctorch\nFloatStorage\nK\x05\x85R.",
        "load from bytes": b"\x80\x02ctorch.storage\n_load_from_bytes\nC\x01a\x85R.",
        "rebuild from": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nN" + _x(text) + b"\x85}tR.",
        "codecs": b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x03\0\0\0zip\x86R.",
        "extension": b"\x80\x02\x82\x01.",
        "text persistent id": b"\x80\x02P" + path + b"\n.",
        "next buffer": b"\x80\x05\x97.",
    }
    return made


def _x(text: bytes) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text


STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\0K\x02K\x03\x86K\x03K\x01\x86\x89}tR"
NAMES = sorted(attacks(Path("x")))


@pytest.mark.parametrize("name", NAMES)
def test_attacks_are_refused(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    before = dict(GLOBALS)
    with pytest.raises((Unsafe, CorruptHeader)) as caught:
        unpickle(attacks(marker)[name], "file")
    assert not marker.exists()
    assert before == GLOBALS
    assert str(caught.value).startswith("file: ")
    assert "\n" not in str(caught.value)


def test_the_attacks_work_on_python(tmp_path: Path) -> None:
    """Else the test above could not fail."""
    marker = tmp_path / "marker"
    for name in ("system2", "eval4", "exec5", "nested2", "inst", "obj"):
        pickle.loads(attacks(marker)[name])  # what ckptfs never does
        assert marker.exists(), name
        marker.unlink()


def test_the_refusal_names_the_global() -> None:
    with pytest.raises(Unsafe, match=r"posix\.system") as caught:
        unpickle(pickle.dumps({"a": Evil(os.system, "true")}), "x.bin")
    assert caught.value.exit_code == 1


def test_a_tensor() -> None:
    made = unpickle(b"\x80\x02" + TENSOR + b".", "p")
    tensor = made.value
    assert isinstance(tensor, StoredTensor)
    assert (tensor.dtype.name, tensor.offset, tensor.shape, tensor.strides) == ("float32", 0, (2, 3), (3, 1))
    assert isinstance(made.storages["0"], Storage)
    assert made.storages == {"0": tensor.storage}
    assert made.storages["0"].n_elements == 6


def tensor_of(offset: bytes = b"K\0", shape: bytes = b"K\x02K\x03\x86", strides: bytes = b"K\x03K\x01\x86") -> bytes:
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + offset + shape + strides + b"\x89}tR."


HUGE = b"\x8a\x09" + (1 << 64).to_bytes(9, "little")


@pytest.mark.parametrize(
    "data",
    [
        tensor_of(offset=b"K\x01"),
        tensor_of(offset=b"J\xff\xff\xff\xff"),
        tensor_of(offset=HUGE),
        tensor_of(offset=b"\x88"),
        tensor_of(shape=b"K\x03K\x03\x86"),
        tensor_of(shape=HUGE + b"K\0\x86"),
        tensor_of(shape=b"J\xff\xff\xff\xffK\x03\x86"),
        tensor_of(shape=b"K\x06\x85"),
        tensor_of(shape=b"X\x01\0\0\0a"),
        tensor_of(strides=b"K\x04K\x01\x86"),
        tensor_of(strides=b"J\xff\xff\xff\xffK\x01\x86"),
        tensor_of(strides=HUGE + HUGE + b"\x86"),
        tensor_of(shape=b"(" + b"K\x01" * 33 + b"t", strides=b"(" + b"K\x01" * 33 + b"t"),
        tensor_of(shape=HUGE + b"K\x01\x86", strides=b"K\0K\0\x86"),
        tensor_of().replace(b"K\x06tQ", b"J\xff\xff\xff\xfftQ"),
        tensor_of().replace(b"X\x07\0\0\0storage", b"X\x07\0\0\0Storage"),
        tensor_of().replace(b"torch\nFloatStorage", b"torch\nfloat32"),
        tensor_of().replace(b"ctorch\nFloatStorage", b"ctorch.storage\nUntypedStorage"),
    ],
)
def test_tensors_outside_their_storage(data: bytes) -> None:
    with pytest.raises(CorruptHeader):
        unpickle(data, "p")


def test_the_same_tensor_untouched_is_accepted() -> None:
    assert isinstance(unpickle(tensor_of(), "p").value, StoredTensor)


BOMBS = {
    "memo of 4 billion": b"\x80\x02}r\xff\xff\xff\xff0.",
    "text of 2**63 bytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fabc.",
    "bytes of 2**63 bytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fabc.",
    "integer of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "integer of 300 bytes": b"\x80\x02\x8b\x2c\x01\0\0" + b"\x01" * 300 + b".",
    "frame past the end": b"\x80\x04\x95" + b"\xff" * 8 + b".",
    "nothing": b"",
    "no end": b"\x80\x02}",
    "empty stack": b"\x80\x020.",
    "no mark": b"\x80\x02t.",
    "memo of nothing": b"\x80\x02h\x05.",
    "old protocol": b"\x80\x01}.",
    "text opcodes": b"(dp0\n.",
    "odd items": b"\x80\x02}(K\x01u.",
    "items of a list": b"\x80\x02](K\x01K\x02u.",
    "append to a dict": b"\x80\x02}K\x01a.",
    "broken text": b"\x80\x02X\x01\0\0\0\xff.",
    "endless name": b"\x80\x02c" + b"a" * 5000,
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bombs_and_damage(name: str) -> None:
    with pytest.raises(CorruptHeader):
        unpickle(BOMBS[name], "p")


def test_copies_have_a_budget() -> None:
    """A short pickle that copies a long tuple again and again would run for hours."""
    long = b"(" + b"N" * 1_000_000 + b"tq\x010"
    data = b"\x80\x02" + long + b"c__builtin__\nset\nq\x020" + b"h\x02h\x01\x85R0" * 1_000_000 + b"N."
    with pytest.raises(CorruptHeader, match="over and over"):
        unpickle(data, "p")


def test_deep_and_cyclic_values_are_only_values() -> None:
    deep = b"\x80\x02N" + b"\x85" * 100_000 + b"."
    assert isinstance(unpickle(deep, "p").value, tuple)
    cycle = unpickle(b"\x80\x02]q\x00h\x00a.", "p").value
    assert isinstance(cycle, Box)
    assert cycle.values[0] is cycle


def test_keys_are_never_hashed() -> None:
    """A key of nested tuples takes 2**60 steps to hash."""
    key = b"N" + b"q\x00h\x00\x86" * 60
    made = unpickle(b"\x80\x02}" + key + b"K\x01s.", "p").value
    assert isinstance(made, Box)
    assert made.values == [1]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60), cut=st.integers(0, 200))
def test_any_bytes_give_a_value_or_our_error(data: bytes, cut: int) -> None:
    whole = b"\x80\x02" + TENSOR + b"."
    for sample in (b"\x80\x02" + data + b".", whole[:cut] + data + whole[cut:]):
        try:
            unpickle(sample, "p")
        except CkptfsError as error:
            assert "\n" not in str(error)


def test_the_table_holds_nothing_of_python_or_torch() -> None:
    assert all(isinstance(row, Global) for row in GLOBALS.values())
    modules = {row.build.__module__ for row in GLOBALS.values() if row.build is not None}
    assert modules == {"ckptfs.formats.torch.globals"}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("data", [b"\x80\x02}.", b"\x80\x02}"], ids=["sound", "cut"])
def test_the_garbage_collector_is_left_as_it_was(data: bytes, enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(CorruptHeader):
            unpickle(data, "f")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
