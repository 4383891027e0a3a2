"""Object headers that differ in addresses alone: read once, then compared.

A checkpoint has thousands of datasets of few kinds. The header of the next one of a kind is the same bytes, but for the
address of its data and the references to its attributes' texts. Comparing bytes is many times faster than decoding
messages; what does not compare is decoded, and remembered as another kind.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from ckptfs.formats.hdf5 import messages
from ckptfs.formats.hdf5.messages import DAMAGE, UNDEFINED, Unsupported
from ckptfs.formats.hdf5.superblock import MetadataFile, text_of

MAX_KINDS = 64
MAX_READ = 1000
"""Records of a kind that are remembered."""
_HEAD = struct.Struct("<B7xI4x")
_MESSAGE = struct.Struct("<HHB")
_REFERENCE = struct.Struct("<IQI")
_ADDRESS_AT = {"contiguous": 2, "chunked": 3}
"""Where in a layout message (version 3) the address is."""
_FIXED = frozenset({0x01, 0x03, 0x04, 0x05, 0x0B})
_NIL, _LAYOUT, _ATTRIBUTE, _MORE, _CHANGED = 0x00, 0x08, 0x0C, 0x10, 0x12

Record = dict[str, Any]


@dataclass(slots=True)
class _Block:
    """One block of a header: pieces that are the same in all of a kind, and holes between them."""

    size: int
    holes: list[tuple[int, int]] = field(default_factory=list)
    """(start, length), in order."""
    cut: struct.Struct = field(init=False)
    same: tuple[bytes, ...] = ()

    def close(self, data: bytes) -> None:
        at, form = 0, "<"
        for start, n in self.holes:
            form += f"{start - at}s{n}s"
            at = start + n
        self.cut = struct.Struct(f"{form}{self.size - at}s")
        self.same = self.cut.unpack(data)[::2]


@dataclass(slots=True)
class _Kind:
    """Headers that are alike. Places are (block, hole)."""

    record: Record
    blocks: list[_Block] = field(default_factory=list)
    more: list[tuple[int, int]] = field(default_factory=list)
    """The hole that has the address of each block after the first."""
    layout: tuple[int, int] = (0, 0)
    texts: list[tuple[str, tuple[int, int], bool]] = field(default_factory=list)
    """Wanted attributes: name, place of the reference, whether it is a list of one text."""
    read: dict[tuple[str, ...], Record] = field(default_factory=dict)
    """Records, but for the layout, by the texts of their attributes: most are equal."""


class HeaderCache:
    """What the headers of one file have in common. Header version 1 alone: what the Cerebras writer makes."""

    def __init__(self, file: MetadataFile, wanted: frozenset[str]) -> None:
        self._file, self._wanted = file, wanted
        self._kinds: dict[int, list[_Kind]] = {}
        self._n_kinds = 0
        self._last = 0
        """Size of the last header."""

    def record(self, address: int) -> Record | None:
        """As `h5_walk.object_record`; None for a header that is like no other before.

        Records that differ in the address of their data alone share their attributes, the same object.
        """
        last = self._last if address + 16 + self._last <= self._file.size - self._file.base else 0
        data = self._file.read(address, 16 + last)
        version, size = _HEAD.unpack_from(data)
        kinds = self._kinds.get(size)
        if version != 1 or kinds is None:
            return None
        data = data[16:] if size == last else self._file.read(address + 16, size)
        self._last = size
        for i, kind in enumerate(kinds):
            holes = self._holes(kind, data)
            if holes is not None:
                kinds[0], kinds[i] = kind, kinds[0]  # the next one may well be of this kind, too
                return self._filled(kind, holes)
        return None

    def learn(self, address: int, record: Record) -> None:
        """Remember the kind of a header that was decoded to *record*."""
        layout = record.get("layout")
        usual = layout and layout[0] in _ADDRESS_AT and "link" not in record
        if self._n_kinds >= MAX_KINDS or not usual:
            return
        version, size = _HEAD.unpack(self._file.read(address, 16))
        kind = _Kind({**record, "attrs": dict(record["attrs"])})  # the caller may change its own
        if version == 1 and self._study(kind, address + 16, size):
            self._kinds.setdefault(size, []).append(kind)
            self._n_kinds += 1

    def _holes(self, kind: _Kind, data: bytes) -> list[tuple[bytes, ...]] | None:
        """What stands in the holes of each block, None where the rest differs."""
        found: list[tuple[bytes, ...]] = []
        for i, block in enumerate(kind.blocks):
            if i:
                at, hole = kind.more[i - 1]
                data = self._file.read(int.from_bytes(found[at][hole], "little"), block.size)
            parts = block.cut.unpack(data)
            if parts[::2] != block.same:
                return None
            found.append(parts[1::2])
        return found

    def _filled(self, kind: _Kind, holes: list[tuple[bytes, ...]]) -> Record:
        block, hole = kind.layout
        address = int.from_bytes(holes[block][hole], "little")
        name, first, second = kind.record["layout"]
        if name == "contiguous":
            where = name, None if address == UNDEFINED else address + self._file.base, second
        else:
            where = name, first, -1 if address == UNDEFINED else address
        texts = tuple(
            [text_of(self._file, *_REFERENCE.unpack(holes[block][hole])) for _, (block, hole), _ in kind.texts]
        )
        known = kind.read.get(texts)
        if known is None:
            said = {name: [text] if listed else text for (name, _, listed), text in zip(kind.texts, texts, strict=True)}
            known = {**kind.record, "attrs": {**kind.record["attrs"], **said}}
            if len(kind.read) < MAX_READ:
                kind.read[texts] = known
        return {**known, "layout": where}

    def _study(self, kind: _Kind, start: int, size: int) -> bool:
        """Find the holes, block by block in the order of `h5_walk.header_messages`; False for what has more to it."""
        todo = [(start, size, (0, 0))]
        while todo:
            start, size, place = todo.pop()
            data, block, at = self._file.read(start, size), _Block(size), 0
            if kind.blocks:
                kind.more.append(place)
            while at + 8 <= size:
                number, n, flags = _MESSAGE.unpack_from(data, at)
                at += 8
                here = len(kind.blocks), len(block.holes)
                hole = self._hole(kind, number, data[at : at + n], here)
                if hole is None or flags & 2 or at + n > size:
                    return False
                if hole[1]:
                    block.holes.append((at + hole[0], hole[1]))
                if number == _MORE:
                    todo.append((*struct.unpack_from("<QQ", data, at), here))
                at += n
            block.close(data)
            kind.blocks.append(block)
        return True

    def _hole(self, kind: _Kind, number: int, body: bytes, here: tuple[int, int]) -> tuple[int, int] | None:
        """(start, length) of what differs in a message; None for a message that makes its header unlike others."""
        if number in _FIXED:
            return 0, 0
        if number in (_NIL, _CHANGED):
            return 0, len(body)
        if number == _MORE:
            return 0, 8
        if number == _LAYOUT:
            kind.layout = here
            return _ADDRESS_AT[kind.record["layout"][0]], 8
        if number != _ATTRIBUTE:
            return None
        try:
            name, type_name, shape, at = messages.attribute(body, self._file.types)
        except (Unsupported, *DAMAGE):
            return 0, 0
        if type_name != "str" or shape not in ((), (1,)) or len(body) != at + 16:
            return 0, 0
        if name in self._wanted:
            kind.texts.append((name, here, shape == (1,)))
        return at, 16
