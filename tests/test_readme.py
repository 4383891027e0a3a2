"""README.md and the pages for users, run: console and Python blocks in order, beside a small real checkpoint.

In a console block a line after ``$`` is a command. The lines below are the output that it must show, in this order;
``…`` stands for anything, in a line or as a line of its own.
"""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click import Context

import ckptfs
from ckptfs.cli.advice import advised, advised_reason
from ckptfs.cli.main import COMMANDS, cli
from ckptfs.conversion import registry
from ckptfs.errors import CkptfsError, UnmatchedKeys, UnsupportedValue
from ckptfs.formats.source import OUTSIDE
from tests.cli.conftest import safetensors_bytes
from tests.conftest import ROOT, Mounter
from tests.documents import blocks, commands, pattern, read
from tests.paths import FAMILIES

pytestmark = pytest.mark.fuse

README, COMMANDS_PAGE = read("README.md"), read("docs/commands.md")
GOLDEN = FAMILIES / "llama/cs2hf-gqa-fp32"


@pytest.mark.parametrize(("page", "count"), [("README.md", 3), ("docs/commands.md", 25), ("docs/python.md", 4)])
def test_every_console_and_python_block_does_what_it_shows(page: str, count: int, mounter: Mounter) -> None:
    folder = mounter.folder
    shutil.copy(GOLDEN / "cs.mdl", folder / "checkpoint.mdl")
    shutil.copy(GOLDEN / "cs.yaml", folder / "params.yaml")
    mnt = mounter.mountpoint("mnt")
    tools = folder / "bin"
    tools.mkdir()
    (tools / "ckptfs").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptfs "$@"\n')
    (tools / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    env = {**mounter.env, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.replace(str(mnt), "/mnt/c")

    n_run = 0
    for language, text in blocks(read(page), "console", "python"):
        if language == "python":
            printed = run(sys.executable, "-c", text.replace("/mnt/c", str(mnt)))
            for shown in re.findall(r"^ *print\(.*# ([\d(].*)$", text, re.MULTILINE):
                assert shown in printed
            n_run += 1
        for command, output in commands(text) if language == "console" else ():
            printed = run("bash", "-o", "pipefail", "-c", command.replace("/mnt/c", str(mnt)))
            assert re.fullmatch(pattern(output) + r"(?:.*\n)*" if output else "", printed), (command, printed)
            n_run += 1
    assert n_run == count
    assert os.listdir(mnt) == [], "the page unmounts what it mounted"


def test_set_up_commands_exist() -> None:
    text = "".join(text for _, text in blocks(README, "sh"))
    scripts = re.findall(r"scripts/\S+", text)
    assert scripts == ["scripts/quickstart.sh", "scripts/test.sh"]
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK)
        subprocess.run(["bash", "-n", ROOT / script], check=True)


def options(*commands: str) -> set[str]:
    """Every option of these commands."""
    found = (cli.get_command(Context(cli), name) for name in commands)
    return {option for command in found if command for p in command.params for option in p.opts}


def test_options_and_extras_exist() -> None:
    named = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", "".join(re.findall(r"`[^`\n]+`", README + COMMANDS_PAGE))))
    assert named - {"--device", "--cap-add", "--help", "-r"} <= options(*COMMANDS)
    table = COMMANDS_PAGE.partition("| option of `mount`")[2].partition("\n\n")[0]
    told = options("mount") - {"--debug", "source", "mountpoint"}
    assert {option for option in told if f"`{option}" not in table} == set()
    extras = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.\[(\w+)\]", README):
        assert f"\n{extra} = [" in extras


def test_every_model_is_named() -> None:
    table = read("docs/models.md").partition("| kind |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([\w-]+)`", table)) - {"cs-2"}
    headless = {name for name in registry.FAMILIES if name.endswith("-headless")}
    assert named | headless == set(registry.FAMILIES)
    decoders, _, bare = table.partition("| decoders |")[2].partition("\n")[0].partition("without their head")
    with_a_head_only = {name for name in re.findall(r"`([\w-]+)`", decoders) if f"{name}-headless" not in headless}
    assert with_a_head_only == set(re.findall(r"`([\w-]+)`", bare.partition(":")[0]))


def test_the_example_of_a_family_converts_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = read("docs/adding-a-model.md")
    code = re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert code is not None
    found: dict[str, Any] = {}
    exec(code[1], found)
    monkeypatch.setitem(registry.FAMILIES, "gpt-neo", found["GPT_NEO"])
    layer = ["attn.attention.q_proj.weight", "attn.attention.out_proj.bias", "ln_1.weight", "mlp.c_fc.bias"]
    keys = [*(f"transformer.h.{i}.{name}" for i in range(2) for name in layer), "transformer.ln_f.bias"]
    keys += ["transformer.wte.weight", "lm_head.weight"]
    tensors = {key: ("F32", np.full((3, 4), i, "<f4")) for i, key in enumerate(keys)}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    config = {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 2]], "hidden_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with ckptfs.open(tmp_path) as hf:
        cs = ckptfs.view(hf, "cs-2.9")
        ckptfs.save({"model": {key: cs[key] for key in cs}}, tmp_path / "cs.mdl")
        assert cs.config["model"]["num_hidden_layers"] == 2
        with ckptfs.open(tmp_path / "cs.mdl") as saved:
            back = ckptfs.view(saved, "hf", config=cs.config)
            assert {key: float(back[key][0][0]) for key in back} == {key: i for i, key in enumerate(keys)}
            assert back.config["attention_types"] == [[["global"], 2]]
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_types": [[["global", "local"], 1]]}))
    with ckptfs.open(tmp_path) as hf, pytest.raises(UnsupportedValue, match="attention_types"):
        ckptfs.view(hf, "cs-2.9")


FOREIGN = {
    "fuse: failed to exec fusermount3",
    "fuse: device not found, try 'modprobe fuse' first",
    "fuse: failed to open /dev/fuse: Permission denied",
    "option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf",
    *map(os.strerror, (errno.EACCES, errno.EIO, errno.ENOSPC, errno.ENOTCONN, errno.EROFS)),
    "did not contain a loop with signature matching types (dtype('V2')",
}
"""Messages of libfuse, its helper, the C library and numpy."""
NO_MESSAGE = {"hf/", "|V2", "from_pretrained"}


def texts(node: ast.AST) -> str:
    """The text of a string or f-string in the source, without what is filled in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str))


def messages() -> list[str]:
    """Every text in the program, and messages that are put together."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "ckptfs").rglob("*.py")]
    found = [texts(node) for tree in trees for node in ast.walk(tree)]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    for call in calls:  # an error, to which commands add the option that helps
        for keyword in call.keywords:
            if keyword.arg == "option" and isinstance(keyword.value, ast.Constant):
                found.append(advised(CkptfsError(texts(call.args[0]), option=str(keyword.value.value))))
    return [*found, advised_reason(OUTSIDE) or "", str(UnmatchedKeys("gpt2", [("a", ""), ("b", "")]))]


def test_symptoms_are_what_the_program_says() -> None:
    text = read("docs/troubleshooting.md")
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    quoted = [quote for heading in headings for quote in re.findall(r"`([^`]+)`", heading)]
    known = messages()
    unknown = [
        quote
        for quote in quoted
        if quote not in FOREIGN | NO_MESSAGE
        and not all(any(part in message for message in known) for part in map(str.strip, quote.split("…")))
    ]
    assert len(quoted) > 25
    assert unknown == []
