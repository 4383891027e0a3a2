"""docs/coverage.md names commands and options that exist."""

from __future__ import annotations

import re

import click
import pytest

from ckptfs.cli.main import COMMANDS, cli
from tests.paths import ROOT

PAGE = (ROOT / "docs/coverage.md").read_text()
LINES = sorted(set(re.findall(r"`ckptfs ([a-z-]+)", PAGE)))


@pytest.mark.parametrize("name", LINES)
def test_its_commands_exist(name: str) -> None:
    assert name in COMMANDS


@pytest.mark.parametrize(
    ("name", "option"),
    [("list", "--hide-notes"), ("convert", "--debug"), ("diff", "--tensor_comparison_op"), ("info", "--list_objects")],
)
def test_its_options_exist(name: str, option: str) -> None:
    assert option in PAGE
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert any(option in param.opts for param in command.params)
