"""The state dict around the model, from one release to another: everything is kept, but for a few places.

A checkpoint is its tree of containers and an item for each leaf. Only containers on the way to a change are made
anew; a leaf keeps the name of its item, whatever key it is found under.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ckptfs.conversion.releases.steps import Model
from ckptfs.errors import ConfigError
from ckptfs.formats.source import Container, Item, Source
from ckptfs.tensors.ranges import to_numpy
from ckptfs.tensors.tensor import n_elements

MODEL, METADATA = "model", "__metadata__"
MAX_VALUES, MAX_DEPTH = 100_000, 100
Child: TypeAlias = Container | str


@dataclass(slots=True)
class State:
    """The top level of a state dict under change."""

    top: dict[object, Child]
    items: dict[str, Item]
    model: Model
    metadata: list[Mapping[str, Any]] = field(default_factory=list)
    kind: str = "dict"
    before: tuple[Container, Model] | None = None
    """The model's node and keys as they were."""


def opened(source: Source) -> State:
    """The state of *source*; where it has no states, all of it is the model."""
    tree = source.tree
    if tree is None or tree.keys is None or MODEL not in tree.keys:
        return State({}, dict(source.items), dict(source.items), list(source.metadata))
    top = dict(zip(tree.keys, tree.children, strict=True))
    model = top[MODEL]
    prefix = f"{MODEL}."
    inner = {k.removeprefix(prefix): i for k, i in source.items.items() if k.startswith(prefix)}
    before = (model, inner) if isinstance(model, Container) else None
    top[MODEL] = top.pop(MODEL)
    return State(top, dict(source.items), inner, list(source.metadata), tree.type, before)


def closed(state: State, source: Source) -> Source:
    """*source* with that state: other states in their order, then the model, what is new, and ``__metadata__``."""
    top = {**state.top, MODEL: _model_node(state)}
    if METADATA in top:
        top[METADATA] = top.pop(METADATA)
    tree = Container(state.kind, tuple(top), tuple(top.values()))
    return replace(source, tree=tree, items=_untangled(tree, state.items), metadata=state.metadata)


def _model_node(state: State) -> Container:
    """The model's node: the old one where no key changed, else a dict of flattened keys, their items added."""
    if state.before is not None and state.model is state.before[1]:
        return state.before[0]
    kind = "OrderedDict" if state.before is not None and state.before[0].type == "OrderedDict" else "dict"
    state.items = {k: i for k, i in state.items.items() if not k.startswith(f"{MODEL}.")}
    state.items |= {f"{MODEL}.{key}": item for key, item in state.model.items()}
    return Container(kind, tuple(state.model), tuple(f"{MODEL}.{key}" for key in state.model))


def keep_model_only(state: State) -> None:
    """Leave out all other states; the releases before 1.7 named their parameters otherwise."""
    state.top, state.metadata = {}, []


def put(state: State, key: str, value: object) -> None:
    """Set the top-level state *key* to *value*: dicts and lists with numbers, texts, None or items in them."""
    state.top[key] = _made(state.items, key, value)


def note(state: State, version: str, model: str, config: Mapping[str, Any]) -> None:
    """Append the entry of a conversion of *model* to ``__metadata__``; *config* is the whole new config."""
    _check_size(config)
    entry = {"version": version, "model_name": model, "params": config}
    old = state.top.pop(METADATA, None)
    held = old.children if isinstance(old, Container) and old.keys is None else ()
    made = _made(state.items, f"{METADATA}.{len(held)}", entry)
    state.top[METADATA] = Container("list", None, (*held, made))
    state.metadata = [*state.metadata, entry]


def catch_up_scheduler(state: State) -> None:
    """``lr_scheduler.last_epoch`` counts as ``global_step`` does: before 2.0 it could lag behind.

    Schedulers inside a sequence keep their own count.
    """
    step, epoch = (_leaf(state, key) for key in (("global_step",), ("lr_scheduler", "last_epoch")))
    if step is None or epoch is None or _number(step) is None:
        return
    if _number(step) != _number(epoch):
        state.items[epoch.key] = replace(step, key=epoch.key)


def move_sparsity(state: State) -> None:
    """Masks from the optimizer's sparsity state to the model, beside their weights; counters to ``sparsity``."""
    optimizer = state.top.get("optimizer")
    old = child(optimizer, "sparsity")
    per_weight = child(old, "state")
    if not isinstance(optimizer, Container) or not isinstance(per_weight, Container) or per_weight.keys is None:
        return
    for name, one in zip(per_weight.keys, per_weight.children, strict=True):
        mask = child(one, "mask")
        weight = next((key for key in (str(name), f"{MODEL}.{name}") if key in state.model), None)
        if isinstance(mask, str) and weight is not None:
            state.model = {**state.model, f"{weight}_mask": state.items[mask]}
    step, indices = child(old, "step"), _indices(state, old)
    counters: dict[object, object] = {"step": state.items[step]} if isinstance(step, str) else {}
    if indices:
        counters["sparsity"] = indices
    state.top["optimizer"] = _without(optimizer, "sparsity")
    if "sparsity" not in state.top:
        put(state, "sparsity", counters)


