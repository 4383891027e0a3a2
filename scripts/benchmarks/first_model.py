"""From a checkpoint to a model in memory, one way or another; prints seconds and bytes written as JSON.

``convert`` stands in for the public converter, which cannot be installed everywhere: it reads the checkpoint with
h5py, renames, orders rotary rows and saves safetensors. The converter does all of that, checks configs and reads
optimizer state besides, so it takes longer than this. ``converter`` is the public one, in the environment of the Python
that is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.mounting import ckptfs_mount

NAMES = {
    "embedding_layer.word_embeddings": "model.embed_tokens",
    "transformer_decoder.norm": "model.norm",
    "transformer_decoder.layers": "model.layers",
    "self_attn.proj_q_dense_layer": "self_attn.q_proj",
    "self_attn.proj_k_dense_layer": "self_attn.k_proj",
    "self_attn.proj_v_dense_layer": "self_attn.v_proj",
    "self_attn.proj_output_dense_layer": "self_attn.o_proj",
    "norm1": "input_layernorm",
    "norm3": "post_attention_layernorm",
    "ffn.ffn.0.linear_layer_for_glu": "mlp.gate_proj",
    "ffn.ffn.0.linear_layer": "mlp.up_proj",
    "ffn.ffn.1.linear_layer": "mlp.down_proj",
}


CONVERTER = "cerebras.modelzoo.tools.convert_checkpoint"
"""The public converter's module."""


def main(way: str, source: str, folder: str, options: str = "{}") -> dict[str, Any]:
    """Time one way; the libraries that all need are loaded before.

    *options* is a JSON object: ``view`` (options of ``ckptfs mount``), ``model``, ``config`` (both as there) and
    ``converter`` (a Python).
    """
    from transformers import AutoModelForCausalLM

    given = json.loads(options)
    model_name, config = _view(source, given.get("model"), given.get("config"))
    start = time.perf_counter()
    if way == "mount":
        with ckptfs_mount(source, folder, *given.get("view", ())) as mount:
            ready = time.perf_counter() - start
            model = AutoModelForCausalLM.from_pretrained(f"{mount.path}/hf", dtype="auto")
            seconds = time.perf_counter() - start
            written = 0
    else:
        if way == "convert":
            written = convert(source, folder, config)
        else:
            params = given.get("config") or _params(source, f"{folder}.yaml")
            written, folder = run_converter(given["converter"], source, folder, model_name, params)
        ready = time.perf_counter() - start
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        seconds = time.perf_counter() - start
    parameters = sum(p.numel() for p in model.parameters())
    return {"seconds": seconds, "before loading": ready, "written": written, "parameters": parameters}


def convert(source: str, folder: str, config: dict[str, Any]) -> int:
    """Write the Hugging Face model of a Llama checkpoint with bfloat16 weights to *folder*; bytes written."""
    import h5py
    import hdf5plugin  # noqa: F401 - registers the LZ4 filter
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    with h5py.File(source) as file:
        for key in (k for k in file if k.startswith("model.") and k != "model.ln_f.weight"):
            data = file[key][...]
            if "proj_q_dense" in key or "proj_k_dense" in key:
                head = config["hidden_size"] // config["num_attention_heads"]
                data = data.reshape(-1, head // 2, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
            tensors[rename(key.removeprefix("model."))] = torch.from_numpy(data).view(torch.bfloat16).contiguous()
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
    Path(folder, "config.json").write_text(json.dumps(config))
    return _size(folder)


def run_converter(python: str, source: str, folder: str, model: str, params: str) -> tuple[int, str]:
    """The public converter's model of *source*: bytes written, and the folder below *folder* that has it."""
    command = [python, "-m", CONVERTER, "convert", source, "--model", model, "--src-fmt", "cs-2.9", "--tgt-fmt", "hf"]
    command += ["--config", params, "--output-dir", folder, "--export-safetensors", "--no-progress-bar"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the converter failed: {done.stderr.strip()[-500:]}")
    made = next(entry.path for entry in os.scandir(folder) if entry.is_dir())
    return _size(made), made


def _size(folder: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder))


def rename(key: str) -> str:
    """The Hugging Face name of a Llama key."""
    for theirs, ours in NAMES.items():
        key = key.replace(theirs, ours)
    return key


def _view(source: str, model: str | None, config: str | None) -> tuple[str, dict[str, Any]]:
    """The family's name and the Hugging Face config, which cost no way anything."""
    import ckptfs

    with ckptfs.open(source) as opened:
        view = ckptfs.view(opened, model=model, config=config)
        return view.plan.model, dict(view.config)


def _params(source: str, path: str) -> str:
    """The config that the checkpoint's trainer recorded, as a file."""
    import yaml

    import ckptfs

    with ckptfs.open(source) as opened:
        recorded = opened.metadata[-1]["params"]
    Path(path).write_text(yaml.safe_dump(json.loads(json.dumps(recorded))))
    return path


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
