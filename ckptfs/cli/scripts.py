"""Installed commands under the names of the public scripts."""

from __future__ import annotations

import sys
from typing import NoReturn

from ckptfs.cli.main import main


def fix_checkpoint_spec() -> NoReturn:
    """``fix_checkpoint_spec``"""
    _command("fix-checkpoint-spec")


def fold_lora_checkpoint() -> NoReturn:
    """``fold_lora_checkpoint``"""
    _command("fold-lora")


def data_iter_state_conversion() -> NoReturn:
    """``data_iter_state_conversion``"""
    _command("convert-data-iter-state")


def _command(name: str) -> NoReturn:
    main([name, *sys.argv[1:]])
