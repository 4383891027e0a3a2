"""docs/adding-a-format.md, run: its modules and rows go into a copy of the package, and numpy is the judge."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT, Mounter
from tests.paths import FAMILIES

PAGE = (ROOT / "docs/adding-a-format.md").read_text()
GOLDEN = FAMILIES / "llama/cs2hf-gqa-fp32"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FORMAT, FORMAT_IMPORT, FORMAT_ROW, VIEW, VIEW_IMPORT, VIEW_ROW, TARGET, TARGET_ROW = BLOCKS


def with_import(text: str, line: str) -> str:
    return text.replace("from __future__ import annotations\n", f"from __future__ import annotations\n\n{line}", 1)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ckptfs as the page changes it: two new modules, and a row each in two lists."""
    folder = tmp_path_factory.mktemp("package")
    ours = folder / "ckptfs"
    shutil.copytree(ROOT / "ckptfs", ours, ignore=shutil.ignore_patterns("__pycache__"))
    (ours / "formats/npz.py").write_text(FORMAT)
    (ours / "vfs/npz.py").write_text(VIEW)
    detect, views = ours / "formats/detect.py", ours / "vfs/views.py"
    head, start, rest = detect.read_text().partition("FORMATS: tuple[Format, ...] = (\n")
    assert start
    detect.write_text(with_import(head, FORMAT_IMPORT) + start + FORMAT_ROW + rest)
    head, start, rest = views.read_text().partition("VIEWS: tuple[ViewSpec, ...] = (\n")
    rows, end, rest = rest.partition("\n)\n")
    assert start and end
    views.write_text(f"{with_import(head, VIEW_IMPORT)}{start}{rows}\n{VIEW_ROW})\n{rest}")
    return folder


def python(package: Path, code: str, *args: object) -> str:
    """What a program prints that imports the changed package."""
    return run(package, "-c", code, *args).stdout


def run(package: Path, *args: object, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}", "XDG_STATE_HOME": str(state or package)}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done


def test_the_page_has_one_module_and_one_row_each() -> None:
    assert [len(block.strip().splitlines()) for block in (FORMAT_IMPORT, VIEW_IMPORT)] == [1, 1]
    assert FORMAT_ROW.count("Format(") == VIEW_ROW.count("ViewSpec(") == TARGET_ROW.count("Target(") == 1


READ = """
import sys, numpy as np, ckptfs
with ckptfs.open(sys.argv[1]) as found, np.load(sys.argv[1], allow_pickle=True) as want:
    assert found.source.format == "npz" and list(found) == list(want)
    for key in set(want) - {"records"}:
        array = np.asarray(found[key])
        assert array.dtype == want[key].dtype and np.array_equal(array, want[key]), key
    print(found.item("records").reason)
"""


def test_the_reader_agrees_with_numpy(package: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 4), "b.c": (), "empty": (0, 2), "three": (2, 3, 4)}
    arrays = {key: rng.random(shape).astype("f4") for key, shape in shapes.items()}
    arrays |= {"ints": np.arange(7), "truth": np.array([True, False]), "columns": np.asfortranarray(arrays["three"])}
    np.savez(tmp_path / "x.npz", **arrays, records=np.zeros(2, [("x", "f4"), ("y", "i2")]))
    assert "cannot be shown" in python(package, READ, tmp_path / "x.npz")


LAZY = """
import sys, numpy as np, ckptfs
from ckptfs.mount.stats import bytes_read
with ckptfs.open(sys.argv[1]) as found:
    before = bytes_read()
    assert found["big"][5:6].tolist() == [[5.0] * 1000]
    print(bytes_read() - before)
"""


def test_the_reader_is_lazy(package: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", big=np.repeat(np.arange(2000.0), 1000).reshape(2000, 1000))
    assert 8000 <= int(python(package, LAZY, tmp_path / "x.npz")) < 1 << 20


@pytest.mark.fuse
def test_the_view_is_an_archive_for_numpy(package: Path, mounter: Mounter) -> None:
    mnt = mounter.mountpoint()
    state = mounter.folder / "state"
    printed = run(package, "-m", "ckptfs", "mount", GOLDEN / "cs.mdl", mnt, state=state).stdout
    line = re.search(r"ViewSpec\(\"npz\", \"(.+?)\"", VIEW_ROW)
    assert line and re.search(rf"/npz +{line[1]}\n", printed)
    assert re.search(rf"^  npz +{line[1]}$", (mnt / "README.txt").read_text(), re.MULTILINE)
    path = mnt / "npz/checkpoint.npz"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with np.load(path) as found:
        raw = {item.name: item.read_bytes() for item in (mnt / "raw").iterdir()}
        assert {key: found[key].tobytes() for key in found} == raw
    equal = run(package, "-m", "ckptfs", "diff", GOLDEN / "cs.mdl", path, "--keys", "*.weight", state=state)
    assert "the same" in equal.stdout
    run(package, "-m", "ckptfs", "umount", mnt, state=state)


FUZZ = """
import io, sys, tempfile, collections
from pathlib import Path
from random import Random
from ckptfs.errors import SourceError
from ckptfs.formats.npz import open_npz
from tests.fuzz import targets
names = {**vars(targets), "io": io, "open_npz": open_npz}
exec(sys.argv[1], names)
target = eval("{" + sys.argv[2].strip() + "}", names)["npz"]
seen = collections.Counter()
for i in range(400):
    with tempfile.TemporaryDirectory() as folder:
        try:
            target.feed(target.make(Random(i)), Path(folder))
        except SourceError:
            seen["refused"] += 1
        else:
            seen["read"] += 1
print(seen["refused"], seen["read"])
"""


def test_the_fuzz_target(package: Path) -> None:
    refused, read = map(int, python(package, FUZZ, TARGET, TARGET_ROW).split())
    assert refused > 50 and read > 50
