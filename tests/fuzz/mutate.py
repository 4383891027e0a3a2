"""Damage done to files on purpose: bytes, JSON values and pickle opcodes. All of it follows from a seeded `Random`."""

from __future__ import annotations

import json
import pickletools
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Span = tuple[int, int]
NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 256, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
NUMBERS += (1 << 40, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)
TEXTS = (
    "",
    ".",
    "..",
    "/",
    "../../etc/passwd",
    "a/b",
    "\0",
    "\ud800",
    "\udc80",
    "é" * 300,
    "[" * 3000,
    "-1",
    "x" * 70_000,
)
TEXTS += ("NaN", "torch.float32", "torch.", "float32", "__SUCCESS__", "<f4", "|V1", "|S0", "str")


def damage(rng: Random, data: bytes, spans: Sequence[Span] = (), other: bytes = b"") -> bytes:
    """*data* with one to six faults, most of them inside of *spans*; some bytes may come from *other*."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if not made:
            break
        fault = rng.choices(_FAULTS, _WEIGHTS)[0]
        fault(rng, made, _place(rng, len(made), spans), other)
    return bytes(made)


def _place(rng: Random, size: int, spans: Sequence[Span]) -> int:
    if spans and rng.random() < 0.85:
        start, stop = rng.choice(spans)
        return min(size - 1, rng.randrange(start, max(start + 1, stop)))
    return rng.randrange(size)


def _flip(rng: Random, made: bytearray, at: int, _: bytes) -> None:
    made[at] ^= 1 << rng.randrange(8)


def _set(rng: Random, made: bytearray, at: int, _: bytes) -> None:
    made[at] = rng.randrange(256)


def _number(rng: Random, made: bytearray, at: int, _: bytes) -> None:
    """An integer field of 1, 2, 4 or 8 bytes, most often at an even place."""
    width = rng.choice((1, 2, 4, 8))
    at -= at % width if rng.random() < 0.7 else 0
    value = rng.choice(NUMBERS) if rng.random() < 0.7 else rng.randrange(len(made) * 2)
    field = (value % (1 << 8 * width)).to_bytes(width, rng.choice(("little", "little", "big")))
    made[at : at + width] = field[: len(made) - at]


def _nudge(rng: Random, made: bytearray, at: int, _: bytes) -> None:
    """A number a little larger or smaller than it was."""
    width = rng.choice((1, 2, 4, 8))
    at -= at % width
    value = int.from_bytes(made[at : at + width], "little") + rng.choice((-8, -1, 1, 8, 16))
    made[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")[: len(made) - at]


def _pointer(rng: Random, made: bytearray, at: int, _: bytes) -> None:
    """One eight-byte field put in another one's place: makes circles and structures of the wrong kind."""
    at -= at % 8
    source = rng.randrange(len(made)) & ~7
    made[at : at + 8] = made[source : source + 8]


def _copy(rng: Random, made: bytearray, at: int, _: bytes) -> None:
    n = rng.choice((1, 4, 8, 16, 40, 512))
    source = rng.randrange(len(made))
    block = made[source : source + n]
    made[at : at + len(block)] = block


def _delete(rng: Random, made: bytearray, at: int, _: bytes) -> None:
    del made[at : at + rng.choice((1, 2, 4, 8, 16, 512))]


def _insert(rng: Random, made: bytearray, at: int, other: bytes) -> None:
    n = rng.choice((1, 2, 4, 8, 16, 512))
    start = rng.randrange(max(1, len(other) - n))
    made[at:at] = other[start : start + n] or rng.randbytes(n)


def _truncate(rng: Random, made: bytearray, at: int, _: bytes) -> None:
    del made[at:]


def _wipe(rng: Random, made: bytearray, at: int, _: bytes) -> None:
    n = min(rng.choice((4, 8, 64, 512)), len(made) - at)
    made[at : at + n] = bytes([rng.choice((0, 255))]) * n


_FAULTS = (_flip, _set, _number, _nudge, _pointer, _copy, _delete, _insert, _truncate, _wipe)
_WEIGHTS = (10, 6, 24, 8, 6, 6, 2, 2, 2, 3)


def damage_json(rng: Random, value: Any) -> Any:
    """A copy of a JSON value with one to four faults in it."""
    made = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 4))):
        holders = _holders(made)
        if not holders:
            return _value(rng)
        holder = rng.choice(holders)
        place = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        _damage_entry(rng, holder, place, _other(rng, holders))
    return made


