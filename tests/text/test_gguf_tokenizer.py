"""Tokenizers rebuilt from GGUF metadata do what the models' own tokenizers did."""

from typing import Any

import pytest

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.text.gguf_tokenizer import SPLITS
from quire.text.tokenizer import Tokenizer
from tests.text.conftest import piece_metadata


def byte_metadata(**changes: object) -> dict[str, object]:
    """A byte-level vocabulary: the 256 bytes, some merges, a control and a user-defined token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(0x100 + place) for place in range(len(others))]
    merges = ["h i", "Ġ hi", "1 2", "12 3", "123 4", "' S"]
    words = ["".join(merge.split(" ")) for merge in merges]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*letters, *words, "<|end|>", "<think>"],
        "tokenizer.ggml.token_type": [1] * (256 + len(words)) + [3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 256 + len(words),
        "tokenizer.ggml.bos_token_id": 256 + len(words),
    }
    for name, value in changes.items():
        metadata[f"tokenizer.ggml.{name}"] = value
    return metadata


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str | None]:
    return [tokenizer.id_to_piece(token) for token in tokenizer.encode(text, **options)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", "5", "Ġhi"]),
        ("smollm", ["1", "2", "3", "4", "5", "Ġhi"]),
        ("qwen2", ["1", "2", "3", "4", "5", "Ġhi"]),
        ("dbrx", ["123", "4", "5", "Ġhi"]),
        ("default", ["123", "4", "5", "Ġhi"]),
    ],
)
def test_the_name_of_the_split_decides_how_digits_are_cut(pre: str, expected: list[str]) -> None:
    assert pieces(Tokenizer.from_gguf(byte_metadata(pre=pre)), "12345 hi") == expected


def test_suffixes_are_cut_without_regard_to_case_where_the_model_did_so() -> None:
    assert pieces(Tokenizer.from_gguf(byte_metadata(pre="gpt-2")), "hi'S") == ["hi", "'", "S"]
    assert pieces(Tokenizer.from_gguf(byte_metadata(pre="qwen2")), "hi'S") == ["hi", "'S"]


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_split_keeps_every_character(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_metadata(pre=pre, add_bos_token=False))
    text = "Hi THERE'll  12345½ 你好, мир!\r\n\n\t x_y(z)…  <think> 😀é "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_marks_are_composed_where_the_model_did_so() -> None:
    for pre, expected in (("qwen2", "é"), ("gpt-2", "e\u0301")):
        tokenizer = Tokenizer.from_gguf(byte_metadata(pre=pre))
        assert tokenizer.decode(tokenizer.encode("e\u0301")) == expected


def test_an_unknown_split_is_refused_by_name_with_those_there_are() -> None:
    with pytest.raises(UnsupportedModel, match=r"'novel'.*smollm"):
        Tokenizer.from_gguf(byte_metadata(pre="novel"))


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = Tokenizer.from_gguf(byte_metadata())
    end, think = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<think>")
    assert end is not None and think is not None
    assert tokenizer.special_ids == {end}
    ids = tokenizer.encode("hi<think>hi<|end|>")
    assert ids[1] == think and ids[-1] == end
    assert tokenizer.decode(ids) == "hi<think>hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<think>hi<|end|>"


def test_bos_is_added_by_the_file_or_by_the_pre_tokenizer() -> None:
    first = Tokenizer.from_gguf(byte_metadata()).token_to_id("<|end|>")
    assert Tokenizer.from_gguf(byte_metadata()).encode("hi")[0] != first
    assert Tokenizer.from_gguf(byte_metadata(add_bos_token=True)).encode("hi")[0] == first
    assert Tokenizer.from_gguf(byte_metadata(pre="llama-bpe")).encode("hi")[0] == first
    assert Tokenizer.from_gguf(byte_metadata(pre="llama-bpe", add_bos_token=False)).encode("hi")[0] != first
    assert Tokenizer.from_gguf(byte_metadata(add_eos_token=True)).encode("hi")[-1] == first
    assert Tokenizer.from_gguf(byte_metadata(add_bos_token=True)).encode_chat("hi")[0] != first


def test_every_end_of_turn_is_an_end_token() -> None:
    metadata = byte_metadata(eos_token_id=0, eot_token_id=1)
    assert Tokenizer.from_gguf(metadata).end_ids == (0, 1, 262)


def test_sentence_pieces_merge_by_score(piece_tokenizer: Tokenizer) -> None:
    assert pieces(piece_tokenizer, "hi ab", add_special_tokens=False) == ["▁hi", "▁ab"]
    assert pieces(piece_tokenizer, "abhi", add_special_tokens=False) == ["▁ab", "hi"]
    assert pieces(piece_tokenizer, "abc", add_special_tokens=False) == ["▁", "a", "bc"]  # bc scores above ab
    assert pieces(piece_tokenizer, "hi") == ["<s>", "▁hi"]


def test_a_letter_outside_the_vocabulary_falls_back_to_its_bytes(piece_tokenizer: Tokenizer) -> None:
    assert pieces(piece_tokenizer, "a€\n", add_special_tokens=False) == [
        "▁",
        "a",
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
        "<0x0A>",
    ]
    # Token ids by hand: <unk>, <s>, </s>, then byte b at 3 + b, then the words.
    assert piece_tokenizer.decode([259, 262, 3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0x0A]) == "a€\n"


def test_without_a_space_prefix_text_begins_as_it_is() -> None:
    tokenizer = Tokenizer.from_gguf(piece_metadata(add_space_prefix=False))
    assert pieces(tokenizer, "hi hi", add_special_tokens=False) == ["hi", "▁hi"]
    assert tokenizer.decode(tokenizer.encode(" hi")) == " hi"


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv"])
def test_other_kinds_of_vocabulary_are_refused_by_name(model: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{model}'"):
        Tokenizer.from_gguf(piece_metadata(model=model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "no list tokenizer.ggml.tokens"),
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"token_type": [1, 2]}, "2 numbers for 271 tokens"),
        ({"scores": None}, "no list tokenizer.ggml.scores"),
        ({"bos_token_id": 9999}, "9999, but there are 271"),
        ({"add_bos_token": "yes"}, "must be bool"),
        ({"merges": ["nonsense"]}, "'nonsense'"),
        ({"merges": ["xyz zyx"]}, "do not fit"),
        ({"tokens": ["twice", "twice"]}, "'twice' more than once"),
    ],
)
def test_damaged_metadata_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BrokenModelFile, match=message):
        Tokenizer.from_gguf(piece_metadata(**changes))
