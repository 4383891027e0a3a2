"""Between Cerebras releases: ways, keys and states, on checkpoints in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.conversion import registry
from ckptfs.conversion.format_names import RELEASES, ModelFormat, parse_format
from ckptfs.conversion.plan import config_as, make_view
from ckptfs.conversion.releases.draft import About
from ckptfs.conversion.releases.keys import Rename
from ckptfs.conversion.releases.paths import STEPS, steps_of
from ckptfs.conversion.releases.steps import Setting, find_path, step, unchanged
from ckptfs.errors import ConfigError, MappingError, MissingField, MissingKeys, NoPath, UnmatchedKeys
from ckptfs.formats.cerebras.state import flatten, state_tree
from ckptfs.formats.source import Container, Item, Source
from tests.factories import ArrayTensor, tensor_of

TRAINER: dict[str, Any] = {"trainer": {"init": {"model": {}}}}
T5_CONFIG = {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 3, "encoder_nonlinearity": "relu"}


def checkpoint(state: dict[str, Any]) -> Source:
    """A checkpoint that holds *state*: nested containers of tensors and plain values."""
    made = state_tree(state)
    return Source("x.mdl", "cerebras-h5", "0.5", "2.10.0", dict(made.items), made.tree)


def model(*keys: str, **more: Any) -> Source:
    """A checkpoint whose model has a tensor under each of *keys*."""
    return checkpoint({"model": {key: tensor_of("float16", (2, 2), i) for i, key in enumerate(keys)}, **more})


def upgrade(source: Source, name: str, src: str, tgt: str, config: dict[str, Any] | None = None, **more: Any) -> Any:
    frm, to = parse_format(src), parse_format(tgt)
    if config is None:
        config = TRAINER if (frm.release or (0, 0)) > (2, 2) else {"model": {}}
    return make_view(source, registry.family(name), config, frm, to, **more)


def way(name: str, src: str, tgt: str) -> list[str]:
    family = registry.family(name)
    return [move.to.name for move in find_path(name, steps_of(family), parse_format(src), parse_format(tgt))]


# ------------------------------------------------------------------------------------------------------------ the way


@pytest.mark.parametrize(
    ("name", "src", "tgt", "steps"),
    [
        ("gpt2", "cs-1.8", "cs-2.1", ["cs-2.0", "cs-2.1"]),
        ("gpt2", "cs-2.2", "cs-2.9", ["cs-2.9"]),  # the converter's direct step, which does not nest the config
        ("gpt2", "cs-2.1", "cs-2.4", ["cs-2.2", "cs-2.3", "cs-2.4"]),  # but no part of a way goes past 2.3
        ("gpt2", "cs-2.4", "cs-2.1", ["cs-2.3", "cs-2.2", "cs-2.1"]),
        ("bert", "cs-1.6", "cs-2.0", ["cs-2.0"]),
        ("bert", "cs-1.7", "cs-2.1", ["cs-1.8", "cs-2.0", "cs-2.1"]),
        ("bert-token-classifier", "cs-1.8", "cs-2.0", ["cs-1.9", "cs-2.0"]),
        ("wizardlm", "cs-2.9", "cs-1.9", [f"cs-2.{n}" for n in range(8, -1, -1)] + ["cs-1.9"]),
        ("mixtral", "cs-2.9", "cs-2.10", ["cs-2.10"]),
        ("gpt2", "cs-2.5", "cs-2.5", []),
    ],
)
def test_way(name: str, src: str, tgt: str, steps: list[str]) -> None:
    assert way(name, src, tgt) == steps


@pytest.mark.parametrize(
    ("name", "src", "tgt", "known"),
    [
        ("llama", "cs-1.8", "cs-2.0", "cs-1.9 … cs-2.10"),
        ("mixtral", "cs-2.2", "cs-2.3", "cs-2.3 … cs-2.10"),
        ("mistral", "cs-2.1", "cs-2.0", "cs-2.1 … cs-2.10"),
        ("mistral", "cs-2.0", "hf", "cs-2.1 … cs-2.10"),
        ("mistral", "hf", "cs-1.9", "cs-2.1 … cs-2.10"),
        ("gpt2", "cs-2.1-dpo", "cs-2.2", "cs-1.8 … cs-2.10"),
    ],
)
def test_no_way_names_what_there_is(name: str, src: str, tgt: str, known: str) -> None:
    with pytest.raises(NoPath) as refusal:
        upgrade(model("lm_head.weight"), name, src, tgt)
    assert f"{name}: cannot convert {src} to {tgt}" in str(refusal.value)
    assert known in str(refusal.value)


@pytest.mark.parametrize("name", STEPS)
def test_all_releases_of_a_model_are_connected(name: str) -> None:
    formats = {f for s in STEPS[name] for f in (s.old, s.new)}
    variant = registry.family(name).variant
    plain = {f for f in formats if f.variant == variant}
    oldest = min(plain, key=lambda f: f.release or RELEASES[0])
    assert len(plain) == len(RELEASES) - RELEASES.index(oldest.release or RELEASES[0])
    for end in {f for f in formats if f.variant or not variant} - {oldest}:
        assert find_path(name, STEPS[name], oldest, end)
        assert find_path(name, STEPS[name], end, oldest)


def test_a_step_that_skips_is_no_part_of_a_longer_way() -> None:
    steps = (*unchanged((2, 5), (2, 8)), step((2, 5), (2, 7), alone=True))
    path = [ModelFormat(r) for r in ((2, 5), (2, 7), (2, 8))]
    assert len(find_path("x", steps, path[0], path[1])) == 1
    assert len(find_path("x", steps, path[0], path[2])) == 3


# ---------------------------------------------------------------------------------------------------------------- keys


def test_positions_move_in_2_1_with_or_without_the_prefix() -> None:
    source = model(
        "embedding_layer.position_embeddings.weight",
        "model.relative_pe_helper.relative_attention_bias.weight",
        "model.lm_head.weight_mask",
    )
    assert list(upgrade(source, "falcon", "cs-2.0", "cs-2.1").tensors) == [
        "embedding_layer.position_embeddings.embed.weight",
        "model.embedding_layer.position_embed_helper.relative_attention_bias.weight",
        "model.lm_head.weight_mask",
    ]


@pytest.mark.parametrize("name", ["gptj-headless", "codegen-headless"])
def test_headless_models_with_a_step_of_their_own_keep_their_keys(name: str) -> None:
    """The public converter lists 2.0 and 2.1 of these two as the same."""
    source = model("embedding_layer.position_embeddings.weight", "relative_pe_helper.slopes")
    view = upgrade(source, name, "cs-2.0", "cs-2.1", {"model": {"use_bfloat16": True}})
    assert list(view.tensors) == [key.removeprefix("model.") for key in source.items]
    assert view.config == {"model": {"fp16_type": "bfloat16"}}


@pytest.mark.parametrize("name", ["gpt2", "bert", "bert-qa", "t5", "starcoder"])
def test_renamed_keys_come_back(name: str) -> None:
    (rename,) = [c for s in STEPS[name] for c in s.changes if s.old.release == (2, 0)]
    assert isinstance(rename, Rename)
    for lead in ("", "model."):
        old = [lead + key + ("x.weight" if key.endswith(".") else "") for key in rename.names]
        source = model(*old, "encoder.norm.weight")
        up = upgrade(source, name, "cs-2.0", "cs-2.1")
        assert not set(up.tensors) & set(old)
        down = upgrade(up.state, name, "cs-2.1", "cs-2.0")
        assert list(down.tensors) == [*old, "encoder.norm.weight"]
        assert all(down.tensors[key] is source.items[f"model.{key}"].tensor for key in old)


def test_two_keys_never_become_one() -> None:
    keys = ("embedding_layer.position_embeddings.weight", "embedding_layer.position_embeddings.embed.weight")
    with pytest.raises(MappingError, match=r"second embedding_layer\.position_embeddings\.embed\.weight"):
        upgrade(model(*keys), "gpt2", "cs-2.0", "cs-2.1")


HEAD, WORDS = "lm_head.weight", "embedding_layer.word_embeddings.weight"


@pytest.mark.parametrize("there", [HEAD, WORDS])
@pytest.mark.parametrize(("src", "tgt"), [("cs-1.9", "cs-2.0"), ("cs-2.0", "cs-1.9")])
def test_a_shared_tensor_that_is_missing_is_filled_in(there: str, src: str, tgt: str) -> None:
    for others in ({}, {HEAD: None, WORDS: None}):
        source = checkpoint({"model": {**others, there: tensor_of("float16", (3, 2))}})
        view = upgrade(source, "llama", src, tgt)
        assert set(view.tensors) == {HEAD, WORDS}
        assert view.tensors[HEAD] is view.tensors[WORDS] is source.items[f"model.{there}"].tensor
        first, second = [item for key, item in view.state.items.items() if key.startswith("model.")]
        assert (first.tied_to, second.tied_to) == (None, first.key)


def test_what_is_not_shared_is_not_filled_in() -> None:
    source = checkpoint({"model": {HEAD: None, WORDS: tensor_of("float16", (3, 2))}})
    view = upgrade(source, "llama", "cs-1.9", "cs-2.0", {"model": {"share_embedding_weights": False}})
    assert list(view.tensors) == [WORDS]
    assert view.state.items[f"model.{HEAD}"].kind == "none"


def test_two_that_are_there_stay_as_they_are() -> None:
    source = model(HEAD, WORDS, "ln_f.weight", "transformer_decoder.norm.weight")
    view = upgrade(source, "gpt2", "cs-1.8", "cs-2.0")
    assert {key: id(t) for key, t in view.tensors.items()} == {
        key.removeprefix("model."): id(item.tensor) for key, item in source.items.items()
    }


def test_none_that_was_shared_does_not_become_what_its_partner_becomes() -> None:
    """The writer ties all Nones of a file; one of them gets a tensor here, the other stays None."""
    items = {
        f"model.{HEAD}": Item(f"model.{HEAD}", "tensor", tensor_of("float16", (3, 2))),
        f"model.{WORDS}": Item(f"model.{WORDS}", "none"),
        "model.bias": Item("model.bias", "none", tied_to=f"model.{WORDS}"),
    }
    keys = tuple(key.removeprefix("model.") for key in items)
    tree = Container("dict", ("model",), (Container("dict", keys, tuple(items)),))
    source = Source("x.mdl", "cerebras-h5", "0.5", None, items, tree)
    state = upgrade(source, "gpt2", "cs-1.8", "cs-2.0").state
    assert (state.items["model.bias"].kind, state.items["model.bias"].tied_to) == ("none", None)


DECODER, ENCODER = "decoder_embeddings.word_embeddings.weight", "encoder_embeddings.word_embeddings.weight"


@pytest.mark.parametrize("lead", ["", "model."])
def test_three_shared_tables_of_t5_become_the_first(lead: str) -> None:
    source = model(lead + DECODER, lead + ENCODER, lead + HEAD)
    view = upgrade(source, "t5", "cs-1.9", "cs-2.0")
    assert list(view.tensors) == [lead + HEAD, lead + DECODER, lead + ENCODER]
    assert set(map(id, view.tensors.values())) == {id(source.items[f"model.{lead}{HEAD}"].tensor)}
    assert "stored apart" in view.warnings[0]


def test_tables_of_t5_that_are_shared_by_two() -> None:
    config = {"model": {"share_embedding_weights": False}}
    source = checkpoint({"model": {DECODER: None, ENCODER: tensor_of("float16", (3, 2)), HEAD: None}})
    view = upgrade(source, "t5", "cs-1.9", "cs-2.0", config)
    assert view.tensors[DECODER] is view.tensors[ENCODER]
    assert view.state.items[f"model.{HEAD}"].kind == "none"


def test_t5_without_its_decoder_table_is_refused() -> None:
    with pytest.raises(MissingKeys, match="decoder_embeddings"):
        upgrade(model(ENCODER, HEAD), "t5", "cs-1.9", "cs-2.0")


def test_a_prefix_of_t5_stays_one() -> None:
    up = upgrade(model("model.lm_head.weight"), "t5", "cs-1.7", "cs-1.8")
    assert list(up.tensors) == ["model.lm_head.weight"]
    assert list(upgrade(up.state, "t5", "cs-1.8", "cs-1.7").tensors) == ["lm_head.weight"]


# ----------------------------------------------------------------------------------------------------- names of 1.6

OLD_BERT = {
    "bert.embeddings.position_embeddings.weight": "bert_encoder.embedding_layer.position_embeddings.weight",
    "bert.encoder.layer.10.output.LayerNorm.bias": "bert_encoder.transformer_encoder.layers.10.norm2.bias",
    "cls.seq_relationship.weight": "bert_cls_head.classifier.ffn.0.linear_layer.weight",
}


def test_bert_of_1_6_loses_all_but_the_model() -> None:
    source = model(*OLD_BERT, global_step=3, optimizer={"state": {}})
    view = upgrade(source, "bert", "cs-1.6", "cs-1.7")
    assert list(view.tensors) == list(OLD_BERT.values())
    assert view.state.tree.keys == ("model",)
    assert "only the model is kept" in view.warnings[0]
    back = upgrade(view.state, "bert", "cs-1.7", "cs-1.6", {"model": {"max_position_embeddings": 7}})
    assert list(back.tensors) == [next(iter(OLD_BERT)), "bert.embeddings.position_ids", *list(OLD_BERT)[1:]]
    assert back.tensors["bert.embeddings.position_ids"].shape == (1, 7)
    assert back.warnings == ()


def test_further_steps_note_themselves_again() -> None:
    config = {"model": {"encoder_nonlinearity": "gelu"}}
    state = upgrade(model(*OLD_BERT, global_step=3), "bert", "cs-1.6", "cs-2.1", config).state
    assert state.tree.keys == ("model", "__metadata__")
    assert [entry["version"] for entry in state.metadata] == ["2.1.0"]


def test_unknown_keys_of_1_6_are_refused_or_dropped() -> None:
    source = checkpoint({"model": {"classifier.weight": tensor_of("float16", (2, 2)), "bert.what": None, "n": 3}})
    with pytest.raises(UnmatchedKeys) as refusal:
        upgrade(source, "bert-token-classifier", "cs-1.6", "cs-1.7")
    assert refusal.value.keys == ["bert.what", "n"]
    view = upgrade(source, "bert-token-classifier", "cs-1.6", "cs-1.7", drop_unmatched=True)
    assert list(view.state.items) == ["model.classifier.weight"]


def test_t5_of_1_6_had_a_bias_in_each_block() -> None:
    bias = "relative_position_{}.relative_attention_bias.weight"
    source = model(bias.format("encoder"), bias.format("decoder"))
    view = upgrade(source, "t5", "cs-1.7", "cs-1.6", {"model": T5_CONFIG})
    old = "{}.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    names = [old.format(side, i) for side, n in (("encoder", 2), ("decoder", 3)) for i in range(n)]
    assert list(view.tensors) == names
    again = upgrade(view.state, "t5", "cs-1.6", "cs-1.7", {"model": T5_CONFIG})
    assert {key: id(t) for key, t in again.tensors.items()} == {
        key.removeprefix("model."): id(item.tensor) for key, item in source.items.items()
    }


@pytest.mark.parametrize("layers", [None, "2", 0, 10**9])
def test_t5_of_1_6_needs_to_know_how_many_blocks(layers: object) -> None:
    source = model("relative_position_encoder.relative_attention_bias.weight")
    config = {"model": {**T5_CONFIG, "encoder_num_hidden_layers": layers}}
    with pytest.raises(MissingField, match="encoder_num_hidden_layers"):
        upgrade(source, "t5", "cs-1.7", "cs-1.6", config)


@pytest.mark.parametrize(("nonlinearity", "inner"), [("relu", "wi"), ("geglu", "wi_1")])
def test_feed_forward_of_t5_in_1_6(nonlinearity: str, inner: str) -> None:
    config = {"model": {**T5_CONFIG, "encoder_nonlinearity": nonlinearity}}
    key = "decoder.layers.0.ffn.ffn.0.linear_layer.weight"
    cross = "decoder.layers.0.multihead_attn.proj_q_dense_layer.weight"
    view = upgrade(model(cross, key), "t5", "cs-1.7", "cs-1.6", config)
    assert list(view.tensors)[1] == f"decoder.block.0.layer.2.DenseReluDense.{inner}.weight"


# --------------------------------------------------------------------------------------------------------------- state


def test_everything_else_is_kept_in_kind_and_order() -> None:
    weight = tensor_of("float16", (2, 2))
    state = {
        "b": OrderedDict(x=[], y=(1, None)),
        "model": {"lm_head.weight": weight},
        "a": {"state": {0: {"exp_avg": tensor_of("float32", (3,))}}, "text": "x", "tied": weight},
    }
    result = upgrade(checkpoint(state), "mistral", "cs-2.4", "cs-2.5").state
    root = dict(zip(result.tree.keys, result.tree.children, strict=True))
    assert list(root) == ["b", "a", "model", "__metadata__"]
    assert (root["b"].type, [child.type for child in root["b"].children]) == ("OrderedDict", ["list", "tuple"])
    assert root["a"].children[0].keys == (0,)
    assert result.items["model.lm_head.weight"].tied_to == "a.tied"
    assert flatten(result).keys[0] == ("b.y.0", "b.y.0")


def test_a_nested_model_is_not_flattened_without_need() -> None:
    state = {"model": {"inner": {"weight": tensor_of("float16", (2,))}, "none": {}}}
    result = upgrade(checkpoint(state), "mistral", "cs-2.4", "cs-2.5").state
    assert result.tree.children[0].keys == ("inner", "none")


def test_a_checkpoint_without_states_is_a_model() -> None:
    source = checkpoint({"lm_head.weight": tensor_of("float16", (2,))})
    assert upgrade(source, "mistral", "cs-2.4", "cs-2.5").state.tree.keys == ("model", "__metadata__")


def test_metadata_is_appended_to() -> None:
    old = {"version": "2.4.1", "model_name": "gpt2", "params": {"trainer": {}}}
    source = model("lm_head.weight", __metadata__=[old])
    source.metadata.append(old)
    view = upgrade(source, "gpt2", "cs-2.4", "cs-2.6")
    assert [entry["version"] for entry in view.state.metadata] == ["2.4.1", "2.6.0"]
    assert view.state.metadata[1]["params"] == view.config
    values = {key: item.value for key, item in view.state.items.items() if item.tensor is None}
    assert values["__metadata__.0.model_name"] == "gpt2"
    assert (values["__metadata__.1.version"], values["__metadata__.1.model_name"]) == ("2.6.0", "gpt2")


def test_configs_that_would_fill_memory_are_refused() -> None:
    bomb: Any = "x"
    for _ in range(40):
        bomb = [bomb, bomb]
    knot: dict[str, Any] = {}
    knot["self"] = knot
    for value in (bomb, knot):
        with pytest.raises(ConfigError, match="levels"):
            upgrade(model("lm_head.weight"), "gpt2", "cs-2.4", "cs-2.5", {**TRAINER, "more": value})


@pytest.mark.parametrize("step", [100, np.array(100), np.array([100])])
def test_the_scheduler_catches_up_before_2_0(step: object) -> None:
    held = ArrayTensor(step) if isinstance(step, np.ndarray) else step
    more = {"global_step": held, "lr_scheduler": {"last_epoch": 7, "_schedulers": [{"last_epoch": 5}]}}
    old = upgrade(model("lm_head.weight", **more), "gpt2", "cs-1.8", "cs-1.9").state
    epoch = old.items["lr_scheduler.last_epoch"]
    assert (epoch.tensor, epoch.value) == ((held, None) if isinstance(step, np.ndarray) else (None, 100))
    assert old.items["lr_scheduler._schedulers.0.last_epoch"].value == 5
    new = upgrade(model("lm_head.weight", **more), "gpt2", "cs-2.0", "cs-2.1").state
    assert new.items["lr_scheduler.last_epoch"].value == 7


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"global_step": 5},
        {"lr_scheduler": {"last_epoch": 7}},
        {"global_step": "x", "lr_scheduler": {"last_epoch": 7}},
        {"global_step": 5, "lr_scheduler": {"last_epoch": 5}},
        {"global_step": 5, "lr_scheduler": [1]},
    ],
)
def test_other_schedulers_stay(more: dict[str, Any]) -> None:
    source = model("lm_head.weight", **more)
    state = upgrade(source, "gpt2", "cs-1.8", "cs-1.9").state
    kept = {key: item for key, item in state.items.items() if not key.startswith(("model", "__"))}
    assert kept == {key: item for key, item in source.items.items() if not key.startswith("model")}


def test_masks_move_beside_their_weights() -> None:
    mask, index = tensor_of("bool", (2, 2)), ArrayTensor(np.array(3))
    sparsity = {
        "state": {
            "a.weight": {"mask": mask, "step": 7},
            "b.weight": {"mask": mask},
            "gone.weight": {"mask": mask},
        },
        "param_groups": [
            {"param_names": ["a.weight", "b.weight"], "sparsity": {"step": index}},
            {"param_names": ["gone.weight"], "sparsity": 0.5},
        ],
        "step": 12,
    }
    optimizer = {"state": {"a.weight": {}}, "sparsity": sparsity}
    source = model("a.weight", "model.b.weight", optimizer=optimizer)
    view = upgrade(source, "mistral", "cs-2.1", "cs-2.2")
    assert list(view.tensors) == ["a.weight", "model.b.weight", "a.weight_mask", "model.b.weight_mask"]
    items = {key: item for key, item in view.state.items.items() if key.startswith("sparsity")}
    assert items["sparsity.step"].value == 12
    assert items["sparsity.sparsity.a.weight.index"].tensor is index
    assert items["sparsity.sparsity.b.weight.index"].tensor is index
    assert len(items) == 3
    optimizer_node = view.state.tree.children[0]
    assert (view.state.tree.keys[0], optimizer_node.keys) == ("optimizer", ("state",))


def test_input_state_is_put_in_unless_there_is_one() -> None:
    inputs = {"samples_streamed": 7, "seed": 0}
    state = upgrade(model("lm_head.weight"), "gpt2", "cs-1.9", "cs-2.0", dataloader=inputs).state
    assert [state.items[f"dataloader.{key}"].value for key in inputs] == [7, 0]
    old = model("lm_head.weight", dataloader={"own": 1})
    state = upgrade(old, "gpt2", "cs-1.9", "cs-2.0", dataloader=inputs).state
    assert [key for key in state.items if key.startswith("dataloader")] == ["dataloader.own"]


def test_what_cannot_be_read_is_refused_or_left_out() -> None:
    source = model("lm_head.weight", schedulers=[1, 2])
    source.items["schedulers.0"] = Item("schedulers.0", "object", reason="needs dill", class_name="os.system")
    with pytest.raises(MappingError, match=r"schedulers\.0 cannot be carried over: needs dill"):
        upgrade(source, "gpt2", "cs-2.4", "cs-2.5")
    state = upgrade(source, "gpt2", "cs-2.4", "cs-2.5", drop_unmatched=True).state
    assert state.tree.children[0].children == ("schedulers.1",)


# ------------------------------------------------------------------------------------------------- with Hugging Face

DIMS = {"hidden_size": 4, "num_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 3, "dropout_rate": 0.0}


def test_older_releases_reach_hugging_face() -> None:
    keys = (WORDS, "embedding_layer.position_embeddings.weight", "ln_f.weight")
    source = model(*keys, optimizer={"state": {}})
    config = {"model": {**DIMS, "use_rms_norm": False}}
    view = upgrade(source, "gpt2", "cs-1.8", "hf", config)
    assert list(view.tensors) == [
        "transformer.wte.weight",
        "lm_head.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
    ]
    assert (view.src, view.tgt, view.state, view.config["n_embd"]) == ("cs-1.8", "hf", None, 4)
    assert config_as(registry.family("gpt2"), config, parse_format("cs-1.8"), ModelFormat())["n_embd"] == 4


def test_hugging_face_reaches_older_releases() -> None:
    names = ("transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight")
    source = Source("x", "safetensors", None, None, dict(checkpoint(dict.fromkeys(names, 1)).items))
    for i, key in enumerate(names):
        source.items[key] = Item(key, "tensor", tensor_of("float16", (2, 2), i))
    config = {"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 1, "n_positions": 3, "use_bfloat16": True}
    config |= {"scale_attn_weights": True, "n_inner": None, "activation_function": "gelu", "vocab_size": 5}
    config |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    view = upgrade(source, "gpt2", "hf", "cs-1.9", config)
    assert list(view.tensors) == [WORDS, "embedding_layer.position_embeddings.weight", HEAD]
    assert (view.tgt, view.state, list(view.config)) == ("cs-1.9", None, ["model"])
    assert view.config["model"]["use_bfloat16"] is True
    assert not view.config["model"].keys() & {"norm_type", "fp16_type", "name"}
    assert config_as(registry.family("gpt2"), config, ModelFormat(), parse_format("cs-1.9")) == view.config


def test_a_change_knows_its_direction() -> None:
    about = About("gpt2", "gpt2", (2, 1), (2, 0))
    rename = Rename({"old": "new"})
    assert list(rename.apply({"new": Item("new", "none")}, Setting(about, False, {}, []))) == ["old"]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
KEYS = st.text("abcd", min_size=1, max_size=3)
STATES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@settings(deadline=None)
@given(st.dictionaries(KEYS, STATES, max_size=4), st.integers(0, 4))
def test_any_state_comes_through(state: dict[str, Any], at: int) -> None:
    items = list(state.items())
    whole = dict([*items[:at], ("model", {"lm_head.weight": tensor_of("float16", (2,))}), *items[at:]])
    result = upgrade(checkpoint(whole), "gpt2", "cs-2.4", "cs-2.10").state

    def value(node: Container | str) -> Any:
        if isinstance(node, str):
            return result.items[node].value
        values = [value(child) for child in node.children]
        return values if node.keys is None else dict(zip(node.keys, values, strict=True))

    root = value(result.tree)
    assert list(root) == [*state, "model", "__metadata__"]
    assert repr({key: root[key] for key in state}) == repr(state)
    assert [key for key, _ in flatten(result).keys] == list(result.items)
