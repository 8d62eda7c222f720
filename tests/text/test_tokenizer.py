"""Text to ids and back: the default model's tokenizer, and Hugging Face folders."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from quire.core.errors import BrokenModelFile, InvalidPrompt, UnsupportedModel
from quire.text.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
# The default model's vocabulary has no tokens for these; they vanish, here as in its own tokenizer.
MISSING = "\x04\x06\x13\x14\x16\x1d"
DEFAULT_TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=MISSING, max_codepoint=0x3FFFF), max_size=60
)


@settings(max_examples=200)
@given(text=DEFAULT_TEXT)
def test_any_text_comes_back(default_tokenizer: Tokenizer, text: str) -> None:
    ids = default_tokenizer.encode(text)
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < default_tokenizer.vocab_size for token in ids)


@settings(max_examples=100)
@given(text=TEXT.filter(lambda text: "▁" not in text))
def test_any_text_comes_back_through_byte_fallback(piece_tokenizer: Tokenizer, text: str) -> None:
    assert piece_tokenizer.decode(piece_tokenizer.encode(text, add_special_tokens=False)) == text


def test_characters_without_tokens_vanish(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.decode(default_tokenizer.encode(f"a{MISSING}b")) == "ab"
    assert default_tokenizer.encode(MISSING) == []


def test_the_default_model_reads_digits_one_by_one(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("12345")
    assert [default_tokenizer.id_to_piece(token) for token in ids] == ["1", "2", "3", "4", "5"]


def test_the_default_model_knows_its_special_tokens(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.bos_id == 1 and default_tokenizer.eos_id == 2
    assert default_tokenizer.end_ids == (2,)
    assert default_tokenizer.special_ids == set(range(17))
    assert default_tokenizer.encode("<|im_start|>user\n")[0] == 1
    assert default_tokenizer.named_tokens["eos_token"] == "<|im_end|>"


class _Spied:
    """A backend that notes what is encoded. Only batches: for a single text the library keeps all threads waiting."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.num_characters = 0

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        self.num_characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.fixture
def spied(default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> _Spied:
    spied = _Spied(default_tokenizer._backend)
    monkeypatch.setattr(default_tokenizer, "_backend", spied)
    return spied


def test_a_long_text_is_encoded_without_pythons_lock(default_tokenizer: Tokenizer, spied: _Spied) -> None:
    assert default_tokenizer.encode("a\u0301" * 5000) and spied.num_characters == 10_000


@pytest.mark.parametrize("word", ["a\u0301", "hello ", "<|im_start|>", "=", "🙂"])
def test_a_text_that_is_far_too_long_is_not_encoded_as_a_whole(
    default_tokenizer: Tokenizer, spied: _Spied, word: str
) -> None:
    long = word * 200_000
    assert default_tokenizer.exceeds(long, 1000) and spied.num_characters < 300_000
    fits = word * 1000
    num_tokens = len(default_tokenizer.encode(fits))
    assert not default_tokenizer.exceeds(fits, num_tokens) and default_tokenizer.exceeds(fits, num_tokens // 2 - 1)


def test_a_batch_is_its_texts_one_by_one(default_tokenizer: Tokenizer) -> None:
    texts = ["one", "", "two words", "12 😀"]
    assert default_tokenizer.encode_batch(texts) == [default_tokenizer.encode(text) for text in texts]


def test_half_a_character_is_refused_and_nothing_else_is(default_tokenizer: Tokenizer) -> None:
    for call in (default_tokenizer.encode, lambda text: default_tokenizer.encode_batch(["fine", text])):
        with pytest.raises(InvalidPrompt, match="U\\+D800, character 2"):
            call("ab\ud800")
    for odd in ("", "\x00", "\ufffe\uffff", "a" * 50_000, " " * 50_000, "\n" * 50_000):
        assert default_tokenizer.decode(default_tokenizer.encode(odd)) == odd


def test_ids_that_are_no_tokens_give_no_text(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.id_to_piece(10**6) is None
    assert default_tokenizer.decode([*default_tokenizer.encode("hi"), 10**6]) == "hi"
    assert default_tokenizer.piece_bytes(10**6) == b""


def test_many_threads_get_the_same_answer(default_tokenizer: Tokenizer) -> None:
    texts = [f"number {count} of 😀 many" for count in range(64)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(default_tokenizer.encode, texts)) == [default_tokenizer.encode(text) for text in texts]


def write_folder(folder: Path, config: dict[str, object]) -> None:
    backend = Backend(WordLevel({"<s>": 0, "</s>": 1, "hello": 2, "world": 3}, unk_token="</s>"))
    backend.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(1)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_folder_is_its_tokenizer_and_its_configuration(tmp_path: Path) -> None:
    write_folder(
        tmp_path,
        {
            "bos_token": {"content": "<s>"},
            "add_bos_token": True,
            "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
            "added_tokens_decoder": {"0": {"content": "<s>"}, "4": {"content": "<new>", "special": True}},
        },
    )
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "world"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids) == (0, 1, (1,))
    assert tokenizer.encode("hello world") == [0, 2, 3]  # the truncation saved with it is not a limit here
    assert tokenizer.encode_chat("<s> hello") == [0, 2]
    assert tokenizer.special_ids == {0, 1, 4}
    assert tokenizer.chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(tmp_path).chat_template == "J"


def test_a_folder_without_a_readable_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"SentencePiece tokenizer\.model.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BrokenModelFile, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(BrokenModelFile, match="JSON object, not list"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("no_id", [-1, 10**6, 2**32, 2**70])
def test_an_id_that_is_none_spells_nothing(default_tokenizer: Tokenizer, no_id: int) -> None:
    assert default_tokenizer.id_to_piece(no_id) is None
    assert default_tokenizer.piece_bytes(no_id) == b"" == default_tokenizer.fallback_byte(no_id)