def _indices(state: State, optimizer: Child | None) -> dict[object, object]:
    """How far each weight's schedule is: the groups of a sparsity *optimizer* count, their weights share the count."""
    found: dict[object, object] = {}
    for group in _children(child(optimizer, "param_groups")):
        step, names = child(child(group, "sparsity"), "step"), child(group, "param_names")
        if isinstance(step, str):
            items = [state.items[name] for name in _children(names) if isinstance(name, str)]
            found |= {item.value: {"index": state.items[step]} for item in items if item.kind == "string"}
    return found


def _children(node: Child | None) -> tuple[Child, ...]:
    """What a list or a tuple holds; nothing for anything else."""
    return node.children if isinstance(node, Container) and node.keys is None else ()


def without(source: Source, keys: Collection[str]) -> Source:
    """*source* without the leaves *keys*; positions in sequences move up."""
    tree = source.tree
    items = {key: item for key, item in source.items.items() if key not in keys}
    return replace(source, items=items, tree=_pruned(tree, keys) if tree is not None else None)


def _pruned(node: Container, keys: Collection[str]) -> Container:
    kept = [i for i, child in enumerate(node.children) if not isinstance(child, str) or child not in keys]
    children = tuple(c if isinstance(c := node.children[i], str) else _pruned(c, keys) for i in kept)
    return Container(node.type, tuple(node.keys[i] for i in kept) if node.keys is not None else None, children)


def child(node: Child | None, key: object) -> Child | None:
    """What a dict holds under *key*; None where it holds nothing or is no dict."""
    if not isinstance(node, Container) or node.keys is None or key not in node.keys:
        return None
    return node.children[node.keys.index(key)]


def _without(node: Container, key: object) -> Container:
    assert node.keys is not None
    kept = [(k, c) for k, c in zip(node.keys, node.children, strict=True) if k != key]
    return Container(node.type, tuple(k for k, _ in kept), tuple(c for _, c in kept))


def _leaf(state: State, path: Sequence[str]) -> Item | None:
    found = state.top.get(path[0])
    for key in path[1:]:
        found = child(found, key)
    return replace(state.items[found], key=found) if isinstance(found, str) else None


def _number(item: Item) -> object:
    """The number of a scalar, or of a tensor with one element (which is read); None for anything else."""
    if item.tensor is not None:
        return to_numpy(item.tensor).reshape(-1)[0].item() if n_elements(item.tensor.shape) == 1 else None
    return item.value if item.kind == "scalar" else None


def _made(items: dict[str, Item], key: str, value: object) -> Child:
    """The node or leaf of a plain value, its items added under *key* and below."""
    if isinstance(value, Item):
        items[key] = replace(value, key=key)
        return key
    if isinstance(value, Mapping):
        keys = tuple(k if k is None or isinstance(k, str | int | float) else str(k) for k in value)
        parts = [_made(items, f"{key}.{k}", v) for k, v in zip(keys, value.values(), strict=True)]
        return Container("dict", keys, tuple(parts))
    if isinstance(value, list | tuple):
        return Container("list", None, tuple(_made(items, f"{key}.{i}", v) for i, v in enumerate(value)))
    if value is None:
        items[key] = Item(key, "none")
    elif isinstance(value, bool | int | float):
        items[key] = Item(key, "scalar", value=value)
    else:
        items[key] = Item(key, "string", value=str(value))
    return key


def _check_size(config: Mapping[str, Any]) -> None:
    """Refuse a config that a few lines of YAML can blow up to, or that contains itself."""
    todo: list[tuple[object, int]] = [(config, 0)]
    seen = 0
    while todo:
        value, depth = todo.pop()
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        seen += len(inner)
        if seen > MAX_VALUES or depth > MAX_DEPTH:
            raise ConfigError(f"the config has more than {MAX_VALUES} values or {MAX_DEPTH} levels; is it a model's?")
        todo.extend((one, depth + 1) for one in inner)


def _untangled(tree: Container, items: Mapping[str, Item]) -> dict[str, Item]:
    """The items of the tree's leaves in order, each with its own name; those with one tensor are tied to the first."""
    result: dict[str, Item] = {}
    first: dict[int, str] = {}
    for key in _leaves(tree):
        item = items[key]
        tied = first.setdefault(id(item.tensor), key) if item.tensor is not None else key
        result[key] = replace(item, key=key, tied_to=None if tied == key else tied)
    return result


def _leaves(tree: Container) -> Iterator[str]:
    for one in tree.children:
        if isinstance(one, str):
            yield one
        else:
            yield from _leaves(one)
