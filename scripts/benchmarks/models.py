"""Shapes of the checkpoints that are measured: keys, sizes and configs of real model families, at any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.state import RELEASE, Stored

Tensors = dict[str, Stored]


@dataclass(frozen=True, slots=True)
class Model:
    """The ``model`` state of a checkpoint and the config that its trainer recorded."""

    tensors: Tensors
    config: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def llama(hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, dtype: str = "bfloat16") -> Model:
    """Llama with *kv* key/value heads."""
    head = hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"embedding_layer.word_embeddings.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"transformer_decoder.layers.{i}"
        for name, rows in (("q", hidden), ("k", kv * head), ("v", kv * head), ("output", hidden)):
            shapes[f"{at}.self_attn.proj_{name}_dense_layer.weight"] = (rows, hidden)
        shapes[f"{at}.ffn.ffn.0.linear_layer_for_glu.weight"] = (ffn, hidden)
        shapes[f"{at}.ffn.ffn.0.linear_layer.weight"] = (ffn, hidden)
        shapes[f"{at}.ffn.ffn.1.linear_layer.weight"] = (hidden, ffn)
        shapes |= {f"{at}.norm1.weight": (hidden,), f"{at}.norm3.weight": (hidden,)}
    shapes |= {
        "transformer_decoder.norm.weight": (hidden,),
        "ln_f.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    config = {
        **_sizes(hidden, ffn, layers, heads, vocab),
        "name": "llama",
        "attention_module": "multiquery_attention",
        "extra_attention_params": {"num_kv_groups": kv},
        "rotary_dim": head,
        **_LLAMA,
    }
    return Model({key: Stored(shape, dtype) for key, shape in shapes.items()}, config)


def gpt2(hidden: int, layers: int, vocab: int = 50257, dtype: str = "bfloat16") -> Model:
    """GPT-2 with heads of 64 and an output layer of its own."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding_layer.word_embeddings.weight": (vocab, hidden),
        "embedding_layer.position_embeddings.embed.weight": (1024, hidden),
    }
    for i in range(layers):
        at = f"transformer_decoder.layers.{i}"
        linear = {f"self_attn.proj_{name}_dense_layer": (hidden, hidden) for name in ("q", "k", "v", "output")}
        linear |= {"ffn.ffn.0.linear_layer": (4 * hidden, hidden), "ffn.ffn.1.linear_layer": (hidden, 4 * hidden)}
        for name, shape in linear.items():
            shapes |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[:1]}
        shapes |= {f"{at}.{norm}.{p}": (hidden,) for norm in ("norm1", "norm3") for p in ("weight", "bias")}
    shapes |= {f"{norm}.{p}": (hidden,) for norm in ("transformer_decoder.norm", "ln_f") for p in ("weight", "bias")}
    shapes["lm_head.weight"] = (vocab, hidden)
    config = {**_sizes(hidden, 4 * hidden, layers, hidden // 64, vocab), "name": "gpt2", **_GPT2}
    return Model({key: Stored(shape, dtype) for key, shape in shapes.items()}, config)


def gptj(hidden: int, layers: int, vocab: int = 50400, dtype: str = "bfloat16") -> Model:
    """GPT-J, whose tensors Hugging Face has under other names and otherwise alike."""
    shapes: dict[str, tuple[int, ...]] = {"embedding_layer.word_embeddings.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"transformer_decoder.layers.{i}"
        shapes |= {f"{at}.self_attn.proj_{x}_dense_layer.weight": (hidden, hidden) for x in ("q", "k", "v", "output")}
        for name, shape in (("0", (4 * hidden, hidden)), ("1", (hidden, 4 * hidden))):
            linear = f"{at}.ffn.ffn.{name}.linear_layer"
            shapes |= {f"{linear}.weight": shape, f"{linear}.bias": shape[:1]}
        shapes |= {f"{at}.norm1.{p}": (hidden,) for p in ("weight", "bias")}
    shapes |= {f"{norm}.{p}": (hidden,) for norm in ("transformer_decoder.norm", "ln_f") for p in ("weight", "bias")}
    shapes |= {"lm_head.weight": (vocab, hidden), "lm_head.bias": (vocab,)}
    config = {**_sizes(hidden, 4 * hidden, layers, max(1, hidden // 256), vocab), "name": "gptj", **_GPTJ}
    return Model({key: Stored(shape, dtype) for key, shape in shapes.items()}, config)


def usual_gptj(nbytes: int) -> Model:
    """About *nbytes*, and one layer at least, of GPT-J 6B's width and proportions: its embeddings are a 15th.

    With all 50,400 words, 1 GB of it would be two thirds embeddings, whose chunks have the narrowest rows.
    """
    return _grown(lambda n: gptj(4096, n, vocab=50400 * n // 28), nbytes)


def usual_llama(nbytes: int, dtype: str = "bfloat16") -> Model:
    """About *nbytes* of Llama in the usual proportions: q and k are a tenth."""
    return _grown(lambda n: llama(2048, 5632, n, 32, 8, 32000, dtype), nbytes)


def usual_gpt2(nbytes: int) -> Model:
    """About *nbytes* of GPT-2 XL's width."""
    return _grown(lambda n: gpt2(1600, n), nbytes)


def llama_7b() -> Model:
    return llama(4096, 11008, 32, 32, 32, 32000)


def llama_70b() -> Model:
    return llama(8192, 28672, 80, 64, 8, 32000)


def state_dict(model: Model, optimizer: bool = False) -> dict[str, Any]:
    """What a trainer saves: model, step and metadata; with AdamW's state if wanted."""
    metadata = {
        "version": RELEASE,
        "model_name": model.config["name"],
        "params": {"trainer": {"init": {"model": model.config}, "fit": {}}},
    }
    state: dict[str, Any] = {
        "model": dict(model.tensors),
        "global_step": Stored((), "int64"),
        "__metadata__": [metadata],
    }
    return state | {"optimizer": adamw(model)} if optimizer else state


def adamw(model: Model) -> dict[str, Any]:
    """Two float32 moments and a step for each tensor."""
    moments = {
        key: {name: Stored(t.shape, "float32") for name in ("exp_avg", "exp_avg_sq")} | {"step": Stored((), "float32")}
        for key, t in model.tensors.items()
    }
    group = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "params": list(range(len(moments)))}
    return {"state": moments, "param_groups": [group]}


def _grown(make: Any, nbytes: int) -> Model:
    """*make(n layers)* with as few layers as reach *nbytes*."""
    one, two = make(1), make(2)
    layer = two.nbytes - one.nbytes
    found: Model = make(max(1, 1 + -(-(nbytes - one.nbytes) // layer)))
    return found


def _sizes(hidden: int, ffn: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "filter_size": ffn,
        "num_hidden_layers": layers,
        "num_heads": heads,
        "vocab_size": vocab,
    }


_LLAMA: dict[str, Any] = {
    "attention_dropout_rate": 0.0,
    "attention_type": "scaled_dot_product",
    "dropout_rate": 0.0,
    "embedding_dropout_rate": 0.0,
    "embedding_layer_norm": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "nonlinearity": "swiglu",
    "norm_first": True,
    "norm_type": "rmsnorm",
    "pos_scaling_factor": 1.0,
    "position_embedding_type": "rotary",
    "rope_theta": 10000.0,
    "share_embedding_weights": False,
    "use_bias_in_output": False,
    "use_ff_layer1_dropout": False,
    "use_ffn_bias": False,
    "use_ffn_bias_in_attention": False,
    "use_projection_bias_in_attention": False,
}
_GPT2: dict[str, Any] = {
    "attention_dropout_rate": 0.0,
    "attention_type": "scaled_dot_product",
    "dropout_rate": 0.0,
    "embedding_dropout_rate": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 1024,
    "nonlinearity": "gelu_new",
    "share_embedding_weights": False,
    "use_bias_in_output": False,
}
_GPTJ: dict[str, Any] = {
    "attention_dropout_rate": 0.0,
    "attention_type": "scaled_dot_product",
    "embedding_dropout_rate": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "nonlinearity": "gelu_new",
    "position_embedding_type": "rotary",
    "residual_dropout_rate": 0.0,
    "rotary_dim": 64,
    "share_embedding_weights": False,
    "use_bias_in_output": True,
    "use_ffn_bias": True,
    "use_ffn_bias_in_attention": False,
    "use_projection_bias_in_attention": False,
    "use_untied_layer_norm": False,
}
