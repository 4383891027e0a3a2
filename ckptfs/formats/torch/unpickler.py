"""What ``torch.save`` pickled, as plain data: a pickle machine that can call nothing.

Python's own unpickler is a poor base for hostile files: the next opcode may call, set up or hash any value, and a
ten-byte file can make it allocate gigabytes. This machine knows the opcodes of protocols 2 to 5 that state dicts
use. A global is a row of a table or is refused, containers are `Box`es that never hash a key, and REDUCE accepts
only rows of the table. Time and memory grow linearly with the pickle's length.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptfs.errors import CorruptHeader, Unsafe
from ckptfs.formats.torch.globals import GLOBALS, MAX_ARGS, Box, Global, Storage, extend, is_size

MAX_PICKLE = 64 << 20
"""Bytes; 100,000 tensors take about 30 MB."""
MAX_OBJECTS = 2_000_000
"""Containers, and again entries of the memo: a byte of pickle can ask for 200 bytes of memory. 100,000 tensors take
800,000 and 600,000."""
MAX_MARKS = 10_000
"""Containers that are open at once."""
OBJECT = "object"
"""Type of a `Box` whose entries are the attributes that BUILD sets."""
Find = Callable[[str, str], Global | None]
_MAX_LONG = 256
"""Bytes of an integer."""


@dataclass(frozen=True, slots=True)
class Pickle:
    """An unpickled value; *stop* is the position behind the pickle, *storages* are those it names, by name."""

    value: object
    stop: int
    storages: dict[str, Storage]


def known_global(module: str, name: str) -> Global | None:
    """The row of `GLOBALS`, None when there is none."""
    return GLOBALS.get((module, name))


def unpickle(data: bytes, path: str, start: int = 0, find: Find = known_global) -> Pickle:
    """The value of the pickle that begins at *start*; *find* gives the value of a global, None to refuse it.

    Values are None, bool, int, float, str, bytes, tuple, `Box`, `StoredTensor`, `Opaque` or `Global`. Raises
    `Unsafe` naming the global that is not in `GLOBALS`, `CorruptHeader` for everything else.
    """
    machine = _Machine(data, start, path, find)
    try:
        with _no_collection():
            return _run(machine)
    except LookupError as error:
        raise CorruptHeader(path, f"the pickle breaks off or lacks a value near its byte {machine.pos}") from error
    except (ValueError, struct.error) as error:
        raise CorruptHeader(path, f"the pickle is damaged near its byte {machine.pos}: {error}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the collector: what is unpickled stays, and looking through it takes up to half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(slots=True)
class _Machine:
    data: bytes
    pos: int
    path: str
    find: Find
    stack: list[object] = field(default_factory=list)
    marked: list[list[object]] = field(default_factory=list)
    """The stacks below each MARK."""
    memo: dict[int, object] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    n_objects: int = 0
    work: int = 0
    """Values that builders have been given to copy; without a bound a short pickle could run for years."""


def _run(m: _Machine) -> Pickle:
    while True:
        opcode = m.data[m.pos]
        m.pos += 1
        if opcode == _STOP:
            return Pickle(m.stack.pop(), m.pos, m.storages)
        step = _OPCODES.get(opcode)
        if step is None:
            raise ValueError(f"opcode {bytes([opcode])!r} is not one that torch writes for a state dict")
        step(m)


# -- opcodes --------------------------------------------------------------------------------------------------------


def _count(m: _Machine) -> None:
    """Account for a container, before it is made."""
    m.n_objects += 1
    if m.n_objects > MAX_OBJECTS:
        raise ValueError(f"it makes more than {MAX_OBJECTS} containers")


def _take(m: _Machine, n: int) -> bytes:
    stop = m.pos + n
    if stop > len(m.data):
        raise IndexError
    taken = m.data[m.pos : stop]
    m.pos = stop
    return taken


def _unsigned(m: _Machine, n: int) -> int:
    return int.from_bytes(_take(m, n), "little")


def _line(m: _Machine) -> str:
    stop = m.data.find(b"\n", m.pos, m.pos + 1000)
    if stop < 0:
        raise ValueError("a global's name does not end")
    return _take(m, stop + 1 - m.pos)[:-1].decode("utf-8")


def _pop_marked(m: _Machine) -> list[object]:
    """The values above the last MARK."""
    above = m.stack
    m.stack = m.marked.pop()
    return above


def _push_global(m: _Machine, module: object, name: object) -> None:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("a global's name is not text")
    known = m.find(module, name)
    if known is None:
        what = f"its pickle names {module[:100]}.{name[:100]}, which ckptfs never imports or calls"
        raise Unsafe(m.path, f"{what}; save plain tensors, numbers and texts instead")
    m.stack.append(known)


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    _push_global(m, module, name)


def _reduce(m: _Machine) -> None:
    args, function = m.stack.pop(), m.stack.pop()
    if not isinstance(function, Global) or function.build is None:
        raise ValueError(f"a call of {function.name if isinstance(function, Global) else type(function).__name__}")
    if not isinstance(args, tuple) or len(args) > MAX_ARGS:
        raise ValueError(f"a call of {function.name} with too many arguments")
    for arg in args:
        m.work += len(arg.values) if isinstance(arg, Box) else len(arg) if isinstance(arg, (str, tuple)) else 0
        if m.work > MAX_PICKLE:
            raise ValueError("it copies the same values over and over")
    _count(m)
    m.stack.append(function.build(args))


def _build(m: _Machine) -> None:
    """Set an object's state. Attributes of a dict (``state_dict()._metadata``) are left out; others have none."""
    state, box = m.stack.pop(), m.stack[-1]
    if not isinstance(box, Box):
        raise ValueError("a state for something that cannot have one")
    if box.type == OBJECT and isinstance(state, Box) and state.keys is not None:
        box.keys, box.values = state.keys, state.values  # shared, not copied: one state may be set often


