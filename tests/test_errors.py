"""The error tree: what the docstring draws is what there is, with its exit codes and errno values."""

from __future__ import annotations

import errno
import re

import pytest

from ckptfs import errors
from ckptfs.errors import CkptfsError

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
        (
            errors.UnknownFamily("lama", ["llama"]),
            "unknown model 'lama'; did you mean llama? 'ckptfs list' shows all names",
        ),
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