def _holders(root: Any) -> list[Any]:
    """Every container of *root* that is not empty, without recursion."""
    found, todo = [], [root]
    while todo:
        value = todo.pop()
        if isinstance(value, (dict, list)) and value:
            found.append(value)
            todo.extend(value.values() if isinstance(value, dict) else value)
    return found


def _other(rng: Random, holders: list[Any]) -> Any:
    """A copy of some value that stands elsewhere."""
    holder = rng.choice(holders)
    found = rng.choice(list(holder.values()) if isinstance(holder, dict) else holder)
    return json.loads(json.dumps(found))


def _damage_entry(rng: Random, holder: Any, place: Any, other: Any) -> None:
    kind = rng.randrange(8)
    value = holder[place]
    if kind == 0:
        del holder[place]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(place)
    elif kind == 1:
        holder.insert(place, other)
    elif kind == 2:
        holder[place] = other
    elif kind == 3 and isinstance(value, str) and value:
        at = rng.randrange(len(value))
        holder[place] = value[:at] + rng.choice(("", "\0", "[", "{", '"', "é", "..", ".", "0")) + value[at + 1 :]
    elif kind <= 4 and type(value) is int:
        holder[place] = rng.choice(
            (value + 1, value - 1, -value, value * 2, value << 32, value + 0.5 if abs(value) < 1 << 64 else 1e308)
        )
    else:
        holder[place] = _value(rng)


def _value(rng: Random) -> Any:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(NUMBERS) * rng.choice((1, 1, -1))
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice((None, True, False, 0.5, float("nan"), float("inf"), 1e308, -0.0, 10**400))
    if kind == 3:
        return rng.choice(([], {}, [[]], [{}], [None], ["a", "b"], {"": {}}, {"__TYPE__": "LinkedObject", "key": "a"}))
    if kind == 4:
        return [rng.choice(NUMBERS) for _ in range(rng.choice((1, 2, 3, 33, 100)))]
    deep: Any = []
    for _ in range(rng.choice((3, 60, 400))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return deep


def damage_pickle(rng: Random, data: bytes) -> bytes:
    """A pickle with opcodes dropped, doubled, moved, replaced or with other arguments; sometimes plain bytes too."""
    codes = split_pickle(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(codes))
        kind = rng.randrange(7)
        if kind == 0 and len(codes) > 1:
            del codes[at]
        elif kind == 1:
            codes[at:at] = [codes[at]] * rng.choice((1, 1, 2, 50))
        elif kind == 2:
            codes.insert(at, codes.pop(rng.randrange(len(codes))))
        elif kind == 3:
            codes[at] = _argument(rng, codes[at])
        elif kind == 4:
            codes[at] = rng.choice(codes)
        else:
            codes.insert(at, _opcode(rng))
    made = b"".join(codes)
    return damage(rng, made, other=data) if rng.random() < 0.15 else made


def split_pickle(data: bytes) -> list[bytes]:
    """The opcodes of the first pickle in *data*, each with its argument."""
    starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    end = starts[-1] + 1
    return [data[a:b] for a, b in zip(starts, [*starts[1:], end], strict=True)]


def _argument(rng: Random, code: bytes) -> bytes:
    """The same opcode with an argument of the same length, but of another value."""
    if len(code) == 1:
        return code
    made = bytearray(code)
    width = min(len(made) - 1, rng.choice((1, 2, 4, 8)))
    made[1 : 1 + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(made)


_SIMPLE = b"()[]}NI012.abdelopqrstuRQi\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98\x81"
_GLOBALS = (b"cos\nsystem\n", b"cbuiltins\neval\n", b"cbuiltins\ndict\n", b"ctorch\nSize\n", b"ctorch\nfloat32\n")
_GLOBALS += (b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n")
_GLOBALS += (
    b"cbuiltins\nlist\n",
    b"cbuiltins\nset\n",
    b"c_codecs\nencode\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n",
)


def _opcode(rng: Random) -> bytes:
    number = rng.choice(NUMBERS)
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: bytes([rng.choice(_SIMPLE)]),
        lambda: rng.choice(_GLOBALS),
        lambda: b"J" + struct.pack("<I", number % (1 << 32)),
        lambda: b"\x8a\x09" + number.to_bytes(9, "little"),
        lambda: bytes([rng.choice(b"XTBjr\x8b")]) + struct.pack("<I", number % (1 << 32)),
        lambda: bytes([rng.choice(b"\x8d\x8e\x96\x95")]) + struct.pack("<Q", number % (1 << 64)),
        lambda: bytes([rng.choice(b"hqKUC\x8c\x80\x82"), rng.randrange(256)]),
        lambda: b"G" + rng.randbytes(8),
    )
    return rng.choice(makers)()
