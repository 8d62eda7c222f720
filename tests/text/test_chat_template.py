"""Chat templates: the text transformers would give, and nothing else a template could do."""

import os
import signal
from collections.abc import Mapping
from datetime import datetime

import pytest

from quire.core.errors import ChatTemplateError, InvalidParameter, InvalidPrompt
from quire.core.worker_process import WorkerProcess
from quire.text import template_sandbox as sandbox
from quire.text import template_worker
from quire.text.chat_template import render
from quire.text.template_worker import TemplateWorkerLost
from quire.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_the_default_model_gets_its_chat_exactly(default_tokenizer: Tokenizer) -> None:
    rendered = render(default_tokenizer.chat_template, USER, named_tokens=default_tokenizer.named_tokens)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = default_tokenizer.encode_chat(rendered)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2


def test_a_whole_conversation_without_a_new_turn(default_tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
        {"role": "assistant", "content": "Yes."},
    ]
    assert render(default_tokenizer.chat_template, messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne\nTwo<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n"
    )


@pytest.mark.parametrize(("template", "kept"), [(CHATML, "So "), (CHATML.replace(".content", ".content|trim"), "So")])
def test_the_last_message_can_be_continued(template: str, kept: str) -> None:
    messages = [*USER, {"role": "assistant", "content": "So "}]
    rendered = render(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == f"<|user|>Hi\n<|assistant|>{kept}"
    assert messages[-1]["content"] == "So "


def test_a_last_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="does not keep"):
        render("nothing", USER, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidParameter, match="cannot both"):
        render(CHATML, USER, continue_final_message=True)


def test_templates_have_what_transformers_gives_them() -> None:
    template = (
        "{%- for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
        "|{{ tools | tojson(indent=2) }}|{{ bos_token }}|{{ strftime_now('%d %B') }}|{{ mood }}|{{ missing }}"
        "{% set ns = namespace(n=1) %}{% for _ in range(3) %}{% set ns.n = ns.n + 1 %}{% endfor %}|{{ ns.n }}"
        "|{% generation %}g{% endgeneration %}|{{ 1 ~ 'x' ~ none }}|{{ documents is none }}"
    )
    rendered = render(
        template,
        USER * 2,
        tools=[{"name": "é<"}],
        named_tokens={"bos_token": "<s>"},
        extra={"mood": "fair"},
        now=lambda: datetime(2024, 2, 3),
    )
    assert rendered == 'user|[\n  {\n    "name": "é<"\n  }\n]|<s>|03 February|fair||4|g|1xNone|True'


def test_macros_may_name_their_arguments_as_they_like() -> None:
    template = "{% macro f(function, context) %}{{ function }}{{ context }}{% endmacro %}"
    assert render(template + "{{ f(function=123456789, context=2) }}", USER) == "1234567892"


def test_the_templates_own_words_reach_the_user() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", USER)
    with pytest.raises(ChatTemplateError, match=r"not valid \(line 2\)"):
        render("one\n{% if %}", USER)
    with pytest.raises(ChatTemplateError, match="ZeroDivisionError"):
        render("{{ 1 / 0 }}", USER)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        render(None, USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}{{ messages.append({}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''['__cl' ~ 'ass__'].mro() }}",
        "{{ '{0.__class__}'.format(messages).mro() }}",
        "{{ namespace(__class__=1) }}",
        "{{ (messages|first).clear() }}",
        "{{ lipsum.__globals__['os'].listdir() }}",
        "{{ dict.mro() }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_cannot_reach_out(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(template, USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 10 ** 1000000 }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{% for a in range(99999999) %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in 'x' * 9999 | list %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
)
def test_a_template_cannot_go_on_for_ever(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 20_000)
    monkeypatch.setattr(sandbox, "MAX_TEXT", 1_000_000)
    with pytest.raises(ChatTemplateError):
        sandbox.render_sandboxed(template, {"messages": USER}, datetime.now())


MEMORY_BOMBS = [
    "{{ '%1500000000d' % 1 }}",
    "{{ '{:1500000000}'.format(1) }}",
    "{{ 'x' | center(1500000000) }}",
    "{{ messages[0].content | center(1500000000) }}",
    "{{ range(100000000) | list | length }}",
    "{% for a in range(400) %}{{ 'x' * 16000000 }}{% endfor %}",
    "{% set n = namespace(s=[]) %}{% for a in range(9000) %}{% set n.s = n.s + ['x' * 16000000] %}{% endfor %}",
]
TIME_BOMBS = [
    "{% set n = namespace(x=3) %}{% for a in range(40) %}{% set n.x = n.x ** 60 %}{% endfor %}",
    "{% for a in range(9000) %}{{ ('x' * 9000000) | replace('x', 'y') | length }}{% endfor %}",
    "{% for a in range(90000) %}{{ ('ab' * 4000000).count('ba') }}{% endfor %}",
    "{{ (range(10000000) | sort | reverse | list | unique | list) | length }}",
]


@pytest.mark.parametrize("template", [*MEMORY_BOMBS, *TIME_BOMBS])
def test_what_the_counted_limits_miss_is_killed_and_the_next_chat_is_rendered(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_worker, "CPU_S", 0.2)
    with pytest.raises(ChatTemplateError):
        render(template, USER)
    assert render(CHATML, USER) == "<|user|>Hi\n<|assistant|>"


def test_a_worker_that_was_killed_is_replaced() -> None:
    render(CHATML, USER)
    idle = template_worker._workers._idle
    pids = {process.pid for process, _ in idle}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert render(CHATML, USER) == "<|user|>Hi\n<|assistant|>"
    assert idle[-1][0].pid not in pids


def test_a_worker_that_is_killed_again_and_again_is_not_blamed_on_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, pids = template_worker._exchange, []

    def killed(process: WorkerProcess, message: Mapping[str, object]) -> object:
        os.kill(process.pid, signal.SIGKILL)
        pids.append(process.pid)
        return exchange(process, message)

    with monkeypatch.context() as patch:
        patch.setattr(template_worker, "_exchange", killed)
        with pytest.raises(TemplateWorkerLost, match="killed twice") as caught:
            render(CHATML, USER)
    assert caught.value.status == 503 and len(set(pids)) == 2
    assert render(CHATML, USER) == "<|user|>Hi\n<|assistant|>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("Hi", "non-empty list"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([{"content": "Hi"}], r"messages\[0\].role"),
        ([{"role": 7, "content": "Hi"}], "not 7"),
        ([*USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": 7}], "text or a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"content\[0\].*text only"),
        ([{"role": "user", "content": "Hi", "name": object()}], "not JSON"),
    ],
)
def test_messages_that_are_none_are_named(messages: object, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        render(CHATML, messages)  # type: ignore[arg-type]


def test_deep_nesting_is_refused_and_tool_calls_need_no_content() -> None:
    deep: object = "end"
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(InvalidPrompt, match="64 levels"):
        render(CHATML, [{"role": "user", "content": "Hi", "extra": deep}])
    calls = [*USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert render("{{ messages[1].tool_calls[0].name }}{{ messages[1].content }}", calls) == "fNone"


def test_a_request_cannot_replace_the_messages() -> None:
    with pytest.raises(InvalidParameter, match="'messages'"):
        render(CHATML, USER, extra={"messages": []})
