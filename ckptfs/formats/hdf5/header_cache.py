"""Object headers that differ in addresses alone: the first is decoded, the others are compared with it.

A checkpoint has thousands of datasets of few kinds. Two headers of one kind have the same bytes, except for the address
of the data and the references to the attributes' texts. Comparing bytes is many times faster than decoding messages. A
header that equals no template is decoded and becomes a new template.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from ckptfs.formats.hdf5 import messages
from ckptfs.formats.hdf5.messages import DAMAGE, UNDEFINED, Unsupported
from ckptfs.formats.hdf5.superblock import MetadataFile, text_of

MAX_TEMPLATES = 64
MAX_RECORDS = 1000
"""Records of a template that are remembered."""
_HEAD = struct.Struct("<B7xI4x")
_MESSAGE = struct.Struct("<HHB")
_REFERENCE = struct.Struct("<IQI")
_ADDRESS_AT = {"contiguous": 2, "chunked": 3}
"""Offset of the address in a layout message (version 3)."""
_FIXED = frozenset({0x01, 0x03, 0x04, 0x05, 0x0B})
_NIL, _LAYOUT, _ATTRIBUTE, _MORE, _CHANGED = 0x00, 0x08, 0x0C, 0x10, 0x12

Record = dict[str, Any]


@dataclass(slots=True)
class _Block:
    """One block of a header: bytes that are the same in all headers of a template, and holes between them."""

    size: int
    holes: list[tuple[int, int]] = field(default_factory=list)
    """(start, length), in order."""
    parts: struct.Struct = field(init=False)
    """Splits the block into constant bytes and holes, in turn."""
    constant: tuple[bytes, ...] = ()

    def close(self, data: bytes) -> None:
        at, form = 0, "<"
        for start, n in self.holes:
            form += f"{start - at}s{n}s"
            at = start + n
        self.parts = struct.Struct(f"{form}{self.size - at}s")
        self.constant = self.parts.unpack(data)[::2]


@dataclass(slots=True)
class HeaderTemplate:
    """What headers of one kind have in common. Holes are numbered as (block, hole)."""

    record: Record
    blocks: list[_Block] = field(default_factory=list)
    more: list[tuple[int, int]] = field(default_factory=list)
    """The hole with the address of each block after the first."""
    layout: tuple[int, int] = (0, 0)
    """The hole with the address of the data."""
    texts: list[tuple[str, tuple[int, int], bool]] = field(default_factory=list)
    """Wanted attributes: name, hole of the reference, whether it is a list of one text."""
    records: dict[tuple[str, ...], Record] = field(default_factory=dict)
    """Records without the layout, by the texts of their attributes: most are equal."""


class HeaderCache:
    """The templates of one file. Supports header version 1 only, which h5py writes by default."""

    def __init__(self, file: MetadataFile, wanted: frozenset[str]) -> None:
        self._file, self._wanted = file, wanted
        self._templates: dict[int, list[HeaderTemplate]] = {}
        """By size of the first block."""
        self._n_templates = 0
        self._last = 0
        """Size of the last header."""

    def record(self, address: int) -> Record | None:
        """As `object_headers.object_record`; None for a header that fits no template.

        Records that differ in the address of their data alone share one object of attributes.
        """
        last = self._last if address + 16 + self._last <= self._file.size - self._file.base else 0
        data = self._file.read(address, 16 + last)
        version, size = _HEAD.unpack_from(data)
        templates = self._templates.get(size)
        if version != 1 or templates is None:
            return None
        data = data[16:] if size == last else self._file.read(address + 16, size)
        self._last = size
        for i, template in enumerate(templates):
            holes = self._holes(template, data)
            if holes is not None:
                templates[0], templates[i] = template, templates[0]  # the next header is likely to fit it, too
                return self._filled(template, holes)
        return None

    def learn(self, address: int, record: Record) -> None:
        """Make a template of a header that was decoded to *record*."""
        layout = record.get("layout")
        usual = layout and layout[0] in _ADDRESS_AT and "link" not in record
        if self._n_templates >= MAX_TEMPLATES or not usual:
            return
        version, size = _HEAD.unpack(self._file.read(address, 16))
        template = HeaderTemplate({**record, "attrs": dict(record["attrs"])})  # the caller may change its own
        if version == 1 and self._find_holes(template, address + 16, size):
            self._templates.setdefault(size, []).append(template)
            self._n_templates += 1

    def _holes(self, template: HeaderTemplate, data: bytes) -> list[tuple[bytes, ...]] | None:
        """The bytes in the holes of each block, None where the constant bytes differ."""
        found: list[tuple[bytes, ...]] = []
        for i, block in enumerate(template.blocks):
            if i:
                at, hole = template.more[i - 1]
                data = self._file.read(int.from_bytes(found[at][hole], "little"), block.size)
            parts = block.parts.unpack(data)
            if parts[::2] != block.constant:
                return None
            found.append(parts[1::2])
        return found

    def _filled(self, template: HeaderTemplate, holes: list[tuple[bytes, ...]]) -> Record:
        block, hole = template.layout
        address = int.from_bytes(holes[block][hole], "little")
        name, first, second = template.record["layout"]
        if name == "contiguous":
            layout = name, None if address == UNDEFINED else address + self._file.base, second
        else:
            layout = name, first, -1 if address == UNDEFINED else address
        texts = tuple(
            [text_of(self._file, *_REFERENCE.unpack(holes[block][hole])) for _, (block, hole), _ in template.texts]
        )
        known = template.records.get(texts)
        if known is None:
            wanted = zip(template.texts, texts, strict=True)
            attributes = {name: [text] if listed else text for (name, _, listed), text in wanted}
            known = {**template.record, "attrs": {**template.record["attrs"], **attributes}}
            if len(template.records) < MAX_RECORDS:
                template.records[texts] = known
        return {**known, "layout": layout}

    def _find_holes(self, template: HeaderTemplate, start: int, size: int) -> bool:
        """Find the holes, block by block in the order of `header_messages`; False where a header has more to decode."""
        todo = [(start, size, (0, 0))]
        while todo:
            start, size, address_hole = todo.pop()
            data, block, at = self._file.read(start, size), _Block(size), 0
            if template.blocks:
                template.more.append(address_hole)
            while at + 8 <= size:
                number, n, flags = _MESSAGE.unpack_from(data, at)
                at += 8
                here = len(template.blocks), len(block.holes)
                hole = self._hole(template, number, data[at : at + n], here)
                if hole is None or flags & 2 or at + n > size:
                    return False
                if hole[1]:
                    block.holes.append((at + hole[0], hole[1]))
                if number == _MORE:
                    todo.append((*struct.unpack_from("<QQ", data, at), here))
                at += n
            block.close(data)
            template.blocks.append(block)
        return True

    def _hole(
        self, template: HeaderTemplate, number: int, body: bytes, here: tuple[int, int]
    ) -> tuple[int, int] | None:
        """(start, length) of the bytes that differ in a message; None for a message that templates cannot have."""
        if number in _FIXED:
            return 0, 0
        if number in (_NIL, _CHANGED):
            return 0, len(body)
        if number == _MORE:
            return 0, 8
        if number == _LAYOUT:
            template.layout = here
            return _ADDRESS_AT[template.record["layout"][0]], 8
        if number != _ATTRIBUTE:
            return None
        try:
            name, type_name, shape, at = messages.attribute(body, self._file.types)
        except (Unsupported, *DAMAGE):
            return 0, 0
        if type_name != "str" or shape not in ((), (1,)) or len(body) != at + 16:
            return 0, 0
        if name in self._wanted:
            template.texts.append((name, here, shape == (1,)))
        return at, 16
