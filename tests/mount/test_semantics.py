"""docs/semantics.md, row by row. Expectations are read from the page; a row that nothing checks fails.

A check is a function of one shared mount (a real checkpoint with ``hf/``), or a test of its own here or elsewhere
(`semantics.ELSEWHERE`).
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs
from tests import documents
from tests.conftest import ROOT, Mounter
from tests.mount.calls import FAILS, WORKS, close_all
from tests.mount.semantics import ELSEWHERE, PAGE, code, table
from tests.mount.test_faults import GOLDEN, MODEL
from tests.mount.test_read_only import CHANGES
from tests.paths import FAMILIES
from tests.waiting import MAX_SECONDS, wait_until_open

pytestmark = pytest.mark.fuse

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")


def fixture(name: str) -> Path:
    """A recorded checkpoint by its file name."""
    return next((ROOT / "tests/data").rglob(name))


@pytest.fixture(scope="module")
def real(shared_mounter: Mounter) -> Iterator[Path]:
    """A Cerebras checkpoint of a tiny Llama, mounted with its config."""
    path = shared_mounter.mountpoint("real")
    done = shared_mounter.ckptfs("mount", GOLDEN / "cs.mdl", path, *MODEL)
    assert done.returncode == 0, done.stderr
    yield path
    close_all()


# ---------------------------------------------------------------------------------------------------------- the tree


@pytest.fixture(scope="module")
def bare(shared_mounter: Mounter) -> Path:
    """The same checkpoint without its config: nothing tells the family."""
    path = shared_mounter.mountpoint("bare")
    alone = shared_mounter.folder / "alone.mdl"
    shutil.copy(GOLDEN / "cs.mdl", alone)
    assert shared_mounter.ckptfs("mount", alone, path).returncode == 0
    return path


@pytest.fixture(scope="module")
def model(shared_mounter: Mounter) -> Path:
    """A Hugging Face model, mounted."""
    path = shared_mounter.mountpoint("model")
    assert shared_mounter.ckptfs("mount", FAMILIES / "llama/hf2cs-gqa-bf16/hf", path).returncode == 0
    return path


@pytest.mark.parametrize("name", table("The tree"))
def test_tree(name: str, real: Path, bare: Path, model: Path) -> None:
    entry, when = code(name), table("The tree")[name][-1]
    assert when in ("always", "Cerebras", "Hugging Face")
    for mount, kinds in ((real, ("always", "Cerebras")), (bare, ("always",)), (model, ("always", "Hugging Face"))):
        assert (mount / entry).exists() == (when in kinds)
        assert (mount / entry).is_dir() == (when in kinds and entry.endswith("/"))


def test_the_tree_has_nothing_else(real: Path, model: Path) -> None:
    names = {code(name) for name in table("The tree")}
    top = {name for name in names if "/" not in name[:-1]}
    assert {f"{p.name}/" if p.is_dir() else p.name for m in (real, model) for p in m.iterdir()} == top
    assert sorted(os.listdir(real / "hf")) == ["config.json", "model.safetensors"]
    assert sorted(os.listdir(real / "hf-bin")) == ["config.json", "pytorch_model.bin"]
    assert sorted(os.listdir(real / "torch")) == ["checkpoint.pt", "model.pt"]
    assert sorted(os.listdir(model / "cs")) == ["checkpoint.mdl", "params.yaml"]
    assert [p for m in (real, model) for p in m.rglob("*") if p.is_symlink()] == []


def test_the_page_says_why_there_is_no_model(bare: Path) -> None:
    assert "There is no hf/: nothing in the checkpoint tells its model family" in (bare / "README.txt").read_text()


def test_two_mounts_are_the_same(model: Path, mounter: Mounter) -> None:
    other = mounter.mountpoint()
    assert mounter.ckptfs("mount", FAMILIES / "llama/hf2cs-gqa-bf16/hf", other).returncode == 0
    files = [p.relative_to(model) for p in model.rglob("*") if p.is_file()]
    assert {"cs", "raw", "tensors", "torch"} <= {p.parts[0] for p in files}
    assert [p for p in files if (model / p).read_bytes() != (other / p).read_bytes()] == []


def test_listings_are_in_the_order_of_the_state_dict(real: Path) -> None:
    with ckptfs.open(GOLDEN / "cs.mdl") as checkpoint:
        assert os.listdir(real / "raw") == list(checkpoint.source.tensors())


def test_names(mounter: Mounter, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rows = table("Names")
    keys = [code(name) for name in rows]
    save_file({key: np.full(3, i, np.float32) for i, key in enumerate(keys)}, tmp_path / "odd.safetensors")
    path = mounter.mountpoint()
    assert mounter.ckptfs("mount", tmp_path / "odd.safetensors", path).returncode == 0
    for i, (name, (in_tensors, in_raw)) in enumerate(rows.items()):
        for place in (path / "tensors" / code(in_tensors), path / "raw" / code(in_raw)):
            assert os.getxattr(place, "user.key") == code(name).encode()
        assert np.load(path / "tensors" / code(in_tensors)).tolist() == [i] * 3
        assert (path / "raw" / code(in_raw)).read_bytes() == np.full(3, i, np.float32).tobytes()
    assert len(os.listdir(path / "raw")) == len(keys)


# -------------------------------------------------------------------------------------------------------- attributes


def entries(top: Path) -> list[Path]:
    return [top, *top.rglob("*")]


def sizes(m: Path) -> None:
    for path in entries(m):
        assert path.stat().st_size == (0 if path.is_dir() else len(path.read_bytes()))


def blocks(m: Path) -> None:
    assert [p for p in entries(m) if p.stat().st_blocks != -(-p.stat().st_size // 512)] == []


def times(m: Path) -> None:
    want = os.stat(GOLDEN / "cs.mdl").st_mtime_ns
    for st in (path.stat() for path in entries(m)):
        assert (st.st_mtime_ns, st.st_ctime_ns, st.st_atime_ns) == (want, want, want)


def keys_of_files(m: Path) -> None:
    for path in (m / "tensors").rglob("*.*"):
        parts = path.relative_to(m / "tensors").with_suffix("").parts
        assert path.is_dir() or os.getxattr(path, "user.key").decode() == ".".join(parts)
    for path in (m / "raw").iterdir():
        assert os.getxattr(path, "user.key").decode() == path.name


def dtypes(m: Path) -> None:
    names = {os.getxattr(path, "user.dtype").decode() for path in (m / "raw").iterdir()}
    assert names == {"float32", "int64"}


def shapes(m: Path) -> None:
    for path in (p for p in (m / "tensors").rglob("*.npy") if p.is_file()):
        assert tuple(json.loads(os.getxattr(path, "user.shape"))) == np.load(path).shape


def file_system(m: Path) -> None:
    found = os.statvfs(m)
    assert found.f_blocks == -(-os.path.getsize(GOLDEN / "cs.mdl") // 4096)
    assert found.f_bavail == 0
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    line = next(line for line in mounts if f" {m} " in line)
    assert f" - {code(table('Attributes')['file system'][0].partition('says')[2])} " in line


def modes(m: Path) -> None:
    file_mode, folder_mode = (int(mode, 8) for mode in re.findall(r"0\d{3}", table("Attributes")["mode"][0]))
    for path in entries(m):
        assert stat.S_IMODE(path.stat().st_mode) == (folder_mode if path.is_dir() else file_mode)


def links(m: Path) -> None:
    assert {str(path.stat().st_nlink) for path in entries(m)} == {table("Attributes")["links"][0]}


def owner(m: Path) -> None:
    assert {(p.stat().st_uid, p.stat().st_gid) for p in entries(m)} == {(os.getuid(), os.getgid())}


ATTRIBUTES: dict[str, Callable[[Path], None]] = {
    "size": sizes,
    "blocks": blocks,
    "times": times,
    "links": links,
    "owner": owner,
    "mode": modes,
    "`user.key`": keys_of_files,
    "`user.dtype`": dtypes,
    "`user.shape`": shapes,
    "file system": file_system,
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(name: str, real: Path) -> None:
    ATTRIBUTES[name](real)


# ------------------------------------------------------------------------------------------------------ system calls


@pytest.mark.parametrize("name", WORKS)
def test_system_calls_that_work(name: str, real: Path) -> None:
    assert not table("System calls")[name][0].startswith("`E")
    WORKS[name](real)


@pytest.mark.parametrize("name", FAILS)
def test_system_calls_that_fail(name: str, real: Path) -> None:
    with pytest.raises(OSError) as caught:
        FAILS[name](real)
    assert errno.errorcode[caught.value.errno or 0] == code(table("System calls")[name][0])


def test_the_page_names_every_change() -> None:
    """`test_read_only` runs them."""
    listed = re.findall(r"`([^`]+)`", PAGE.partition("Every change is: ")[2].partition(".\n")[0])
    assert set(listed) == set(CHANGES)
    assert code(table("System calls")["every change"][0]) == "EROFS"


# ------------------------------------------------------------------------------------------------------------ errors


@as_root
def test_another_user_is_refused(real: Path) -> None:
    program = f"import os\ntry: os.stat({str(real / 'README.txt')!r})\nexcept OSError as e: print(e.errno)"
    user = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all,+dac_read_search"]
    done = subprocess.run(
        [*user, "--ambient-caps=-all,+dac_read_search", sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(errno.EACCES), done.stderr


def test_a_read_under_way_when_the_daemon_is_killed(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    program = f"import os\ntry: open({str(path / 'slow')!r}, 'rb').read(1)\nexcept OSError as e: print(e.errno)"
    reader = mounter.start("-c", program)
    wait_until_open(reader.pid, path / "slow")
    assert reader.poll() is None
    os.kill(mounter.daemon_pid, signal.SIGKILL)
    out, _ = reader.communicate(timeout=MAX_SECONDS)
    row = next(name for name in table("Errors") if "ECONNABORTED" in name)
    assert errno.errorcode[int(out)] in re.findall(r"`(\w+)`", row)
    with pytest.raises(OSError) as caught:
        os.listdir(path / "many")
    assert caught.value.errno == errno.ENOTCONN


# ---------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("number", table("Exit codes"))
def test_exit_codes(number: str, mounter: Mounter, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "cs.mdl", tmp_path / "checkpoint.mdl")
    shutil.copy(GOLDEN / "cs.yaml", tmp_path / "params.yaml")
    (tmp_path / "mnt").mkdir()
    program, *args = shlex.split(code(table("Exit codes")[number][1]))
    assert program == "ckptfs"
    done = subprocess.run(
        [sys.executable, "-m", "ckptfs", *args], cwd=tmp_path, env=mounter.env, capture_output=True, text=True
    )
    assert str(done.returncode) == number
    assert len(done.stderr.splitlines()) == (number != "0")


def test_a_mount_point_with_something_in_it(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    (path / "mine").write_text("x")
    assert mounter.ckptfs("mount", GOLDEN / "cs.mdl", path).returncode == 4
    assert mounter.ckptfs("mount", GOLDEN / "cs.mdl", path, "-o", "nonempty").returncode == 0
    assert not (path / "mine").exists()
    assert mounter.ckptfs("umount", path).returncode == 0
    assert (path / "mine").read_text() == "x"


# ---------------------------------------------------------------------------------------------------------- security


def test_a_pickled_object_is_shown_as_refused(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.ckptfs("mount", fixture("objects.mdl"), path).returncode == 0
    shown = json.loads((path / "tensors/complex.json").read_text())
    assert shown["class"] == "builtins.complex"
    assert "could run code" in shown["refused"]


def test_a_foreign_torch_pickle_is_refused(mounter: Mounter, tmp_path: Path) -> None:
    import torch

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"model": {"w": torch.ones(3)}, "trap": Trap()}, tmp_path / "trap.pt")
    done = mounter.ckptfs("mount", tmp_path / "trap.pt", mounter.mountpoint())
    assert done.returncode == 1
    assert "mkdir" in done.stderr
    assert not (tmp_path / "sprung").exists()


def test_a_link_out_of_the_folder_is_not_followed(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.ckptfs("mount", fixture("link_absolute.mdl"), path).returncode == 0
    refused = [json.loads(p.read_text()) for p in (path / "tensors").rglob("*.json")]
    (link,) = [r for r in refused if isinstance(r, dict) and "target" in r]
    assert link["target"].startswith("/")
    assert "--follow-links" in link["refused"]


# ------------------------------------------------------------------------------------------------------------- bytes


def test_made_heads_are_the_documented_stream() -> None:
    folder = FAMILIES / "gpt2/hf2cs-headless-tied-bf16/hf"
    config = {**json.loads((folder / "config.json").read_text()), "tie_word_embeddings": False}
    head = ckptfs.view(folder, "cs-2.9", model="gpt2-headless", config=config)["lm_head.weight"]
    ((_, recipe),) = documents.blocks(PAGE.partition("The samples of a generated head")[2], "python")
    names: dict[str, Any] = {"numpy": np, "t": 0}
    exec(recipe, names)
    tile = names["samples"]
    assert (head.dtype, len(head.shape)) == ("float32", 2)
    assert np.array_equal(np.asarray(head).reshape(-1), tile[: np.asarray(head).size])


# ------------------------------------------------------------------------------------------- every row has its check

HERE: dict[str, Iterable[str]] = {
    "The tree": table("The tree"),
    "Names": table("Names"),
    "Attributes": ATTRIBUTES,
    "System calls": {**WORKS, **FAILS},
    "Exit codes": table("Exit codes"),
}


def test_control_characters_are_escaped(mounter: Mounter, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a\x1b[31m\n": np.ones(1, np.float32)}, tmp_path / "odd.safetensors")
    shown = mounter.ckptfs("ls", tmp_path / "odd.safetensors").stdout
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 1
    path = mounter.mountpoint()
    assert mounter.ckptfs("mount", tmp_path / "odd.safetensors", path).returncode == 0
    assert os.listdir(path / "raw") == ["a%1B[31m%0A"]


@pytest.mark.parametrize("heading", sorted({*HERE, *ELSEWHERE}))
def test_every_row_has_a_check(heading: str) -> None:
    checked = [*HERE.get(heading, ()), *ELSEWHERE.get(heading, ())]
    assert sorted(checked) == sorted(table(heading))
    for name in ELSEWHERE.get(heading, {}).values():
        module, _, test = name.partition(".")
        assert callable(getattr(importlib.import_module(f"tests.mount.{module}"), test))


def test_every_table_is_known() -> None:
    headings = [part.partition("\n") for part in re.split(r"^#+ ", PAGE, flags=re.MULTILINE)[1:]]
    assert {name for name, _, body in headings if "\n|---" in body} == {*HERE, *ELSEWHERE}
