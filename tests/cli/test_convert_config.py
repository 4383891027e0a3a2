"""``ckptfs convert-config`` between Cerebras releases: one step, several, and refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Result
from tests.paths import FAMILIES
from tests.recorded.cases import KEPT_HERE, Run, runs

Ckptfs = Callable[..., Result]
RECORDED = [
    run
    for run in runs("config")
    if run.src.startswith("cs-") and run.tgt.startswith("cs-") and run.tgt != "cs-current" and run.model != "dpo"
    if run.case != KEPT_HERE
]
OLD = """
model: {hidden_size: 64, filter_size: 256, num_hidden_layers: 2, num_heads: 4, vocab_size: 100, use_bfloat16: true,
        mixed_precision: true, use_rms_norm: true, weight_initialization_seed: 1}
optimizer: {optimizer_type: AdamW, beta1: 0.9, beta2: 0.95, weight_decay_rate: 0.1, learning_rate:
            [{scheduler: Linear, steps: 10, base_lr: 0.0, end_learning_rate: 0.1},
             {scheduler: Constant, learning_rate: 0.1}]}
runconfig: {max_steps: 20, keep_checkpoint_max: 2, is_pretrained_checkpoint: true, num_wgt_servers: 3, mode: train}
train_input: {batch_size: 8}
"""
NEW = {
    "init": {
        "callbacks": [
            {"LoadCheckpointStates": {"load_checkpoint_states": ["model", "dataloader"]}},
            {"KeepNCheckpoints": {"n": 2}},
        ],
        "loop": {"max_steps": 20},
        "model": {
            "filter_size": 256,
            "hidden_size": 64,
            "name": "gpt2",
            "norm_type": "rmsnorm",
            "num_heads": 4,
            "num_hidden_layers": 2,
            "vocab_size": 100,
        },
        "optimizer": {"AdamW": {"betas": [0.9, 0.95], "weight_decay": 0.1}},
        "precision": {"enabled": True, "fp16_type": "bfloat16"},
        "schedulers": [
            {
                "SequentialLR": {
                    "schedulers": [
                        {"LinearLR": {"end_learning_rate": 0.1, "initial_learning_rate": 0.0, "total_iters": 10}},
                        {"ConstantLR": {"learning_rate": 0.1}},
                    ]
                }
            }
        ],
    },
    "fit": {"train_dataloader": {"batch_size": 8}},
}


def convert(ckptfs: Ckptfs, tmp: Path, config: str, *options: str) -> Result:
    path = tmp / "cs.yaml"
    path.write_text(config)
    return ckptfs("convert-config", path, *options)


def written(result: Result) -> Any:
    assert result.code == 0, result.err
    return yaml.safe_load(path_in(result).read_text())


def path_in(result: Result) -> Path:
    start = "Config saved to "
    assert result.text.startswith(start)
    return Path(result.text.removeprefix(start).rstrip("\n"))


@pytest.mark.parametrize("run", RECORDED, ids=str)
def test_recorded(ckptfs: Ckptfs, tmp_path: Path, run: Run) -> None:
    formats = ("--src-fmt", run.src, "--tgt-fmt", run.tgt)
    result = convert(ckptfs, tmp_path, yaml.safe_dump(run.config), "--model", run.model, *formats)
    if run.refused and not run.works_here:
        assert (result.code, result.err.count("\n")) == (1, 1)
        assert [path.name for path in tmp_path.iterdir()] == ["cs.yaml"]
    else:
        assert written(result) == (run.expected["config"] if not run.refused else written(result))


@pytest.mark.parametrize("src", ["cs-1.8", "cs-1.9"])
@pytest.mark.parametrize("tgt", ["cs-2.4", "cs-2.5", "cs-2.10"])
def test_several_steps(ckptfs: Ckptfs, tmp_path: Path, src: str, tgt: str) -> None:
    result = convert(ckptfs, tmp_path, OLD, "--model", "gpt2", "--src-fmt", src, "--tgt-fmt", tgt)
    assert path_in(result).name == f"cs_to_{tgt}.yaml"
    assert written(result) == {"trainer": NEW}


def test_what_gets_lost_is_said(ckptfs: Ckptfs, tmp_path: Path) -> None:
    config = "{model: {hidden_size: 8}, runconfig: {num_wgt_servers: 3, odd: 1}}"
    result = convert(ckptfs, tmp_path, config, "--model", "llama", "--src-fmt", "cs-2.0", "--tgt-fmt", "cs-2.4")
    assert written(result) == {"trainer": {"init": {"model": {"hidden_size": 8, "name": "llama"}}}}
    servers, odd = result.err.splitlines()
    assert servers.startswith("ckptfs: ") and "num_wgt_servers" in servers
    assert odd.startswith("ckptfs: ") and "runconfig.odd" in odd


CURRENT = "{model: {name: llama, hidden_size: 8}}"


@pytest.mark.parametrize(
    ("name", "config", "tgt", "made"),
    [
        ("config.json", '{"model_type": "gpt2", "n_embd": 8}', "cs-2.9", "config_to_cs-2.9.yaml"),
        ("x_to_cs-2.2.yaml", CURRENT, "cs-2.3", "x_to_cs-2.2_to_cs-2.3.yaml"),
        ("x.yaml", CURRENT, "cs-2.3", None),
    ],
)
def test_the_file_tells_its_format(
    ckptfs: Ckptfs, tmp_path: Path, name: str, config: str, tgt: str, made: str | None
) -> None:
    (tmp_path / name).write_text(config)
    result = ckptfs(
        "convert-config", tmp_path / name, "--tgt-fmt", tgt, "--model", "gpt2" if "json" in name else "llama"
    )
    if made is None:
        assert (result.code, result.out) == (2, b"")
        assert "--src-fmt" in result.err
    else:
        assert result.code == 0, result.err
        assert path_in(result).name == made


def test_to_hugging_face_any_release_will_do(ckptfs: Ckptfs, tmp_path: Path) -> None:
    source = FAMILIES / "llama/cs2hf-gqa-fp32/cs.yaml"
    told = ckptfs("convert-config", source, "--tgt-fmt", "hf", "--output-dir", tmp_path / "a", "--src-fmt", "cs-2.9")
    found = ckptfs("convert-config", source, "--tgt-fmt", "hf", "--output-dir", tmp_path / "b")
    assert (told.code, found.code) == (0, 0)
    assert path_in(told).read_bytes() == path_in(found).read_bytes()


def test_releases_that_are_not_connected(ckptfs: Ckptfs, tmp_path: Path) -> None:
    result = convert(ckptfs, tmp_path, OLD, "--model", "mixtral", "--src-fmt", "cs-1.8", "--tgt-fmt", "cs-2.4")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "cannot convert cs-1.8 to cs-2.4" in result.err


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "attention_bias": True,
    "use_cache": True,
    "rope_bend": 3,
}
HOW = ("--model", "llama", "--src-fmt", "hf", "--tgt-fmt", "cs-2.9")


def test_explain(ckptfs: Ckptfs, tmp_path: Path) -> None:
    """Each given field, then the defaults that are filled in; nothing is written."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = ckptfs("convert-config", tmp_path / "config.json", *HOW, "--explain")
    assert (result.code, result.err, os.listdir(tmp_path)) == (0, "", ["config.json"])
    heading, *lines = result.text.splitlines()
    assert heading.split() == ["FIELD", "WHAT", "HAPPENS", "llama,", "hf", "to", "cs-2.9"]
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert rows["model_type"] == ["required", "'llama'"]
    assert rows["hidden_size"] == ["renamed", "hidden_size"]
    assert rows["num_attention_heads"] == ["renamed", "num_heads, attention_inner_dim, rotary_dim"]
    assert rows["attention_bias"] == ["transformed", "use_projection_bias_in_attention, use_ffn_bias_in_attention"]
    assert rows["use_cache"] == ["ignored", "how the result is computed, not what it is"]
    assert rows["rope_bend"] == ["unknown"]
    assert rows["rms_norm_eps"] == ["default", "1e-06 as layer_norm_epsilon"]


