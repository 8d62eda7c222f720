"""What a body may carry is measured before anything is made of it: the engine is not asked, and nothing is tokenized."""

import pytest

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
