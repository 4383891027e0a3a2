"""Tree specs of the old formats: any tree comes back; nothing that a pickle names is run; sizes are bounded."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import h5py
import pytest

from ckptfs.errors import CkptfsError, CorruptHeader, Unsafe
from ckptfs.formats.cerebras.legacy_spec import parse_legacy_spec
from ckptfs.formats.cerebras.reader import open_h5
from ckptfs.formats.source import Container
from ckptfs.tensors.cache import TileCache
from tests.effort import MAX_EFFORT, measured
from tests.formats.cerebras.legacy_specs import Call, Class, leaf, spec_hex, spec_pickle, tree
from tests.formats.hdf5.h5_files import DATA

NODE = Class("torch.utils._pytree", "TreeSpec")


def parse(root: dict[str, Any]) -> Container:
    return parse_legacy_spec(spec_hex(root), "c.mdl")[0]


def random_state(rng: random.Random, depth: int) -> Any:
    """A nested state whose leaves are None."""
    n = rng.randrange(4)
    if depth == 0 or rng.random() < 0.3:
        return None
    children = [random_state(rng, depth - 1) for _ in range(n)]
    kind = rng.choice([dict, list, tuple])
    return {rng.choice([f"k{i}.x", i]): child for i, child in enumerate(children)} if kind is dict else kind(children)


def as_spec(state: Any) -> dict[str, Any]:
    if state is None:
        return leaf()
    if isinstance(state, dict):
        return tree("dict", list(state), *map(as_spec, state.values()))
    return tree(type(state).__name__, None, *map(as_spec, state))


def flattened(state: Any, prefix: str = "") -> list[str]:
    if state is None:
        return [prefix]
    parts = state.items() if isinstance(state, dict) else enumerate(state)
    return [key for part, child in parts for key in flattened(child, f"{prefix}.{part}" if prefix else str(part))]


def rebuilt(node: Container | str) -> Any:
    if isinstance(node, str):
        return None
    children = [rebuilt(child) for child in node.children]
    if node.keys is not None:
        return dict(zip(node.keys, children, strict=True))
    return {"list": list, "tuple": tuple}[node.type](children)


@pytest.mark.parametrize("seed", range(30))
def test_any_tree(seed: int) -> None:
    state = {"a": random_state(random.Random(seed), 5), "b": None, 3: random_state(random.Random(seed + 100), 4)}
    made, keys, warnings = parse_legacy_spec(spec_hex(as_spec(state)), "c.mdl")
    assert rebuilt(made) == state
    assert keys == flattened(state)
    assert warnings == []


@pytest.mark.parametrize(
    ("kind", "context", "want"),
    [
        (Class("collections", "OrderedDict"), ["x"], ("OrderedDict", ("x",))),
        (Class("collections", "defaultdict"), [Call("dill._dill", "_load_type", "int"), ["x"]], ("dict", ("x",))),
        (Class("collections", "deque"), 5, ("deque", None)),
        (Class("collections", "namedtuple"), Class("elsewhere", "Point"), ("namedtuple", None)),
        (Class("cerebras_pytorch.utils.tensor_scalar_dict", "TensorScalarDict"), ["x"], ("dict", ("x",))),
        (Class("any.module", "AnyDict"), ["x"], ("dict", ("x",))),
    ],
)
def test_containers(kind: object, context: object, want: tuple[str, Any]) -> None:
    node = parse(tree(kind, context, leaf()))
    assert (node.type, node.keys) == want


def test_unknown_dicts_are_reported() -> None:
    root = tree("dict", ["a"], tree(Class("any.module", "AnyDict"), ["x"], leaf()))
    assert parse_legacy_spec(spec_hex(root), "c.mdl")[2] == [
        "a: is a any.module.AnyDict, which is not known; it is shown as a dict"
    ]


@pytest.mark.parametrize(
    "call",
    [
        Call("os", "system", "touch {marker}"),
        Call("io", "open", "{marker}", "w"),
        Call("builtins", "eval", "open('{marker}', 'w')"),
        Call("builtins", "getattr", Class("os", "path"), "join"),
        Call("dill._dill", "_create_code", "x"),
        Call("dill._dill", "_import_module", "os"),
        Call("torch.utils._pytree", "tree_map", "x"),
    ],
    ids=lambda call: f"{call.function.module}.{call.function.name}",
)
@pytest.mark.parametrize("where", ["root", "type", "context", "key", "factory", "children"])
def test_nothing_is_called(call: Call, where: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    call = Call(
        call.function.module,
        call.function.name,
        *(arg.format(marker=marker) if isinstance(arg, str) else arg for arg in call.args),
    )
    roots: dict[str, object] = {
        "root": call,
        "type": tree(call, ["a"], leaf()),
        "context": tree("dict", call, leaf()),
        "key": tree("dict", ["a", call], leaf(), leaf()),
        "factory": tree(Class("collections", "defaultdict"), [call, ["a"]], leaf()),
        "children": {**tree("dict", ["a"], leaf()), "children_specs": call},
    }
    with pytest.raises(Unsafe, match=f"calls {call.function.module}.{call.function.name}"):
        parse_legacy_spec(spec_pickle(roots[where]).hex(), "c.mdl")
    assert not marker.exists()


def nested(depth: int) -> bytes:
    """A list in a list in a list …, written without recursion."""
    kind = b"X\4\0\0\0typeX\n\0\0\0dill._dillX\n\0\0\0_load_type\x93X\4\0\0\0list\x85R"
    start = b"ctorch.utils._pytree\nTreeSpec\n)\x81}(" + kind + b"X\7\0\0\0contextNX\x0e\0\0\0children_specs]"
    return b"\x80\4" + (start + b"(") * depth + start + b"ub" + b"eub" * depth + b"."


def shared(depth: int) -> bytes:
    """Each node holds the one below twice: 2 ** depth leaves in a few hundred bytes."""
    data = b"\x80\4" + spec_pickle(leaf())[2:-1] + b"q\0"
    for i in range(depth):
        node = spec_pickle(tree("list", None))[2:-1]
        data += node.replace(b"](e", b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"e") + b"q" + bytes([i + 1])
    return data + b"."


BOMBS = {
    "deep": nested(5_000),
    "very deep": nested(200_000),
    "shared": shared(60),
    "huge text": b"\x80\4\x8d" + (1 << 60).to_bytes(8, "little") + b"x.",
    "huge memo": b"\x80\4Nr\xff\xff\xff\x7f.",
    "marks": b"\x80\4" + b"(" * 100_000 + b".",
    "circle": b"\x80\4ctorch.utils._pytree\nTreeSpec\n)\x81q\0}(X\4\0\0\0typeccollections\ndeque\nX\7\0\0\0contextN"
    b"X\x0e\0\0\0children_specs](h\0eub.",
    "no node": pickle.dumps({"a": 1}, 4),
    "one leaf": spec_pickle(leaf()),
    "empty": b"",
    "protocol 0": pickle.dumps([1], 0),
    "too few keys": spec_pickle(tree("dict", ["a"], leaf(), leaf())),
    "no keys": spec_pickle(tree("dict", None, leaf())),
    "unhashable": spec_pickle(tree("dict", [["a"]], leaf())),
    "no type": spec_pickle(tree(5, ["a"], leaf())),
    "unknown": spec_pickle(tree(Class("any.module", "Thing"), None, leaf())),
    "children": spec_pickle({**tree("list", None), "children_specs": 5}),
    "other class": b"\x80\4ctorch.utils._pytree\nTreeSpec\n.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    with measured() as effort, pytest.raises(CorruptHeader) as caught:
        parse_legacy_spec(BOMBS[name].hex(), "c.mdl")
    assert str(caught.value).startswith("c.mdl: ")
    assert "\n" not in str(caught.value)
    assert effort() < MAX_EFFORT


def test_sharing_within_reason() -> None:
    made = parse_legacy_spec(shared(3).hex(), "c.mdl")[0]
    assert rebuilt(made) == [[[None, None], [None, None]], [[None, None], [None, None]]]


@pytest.mark.parametrize("seed", range(200))
def test_damaged_pickles(seed: int) -> None:
    """Whatever the bytes are, there is a tree or one of our errors."""
    with h5py.File(DATA / "legacy" / "v04_basic.mdl") as file:
        data = bytearray(bytes.fromhex(file.attrs["__spec__"]))
    rng = random.Random(seed)
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if seed % 3 == 0:
        del data[rng.randrange(len(data)) :]
    try:
        made, keys, _ = parse_legacy_spec(data.hex(), "c.mdl")
    except CkptfsError as error:
        assert str(error).startswith("c.mdl: ")
    else:
        assert isinstance(made, Container)
        assert len(keys) <= 22


@pytest.mark.parametrize("spec", ["zz", "8", "", '[null, "[1]"]', 5, b"\x80\4N."])
def test_specs_of_another_kind(tmp_path: Path, spec: object) -> None:
    with h5py.File(tmp_path / "c.mdl", "w") as file:
        file.attrs["__spec__"] = spec
        file.attrs["__version__"] = 0.4
    with pytest.raises(CorruptHeader, match=r"c\.mdl"):
        open_h5(tmp_path / "c.mdl", TileCache())


def test_payload_of_the_fixture_never_runs() -> None:
    """The reference creates that file as soon as it opens the checkpoint."""
    marker = Path("/tmp/ckptfs_fixture_marker")  # the name stands in the pickle
    marker.unlink(missing_ok=True)
    with pytest.raises(Unsafe, match=r"calls io\.open"):
        open_h5(DATA / "h5" / "damaged" / "evil_spec_v04.mdl", TileCache())
    assert not marker.exists()
