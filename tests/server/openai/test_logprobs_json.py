"""Log-probabilities in JSON: minus infinity, tokens with the same text, and text offsets."""

import math

from quire.engine.outputs import Logprob
from quire.server.chat.logprobs import CompletionLogprobs, Entry, TokenText, chat_logprobs, prompt_logprobs_json
from quire.server.context import ServedModel
from quire.text.detokenizer import Detokenizer

IDS = TokenText(None, as_ids=True)


def completion_logprobs(token_text: TokenText, *entries: Entry) -> dict[str, object]:
    scores = CompletionLogprobs(token_text, token_text.detokenizer())
    scores.add(entries)
    return scores.take(1, ended=True)


def test_minus_infinity_becomes_a_large_negative_number() -> None:
    entry = {5: Logprob(-math.inf, 9, "x"), 6: Logprob(-0.5, 1, "y")}
    [response] = chat_logprobs([entry], 1, TokenText(None, as_ids=False))
    assert response["logprob"] == -9999.0
    assert completion_logprobs(IDS, entry)["token_logprobs"] == [-9999.0]
    assert prompt_logprobs_json([None, entry]) == [
        None,
        {
            "5": {"logprob": -9999.0, "rank": 9, "decoded_token": "x"},
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
        },
    ]


def test_a_sampled_token_outside_the_top_is_not_in_top_logprobs() -> None:
    entry = {5: Logprob(-3.0, 9, "x"), 6: Logprob(-0.5, 1, "y"), 7: Logprob(-0.7, 2, "z")}
    [response] = chat_logprobs([entry], 2, IDS)
    assert (response["token"], response["logprob"]) == ("token_id:5", -3.0)
    assert [top["token"] for top in response["top_logprobs"]] == ["token_id:6", "token_id:7"]  # type: ignore[attr-defined]


def test_of_two_tokens_with_the_same_text_the_more_likely_is_kept(model: ServedModel) -> None:
    """Else a client that compares with the maximum would call an unlikely token the model's own choice."""
    entry = {5: Logprob(-3.0, 3, "x"), 6: Logprob(-0.5, 1, "x"), 7: Logprob(-0.7, 2, "x")}
    response = completion_logprobs(TokenText(model.tokenizer, as_ids=False), entry)
    assert response["token_logprobs"] == [-3.0]
    assert response["top_logprobs"] == [{"x": -0.5}]


def test_tokens_behind_the_sent_text_stay_pending(model: ServedModel) -> None:
    """It may be a stop string: then its tokens stand where the text ends."""
    tokenizer = model.text()
    ids = tokenizer.encode("one two three")
    scores = CompletionLogprobs(TokenText(tokenizer, as_ids=False), Detokenizer(tokenizer))
    scores.add([{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in ids])
    first = scores.take(len("one"), ended=False)
    assert (first["tokens"], first["text_offset"]) == (["one", " two"], [0, 3])
    last = scores.take(len("one tw"), ended=True)
    assert (last["tokens"], last["text_offset"]) == ([" three"], [6])


def test_an_added_special_token_has_no_width_in_the_prompt(model: ServedModel) -> None:
    tokenizer = model.text()
    special = min(tokenizer.special_ids)
    decoded = tokenizer.decode([special], skip_special_tokens=False)
    ids = [special, *tokenizer.encode("one two"), special]
    entries = [None, *({token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in ids[1:])]
    for text, places in (
        ("one two", [0, 0, 3, 7]),
        (f"{decoded}one two{decoded}", [0, len(decoded), len(decoded) + 3, len(decoded) + 7]),
    ):
        scores = CompletionLogprobs(TokenText(tokenizer, as_ids=False), None)
        scores.echo(text, ids, entries)
        response = scores.take(len(text), ended=True)
        assert response["text_offset"] == places
        assert response["tokens"][0] == decoded and response["token_logprobs"][0] is None  # type: ignore[index]


def test_a_replacement_character_in_the_text_is_text(model: ServedModel) -> None:
    tokenizer = model.text()
    [token] = tokenizer.encode("\ufffd", add_special_tokens=False)
    token_text = TokenText(tokenizer, as_ids=False)
    assert completion_logprobs(token_text, {token: Logprob(-1.0, 1, "\ufffd")})["tokens"] == ["\ufffd"]


def test_a_partial_character_is_named_by_its_bytes(model: ServedModel) -> None:
    tokenizer = model.text()
    whole = "🦕"
    halves = tokenizer.encode(whole, add_special_tokens=False)
    entries = [{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in halves]
    response = chat_logprobs(entries, 0, TokenText(tokenizer, as_ids=False))
    assert b"".join(bytes(each["bytes"]) for each in response).decode() == whole  # type: ignore[call-overload]
