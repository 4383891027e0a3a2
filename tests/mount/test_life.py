"""How mounts begin and end: refusals, signals, dead daemons, unmounting."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, TREE_MODULE, Mounter
from tests.mount.trees import BIG, TEXT
from tests.paths import FAMILIES
from tests.waiting import MAX_SECONDS, wait_for, wait_until_open

pytestmark = pytest.mark.fuse

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32/cs.mdl"
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


def is_mounted(path: Path) -> bool:
    with open("/proc/self/mountinfo") as f:
        return any(line.split()[4] == str(path) for line in f)


def alive(pid: int) -> bool:
    """Whether a process has a thread left: its first one may be a zombie while another still holds the connection."""
    try:
        states = [p.read_text().rpartition(")")[2].split()[0] for p in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return alive(pid)  # a thread ended meanwhile
    return states not in ([], ["Z"])


def start_in_foreground(mounter: Mounter, path: Path, *options: str) -> subprocess.Popen[str]:
    process = mounter.start(*TREE_MODULE, "-f", path, *options)
    wait_for("the mount", lambda: is_mounted(path) and (path / "README.txt").read_bytes() == TEXT)
    return process


def test_sighup_opens_the_log_again(mounter: Mounter) -> None:
    """As logrotate wants it: the file is renamed, then the daemon told."""
    path, log = mounter.mountpoint(), mounter.folder / "x.log"
    assert mounter.ckptfs("mount", LLAMA, path, "--log-file", log).returncode == 0
    pid = mounter.daemon_pid
    log.rename(mounter.folder / "x.log.1")
    os.kill(pid, signal.SIGHUP)
    wait_for("the new log", lambda: log.exists() and "opened again" in log.read_text())
    assert is_mounted(path)
    assert (path / "README.txt").read_bytes()
    assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2)} == {str(log)}
    log.unlink()
    log.mkdir()
    os.kill(pid, signal.SIGHUP)  # cannot be written: it goes on
    time.sleep(0.1)
    assert alive(pid)
    assert mounter.ckptfs("umount", path).returncode == 0


def test_sighup_in_the_foreground_with_a_log_file(mounter: Mounter) -> None:
    path, log = mounter.mountpoint(), mounter.folder / "x.log"
    process = mounter.start("-m", "ckptfs", "mount", LLAMA, path, "-f", "--log-file", log)
    wait_for("the mount", lambda: log.exists() and "mounted on" in log.read_text())
    log.unlink()
    process.send_signal(signal.SIGHUP)
    wait_for("the new log", lambda: log.exists() and "opened again" in log.read_text())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 0
    assert not is_mounted(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_unmount_in_the_foreground(mounter: Mounter, number: int) -> None:
    path = mounter.mountpoint()
    process = start_in_foreground(mounter, path)
    process.send_signal(number)
    _, err = process.communicate(timeout=MAX_SECONDS)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert not is_mounted(path)
    assert os.listdir(path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_unmount_in_the_background(mounter: Mounter, number: int) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    pid = mounter.daemon_pid
    os.kill(pid, number)
    wait_for("the daemon's end", lambda: not alive(pid))
    assert not is_mounted(path)
    assert "unmounted" in mounter.log


def test_a_signal_ends_the_daemon_while_a_file_is_open(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    pid = mounter.daemon_pid
    fd = os.open(path / "big.bin", os.O_RDONLY)
    os.kill(pid, signal.SIGTERM)
    wait_for("the daemon's end", lambda: not alive(pid))
    assert not is_mounted(path)
    with pytest.raises(OSError) as caught:
        os.close(fd)
    assert caught.value.errno == errno.ENOTCONN


@pytest.mark.parametrize("threads", [[], ["threads=1"], ["threads=4"]], ids=["default", "one", "four"])
def test_a_signal_ends_the_daemon_while_a_read_waits(mounter: Mounter, threads: list[str]) -> None:
    path = mounter.mountpoint()
    process = start_in_foreground(mounter, path, *threads)
    program = "import sys\ntry: open(sys.argv[1], 'rb').read()\nexcept OSError as e: print(e.errno)"
    command = [sys.executable, "-c", program, path / "slow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        wait_until_open(reader.pid, path / "slow")
        assert reader.poll() is None, "the read is under way, for minutes"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=MAX_SECONDS)
        assert process.returncode == 0, err
        assert "unmounted" in err
        assert not is_mounted(path)
        said, _ = reader.communicate(timeout=MAX_SECONDS)
        assert int(said) in (errno.ECONNABORTED, errno.ENOTCONN)


def test_a_signal_leaves_a_later_mount_alone(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    first = start_in_foreground(mounter, path)
    with open(path / "big.bin", "rb", buffering=0) as file:
        assert mounter.ckptfs("umount", "--lazy", path).returncode == 0
        second = start_in_foreground(mounter, path)
        assert file.read(1), "the first one answers still"
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=MAX_SECONDS)
        with pytest.raises(OSError, match="not connected"):
            os.pread(file.fileno(), 1, len(BIG) - 1)
    assert first.returncode == 0
    assert (path / "README.txt").read_bytes() == TEXT
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=MAX_SECONDS)
    assert second.returncode == 0


def test_mounting_returns_when_the_mount_answers(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    done = mounter.tree(path)  # reads its pipes to their end: the daemon must not hold them
    assert (done.returncode, done.stderr) == (0, "")
    assert (path / "big.bin").read_bytes() == BIG
    assert alive(mounter.daemon_pid)


def test_the_daemon_holds_no_terminal_and_no_foreign_files(mounter: Mounter, tmp_path: Path) -> None:
    path = mounter.mountpoint()
    with open(tmp_path / "held", "w") as held:
        os.set_inheritable(held.fileno(), True)
        command = [sys.executable, *TREE_MODULE, str(path)]
        subprocess.run(command, env=mounter.env, cwd=Path(__file__).parents[2], check=True, close_fds=False)
    pid = mounter.daemon_pid
    links = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert links["0"] == "/dev/null"
    assert links["1"] == links["2"]
    assert links["1"].endswith(".log")
    assert str(tmp_path / "held") not in links.values()
    assert sorted(fd for fd, link in links.items() if link == "/dev/fuse") != []
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.getsid(pid) == pid


def test_unmounting_waits_for_the_end(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    pid = mounter.daemon_pid
    done = mounter.ckptfs("umount", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_mounted(path)
    assert not alive(pid)
    assert os.listdir(path) == []


def test_a_busy_mount_names_who_uses_it(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    with open(path / "big.bin", "rb") as f:
        done = mounter.ckptfs("umount", path)
        assert done.returncode == 1
        assert "busy" in done.stderr
        assert f"({os.getpid()})" in done.stderr
        assert f"ckptfs umount --lazy {path}" in done.stderr
        assert is_mounted(path)
        assert mounter.ckptfs("umount", "--lazy", path).returncode == 0
        assert not is_mounted(path)
        assert f.read() == BIG, "open files stay readable after a lazy unmount"


def test_unmounting_what_is_not_mounted(mounter: Mounter) -> None:
    for path in (mounter.mountpoint(), mounter.folder / "absent"):
        done = mounter.ckptfs("umount", path)
        assert done.returncode == 1
        assert f"{path} is not mounted" in done.stderr
    done = mounter.ckptfs("umount", "/proc")
    assert done.returncode == 1
    assert "not one of ckptfs" in done.stderr


def test_names_are_absolute_in_the_process_list_and_the_log(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    names = [os.path.relpath(name, ROOT) for name in (LLAMA, path)]
    assert mounter.ckptfs("mount", *names).returncode == 0
    words = Path(f"/proc/{mounter.daemon_pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert words[-3:] == [b"mount", bytes(LLAMA), bytes(path)]
    assert f"mounted on {path}: {LLAMA}" in mounter.log
    assert mounter.ckptfs("umount", path).returncode == 0


def test_files_of_a_killed_daemon_are_removed(mounter: Mounter) -> None:
    path, other = mounter.mountpoint(), mounter.mountpoint("other")
    assert mounter.tree(path).returncode == 0
    pid = mounter.daemon_pid
    os.kill(pid, signal.SIGKILL)
    wait_for("the daemon's end", lambda: not alive(pid))
    state = mounter.folder / "state/ckptfs"
    (left,) = state.glob("*.pid")
    assert mounter.tree(other).returncode == 0
    assert left not in (kept := list(state.glob("*.pid")))
    assert len(kept) == 1
    assert mounter.ckptfs("umount", path).returncode == mounter.ckptfs("umount", other).returncode == 0
    assert list(state.glob("*.pid")) == []


def test_a_link_to_the_mount_point_will_do(mounter: Mounter) -> None:
    path = mounter.mountpoint("with space and é")
    (mounter.folder / "link").symlink_to(path)
    assert mounter.tree(mounter.folder / "link").returncode == 0
    assert (path / "README.txt").read_bytes() == TEXT
    assert mounter.ckptfs("umount", mounter.folder / "link").returncode == 0
    assert os.listdir(path) == []


def test_unfit_mount_points(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    done = mounter.tree(mounter.folder / "absent")
    assert done.returncode == 4
    assert f"mkdir -p {mounter.folder}/absent" in done.stderr
    (mounter.folder / "file").write_text("x")
    done = mounter.tree(mounter.folder / "file")
    assert done.returncode == 4
    assert "not a directory" in done.stderr
    (path / "mine").write_text("x")
    done = mounter.tree(path)
    assert done.returncode == 4
    assert "not empty" in done.stderr
    assert not is_mounted(path)


def test_mounting_twice_is_refused(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    done = mounter.tree(path)
    assert done.returncode == 4
    assert f"ckptfs umount {path}" in done.stderr
    assert (path / "README.txt").read_bytes() == TEXT


def test_a_killed_daemon_hangs_nobody(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    reader = subprocess.Popen(["cat", path / "slow"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_until_open(reader.pid, path / "slow")
    assert reader.poll() is None, "the read is under way"
    os.kill(mounter.daemon_pid, signal.SIGKILL)
    _, err = reader.communicate(timeout=MAX_SECONDS)
    assert reader.returncode == 1
    assert err
    with pytest.raises(OSError) as caught:
        (path / "deep" / "er" / "text").read_bytes()
    assert caught.value.errno == errno.ENOTCONN

    again = mounter.tree(path)
    assert again.returncode == 4
    assert f"ckptfs umount {path}" in again.stderr
    assert "dead" in mounter.ckptfs("doctor").stdout
    assert mounter.ckptfs("umount", path).returncode == 0
    assert not is_mounted(path)
    assert mounter.tree(path).returncode == 0
    assert (path / "README.txt").read_bytes() == TEXT


@as_root
def test_a_failing_daemon_reports_to_the_terminal(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    command = ["unshare", "-m", "sh", "-euc", 'mount --bind /dev/null /dev/fuse; exec "$@"', "sh"]
    done = subprocess.run(
        [*command, sys.executable, *TREE_MODULE, path],
        env=mounter.env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4
    assert "ckptfs: " in done.stderr
    assert "fuse" in done.stderr
    assert "ckptfs doctor" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not is_mounted(path)
    assert os.listdir(mounter.folder / "state/ckptfs") == [
        p.name for p in (mounter.folder / "state/ckptfs").glob("*.log")
    ]


PLAIN_USER = """
mount --bind "$T" /mnt
T=/mnt
mkdir "$T/home" "$T/user"
chown 65534:65534 "$T/home" "$T/user"
mknod "$T/fuse" c 10 229
chmod 666 "$T/fuse"
mount --bind "$T/fuse" /dev/fuse
exec setpriv --reuid=65534 --regid=65534 --clear-groups \
  --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search \
  env HOME="$T/home" USER=nobody PYTHONDONTWRITEBYTECODE=1 sh -euc '
    cd /
    "$PYTHON" -m tests.mount.mount_tree "$T/user"
    cat "$T/user/deep/er/text"
    stat -c "owner %u:%g" "$T/user/README.txt"
    (cd "$T/user" && "$PYTHON" -m ckptfs umount "$T/user") && exit 9 || echo "busy $?"
    "$PYTHON" -m ckptfs umount "$T/user"
    echo "left: $(ls "$T/user")"
    "$PYTHON" -m tests.mount.mount_tree "$T/user" allow_other=1 || echo "refused $?"
    "$PYTHON" -m tests.mount.mount_tree "$T/user"
    kill -9 "$(cut -d" " -f1 "$T"/home/.local/state/ckptfs/*.pid)"
    sleep 0.3
    cat "$T/user/README.txt" || echo "dead"
    "$PYTHON" -m ckptfs umount "$T/user"
    echo "left: $(ls "$T/user")"
    "$PYTHON" -m tests.mount.mount_tree "$T/user"
    cat "$T/user/slow" & sleep 0.5
    kill "$(cut -d" " -f1 "$T"/home/.local/state/ckptfs/*.pid)"
    wait $! || echo "ended: $(ls "$T/user")"
  '
"""


@as_root
def test_a_plain_user_mounts_and_unmounts(mounter: Mounter) -> None:
    """In a mount namespace of its own: /dev/fuse is open to everybody as udev makes it, and /mnt is the test's folder,
    for that of pytest is closed to others. The user may read everything, as the interpreter may be closed, too.
    """
    env = {**mounter.env, "T": str(mounter.folder), "PYTHON": sys.executable}
    env.pop("XDG_STATE_HOME")
    mounter.folder.chmod(0o755)
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-euc", PLAIN_USER], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == TEXT.decode().splitlines()
    assert lines[3:] == ["owner 65534:65534", "busy 1", "left: ", "refused 4", "dead", "left: ", "ended: "]
    assert "busy" in done.stderr
    assert "user_allow_other" in done.stderr
