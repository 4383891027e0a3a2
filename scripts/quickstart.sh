#!/usr/bin/env bash
# From nothing to a mounted checkpoint: installs ckptfs, mounts a small real Cerebras checkpoint, reads it with
# ordinary tools, NumPy and transformers, and unmounts. Safe to run twice.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
PATH="$PWD/.venv/bin:$PATH"

work=$(mktemp -d)
mnt=$work/c
finish() {
    ckptfs umount "$mnt" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap finish EXIT
show() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

# Written by a Cerebras trainer: model, AdamW state and schedule of a tiny Llama, with its config beside it.
cp tests/recorded/families/llama/cs2hf-gqa-fp32/cs.mdl "$work/checkpoint_100.mdl"
cp tests/recorded/families/llama/cs2hf-gqa-fp32/cs.yaml "$work/params.yaml"
mkdir "$mnt"

show ckptfs info "$work/checkpoint_100.mdl"
show ckptfs mount "$work/checkpoint_100.mdl" "$mnt" --model llama --config "$work/params.yaml"
show ls -l "$mnt" "$mnt/hf"
show cat "$mnt/hf/config.json"
echo
show python - "$mnt" <<'PY'
import sys
import numpy as np

path = sys.argv[1] + "/tensors/model/embedding_layer/word_embeddings/weight.npy"
weight = np.load(path, mmap_mode="r")
print(f"numpy.load({path!r})\n  -> {weight.dtype} {weight.shape}, first row starts {np.asarray(weight[0, :3])}")
PY
show python - "$mnt" <<'PY'
import sys
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/hf")
with torch.no_grad():
    logits = model(torch.tensor([[1, 2, 3]])).logits
print(f"AutoModelForCausalLM.from_pretrained -> {type(model).__name__}, logits {tuple(logits.shape)}")
PY
show ckptfs umount "$mnt"
printf '\nDone: the checkpoint was read as a Hugging Face model; nothing was converted or written.\n'
