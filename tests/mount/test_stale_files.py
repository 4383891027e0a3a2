"""Which state files of gone mounts are removed, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ckptfs.mount import stale_files
from ckptfs.mount.stale_files import KEEP_S, boot_id, owner_of, remove_stale, start_time


def state(folder: Path, name: str, text: str, age: float = 0.0) -> Path:
    path = folder / name
    path.write_text(text)
    when = path.stat().st_mtime - age
    os.utime(path, (when, when))
    return path


def test_what_goes_and_what_stays(tmp_path: Path) -> None:
    me, ended = os.getpid(), subprocess.Popen(["true"])
    ended.wait()
    old = KEEP_S + 60
    live = f"{me} {start_time(me)}"
    stay = [
        state(tmp_path, "live.pid", f"{live} {boot_id()}\n", old),
        state(tmp_path, "live.log", "", old),
        state(tmp_path, "elsewhere.pid", f"{live} another-boot\n"),
        state(tmp_path, "recent.log", "what went wrong"),
        state(tmp_path, "notes.txt", "mine", old),
    ]
    go = [
        state(tmp_path, "ended.pid", f"{ended.pid} 1 {boot_id()}\n"),
        state(tmp_path, "again.pid", f"{me} 1 {boot_id()}\n"),
        state(tmp_path, "before.pid", f"{live} another-boot\n", old),
        state(tmp_path, "damaged.pid", "?", old),
        state(tmp_path, "old.log", "", old),
    ]
    remove_stale(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted(stay)
    assert not any(path.exists() for path in go)
    remove_stale(str(tmp_path / "nowhere"))


def test_whose_file_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.pid"
    for text, owner in (("7 99\n", (7, "99")), (f"7 99 {boot_id()}\n", (7, "99")), ("7 99 other\n", None), ("", None)):
        path.write_text(text)
        assert owner_of(path) == owner
    assert owner_of(tmp_path / "none") is None
    assert stale_files.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_command_line_of_any_length() -> None:
    code = (
        "from ckptfs.mount.title import set_command_line\n"
        "words = ['ckptfs', 'mount', '/' + 'x' * 3000, '/mnt/ä b']\n"
        "import subprocess\n"
        "if set_command_line(words):\n"
        "    found = open('/proc/self/cmdline', 'rb').read().rstrip(b'\\0').split(b'\\0')\n"
        "    assert found == [word.encode() for word in words], found\n"
        "held = [bytes(1000) for _ in range(100_000)]\n"
        "assert subprocess.run(['env'], capture_output=True).returncode == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
