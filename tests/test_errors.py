"""The error tree: what the docstring draws is what there is, with its exit codes and errno values."""

from __future__ import annotations

import copy
import errno
import inspect
import os
import pickle
import re
from pathlib import Path

import pytest

import ckptfs
from ckptfs import errors
from ckptfs.errors import CkptfsError
from ckptfs.formats.files import open_file

LINE = re.compile(r"^[\s│├└─]*(\w+)\s+exit (\d), (E\w+)", re.M)


def all_errors() -> dict[str, type[CkptfsError]]:
    found = {"CkptfsError": CkptfsError}
    stack = [CkptfsError]
    while stack:
        for child in stack.pop().__subclasses__():
            if child.__module__ == errors.__name__:
                found[child.__name__] = child
                stack.append(child)
    return found


def test_the_drawing_is_complete_and_true() -> None:
    drawn = {name: (int(code), getattr(errno, number)) for name, code, number in LINE.findall(errors.__doc__ or "")}
    assert drawn == {name: (e.exit_code, e.errno) for name, e in all_errors().items()}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.CorruptChunk("a.mdl", "w", 12, "damaged"), "a.mdl: w: damaged (at byte 12)"),
        (errors.MissingKey("a.mdl", "w", ["v"]), "a.mdl: no key 'w'; nearest: v"),
        (errors.UnknownFamily("lama", ["llama"]), "unknown model 'lama'; did you mean llama?"),
        (errors.UnsupportedValue("gpt2", "f", 3, "only 2"), "gpt2: config field f is 3, but only 2"),
        (errors.ShapeError("w", (2, 3), "rows must be 4"), "w: shape (2, 3) does not fit: rows must be 4"),
    ],
)
def test_messages_say_what_and_where(error: CkptfsError, text: str) -> None:
    assert str(error) == text


def test_a_missing_key_is_a_key_error_too() -> None:
    with pytest.raises(KeyError, match="no key 'w'"):
        raise errors.MissingKey("a.mdl", "w")


def test_long_lists_are_cut() -> None:
    error = errors.UnmatchedKeys("gpt2", [(f"k{i}", "") for i in range(30)])
    assert len(error.keys) == 30
    assert "k7 and 22 more" in str(error)


def sample_of(kind: type[CkptfsError]) -> CkptfsError:
    """One of each class, made from the types of its parameters."""
    given: dict[str, object] = {
        **dict.fromkeys(("path", "key", "what", "name", "model", "src", "tgt", "why", "field", "allowed"), "text"),
        **dict.fromkeys(("want", "shard"), "other text"),
        "offset": 7,
        "number": errno.ENOSPC,
        "got": (2, 3),
        "keys": [("a", "b")],
        "value": {"x": [1]},
    }
    if kind is errors.MissingKeys:
        given["keys"] = ["a", "b"]
    given["message"] = "a message"
    parameters = inspect.signature(kind).parameters.values()
    return kind(*[given[p.name] for p in parameters if p.default is p.empty])


@pytest.mark.parametrize("kind", all_errors().values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_every_error_survives_pickle(kind: type[CkptfsError], protocol: int) -> None:
    """Worker processes send their errors; one that cannot be loaded hangs a pool for ever."""
    error = sample_of(kind)
    error.more = ["fact"]  # type: ignore[attr-defined]
    for found in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(found) is kind
        assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
        assert (found.errno, found.exit_code) == (error.errno, error.exit_code)
        assert getattr(found, "filename", None) == getattr(error, "filename", None)


def test_errors_that_the_system_has_too(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder") as missing:
        ckptfs.open(tmp_path / "absent.mdl")
    assert isinstance(missing.value, errors.UsageError)
    found = missing.value
    assert (found.exit_code, found.errno, found.filename) == (2, errno.ENOENT, str(tmp_path / "absent.mdl"))
    assert found.strerror == "No such file or directory"
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors") as shard:
        ckptfs.open(tmp_path)
    assert isinstance(shard.value, errors.MissingShard)
    assert (shard.value.filename, shard.value.exit_code) == (str(tmp_path / "gone.safetensors"), 3)


def test_a_file_without_permission(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "secret").write_bytes(b"x")
    monkeypatch.setattr(os, "open", refuse)  # root may read everything
    with pytest.raises(PermissionError, match="secret: cannot be opened: Permission denied") as caught:
        open_file(tmp_path / "secret")
    assert isinstance(caught.value, errors.SourceError)
    assert (caught.value.exit_code, caught.value.errno) == (3, errno.EACCES)
