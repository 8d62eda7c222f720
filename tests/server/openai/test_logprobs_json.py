"""Log-probabilities on paper: what JSON cannot say, what looks alike, and what stands beside."""

import math

from quire.engine.outputs import Logprob
from quire.server.context import ServedModel
from quire.server.openai.chunks import CompletionLogprobs, Entry, TokenText, chat_logprobs, prompt_logprobs_json
from quire.text.detokenizer import Detokenizer

IDS = TokenText(None, as_ids=True)


def completion_scores(spelling: TokenText, *entries: Entry) -> dict[str, object]:
    scores = CompletionLogprobs(spelling, spelling.detokenizer())
    scores.add(entries)
    return scores.take(1, ended=True)


def test_what_is_impossible_is_very_unlikely() -> None:
    entry = {5: Logprob(-math.inf, 9, "x"), 6: Logprob(-0.5, 1, "y")}
    [told] = chat_logprobs([entry], 1, TokenText(None, as_ids=False))
    assert told["logprob"] == -9999.0
    assert completion_scores(IDS, entry)["token_logprobs"] == [-9999.0]
    assert prompt_logprobs_json([None, entry]) == [
        None,
        {
            "5": {"logprob": -9999.0, "rank": 9, "decoded_token": "x"},
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
        },
    ]


def test_an_unlikely_token_is_not_among_the_likeliest() -> None:
    entry = {5: Logprob(-3.0, 9, "x"), 6: Logprob(-0.5, 1, "y"), 7: Logprob(-0.7, 2, "z")}
    [told] = chat_logprobs([entry], 2, IDS)
    assert (told["token"], told["logprob"]) == ("token_id:5", -3.0)
    assert [top["token"] for top in told["top_logprobs"]] == ["token_id:6", "token_id:7"]  # type: ignore[attr-defined]


def test_of_two_tokens_that_look_alike_the_likelier_is_told(model: ServedModel) -> None:
    """Else a client that compares with the maximum would call an unlikely token the model's own choice."""
    entry = {5: Logprob(-3.0, 3, "x"), 6: Logprob(-0.5, 1, "x"), 7: Logprob(-0.7, 2, "x")}
    told = completion_scores(TokenText(model.tokenizer, as_ids=False), entry)
    assert told["token_logprobs"] == [-3.0]
    assert told["top_logprobs"] == [{"x": -0.5}]


def test_what_stands_behind_the_text_waits_for_it(model: ServedModel) -> None:
    """It may be a stop string: then its tokens stand where the text ends."""
    tokenizer = model.text()
    ids = tokenizer.encode("one two three")
    scores = CompletionLogprobs(TokenText(tokenizer, as_ids=False), Detokenizer(tokenizer))
    scores.add([{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in ids])
    first = scores.take(len("one"), ended=False)
    assert (first["tokens"], first["text_offset"]) == (["one", " two"], [0, 3])
    last = scores.take(len("one tw"), ended=True)
    assert (last["tokens"], last["text_offset"]) == ([" three"], [6])


def test_a_token_that_the_prompt_does_not_say_takes_no_place(model: ServedModel) -> None:
    tokenizer = model.text()
    special = min(tokenizer.special_ids)
    spelled = tokenizer.decode([special], skip_special_tokens=False)
    ids = [special, *tokenizer.encode("one two"), special]
    entries = [None, *({token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in ids[1:])]
    for text, places in (
        ("one two", [0, 0, 3, 7]),
        (f"{spelled}one two{spelled}", [0, len(spelled), len(spelled) + 3, len(spelled) + 7]),
    ):
        scores = CompletionLogprobs(TokenText(tokenizer, as_ids=False), None)
        scores.echo(text, ids, entries)
        told = scores.take(len(text), ended=True)
        assert told["text_offset"] == places
        assert told["tokens"][0] == spelled and told["token_logprobs"][0] is None  # type: ignore[index]


def test_the_character_that_stands_for_wrong_bytes_is_text(model: ServedModel) -> None:
    tokenizer = model.text()
    [token] = tokenizer.encode("\ufffd", add_special_tokens=False)
    spelling = TokenText(tokenizer, as_ids=False)
    assert completion_scores(spelling, {token: Logprob(-1.0, 1, "\ufffd")})["tokens"] == ["\ufffd"]


def test_half_a_character_is_its_bytes(model: ServedModel) -> None:
    tokenizer = model.text()
    whole = "🦕"
    halves = tokenizer.encode(whole, add_special_tokens=False)
    entries = [{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in halves]
    told = chat_logprobs(entries, 0, TokenText(tokenizer, as_ids=False))
    assert b"".join(bytes(each["bytes"]) for each in told).decode() == whole  # type: ignore[call-overload]
