"""Log-probabilities on paper: what JSON cannot say, what looks alike, and what stands beside."""

import math

from quire.engine.outputs import Logprob
from quire.server.scores import CompletionScores, Spelling, chat_scores, prompt_scores
from quire.server.served import Served

IDS = Spelling(None, as_ids=True)


def test_what_is_impossible_is_very_unlikely() -> None:
    entry = {5: Logprob(-math.inf, 9, "x"), 6: Logprob(-0.5, 1, "y")}
    [told] = chat_scores([entry], 1, Spelling(None, as_ids=False))
    assert told["logprob"] == -9999.0
    assert CompletionScores(IDS).piece([entry])["token_logprobs"] == [-9999.0]
    assert prompt_scores([None, entry]) == [
        None,
        {
            "5": {"logprob": -9999.0, "rank": 9, "decoded_token": "x"},
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
        },
    ]


def test_an_unlikely_token_is_not_among_the_likeliest() -> None:
    entry = {5: Logprob(-3.0, 9, "x"), 6: Logprob(-0.5, 1, "y"), 7: Logprob(-0.7, 2, "z")}
    [told] = chat_scores([entry], 2, IDS)
    assert (told["token"], told["logprob"]) == ("token_id:5", -3.0)
    assert [top["token"] for top in told["top_logprobs"]] == ["token_id:6", "token_id:7"]  # type: ignore[attr-defined]


def test_of_two_tokens_that_look_alike_the_likelier_is_told(served: Served) -> None:
    """Else a client that compares with the maximum would call an unlikely token the model's own choice."""
    entry = {5: Logprob(-3.0, 3, "x"), 6: Logprob(-0.5, 1, "x"), 7: Logprob(-0.7, 2, "x")}
    told = CompletionScores(Spelling(served.tokenizer, as_ids=False)).piece([entry])
    assert told["token_logprobs"] == [-3.0]
    assert told["top_logprobs"] == [{"x": -0.5}]


def test_offsets_go_on_from_piece_to_piece() -> None:
    scores = CompletionScores(IDS)
    entries = [{5: Logprob(-1.0, 1, "ab")}, {6: Logprob(-1.0, 1, "c")}]
    assert scores.piece([None, *entries], "first")["text_offset"] == [0, 5, 7]
    assert scores.piece(entries)["text_offset"] == [8, 10]


def test_half_a_character_is_its_bytes(served: Served) -> None:
    tokenizer = served.text()
    whole = "🦕"
    halves = tokenizer.encode(whole, add_special_tokens=False)
    entries = [{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in halves]
    told = chat_scores(entries, 0, Spelling(tokenizer, as_ids=False))
    assert b"".join(bytes(each["bytes"]) for each in told).decode() == whole  # type: ignore[call-overload]
