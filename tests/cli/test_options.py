"""Sizes and permission bits on the command line."""

from __future__ import annotations

import click
import pytest

from ckptfs.cli.mount import fuse_flags
from ckptfs.cli.options import octal, size
from ckptfs.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4k", 4096),
        ("4KiB", 4096),
        ("4 KB", 4000),
        ("10GB", 10_000_000_000),
        ("1.5GiB", 1_610_612_736),
        ("0.1MB", 100_000),
        ("2T", 2_199_023_255_552),
    ],
)
def test_size(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "GB", "1XB", "1e9", "0x10", "1 2", "٣", "9" * 40])
def test_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        size(text)


def test_octal() -> None:
    assert octal("022") == 18
    for text in ("8", "0o22", "-1", "", "77777"):
        with pytest.raises(click.BadParameter):
            octal(text)


def test_mount_flags() -> None:
    assert fuse_flags(["ro,noexec", "max_read=65536"]) == {"ro": "", "noexec": "", "max_read": "65536"}
    for text in ("rw", "suid", "max_read", "max_read=x", "ro=1", "=", "fd=3"):
        with pytest.raises(UsageError):
            fuse_flags([text])
