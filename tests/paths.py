"""Where the tests' data lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests/data"
FAMILIES = ROOT / "tests/recorded/families"
"""Conversions between Hugging Face and Cerebras, as the public converter made them: ``<family>/<case>``."""
RELEASES = ROOT / "tests/recorded/releases"
"""Conversions between Cerebras releases: ``<family>/<case>``."""
