"""The documents' form: line lengths, links, names of modules and files; and the pictures, drawn again."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptfs.conversion import ops
from ckptfs.conversion import rules as rules_module
from ckptfs.conversion.config import ConfigTable, SideTable
from ckptfs.conversion.families import decoder
from ckptfs.conversion.family import Family
from tests.conftest import ROOT
from tests.documents import PAGES, blocks, prose, read
from tests.test_imports import ROOMS

sys.path.insert(0, str(ROOT / "scripts"))

import plots
import terminal_svg

MAX_COLUMNS = 100
MAX_README_LINES = 120
EXAMPLES = {"families/gpt_neo.py", "ckptfs/formats/NAME.py", "ckptfs/formats/npz.py", "ckptfs/vfs/npz.py"}
"""Files that a page tells the reader to write."""
PLACES = ("", "ckptfs", "ckptfs/conversion", "scripts")
"""Folders that a file may be named from."""

by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@by_name
def test_lines_fit_the_page(page: Path) -> None:
    """A link that is longer than a line cannot be broken."""
    long = [(n, line) for n, line in prose(page) if len(line) > MAX_COLUMNS and " " in line.strip().strip("-* ")]
    assert long == []


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= MAX_README_LINES


@by_name
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def anchors(page: Path) -> set[str]:
    """What GitHub names the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_name
def test_files_that_are_named_exist(page: Path) -> None:
    names = {*named(page, SOURCE_FILE), *named(page, BELOW_ROOT)} - EXAMPLES
    assert [name for name in sorted(names) if not exists(name)] == []


SOURCE_FILE = r"(?:[\w-]+/)*[\w-]+\.(?:py|c|h|sh)\b"
BELOW_ROOT = r"(?<![\w./-])(?:ckptfs|scripts|tests|docs)/[\w./-]*[\w/]"


def exists(name: str) -> bool:
    """Whether there is such a file or folder; a bare name may be anywhere in the package or the scripts."""
    if "/" in name:
        return any((ROOT / place / name).exists() for place in PLACES)
    return any(True for room in ("ckptfs", "scripts") for _ in (ROOT / room).rglob(name))


@by_name
def test_modules_that_are_named_exist(page: Path) -> None:
    for name in named(page, r"(?<![\w./])ckptfs(?:\.[A-Za-z_]\w*)+"):
        assert resolved(name) is not None, name


def named(page: Path, pattern: str) -> Iterator[str]:
    """Everything in backticks outside of fenced blocks that matches *pattern*."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`\n]+)`", text):
        yield from re.findall(pattern, code)


def resolved(name: str) -> object:
    """The module, or what stands in one, by its full name."""
    found: object = import_module("ckptfs")
    path = "ckptfs"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = import_module(path)
        else:
            found = getattr(found, part)
    return found


def test_rooms_stand_in_their_order_with_their_charters() -> None:
    rows = re.findall(r"^\| `ckptfs/(\w+)(?:/|\.py)` \| (.*) \|$", read("docs/architecture.md"), re.MULTILINE)
    assert [room for room, _ in rows] == ROOMS
    charters = {room: import_module(f"ckptfs.{room}").__doc__ or "" for room, _ in rows[:-1]}
    assert dict(rows[:-1]) == {room: " ".join(text.split()) for room, text in charters.items()}


def test_the_reference_of_families_names_what_there_is() -> None:
    page = read("docs/family-tables.md")
    rules = page.partition("## Tensor rules")[2].partition("\n## ")[0]
    called = {name for code in re.findall(r"`([^`]+)`", rules) for name in re.findall(r"\b([A-Za-z_]+)\(", code)}
    assert called > {"same", "split", "stack"}
    assert {
        name for name in called if not any(hasattr(module, name) for module in (decoder, ops, rules_module))
    } == set()
    both, side, whole = (
        first_cells(page, heading) for heading in ("| field | meaning", "| field of a side", "| field of a family")
    )
    assert both == names_of(ConfigTable) - {"hf", "cs"}
    assert side == names_of(SideTable)
    assert whole < names_of(Family)


def first_cells(page: str, heading: str) -> set[str]:
    """The names in backticks in the first column of the table that begins so."""
    rows = page.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}


def names_of(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


# ---------------------------------------------------------------------------------------------------------- pictures

DATA: dict[str, Any] = json.loads(read("docs/performance.json"))


def test_plots_show_the_data() -> None:
    drawn = plots.pictures(DATA)
    assert {name: read(f"docs/{name}") == text for name, text in drawn.items()} == dict.fromkeys(drawn, True)
    assert {f"performance-{part}.svg" for part in ("targets", "rates")} == set(drawn)


def test_figures_are_those_of_the_data() -> None:
    rows = re.findall(
        r"^\| (P\d|FAR) \| .* \| ([\d.]+)[^|]*\| ([\d.]+) to ([\d.]+) \| (.) ([\d.]+) \|$", PERFORMANCE, re.M
    )
    assert {name for name, *_ in rows} == set(DATA)
    for name, value, least, largest, sign, target in rows:
        measured = DATA[name]
        found = (measured["value"], min(measured["runs"]), max(measured["runs"]))
        assert (value, least, largest) == tuple(f"{number:.3g}" for number in found), name
        assert float(target) == measured["target"]
        assert measured["met"] == (found[0] >= float(target) if sign == "≥" else found[0] <= float(target))


PERFORMANCE = read("docs/performance.md")


@pytest.mark.fuse
def test_the_terminal_shows_what_the_commands_print() -> None:
    assert terminal_svg.draw(terminal_svg.session()) == read("docs/terminal.svg")


def test_the_pictures_are_shown() -> None:
    shown = {name for page in PAGES for name in re.findall(r"!\[[^\]]*\]\((?:docs/)?([^)]+)\)", page.read_text())}
    assert shown == {path.name for path in (ROOT / "docs").glob("*.svg")}


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    }
    assert [page.name for page in PAGES if page not in linked and page.name != "README.md"] == []


def test_shell_blocks_name_scripts_that_exist() -> None:
    for page in PAGES:
        for _, text in blocks(page.read_text(), "sh", "console"):
            for script in re.findall(r"(?<![\w/])scripts/[\w./-]+", text):
                assert (ROOT / script).exists(), (page.name, script)
