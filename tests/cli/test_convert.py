"""``ckptfs convert`` and ``convert-config``: flags and names of the public converter; the bytes of the mount."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
from pathlib import Path

import pytest

from ckptfs.errors import UsageError
from ckptfs.formats.extents import text_file
from ckptfs.tools.export import write_outputs
from tests.conftest import Mounter
from tests.paths import FAMILIES, RELEASES
from tests.waiting import MAX_SECONDS, wait_for

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
TO_HF = ["--model", "llama", "--src-fmt", "cs-2.9", "--tgt-fmt", "hf", "--config", LLAMA / "cs.yaml"]


def test_the_converters_command_line_carries_over(mounter: Mounter) -> None:
    out = mounter.folder / "out"
    done = mounter.ckptfs(
        *("convert", LLAMA / "cs.mdl", *TO_HF, "--output-dir", out, "--hf-shard-size", "20KB", "--export-pickle"),
        *("--drop-unmatched-keys", "--no-progress-bar", "--debug"),
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"Checkpoint saved to {out}/cs_to_hf",
        f"Config saved to {out}/cs_to_hf/config.json",
    ]
    *mapping, warning = done.stderr.splitlines()
    assert "lm_head.weight -> lm_head.weight" in mapping
    assert warning.startswith("ckptfs: no file names the end-of-text token")
    names = {p.name for p in (out / "cs_to_hf").iterdir()}
    assert names == {
        "config.json",
        "pytorch_model.bin.index.json",
        *(f"pytorch_model-0000{i}-of-00003.bin" for i in (1, 2, 3)),
    }


def test_a_second_run_is_refused_in_one_line(mounter: Mounter) -> None:
    command = ["convert", LLAMA / "cs.mdl", *TO_HF, "--output-dir", mounter.folder]
    assert mounter.ckptfs(*command).returncode == 0
    again = mounter.ckptfs(*command)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "--force" in again.stderr
    assert mounter.ckptfs(*command, "--force").returncode == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [("dropout_rate: 0.3", "dropout_rate is 0.3"), ("norm_type: layernorm", "norm_type is 'layernorm'")],
)
def test_a_refused_config_leaves_nothing(mounter: Mounter, config: str, message: str) -> None:
    params = mounter.folder / "params.yaml"
    name = config.partition(":")[0]
    lines = (FAMILIES / "llama/hf2cs-gqa-bf16/cs.yaml").read_text().splitlines()
    params.write_text("\n".join(f"    {config}" if f" {name}:" in line else line for line in lines))
    done = mounter.ckptfs(
        "convert",
        LLAMA / "cs.mdl",
        "--model",
        "llama",
        "--tgt-fmt",
        "hf",
        "--config",
        params,
        "--output-dir",
        mounter.folder,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert [p.name for p in mounter.folder.iterdir()] == ["params.yaml"]


def test_each_output_lies_beside_its_input(mounter: Mounter) -> None:
    source, configs = mounter.folder / "checkpoints", mounter.folder / "configs"
    shutil.copytree(FAMILIES / "gpt2/hf2cs-untied-fp32/hf", source)
    configs.mkdir()
    (source / "config.json").rename(configs / "config.json")
    weights = next(source.glob("*.index.json"))
    there = ("--model", "gpt2", "--src-fmt", "hf", "--tgt-fmt", "cs-2.9", "--config", configs / "config.json")
    done = mounter.ckptfs("convert", weights, *there)
    assert done.returncode == 0, done.stderr
    (mdl,) = source.glob("*_to_cs-2.9.mdl")
    config = configs / "config_to_cs-2.9.yaml"
    assert done.stdout.splitlines() == [f"Checkpoint saved to {mdl}", f"Config saved to {config}"]
    back = ("--model", "gpt2", "--src-fmt", "cs-2.9", "--tgt-fmt", "hf", "--config", config)
    done = mounter.ckptfs("convert", mdl, *back)
    folder = source / f"{mdl.stem}_to_hf"
    assert done.stdout.splitlines() == [
        f"Checkpoint saved to {folder}",
        f"Config saved to {folder}/config.json",
    ]


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give another folder"):
        write_outputs({"/nowhere/config.yaml": text_file("x"), "a.mdl": text_file("y")}, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_convert_wrote_mounts_without_flags(mounter: Mounter) -> None:
    """Nothing but the checkpoint is there, and configs of that release have no name."""
    source = FAMILIES / "gpt2/hf2cs-untied-fp32/hf"
    to = ("--tgt-fmt", "cs-2.2", "--output-dir", mounter.folder)
    assert mounter.ckptfs("convert", source, *to).returncode == 0
    (mounter.folder / "config_to_cs-2.2.yaml").unlink()
    about = json.loads(mounter.ckptfs("info", mounter.folder / "hf_to_cs-2.2.mdl", "--json").stdout)
    assert about["family"] == "gpt2"
    assert list(about["views"]) == ["hf"]


def test_debug_says_what_each_key_becomes(mounter: Mounter) -> None:
    out = ("--output-dir", mounter.folder, "--debug")
    done = mounter.ckptfs("convert", LLAMA / "cs.mdl", *TO_HF, *out)
    pairs = dict(line.split(" -> ") for line in done.stderr.splitlines() if " -> " in line)
    assert pairs["embedding_layer.word_embeddings.weight"] == "model.embed_tokens.weight"
    assert pairs["ln_f.weight"] == "nothing"
    quiet = mounter.ckptfs("convert", LLAMA / "cs.mdl", *TO_HF, *out[:2], "--force")
    assert " -> " not in quiet.stderr
    case, mdl = RELEASES / "llama/2.0_to_2.1", mounter.folder / "old.mdl"
    mdl.write_bytes(gzip.decompress((case / "cs.mdl.gz").read_bytes()))
    options = ("--model", "llama", "--src-fmt", "cs-2.0", "--tgt-fmt", "cs-2.1", "--config", case / "cs.yaml")
    done = mounter.ckptfs("convert", mdl, *options, *out)
    assert done.returncode == 0, done.stderr
    assert "lm_head.weight -> lm_head.weight" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(mounter: Mounter, number: signal.Signals, code: int) -> None:
    """The command is stopped in the middle of its first file, which is large enough to take a while."""
    big = mounter.folder / "model.safetensors"
    with big.open("wb") as out:  # 4 GB of zeros that take no room
        header = b'{"transformer.wte.weight":{"dtype":"F32","shape":[1000000,1000],"data_offsets":[0,4000000000]}}'
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + 4_000_000_000)
    out_dir = mounter.folder / "out"
    config = FAMILIES / "gpt2/hf2cs-untied-fp32/hf/config.json"
    process = mounter.start(
        *("-m", "ckptfs", "convert", big, "--model", "gpt2", "--tgt-fmt", "cs-2.9", "--config", config),
        *("--output-dir", out_dir),
    )
    try:
        wait_for(
            "the output", lambda: out_dir.is_dir() and any(p.stat().st_size > 10_000_000 for p in out_dir.iterdir())
        )
        process.send_signal(number)
        _, said = process.communicate(timeout=MAX_SECONDS)
    finally:
        process.kill()
        process.wait()
        big.unlink()
    assert process.returncode == code
    assert "Traceback" not in said
    assert list(out_dir.iterdir()) == []


@pytest.mark.fuse
def test_cp_from_the_mount_gives_the_bytes_of_convert(mounter: Mounter) -> None:
    mnt = mounter.mountpoint()
    assert (
        mounter.ckptfs("mount", LLAMA / "cs.mdl", mnt, "--model", "llama", "--config", LLAMA / "cs.yaml").returncode
        == 0
    )
    out = mounter.folder / "out"
    for kind, shown, written in (
        ("--export-safetensors", "hf/model.safetensors", "model-00001-of-00001.safetensors"),
        ("--export-pickle", "hf-bin/pytorch_model.bin", "pytorch_model-00001-of-00001.bin"),
    ):
        assert mounter.ckptfs("convert", LLAMA / "cs.mdl", *TO_HF, kind, "--output-dir", out, "--force").returncode == 0
        assert (mnt / shown).read_bytes() == (out / "cs_to_hf" / written).read_bytes()
        assert (mnt / "hf/config.json").read_bytes() == (out / "cs_to_hf/config.json").read_bytes()


@pytest.mark.fuse
def test_a_hugging_face_model_mounts_as_a_cerebras_checkpoint(mounter: Mounter) -> None:
    source = FAMILIES / "gpt2/hf2cs-untied-fp32/hf"
    mnt = mounter.mountpoint()
    done = mounter.ckptfs("mount", source, mnt, "--tgt-fmt", "cs-2.9")
    assert done.returncode == 0, done.stderr
    assert "hf" not in {p.name for p in mnt.iterdir()}
    out = mounter.folder / "out"
    done = mounter.ckptfs("convert", source, "--tgt-fmt", "cs-2.9", "--output-dir", out)
    assert done.returncode == 0, done.stderr
    assert (mnt / "cs/checkpoint.mdl").read_bytes() == (out / "hf_to_cs-2.9.mdl").read_bytes()
    assert (mnt / "cs/params.yaml").read_bytes() == (source.parent / "cs.yaml").read_bytes()


def test_convert_config_both_ways(mounter: Mounter) -> None:
    case = FAMILIES / "llama/hf2cs-llama3-rope-bf16"
    done = mounter.ckptfs(
        *("convert-config", case / "hf/config.json", "--model", "llama", "--src-fmt", "hf", "--tgt-fmt", "cs-2.9"),
        *("--output-dir", mounter.folder),
    )
    assert done.returncode == 0, done.stderr
    there = mounter.folder / "config_to_cs-2.9.yaml"
    assert there.read_bytes() == (case / "cs.yaml").read_bytes()
    done = mounter.ckptfs("convert-config", there, "--src-fmt", "cs-2.9", "--tgt-fmt", "hf")
    assert done.returncode == 0, done.stderr
    back = json.loads(Path(done.stdout.removeprefix("Config saved to ").strip()).read_text())
    recorded = json.loads((case / "expected_hf.json").read_text())["roundtrip"]["config"]
    assert {k: v for k, v in back.items() if k != "architectures"} == recorded
    again = mounter.ckptfs("convert-config", there, "--src-fmt", "cs-2.9", "--tgt-fmt", "hf")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
