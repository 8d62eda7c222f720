"""Text from tokens as they come is the text of all of them at once, and never half a character."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.detokenizer import Detokenizer, decode_whole
from quire.text.tokenizer import Tokenizer
from tests.tiers import examples

LAW = settings(max_examples=examples(50, 200))


def joined(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> str:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    chunks = [ids[start:end] for start, end in pairwise(places)]
    return "".join([*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()])


def num_begun(data: bytes) -> int:
    """How many bytes at the end begin a character that more bytes could finish: tried out."""
    for count in (3, 2, 1):
        for length in range(1, 4):
            for rest in product(b"\x80\xbf", repeat=length):
                try:
                    if len((data[-count:] + bytes(rest)).decode()) == 1 and len(data) >= count:
                        return count
                except UnicodeDecodeError:
                    continue
    return 0


def without_half_a_character(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> list[int]:
    """Of a vocabulary whose every fallback byte is a token."""
    said = [token for token in ids if not skip or token not in tokenizer.special_ids]
    run = b""
    for token in reversed(said):
        if not tokenizer.fallback_byte(token):
            break
        run = tokenizer.fallback_byte(token) + run
    return said[: len(said) - num_begun(run)]


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
    said = [token for token in ids if not skip or token not in default_tokenizer.special_ids]
    if num_begun(b"".join(map(default_tokenizer.piece_bytes, said))):
        assert whole.endswith("\ufffd")
        whole = whole[:-1]
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
    said = without_half_a_character(piece_tokenizer, ids, skip)
    whole = piece_tokenizer.decode(prompt + said, skip_special_tokens=skip)
    assert before + joined(Detokenizer(piece_tokenizer, skip, prompt), ids, cuts) == whole


@LAW
@given(ids=st.lists(st.integers(0, 269), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=12))
def test_random_sentence_pieces_without_a_prompt_join_to_the_whole(
    piece_tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    said = without_half_a_character(piece_tokenizer, ids, skip=True)
    assert joined(Detokenizer(piece_tokenizer), ids, cuts) == piece_tokenizer.decode(said)


@LAW
@given(
    name=st.sampled_from(["default_tokenizer", "piece_tokenizer"]),
    text=st.text(st.sampled_from("aé你🙂\ufffd "), min_size=1),
    cut=st.integers(0, 30),
    length=st.integers(0, 60),
)
def test_every_token_stands_where_its_character_does_whatever_is_prompt(
    name: str, text: str, cut: int, length: int, request: pytest.FixtureRequest
) -> None:
    """A character may begin in the prompt, and may be cut: what is said is all that is whole, and each place in it."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, answer = ids[:cut], ids[cut : cut + length]
    before, whole = decode_whole(tokenizer, prompt), decode_whole(tokenizer, prompt + answer)
    assert text.startswith(before) and text.startswith(whole)
    detokenizer = Detokenizer(tokenizer, prompt_ids=prompt)
    places, said = [], ""
    for token in answer:
        places.append(len(before) + detokenizer.place)
        said += detokenizer.push([token])
    assert before + said + detokenizer.finish() == whole
    assert places == [len(decode_whole(tokenizer, ids[: cut + place])) for place in range(len(answer))]


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


def test_an_unfinished_character_is_left_out(default_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(default_tokenizer)
    assert detokenizer.push(default_tokenizer.encode("a😀")[:-1]) == "a"
    assert detokenizer.finish() == ""
    pieces = Detokenizer(piece_tokenizer)
    assert pieces.push([262]) == "a"
    assert pieces.push([3 + byte for byte in "é€".encode()[:-1]]) == ""
    assert pieces.finish() == "é", "the half must not spoil what stands before it"


def test_what_no_byte_could_finish_is_replaced(default_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    """Wrong bytes that others follow, and U+FFFD itself, are what the model said."""
    half = default_tokenizer.encode("😀")[:-1]
    for said, text in (
        ([*half, *default_tokenizer.encode("a")], "\ufffda"),
        (default_tokenizer.encode("a\ufffd"), "a\ufffd"),
    ):
        detokenizer = Detokenizer(default_tokenizer)
        assert detokenizer.push(said) + detokenizer.finish() == text
    for data, text in ((b"\xe2\x82", "\ufffd\ufffda"), (b"\x80", "\ufffda"), ("\ufffd".encode(), "\ufffda")):
        pieces = Detokenizer(piece_tokenizer)
        assert pieces.push([*(3 + byte for byte in data), 262]) + pieces.finish() == text
    for data in (b"\x80", "\ufffd".encode()):
        pieces = Detokenizer(piece_tokenizer)
        assert pieces.push([3 + byte for byte in data]) + pieces.finish() == "\ufffd"


def test_the_space_before_a_word_is_kept_after_a_prompt_and_dropped_at_the_start(
    piece_tokenizer: Tokenizer,
) -> None:
    word = piece_tokenizer.encode("hi", add_special_tokens=False)
    assert Detokenizer(piece_tokenizer).push(word) == "hi"
    assert Detokenizer(piece_tokenizer, prompt_ids=piece_tokenizer.encode("ab")).push(word) == " hi"
    after_special = [*piece_tokenizer.encode("ab"), *[2] * 20]
    assert Detokenizer(piece_tokenizer, prompt_ids=after_special).push(word) == " hi"


@LAW
@given(ids=st.lists(st.integers(0, 270), min_size=1, max_size=12))
def test_the_spellings_of_tokens_join_to_the_text(piece_tokenizer: Tokenizer, ids: list[int]) -> None:
    """Of all that are not parts of a character: those have no text of their own."""
    ids = [token for token in ids if piece_tokenizer.fallback_byte(token) < b"\x80"]
    after = piece_tokenizer.decode([262, *ids], skip_special_tokens=False)
    assert "a" + "".join(map(piece_tokenizer.spell, ids)) == after


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
