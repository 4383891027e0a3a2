"""Models that transformers saves, and loads again from a mount.

That happens in a process of its own: a hung mount must not hang the tests. ``python -m tests.mount.with_transformers
MODULE`` reads a line with ``save`` or ``load`` and its arguments (JSON), calls that function of the module, and answers
with a line: null, or the traceback. `RoundTrips` is the other end of it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ckptfs
from ckptfs.tools.export import outputs, write_outputs
from tests.conftest import ROOT, Mounter
from tests.mount.forks import Command

MAX_SECONDS = 300
"""Of one answer; whoever takes longer hangs."""


def transformers_major() -> int:
    """The installed version, 0 when there is none."""
    try:
        return int(importlib.metadata.version("transformers").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


@dataclass
class RoundTrips:
    """Models by name: saved, converted, mounted and loaded when a test first asks for it.

    A step that fails does so for the tests of its model, and for no other.
    """

    folder: Path
    mounter: Mounter
    command: Command
    call: Callable[..., None]
    release: Callable[[str], str]
    _mounts: dict[str, Path] = field(default_factory=dict)

    def saved(self, name: str) -> Path:
        """The model as transformers saves it, and beside it ``<name>.npy``: what it makes of an example."""
        path = self.folder / "saved" / name
        if not path.with_name(f"{path.name}.npy").exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.call("save", name, path)
        return path

    def converted(self, name: str, family: str) -> tuple[Path, Path]:
        """A folder of saved models as a Cerebras checkpoint: ``.mdl`` and config."""
        folder = self.folder / "converted" / name
        if not folder.exists():
            with ckptfs.open(self.folder / "saved" / name) as checkpoint:
                view = ckptfs.view(checkpoint, self.release(family), model=family)
                write_outputs(outputs(view.plan, "m", None, shard_bytes=1 << 30, safetensors=True), str(folder))
        (mdl,), (config,) = folder.glob("*.mdl"), folder.glob("*.yaml")
        return mdl, config

    def mounted(self, name: str, family: str) -> Path:
        """The converted checkpoint, mounted; nobody says of which format it is."""
        if name not in self._mounts:
            mdl, config = self.converted(name, family)
            mnt = self.mounter.mountpoint(name.replace("/", "-"))
            code, _, err = self.command(mdl.parent, "mount", mdl, mnt, "--model", family, "--config", config)
            assert code == 0, err
            self._mounts[name] = mnt
        return self._mounts[name]

    def loaded(self, name: str, shown: Path) -> Path:
        """Beside this path: ``<name>.npy`` as transformers makes it of *shown*, and ``<name>.json``, the complaints."""
        path = self.folder / "loaded" / name
        if not path.with_name(f"{path.name}.npy").exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.call("load", name, shown, path)
        return path


@contextlib.contextmanager
def round_trips(
    module: str, folder: Path, mounter: Mounter, command: Command, release: Callable[[str], str]
) -> Iterator[RoundTrips]:
    """Round trips of the models of a module; its process starts with the first model."""
    with contextlib.ExitStack() as stack:
        started: list[Callable[..., None]] = []

        def call(*args: object) -> None:
            if not started:
                started.append(stack.enter_context(_process(module)))
            started[0](*args)

        yield RoundTrips(folder, mounter, command, call, release)


@contextlib.contextmanager
def _process(module: str) -> Iterator[Callable[..., None]]:
    args = [sys.executable, "-m", "tests.mount.with_transformers", module]
    with subprocess.Popen(args, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        asked, answered = process.stdin, process.stdout
        assert asked is not None
        assert answered is not None

        def call(*args: object) -> None:
            print(json.dumps([str(arg) for arg in args]), file=asked, flush=True)
            late = threading.Timer(MAX_SECONDS, process.kill)
            late.start()
            line = answered.readline()
            late.cancel()
            assert line, f"{module} ended with {process.wait()} while it ran {args}"
            error = json.loads(line)
            assert error is None, error

        yield call
        asked.close()


def serve(module: str, asked: IO[str], answered: IO[str]) -> None:
    """The process: one answer for each line."""
    functions = vars(importlib.import_module(module))
    for line in asked:
        name, *args = json.loads(line)
        error = None
        try:
            functions[name](args[0], *map(Path, args[1:]))
        except Exception:  # whatever it is, a test shows it
            error = traceback.format_exc()[-4000:]
        print(json.dumps(error), file=answered, flush=True)


def random_model(kind: Any, fields: dict[str, Any], seed: int, change: Callable[[Any], None] | None = None) -> Any:
    """A model of a class of transformers whose weights, norms and biases are all random."""
    import torch

    torch.manual_seed(seed)
    model = kind(kind.config_class(**fields)).eval()
    if change:
        change(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def keep(path: Path, model: Any, *args: Any, pick: Callable[[Any], list[Any]], **inputs: Any) -> None:
    """Write what *model* makes of inputs, as <path>.npy."""
    import numpy as np
    import torch

    with torch.no_grad():
        for parameter in model.parameters():  # to memory aligned alike: sums of a single row depend on it
            parameter.data = parameter.data.clone()
        found = pick(model(*args, **inputs))
    np.save(path.with_name(f"{path.name}.npy"), np.concatenate([x.numpy().reshape(-1) for x in found]))


def keep_report(path: Path, report: dict[str, Any]) -> None:
    """Write what the loader complained of, as <path>.json."""
    path.with_name(f"{path.name}.json").write_text(json.dumps({k: sorted(map(str, v)) for k, v in report.items() if v}))


if __name__ == "__main__":
    answers = sys.stdout
    sys.stdout = sys.stderr  # of libraries that print
    serve(sys.argv[1], sys.stdin, answers)
