"""A mount names the config fields that it could not use."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import Mounter
from tests.paths import FAMILIES

pytestmark = pytest.mark.fuse
CASE = FAMILIES / "llama/cs2hf-gqa-fp32"


def test_readme_names_unknown_config_fields(mounter: Mounter, tmp_path: Path) -> None:
    values = yaml.safe_load((CASE / "cs.yaml").read_text())
    values["trainer"]["init"]["model"]["rope_bend"] = 3
    config = tmp_path / "params.yaml"
    config.write_text(yaml.safe_dump(values))
    mnt = mounter.mountpoint("mnt")
    done = mounter.ckptfs("mount", CASE / "cs.mdl", mnt, "--model", "llama", "--config", config)
    assert done.returncode == 0, done.stderr
    page = (mnt / "README.txt").read_text()
    assert "llama: 1 config field is not known and left out: rope_bend" in page
    assert "rope_bend" not in (mnt / "hf/config.json").read_text()