def _persistent(m: _Machine) -> None:
    """``("storage", class, name, device, n_elements[, view])``."""
    pid = m.stack.pop()
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], Global):
        raise ValueError("a persistent id is not a storage")
    kind, name, n_elements = pid[1], pid[2], pid[4]
    if kind.storage is None or not isinstance(name, str) or not is_size(n_elements):
        raise ValueError("a storage has no class, name or length")
    if len(pid) > 5 and pid[5] is not None:
        raise ValueError("a storage is a view of another one, as torch before 0.4 wrote them; save it again")
    storage = Storage(name, kind.storage, n_elements, typed="Untyped" not in kind.name)
    if m.storages.setdefault(name, storage) != storage:
        raise ValueError(f"storage {name[:100]!r} has two types or lengths")
    m.stack.append(storage)


def _set_items(m: _Machine, pairs: list[object]) -> None:
    box = m.stack[-1]
    if not isinstance(box, Box):
        raise ValueError("items for something that is not a dict")
    extend(box, pairs[::2], pairs[1::2])


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_items(m, [key, value])


def _append(m: _Machine, values: list[object]) -> None:
    box = m.stack[-1]
    if not isinstance(box, Box) or box.keys is not None:
        raise ValueError("values for something that is not a list or set")
    box.values += values


