"""Zip archives as we write them, with Python's zipfile as the judge."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.errors import UsageError
from ckptfs.formats.files import open_file
from ckptfs.formats.sealed import Sealed
from ckptfs.formats.zip import ALIGNMENT, damaged_records, data_offset, read_directory, zip_file
from tests.factories import array_of, tensor_of
from tests.formats.reading import content

PARTS = st.lists(st.one_of(st.binary(max_size=40), st.integers(1, 9)), max_size=4)
"""Bytes, or the number of elements of a tensor."""


@given(st.dictionaries(st.text("aé/.", min_size=1, max_size=8), PARTS, max_size=5))
def test_records_of_several_bodies(records: dict[str, list[bytes | int]]) -> None:
    def body(part: bytes | int) -> bytes | Sealed:
        return part if isinstance(part, bytes) else Sealed(tensor_of("int16", (part,), part))

    data = content(zip_file((name, [body(part) for part in parts]) for name, parts in records.items()))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == list(records)
        for name, parts in records.items():
            rest = archive.read(name)
            for part in parts:
                want = part if isinstance(part, bytes) else array_of("int16", (part,), part).tobytes()
                assert rest.startswith(want)
                rest = rest[len(want) :] if isinstance(part, bytes) else rest[len(want) + 4 :]
            assert not rest


def test_what_was_written_is_read_and_aligned(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(content(zip_file([("a", [b"x"]), ("folder/b", [b"y" * 100, b"z"]), ("empty", [])])))
    file = open_file(path)
    archive = read_directory(file)
    places = {name: data_offset(archive, record) for name, record in archive.records.items()}
    assert list(places) == ["a", "folder/b", "empty"]
    assert not any(place % ALIGNMENT for place in places.values())
    assert os.pread(file.fd, 101, places["folder/b"]) == b"y" * 100 + b"z"
    file.close()


@pytest.mark.parametrize("victim", ["a", "b"])
def test_damaged_records_are_named(tmp_path: Path, victim: str) -> None:
    path = tmp_path / "a.zip"
    data = bytearray(content(zip_file([("a", [b"first data"]), ("b", [b"other data"])])))
    at = data.index(b"first data" if victim == "a" else b"other data")
    data[at] ^= 1
    path.write_bytes(data)
    file = open_file(path)
    assert [(record.name, start) for record, start in damaged_records(file)] == [(victim, at)]
    file.close()


@pytest.mark.parametrize("name", ["\ud800", "x" * 65_536])
def test_names_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot have a record of this name"):
        zip_file([(name, [b"x"])])
