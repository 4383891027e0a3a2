"""Command lines of ckptfs, each in a fork of one process that has imported everything: a mount in a tenth of a second.

``python -m tests.mount.forks`` reads a line with a folder and a command line (JSON), runs the command there, and
answers with a line: exit code, stdout, stderr. `commands` is the other end of it.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ckptfs.mount.fuse
from ckptfs.cli.main import run
from tests.conftest import ROOT

LEFT_OUT = ("ckptfs.__main__", "ckptfs._native", "ckptfs.formats.hdf5.decode_worker")
"""The daemon never has h5py, so it is not imported here either."""
Ended = tuple[int, str, str]
Command = Callable[..., Ended]


@contextmanager
def commands(env: dict[str, str]) -> Iterator[Command]:
    """A function that takes a folder and a command line: the command's exit code, stdout and stderr."""
    args = [sys.executable, "-m", "tests.mount.forks"]
    with subprocess.Popen(args, cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        asked, answered = process.stdin, process.stdout
        assert asked is not None
        assert answered is not None

        def call(folder: Path, *command: object) -> Ended:
            print(json.dumps([str(folder), *map(str, command)]), file=asked, flush=True)
            code, out, err = json.loads(answered.readline())
            return code, out, err

        yield call
        asked.close()


def serve() -> None:
    for module in pkgutil.walk_packages(ckptfs.__path__, "ckptfs."):
        if module.name not in LEFT_OUT:
            importlib.import_module(module.name)
    ckptfs.mount.fuse.load_binding()
    for line in sys.stdin:
        print(json.dumps(forked(*json.loads(line))), flush=True)


def forked(folder: str, *command: str) -> Ended:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            with open(os.devnull) as nothing:
                for number, file in enumerate((nothing, out, err)):
                    os.dup2(file.fileno(), number)
            os.chdir(folder)
            code = run(command)
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (out, err):
            file.seek(0)
        return code, out.read(), err.read()


if __name__ == "__main__":
    serve()
