"""Which tokens begin and end a text: named by files, never by class defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from ckptfs.errors import UsageError
from ckptfs.formats.extents import file_of, text_file
from ckptfs.vfs.generation import generation_file, lacks_end
from ckptfs.vfs.token_ids import tokenizer_ids
from ckptfs.vfs.tree import Entry, Leaf
from tests.formats.reading import content

FAST = {"added_tokens": [{"id": 9, "content": "<pad>"}], "model": {"vocab": {"<s>": 1, "</s>": 2}}}
NAMED = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>", "unk_token": None}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 9}


def folder(**files: object) -> dict[str, Entry]:
    """A tokenizer's files; underscores at the end of a name's stem are for dots."""
    return {
        name.replace("__", "."): Leaf(text_file(value if isinstance(value, str) else json.dumps(value)))
        for name, value in files.items()
    }


def generation(config: Mapping[str, Any], beside: Mapping[str, Entry]) -> dict[str, Any] | None:
    file = generation_file(config, beside)
    return None if file is None else json.loads(content(file))


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"architectures": ["BertForMaskedLM"], "pad_token_id": 0}, None),
        ({"architectures": None, "bos_token_id": 0, "top_k": 50}, {"bos_token_id": 0}),
        ({"model_type": "llama"}, None),
        ({"model_type": "gpt_neox", "bos_token_id": None, "eos_token_id": 5}, {"eos_token_id": 5}),
        ({"model_type": "llama", "temperature": 0.7}, None),
        (
            {"architectures": ["T5ForConditionalGeneration"], "top_k": 5, "max_length": 20, "eos_token_id": [1, 2]},
            {"top_k": 5, "eos_token_id": [1, 2]},
        ),
    ],
)
def test_from_the_config_alone(config: dict[str, Any], want: dict[str, Any] | None) -> None:
    assert generation(config, {}) == (None if want is None else {"_from_model_config": True, **want})


def test_the_tokenizers_generation_config_comes_first() -> None:
    text = '{"eos_token_id": [7, 8],   "temperature": 0.6}'
    beside = folder(generation_config__json=text, tokenizer_config__json=NAMED, tokenizer__json=FAST)
    file = generation_file({"eos_token_id": 3}, beside)
    assert file is not None
    assert content(file).decode() == text


def test_then_the_tokenizer_then_the_config() -> None:
    beside = folder(
        generation_config__json={"top_p": 0.9, "eos_token_id": None, "pad_token_id": 4},
        tokenizer_config__json=NAMED,
        tokenizer__json=FAST,
    )
    found = generation({"eos_token_id": 3, "bos_token_id": 3, "decoder_start_token_id": 6}, beside)
    assert found == {
        "top_p": 0.9,
        "pad_token_id": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 6,
    }


def test_a_file_that_names_no_token_is_kept() -> None:
    assert generation({}, folder(generation_config__json={"temperature": 0.6})) == {"temperature": 0.6}


@pytest.mark.parametrize(
    "beside",
    [
        folder(tokenizer_config__json=NAMED, tokenizer__json=FAST),
        folder(special_tokens_map__json=NAMED, tokenizer__json=FAST),
        folder(tokenizer_config__json=NAMED, vocab__json={"<s>": 1, "</s>": 2}, added_tokens__json={"<pad>": 9}),
        folder(tokenizer_config__json=NAMED, vocab__txt="x\n<s>\n</s>\n3\n4\n5\n6\n7\n8\n<pad>\n"),
        folder(
            tokenizer_config__json=NAMED,
            tokenizer__json={
                "model": {"vocab": [["x", 0.0], ["<s>", 0.0], ["</s>", -1.0], *[["y", 0]] * 6, ["<pad>", 0]]}
            },
        ),
        folder(
            tokenizer_config__json={
                **NAMED,
                "added_tokens_decoder": {str(n): {"content": t} for t, n in (("<s>", 1), ("</s>", 2), ("<pad>", 9))},
            },
            tokenizer__json={"model": {"vocab": {"</s>": 77}}},
        ),
    ],
)
def test_ids_from_each_kind_of_tokenizer(beside: dict[str, Entry]) -> None:
    assert tokenizer_ids(beside) == IDS


def piece(text: str) -> bytes:
    """A SentencePiece: its text, a score (fixed, 4 bytes) and a type (varint), as protocol buffers spell them."""
    body = b"\x0a" + bytes([len(text)]) + text.encode() + b"\x15\0\0\0\0" + b"\x18\x03"
    return b"\x0a" + bytes([len(body)]) + body


def test_ids_from_a_sentencepiece_model() -> None:
    model = b"".join(map(piece, ["<unk>", "<s>", "</s>"])) + b"\x12\x03abc"
    beside = {**folder(tokenizer_config__json=NAMED), "tokenizer.model": Leaf(file_of([model]))}
    assert tokenizer_ids(beside) == {"bos_token_id": 1, "eos_token_id": 2}
    with pytest.raises(UsageError, match=r"tokenizer\.model"):
        tokenizer_ids({**beside, "tokenizer.model": Leaf(file_of([b"\x0a"]))})


def test_the_real_tokenizers_agree(tmp_path: Any) -> None:
    """transformers writes the folder; what it says itself is the judge."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<unk>", "w", "<s>", "</s>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<new>")
    fast.save_pretrained(tmp_path)
    beside: dict[str, Entry] = {p.name: Leaf(file_of([p.read_bytes()])) for p in tmp_path.iterdir()}
    assert tokenizer_ids(beside) == {
        f"{name}_id": fast.convert_tokens_to_ids(getattr(fast, name))
        for name in ("bos_token", "eos_token", "pad_token")
    }


def test_whether_the_end_is_known() -> None:
    assert lacks_end({"model_type": "llama"}, {})
    assert lacks_end({}, folder(tokenizer_config__json={"eos_token": "</s>"}))
    assert not lacks_end({"eos_token_id": 0}, {})
    assert not lacks_end({}, folder(tokenizer_config__json=NAMED, tokenizer__json=FAST))
    assert not lacks_end({"architectures": ["ViTModel"]}, {})


@pytest.mark.parametrize("name", ["tokenizer_config__json", "tokenizer__json"])
def test_damaged_files_are_named(name: str) -> None:
    files: dict[str, object] = {"special_tokens_map__json": NAMED, name: "{"}
    with pytest.raises(UsageError, match=name.replace("__", ".")):
        tokenizer_ids(folder(**files))
