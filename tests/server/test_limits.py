"""What a body may carry is measured before anything is made of it: nothing is tokenized, and no engine asked."""

import pytest

from quire.server import fitting
from quire.server.dialogue import Dialogue
from quire.server.served import Served
from tests.server.scripted import Script, app_over, post

CHAT = [{"role": "user", "content": "hi"}]


def refused(served: Served, path: str, body: dict[str, object]) -> dict[str, str]:
    script = Script(["Hello."])
    answer = post(app_over(script, served), path, body)
    assert answer.status_code == 400 and not script.asked, answer.text
    return answer.json()["error"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "asks"), [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": CHAT})]
)
def test_more_allowed_ids_than_tokens_never_reach_the_engine(
    served: Served, path: str, asks: dict[str, object]
) -> None:
    most = served.vocab_size
    error = refused(served, path, {**asks, "allowed_token_ids": [5] * (most + 1)})
    assert error["param"] == "allowed_token_ids"
    assert error["message"] == f"allowed_token_ids holds {most + 1} entries; the most is {most}."


def test_a_long_conversation_is_shortened_without_a_copy_for_every_turn(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[dict[str, object]] = [
        {"role": role, "content": str(place)} for place in range(10_000) for role in ("user", "assistant")
    ]
    copies = []

    def replaced(whole: Dialogue, messages: list[dict[str, object]]) -> Dialogue:
        copies.append(len(messages))
        return Dialogue(messages)

    monkeypatch.setattr(fitting, "replace", replaced)
    kept = fitting.fitted(Dialogue(turns), served, max_tokens=100).messages
    assert len(copies) < 20
    assert 50 < len(kept) < 200 and kept == turns[-len(kept) :] and kept[0]["role"] == "user"


def test_turns_too_long_to_be_read_are_dropped_too(served: Served) -> None:
    turns = [
        {"role": "user", "content": "ab " * 46_666},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "hi"},
    ]
    assert refused(served, "/v1/responses", {"input": turns})["code"] == "context_length_exceeded"
    script = Script(["Hello."])
    answer = post(app_over(script, served), "/v1/responses", {"input": turns, "truncation": "auto"})
    assert answer.status_code == 200, answer.text
    [(ids, _, _)] = script.asked
    assert "hi" in served.spelled(ids) and "ok" not in served.spelled(ids)