def _tuple_of(n: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        if len(m.stack) < n:
            raise IndexError
        _count(m)
        values = tuple(m.stack[-n:])
        del m.stack[-n:]
        m.stack.append(values)

    return step


def _long(m: _Machine, n: int) -> None:
    if n > _MAX_LONG:
        raise ValueError(f"an integer of {n} bytes")
    m.stack.append(int.from_bytes(_take(m, n), "little", signed=True))


# A checkpoint of 100,000 tensors has millions of the next five; they go without calls of their own.


def _get1(m: _Machine) -> None:
    m.stack.append(m.memo[m.data[m.pos]])
    m.pos += 1


def _get4(m: _Machine) -> None:
    m.stack.append(m.memo[_INT.unpack_from(m.data, m.pos)[0]])
    m.pos += 4


def _put1(m: _Machine) -> None:
    m.memo[m.data[m.pos]] = m.stack[-1]
    m.pos += 1


def _put4(m: _Machine) -> None:
    if len(m.memo) > MAX_OBJECTS:
        raise ValueError(f"it remembers more than {MAX_OBJECTS} values")
    m.memo[_INT.unpack_from(m.data, m.pos)[0]] = m.stack[-1]
    m.pos += 4


def _int1(m: _Machine) -> None:
    m.stack.append(m.data[m.pos])
    m.pos += 1


def _memoize(m: _Machine) -> None:
    if len(m.memo) > MAX_OBJECTS:
        raise ValueError(f"it remembers more than {MAX_OBJECTS} values")
    m.memo[len(m.memo)] = m.stack[-1]


def _mark(m: _Machine) -> None:
    if len(m.marked) > MAX_MARKS:
        raise ValueError(f"more than {MAX_MARKS} of its containers are open at once")
    m.marked.append(m.stack)
    m.stack = []


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.stack = m.marked.pop()


def _drop(m: _Machine) -> None:
    m.stack = m.marked.pop()


def _frame(m: _Machine) -> None:
    _take(m, 8)  # the length of the frame: a hint


def _protocol(m: _Machine) -> None:
    protocol = _unsigned(m, 1)
    if not 2 <= protocol <= 5:
        raise ValueError(f"pickle protocol {protocol}; ckptfs reads 2 to 5")


def _push(read: Callable[[_Machine], object]) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        value = read(m)  # may replace m.stack
        m.stack.append(value)

    return step


def _push_box(type_: str, *, is_dict: bool = False) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        _count(m)
        m.stack.append(Box(type_, [] if is_dict else None))

    return step


def _push_marked(make: Callable[[list[object]], object]) -> Callable[[_Machine], None]:
    """Pushes what *make* makes of the values above the last MARK."""

    def step(m: _Machine) -> None:
        _count(m)
        above = _pop_marked(m)
        m.stack.append(make(above))

    return step


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _text(m: _Machine, n: int) -> str:
    return _take(m, n).decode("utf-8")


_INT = struct.Struct("<I")
_STOP = ord(".")
# Names of the opcodes are pickle's (pickletools.opcodes has their meaning).
_OPCODES: dict[int, Callable[[_Machine], None]] = {
    ord(code): step
    for code, step in (
        ("\x80", _protocol),
        ("\x95", _frame),
        ("(", _mark),
        ("0", _pop),
        ("1", _drop),
        ("2", _push(lambda m: m.stack[-1])),  # DUP
        ("N", _constant(None)),
        ("\x88", _constant(True)),
        ("\x89", _constant(False)),
        ("J", _push(lambda m: struct.unpack("<i", _take(m, 4))[0])),  # BININT
        ("K", _int1),
        ("M", _push(lambda m: _unsigned(m, 2))),  # BININT2
        ("\x8a", lambda m: _long(m, _unsigned(m, 1))),  # LONG1
        ("\x8b", lambda m: _long(m, _unsigned(m, 4))),  # LONG4
        ("G", _push(lambda m: struct.unpack(">d", _take(m, 8))[0])),  # BINFLOAT
        ("X", _push(lambda m: _text(m, _unsigned(m, 4)))),  # BINUNICODE
        ("\x8c", _push(lambda m: _text(m, _unsigned(m, 1)))),
        ("\x8d", _push(lambda m: _text(m, _unsigned(m, 8)))),
        ("U", _push(lambda m: _take(m, _unsigned(m, 1)).decode("latin-1"))),  # SHORT_BINSTRING: Python 2
        ("T", _push(lambda m: _take(m, _unsigned(m, 4)).decode("latin-1"))),  # BINSTRING
        ("C", _push(lambda m: _take(m, _unsigned(m, 1)))),  # SHORT_BINBYTES
        ("B", _push(lambda m: _take(m, _unsigned(m, 4)))),  # BINBYTES
        ("\x8e", _push(lambda m: _take(m, _unsigned(m, 8)))),  # BINBYTES8
        ("\x96", _push(lambda m: _take(m, _unsigned(m, 8)))),  # BYTEARRAY8
        (")", _constant(())),
        ("\x85", _tuple_of(1)),
        ("\x86", _tuple_of(2)),
        ("\x87", _tuple_of(3)),
        ("t", _push_marked(tuple)),
        ("}", _push_box("dict", is_dict=True)),
        ("]", _push_box("list")),
        ("\x8f", _push_box("set")),
        ("\x91", _push_marked(lambda values: Box("set", None, values))),  # FROZENSET
        ("s", _set_item),
        ("u", lambda m: _set_items(m, _pop_marked(m))),
        ("a", lambda m: _append(m, [m.stack.pop()])),
        ("e", lambda m: _append(m, _pop_marked(m))),
        ("\x90", lambda m: _append(m, _pop_marked(m))),  # ADDITEMS
        ("q", _put1),
        ("r", _put4),
        ("\x94", _memoize),
        ("h", _get1),
        ("j", _get4),
        ("c", lambda m: _push_global(m, _line(m), _line(m))),
        ("\x93", _stack_global),
        ("R", _reduce),
        ("\x81", _reduce),  # NEWOBJ
        ("b", _build),
        ("Q", _persistent),
    )
}
