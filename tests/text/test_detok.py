"""Text from tokens as they come is the text of all of them at once, and never half a character."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.detok import Detokenizer
from quire.text.tokenizer import Tokenizer

LAW = settings(max_examples=200)


def joined(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> str:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    chunks = [ids[start:end] for start, end in pairwise(places)]
    return "".join([*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()])


@LAW
@given(
    ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49_999)), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=12),
    skip=st.booleans(),
)
def test_random_byte_level_tokens_join_to_the_whole(
    default_tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    whole = default_tokenizer.decode(ids, skip_special_tokens=skip)
    assert joined(Detokenizer(default_tokenizer, skip), ids, cuts) == whole


@LAW
@given(
    prompt=st.lists(st.integers(0, 269), max_size=12),
    ids=st.lists(st.one_of(st.integers(0, 269), st.integers(259, 269)), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=12),
    skip=st.booleans(),
)
def test_random_sentence_pieces_join_to_what_follows_the_prompt(
    piece_tokenizer: Tokenizer, prompt: list[int], ids: list[int], cuts: list[int], skip: bool
) -> None:
    prompt = [*prompt, 262]  # ends in a letter, so that no run of bytes crosses the border
    before = piece_tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = piece_tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    assert before + joined(Detokenizer(piece_tokenizer, skip, prompt), ids, cuts) == whole


@LAW
@given(ids=st.lists(st.integers(0, 269), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=12))
def test_random_sentence_pieces_without_a_prompt_join_to_the_whole(
    piece_tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    assert joined(Detokenizer(piece_tokenizer), ids, cuts) == piece_tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["😀👩‍👩‍👧‍👦 family", "你好，世界 ᚠᛇᚻ", "naïve é ½ ๛", "𝕳𝖊𝖑𝖑𝖔"])
@pytest.mark.parametrize("name", ["default_tokenizer", "piece_tokenizer"])
def test_no_character_is_split(text: str, name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text) / 2
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push([token]) for token in ids]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) + detokenizer.finish() == text


def test_text_is_given_out_as_soon_as_it_is_certain(default_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(default_tokenizer)
    assert detokenizer.push(default_tokenizer.encode("Hello")) == "Hello"
    assert detokenizer.push(default_tokenizer.encode(" world")) == " world"
    *first, last = default_tokenizer.encode("😀")
    assert detokenizer.push(first) == ""
    assert detokenizer.push([last]) == "😀"
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_replaced_at_the_end(
    default_tokenizer: Tokenizer, piece_tokenizer: Tokenizer
) -> None:
    detokenizer = Detokenizer(default_tokenizer)
    assert detokenizer.push(default_tokenizer.encode("a😀")[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"
    pieces = Detokenizer(piece_tokenizer)
    assert pieces.push([262]) == "a"
    assert pieces.push([3 + 0xE2, 3 + 0x82]) == ""
    assert pieces.finish() == "\ufffd\ufffd"


def test_the_space_before_a_word_is_kept_after_a_prompt_and_dropped_at_the_start(
    piece_tokenizer: Tokenizer,
) -> None:
    word = piece_tokenizer.encode("hi", add_special_tokens=False)
    assert Detokenizer(piece_tokenizer).push(word) == "hi"
    assert Detokenizer(piece_tokenizer, prompt_ids=piece_tokenizer.encode("ab")).push(word) == " hi"
    after_special = [*piece_tokenizer.encode("ab"), *[2] * 20]
    assert Detokenizer(piece_tokenizer, prompt_ids=after_special).push(word) == " hi"


@pytest.mark.parametrize("token", [3 + 0x80, 262])
def test_work_does_not_grow_with_the_text(
    piece_tokenizer: Tokenizer, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    honest = Tokenizer.decode

    def counting(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoded.append(len(ids))
        return honest(tokenizer, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    detokenizer = Detokenizer(piece_tokenizer)
    for _ in range(2000):
        detokenizer.push([token])
    detokenizer.finish()
    assert sum(decoded) <= 4 * 2000
