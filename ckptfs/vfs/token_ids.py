"""The ids of special tokens, from the files of a tokenizer's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ckptfs.errors import UsageError
from ckptfs.formats.extents import ExtentFile
from ckptfs.vfs.tree import Entry, Leaf


def tokenizer_ids(beside: Mapping[str, Entry]) -> dict[str, int]:
    """The ids of the special tokens that the tokenizer's files name, by their name in ``generation_config.json``."""
    stated = {**json_of(beside, "special_tokens_map.json"), **json_of(beside, "tokenizer_config.json")}
    found: dict[str, int] = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        token = stated.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        number = _number(text, beside) if isinstance(text, str) else None
        if number is not None:
            found[f"{name}_id"] = number
    return found


def file_beside(beside: Mapping[str, Entry], name: str) -> ExtentFile | None:
    """The file of that name beside the weights; None where it is absent."""
    entry = beside.get(name)
    return entry.file if isinstance(entry, Leaf) else None


def json_of(beside: Mapping[str, Entry], name: str) -> Mapping[str, Any]:
    """The mapping in a JSON file beside the weights; an empty one where it is absent."""
    data = _content(beside, name)
    if not data:
        return {}
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} of the tokenizer is not valid JSON ({error}); leave it out of the folder") from error
    return values if isinstance(values, Mapping) else {}


def _number(token: str, beside: Mapping[str, Entry]) -> int | None:
    """The id of *token*, from the first file that has it; large files are read last."""
    for table in (_added, _added_alone, _fast, _vocabulary, _word_list, _sentencepiece):
        number = table(token, beside)
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            return number
    return None


def _added(token: str, beside: Mapping[str, Entry]) -> object:
    table = json_of(beside, "tokenizer_config.json").get("added_tokens_decoder")
    entries = table.items() if isinstance(table, Mapping) else ()
    ids = (str(n) for n, one in entries if isinstance(one, Mapping) and one.get("content") == token)
    return next((int(n) for n in ids if n.isdecimal()), None)


def _added_alone(token: str, beside: Mapping[str, Entry]) -> object:
    return json_of(beside, "added_tokens.json").get(token)


def _fast(token: str, beside: Mapping[str, Entry]) -> object:
    whole = json_of(beside, "tokenizer.json")
    added = whole.get("added_tokens")
    for one in added if isinstance(added, list) else ():
        if isinstance(one, Mapping) and one.get("content") == token:
            return one.get("id")
    model = whole.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        return vocabulary.get(token)
    pieces = vocabulary if isinstance(vocabulary, list) else ()
    return next((n for n, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [token]), None)


def _vocabulary(token: str, beside: Mapping[str, Entry]) -> object:
    return json_of(beside, "vocab.json").get(token)


def _word_list(token: str, beside: Mapping[str, Entry]) -> object:
    words = _content(beside, "vocab.txt").decode(errors="replace").split("\n")
    return words.index(token) if token in words else None


def _sentencepiece(token: str, beside: Mapping[str, Entry]) -> object:
    """Pieces are numbered in their order: ``ModelProto.pieces`` is field 1, and so is the text of a piece."""
    wanted = token.encode()
    for name in ("tokenizer.model", "spiece.model"):
        for n, piece in enumerate(_first_fields(_content(beside, name), name)):
            if next(_first_fields(piece, name), None) == wanted:
                return n
    return None


def _first_fields(message: bytes, name: str) -> Iterator[bytes]:
    """The contents of field 1 of a protocol buffers message, where it is of variable length."""
    at = 0
    try:
        while at < len(message):
            tag, at = _varint(message, at)
            kind = tag & 7
            if kind == 0:
                size, (_, at) = 0, _varint(message, at)
            elif kind == 2:
                size, at = _varint(message, at)
            else:
                size = {1: 8, 5: 4}[kind]
            if tag == (1 << 3 | 2):
                yield message[at : at + size]
            at += size
    except LookupError:
        raise UsageError(f"{name} of the tokenizer is damaged; leave it out of the folder") from None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _content(beside: Mapping[str, Entry], name: str) -> bytes:
    """The bytes of a file beside the weights; none where it is absent."""
    file = file_beside(beside, name)
    if file is None:
        return b""
    data = bytearray(file.size)
    file.read_into(0, memoryview(data))
    return bytes(data)
