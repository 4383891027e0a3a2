"""From a checkpoint to a model in memory, one way or another; prints seconds and bytes written as JSON.

``convert`` stands in for the public converter, which cannot be installed everywhere: it reads the checkpoint with
h5py, renames, orders rotary rows and saves safetensors. ``cstorch`` does the same with the public cerebras_pytorch, on
which the converter stands. The converter does all of that, checks configs and reads optimizer state besides, so it
takes longer than either. ``converter`` is the public one. The last two run in the environment of the Python that is
named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.memory import HeldMemory
from benchmarks.mounting import ckptfs_mount, warm

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
    """Time one way; the libraries that all need are loaded before, and have loaded a small model.

    *options* is a JSON object: ``view`` (options of ``ckptfs mount``), ``model``, ``config`` (both as there),
    ``converter`` and ``cstorch`` (each a Python).
    """
    given = json.loads(options)
    model_name, config = _view(source, given.get("model"), given.get("config"))
    _warm_up()
    held = HeldMemory((2 if way == "mount" else 3) * os.path.getsize(source))  # a conversion has the tensors besides
    held.settle()
    warm(source)
    held.release()
    start = time.perf_counter()
    if way == "mount":
        with ckptfs_mount(source, folder, *given.get("view", ())) as mount:
            return _load(f"{mount.path}/hf", start, 0)
    if way == "convert":
        written = convert(source, folder, config)
    elif way == "cstorch":
        written = run_cstorch(given["cstorch"], source, folder, config)
    else:
        params = given.get("config") or _params(source, f"{folder}.yaml")
        written, folder = run_converter(given["converter"], source, folder, model_name, params)
    return _load(folder, start, written)


def _warm_up() -> None:
    """Have transformers import what it imports with the first model, which takes longer than to load one."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    small = LlamaConfig(num_hidden_layers=1, vocab_size=32, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(small).save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)


def _load(folder: str, start: float, written: int) -> dict[str, Any]:
    """``from_pretrained``, then a byte of each page of each weight: files are mapped, and read when touched."""
    import torch
    from transformers import AutoModelForCausalLM

    ready = time.perf_counter() - start
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    seconds = time.perf_counter() - start
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.detach().reshape(-1).view(torch.uint8)[::4096].sum()
    touched = time.perf_counter() - start
    n = sum(p.numel() for p in parameters)
    return {"seconds": seconds, "before loading": ready, "touched": touched, "written": written, "parameters": n}


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


def run_cstorch(python: str, source: str, folder: str, config: dict[str, Any]) -> int:
    """As `convert`, by `benchmarks.with_cstorch` in another environment."""
    import ckptfs

    with ckptfs.open(source) as opened:
        keys = [key.removeprefix("model.") for key in opened if key.startswith("model.") and ".ln_f." not in f".{key}"]
    head = config["hidden_size"] // config["num_attention_heads"]
    given = json.dumps({"names": {key: rename(key) for key in keys}, "config": config, "head": head})
    script = Path(__file__).with_name("with_cstorch.py")
    done = subprocess.run([python, "-W", "ignore", script, source, folder, given], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cerebras_pytorch failed: {done.stderr.strip()[-500:]}")
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
