"""``mount --tokenizer``: a folder's small files stand beside the weights, and pipelines start from ``hf/`` alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfs.errors import UsageError
from ckptfs.vfs import tokenizer
from tests.conftest import Mounter
from tests.paths import FAMILIES

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
VIEW = ("--model", "llama", "--config", LLAMA / "cs.yaml")

MAKE = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, 37))])}
made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
fast.save_pretrained(sys.argv[1])
"""

GENERATE = """
import sys
from transformers import pipeline
say = pipeline("text-generation", model=sys.argv[1])
print(say("w5 w6 w7", max_new_tokens=4, do_sample=False)[0]["generated_text"])
"""


def python(code: str, *args: object) -> str:
    """What a program prints, in a process of its own: a hung mount must not hang the tests."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=200, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.fuse
def test_a_pipeline_starts_from_the_mount_alone(mounter: Mounter) -> None:
    pytest.importorskip("transformers")
    folder = mounter.folder / "tokenizer"
    python(MAKE, folder)
    texts = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "tokenizer.json" in texts
    mnt = mounter.mountpoint()
    done = mounter.ckptfs("mount", LLAMA / "cs.mdl", mnt, *VIEW, "--tokenizer", folder)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder)
    for place in ("hf", "hf-bin"):
        assert {name: (mnt / place / name).read_bytes() for name in texts} == texts
    assert (mnt / "hf/tokenizer.json").stat().st_ino != (mnt / "hf-bin/tokenizer.json").stat().st_ino
    said = python(GENERATE, mnt / "hf")
    assert re.fullmatch(r"w5 w6 w7( ?(w\d+|<\w+>))+\n", said)
    assert python(GENERATE, mnt / "hf-bin") == said


@pytest.mark.fuse
def test_the_models_own_files_stay(mounter: Mounter) -> None:
    folder = mounter.folder / "tokenizer"
    folder.mkdir()
    for name in ("config.json", "model.safetensors.index.json", "vocab.txt"):
        (folder / name).write_text("theirs")
    mnt = mounter.mountpoint()
    assert mounter.ckptfs("mount", LLAMA / "cs.mdl", mnt, *VIEW, "--tokenizer", folder).returncode == 0
    assert files(mnt / "hf") == ["config.json", "model.safetensors", "vocab.txt"]
    assert "hidden_size" in json.loads((mnt / "hf/config.json").read_text())


@pytest.mark.fuse
def test_the_end_of_text_is_named_or_said_to_be_unknown(mounter: Mounter) -> None:
    mnt = mounter.mountpoint()
    assert mounter.ckptfs("mount", LLAMA / "cs.mdl", mnt, *VIEW).returncode == 0
    assert not (mnt / "hf/generation_config.json").exists()
    assert "no file names the end-of-text token" in (mnt / "README.txt").read_text()
    assert mounter.ckptfs("umount", mnt).returncode == 0
    folder = mounter.folder / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (folder / "added_tokens.json").write_text('{"<end>": 36}')
    assert mounter.ckptfs("mount", LLAMA / "cs.mdl", mnt, *VIEW, "--tokenizer", folder).returncode == 0
    assert json.loads((mnt / "hf/generation_config.json").read_text()) == {"eos_token_id": 36}
    assert "end-of-text" not in (mnt / "README.txt").read_text()


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("kind", "place", "weights", "index"),
    [
        ("--export-safetensors", "hf", "model{}.safetensors", "model.safetensors.index.json"),
        ("--export-pickle", "hf-bin", "pytorch_model{}.bin", "pytorch_model.bin.index.json"),
    ],
)
def test_convert_writes_what_the_mount_shows(mounter: Mounter, kind: str, place: str, weights: str, index: str) -> None:
    """But for the names of shards, which convert always numbers."""
    folder = mounter.folder / "tokenizer"
    folder.mkdir()
    for name, text in (
        ("generation_config.json", '{"eos_token_id": 5}'),
        ("tokenizer.json", "{}"),
        ("chat_template.jinja", "{{ x }}"),
    ):
        (folder / name).write_text(text)
    mnt = mounter.mountpoint()
    how = (*VIEW, "--tokenizer", folder)
    assert mounter.ckptfs("mount", LLAMA / "cs.mdl", mnt, *how).returncode == 0
    to = ("--tgt-fmt", "hf", kind, "--output-dir", mounter.folder)
    done = mounter.ckptfs("convert", LLAMA / "cs.mdl", *how, *to)
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_bytes() for path in (mounter.folder / "cs_to_hf").iterdir()}
    del written[index]
    written[weights.format("")] = written.pop(weights.format("-00001-of-00001"))
    assert written == {path.name: path.read_bytes() for path in (mnt / place).iterdir()}


@pytest.mark.fuse
def test_a_cerebras_target_has_no_place_for_it(mounter: Mounter) -> None:
    source = FAMILIES / "gpt2/hf2cs-untied-fp32/hf"
    done = mounter.ckptfs("mount", source, mounter.mountpoint(), "--tgt-fmt", "cs-2.9", "--tokenizer", source)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--tokenizer" in done.stderr


def test_which_files_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MAX_BYTES", 1000)
    outside = tmp_path / "blob"
    outside.write_bytes(b"linked")
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    (folder / "tokenizer.json").symlink_to(outside)
    (folder / "broken.json").symlink_to(tmp_path / "nothing")
    wanted = {"vocab.txt": b"a b", "empty.txt": b"", "tokenizer.model": bytes(1000), "chat_template.jinja": b"{{ x }}"}
    unwanted = (
        "model.safetensors",
        "pytorch_model.bin",
        "x.PT",
        "model.safetensors.index.json",
        "config.json",
        ".hidden",
    )
    for name, data in [*wanted.items(), *((name, b"x") for name in unwanted), ("large.json", bytes(1001))]:
        (folder / name).write_bytes(data)
    found = tokenizer.small_files(str(folder))
    wanted["tokenizer.json"] = b"linked"
    assert sorted(found) == sorted(wanted)
    outside.unlink()
    for name, data in wanted.items():
        out = bytearray(len(data) + 5)
        assert found[name].file.read_into(0, memoryview(out)) == len(data) == found[name].size
        assert out[: len(data)] == data


def test_folders_that_make_no_sense(tmp_path: Path) -> None:
    for folder, why in ((tmp_path / "none", "cannot be read"), (tmp_path, "tokenizer.json")):
        with pytest.raises(UsageError, match=why):
            tokenizer.small_files(str(folder))
    for i in range(tokenizer.MAX_FILES + 1):
        (tmp_path / f"{i}.txt").touch()
    with pytest.raises(UsageError, match="257 files"):
        tokenizer.small_files(str(tmp_path))
