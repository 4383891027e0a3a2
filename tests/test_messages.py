"""Messages of the library name no option and no command of the command line: `cli` adds those."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptfs
from ckptfs.cli.advice import advised, advised_reason
from ckptfs.conversion.resolve import NO_MODEL, UNKNOWN_MODEL
from ckptfs.errors import MissingKey, NoPath, UnknownFamily, UnmatchedKeys, UsageError
from ckptfs.formats.source import OUTSIDE

ROOT = Path(ckptfs.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z]|'ckptfs (?!doctor)")
ROOMS = ("api", "tools", "conversion", "formats", "tensors", "native")


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of a module with their lines, without docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


@pytest.mark.parametrize("room", [*ROOMS, "errors.py"])
def test_no_option_is_named(room: str) -> None:
    paths = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    found = [f"{path}:{line}: {text}" for path in paths for line, text in messages(path) if OPTION.search(text)]
    assert not found


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MissingKey("a.mdl", "w", ["v"]), "a.mdl: no key 'w'; nearest: v; 'ckptfs ls' lists them"),
        (
            UnknownFamily("lama", ["llama"]),
            "unknown model 'lama'; did you mean llama? 'ckptfs list' shows all names",
        ),
        (UsageError("x: the checkpoint holds no model config; give it", option="config"), " give it with --config"),
        (NoPath("llama", "hf", "hf"), "name its release with --src-fmt, such as cs-2.9"),
        (UnmatchedKeys("llama", [("x", "")]), "no rule: x. Use --drop-unmatched-keys to leave out"),
        (UsageError("plain"), "plain"),
    ],
)
def test_commands_add_the_option_that_helps(error: UsageError, text: str) -> None:
    assert text in advised(error)


def test_reasons() -> None:
    assert advised_reason(None) is None
    assert advised_reason("because") == "because"
    assert advised_reason(NO_MODEL) == f"{NO_MODEL}; name it with --model and --config"
    assert advised_reason(f"{UNKNOWN_MODEL} (x)") == f"{UNKNOWN_MODEL} (x); 'ckptfs list' shows all"
    assert advised_reason(f"its data are in 'x', {OUTSIDE}") == (
        f"its data are in 'x', {OUTSIDE}. Use --follow-links to allow it"
    )
