"""The documents as data: their fenced blocks, the commands in these, and the output that each must show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def read(page: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / page).read_text()


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks in these languages."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(language, body) for language, body in found if language in languages]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(command, lines of output) in a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *output = part.rstrip("\n").split("\n")
        yield command, output


def pattern(output: list[str]) -> str:
    """A regular expression for output in which ``…`` stands for anything."""
    lines = [r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n" for line in output]
    return "".join(lines)


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """(number, line) outside of fenced blocks and tables."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("|"):
            yield number, line
