"""A chat template whose work grows with the square of the conversation, as published ones do: long chats of one tenant
cost seconds each, and the chats of another do not wait for them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.conftest import HOSTILE, INNOCENT, NUM_ROWS
from tests.attack.test_floods import NUM_INNOCENT, report_innocent
from tests.chaos.conftest import Report
from tests.server.many_clients import RawResponse, fetch, request
from tests.server.scripted_servers import scripted
from tests.server.server_process import Running, wait_until_at_rest

TEMPLATE = """{% for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- for later in messages[loop.index:] %}{% if later.role == 'tool' %}{{ later.content }}{% endif %}{% endfor %}
{%- endfor %}<|assistant|>"""
NUM_MESSAGES, NUM_CHATS = 1200, 12  # 720,000 steps each, of 1,000,000 that a rendering may take; 45 kB


@pytest.fixture
def server(default_model_path: Path, tmp_path: Path) -> Iterator[Running]:
    keys, template = tmp_path / "keys", tmp_path / "template.jinja"
    keys.write_text("sk-hostile name=hostile\nsk-innocent name=innocent\n")
    template.write_text(TEMPLATE)
    rows = ("--max-num-seqs", str(NUM_ROWS), "--max-waiting", str(NUM_ROWS))
    with scripted(tmp_path, *rows, "--api-key-file", str(keys), "--chat-template", str(template)) as running:
        yield running


def chat(num_messages: int, headers: dict[str, str]) -> bytes:
    messages = [{"role": "user", "content": "h"}] * num_messages
    return request({"messages": messages, "max_tokens": 4}, "/v1/chat/completions", headers)


def test_long_chats_of_one_tenant_do_not_hold_up_those_of_another(server: Running, report: Report) -> None:
    async def attack() -> tuple[list[RawResponse], int]:
        hostile = [asyncio.create_task(fetch(server.port, chat(NUM_MESSAGES, HOSTILE))) for _ in range(NUM_CHATS)]
        await asyncio.sleep(0.5)  # they are being rendered
        innocent = [await fetch(server.port, chat(1, INNOCENT)) for _ in range(NUM_INNOCENT)]
        num_left = sum(not each.done() for each in hostile)
        assert {each.status for each in await asyncio.gather(*hostile)} == {200}
        return innocent, num_left

    innocent, num_left = asyncio.run(attack())
    report_innocent(report, f"{NUM_CHATS} chats of {NUM_MESSAGES} messages, each rendered in a second", innocent)
    assert num_left > 0, "another tenant's requests waited for all of them"
    with server.client(headers=INNOCENT) as client:
        wait_until_at_rest(client)