def test_explain_as_json(ckptfs: Ckptfs, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = ckptfs("convert-config", tmp_path / "config.json", *HOW, "--explain", "--json")
    found = json.loads(result.text)
    assert (found["model"], found["src"], found["tgt"]) == ("llama", "hf", "cs-2.9")
    assert {"field": "rope_bend", "what": "unknown", "detail": ""} in found["fields"]
    assert {f["field"] for f in found["fields"] if f["what"] != "default"} == set(LLAMA)


def test_explain_a_cerebras_config_with_mup(ckptfs: Ckptfs, tmp_path: Path) -> None:
    (tmp_path / "cs.yaml").write_text("model: {hidden_size: 8, num_heads: 2, mup_base_hidden_size: 4, odd: 1}")
    how = ("--model", "gpt2", "--src-fmt", "cs-2.9", "--tgt-fmt", "hf")
    rows = [
        line.split() for line in ckptfs("convert-config", tmp_path / "cs.yaml", *how, "--explain").text.splitlines()
    ]
    assert ["mup_base_hidden_size", "transformed", "muP,", "folded", "into", "the", "weights"] in rows
    assert ["odd", "unknown"] in rows


@pytest.mark.parametrize(
    "options", [("--json", *HOW), ("--explain", "--model", "gpt2", "--src-fmt", "cs-2.2", "--tgt-fmt", "cs-2.4")]
)
def test_explain_has_limits(ckptfs: Ckptfs, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = ckptfs("convert-config", tmp_path / "config.json", *options)
    assert (result.code, result.err.count("\n")) == (2, 1)


def test_unknown_fields_are_named(ckptfs: Ckptfs, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = ckptfs("convert-config", tmp_path / "config.json", *HOW)
    assert (result.code, result.err) == (0, "ckptfs: llama: 1 config field is not known and left out: rope_bend\n")
