#!/usr/bin/env python3
"""Draws docs/terminal.svg: commands on a small real checkpoint, run here, with the output that they print.

Run it with the Python of the environment that ckptfs is installed in. The picture depends on the output alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from unittest import mock

import svg

from ckptfs.mount.state_files import state_file

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/terminal.svg"
CHECKPOINT = ROOT / "tests/recorded/families/llama/cs2hf-gqa-fp32"
MOUNT_POINT = "/mnt/c"
LOAD = (
    "from transformers import AutoModelForCausalLM as Auto; "
    f"print(type(Auto.from_pretrained('{MOUNT_POINT}/hf')).__name__)"
)
COMMANDS = (
    "ckptfs ls checkpoint.mdl '*layers.0.self_attn*weight'",
    f"ckptfs mount checkpoint.mdl {MOUNT_POINT} --model llama --config params.yaml",
    f"ls {MOUNT_POINT}/hf",
    f'python3 -c "{LOAD}"',
    f"ckptfs umount {MOUNT_POINT}",
)
"""What is shown, in order. The mount point stands for a temporary folder."""
BACKGROUND, BAR, TEXT, PROMPT, COMMAND = "#0f1720", "#1b2733", "#c9d1d9", "#4ec9a5", "#ffffff"
CHARACTER, LINE, SIZE, PADDING, TOP = 7.83, 19.0, 13, 18, 54
"""Width of a character, distance of lines, size of the font, space around the text, and above it."""


def main() -> None:
    """Run the commands and write the picture."""
    PICTURE.write_text(draw(session()))
    print(PICTURE)


def session() -> list[tuple[str, list[str]]]:
    """Each command with the lines that it prints."""
    with tempfile.TemporaryDirectory(prefix="ckptfs-session-") as name:
        folder = Path(name)
        run = _shell(folder)
        try:
            return [(command, run(command)) for command in COMMANDS]
        finally:
            if os.path.ismount(folder / "c"):
                run(COMMANDS[-1])


def _shell(folder: Path) -> Callable[[str], list[str]]:
    """A function that runs a command in *folder*, beside the checkpoint, with this Python."""
    shutil.copy(CHECKPOINT / "cs.mdl", folder / "checkpoint.mdl")
    shutil.copy(CHECKPOINT / "cs.yaml", folder / "params.yaml")
    for part in ("c", "bin"):
        (folder / part).mkdir()
    for tool, arguments in (("ckptfs", "-m ckptfs "), ("python3", "")):
        (folder / "bin" / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        (folder / "bin" / tool).chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    places = {"PATH": path, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")}
    env = {**os.environ, **places, "LC_ALL": "C.UTF-8"}

    def run(command: str) -> list[str]:
        real = command.replace(MOUNT_POINT, str(folder / "c"))
        done = subprocess.run(["bash", "-c", real], cwd=folder, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{command}: {done.stderr}")
        return _with_stand_ins(done.stdout, folder).splitlines()

    return run


def _with_stand_ins(output: str, folder: Path) -> str:
    """*output* as it is for a mount on `MOUNT_POINT`, with its log below the user's home."""
    with mock.patch.dict(os.environ, XDG_STATE_HOME=str(folder / "state")):
        real, shown = (state_file(point, ".log") or "" for point in (str(folder / "c"), MOUNT_POINT))
    output = output.replace(real, f"~/.local/state/ckptfs/{os.path.basename(shown)}")
    return output.replace(str(folder / "c"), MOUNT_POINT)


def draw(shown: list[tuple[str, list[str]]]) -> str:
    """The SVG text of a terminal with these commands and their output."""
    lines = [line for command, output in shown for line in (f"$ {command}", *output)]
    width = max(map(len, lines)) * CHARACTER + 2 * PADDING
    height = TOP + len(lines) * LINE + PADDING

    def body() -> Iterator[str]:
        yield svg.rect(0, 0, width, height, BACKGROUND, 10)
        yield svg.rect(0, 0, width, 34, BAR, 10)
        for i, fill in enumerate(("#ff5f57", "#febc2e", "#28c840")):
            yield svg.circle(22 + 20 * i, 17, 6, fill)
        yield f'<g font-family="{svg.MONO}" font-size="{SIZE}" xml:space="preserve">'
        y = float(TOP)
        for command, output in shown:
            prompt = f"<tspan fill='{PROMPT}'>$ </tspan><tspan fill='{COMMAND}'>{escape(command)}</tspan>"
            yield _line(y, prompt, len(command) + 2)
            for i, line in enumerate(output, 1):
                yield _line(y + i * LINE, escape(line), len(line))
            y += (1 + len(output)) * LINE
        yield "</g>"

    return svg.picture(width, height, "A terminal session with ckptfs", body())


def _line(y: float, content: str, length: int) -> str:
    """One line of text, as wide as its characters in every font."""
    width = f" textLength='{svg.number(length * CHARACTER)}'" if length else ""
    return f"<text x='{PADDING}' y='{svg.number(y)}' fill='{TEXT}'{width}>{content}</text>"


if __name__ == "__main__":
    main()
