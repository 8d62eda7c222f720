"""Priority, tenants, timeouts and a full queue, as callers of the offline API see them."""

import sys

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import InvalidParameter, InvalidPrompt, QueueFull
from quire.engine.messages import RequestOptions
from quire.sched.audit import audit_rest

SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def narrow(tiny_folder) -> LLM:
    """One row: all requests but one wait."""
    return LLM(str(tiny_folder), dtype="float32", max_num_seqs=1, max_waiting=3)


@pytest.fixture(autouse=True)
def _at_rest(narrow: LLM):
    yield
    audit_rest(narrow.built.engine.scheduler)


def finish(llm: LLM) -> None:
    while not llm.client.idle:
        llm.client.step()


def test_the_higher_priority_runs_first(narrow):
    tickets = [
        narrow.client.submit(f"p{priority}", SHORT, options=RequestOptions(priority=priority))
        for priority in (5, 0, -5)
    ]
    finish(narrow)
    finished = [ticket.output().metrics.finished_step for ticket in tickets]
    assert finished == sorted(finished, reverse=True)
    queued = [ticket.output().metrics.queue_s for ticket in tickets]
    assert 0 <= queued[2] <= queued[1] <= queued[0]


def test_a_request_not_started_in_time_expires(narrow):
    late = narrow.generate("late", SHORT, timeout_s=0.0)[0]
    assert late.outputs[0].finish_reason == "expired"
    assert "timeout_s" in late.outputs[0].error
    assert late.outputs[0].token_ids == [] and late.metrics.queue_s is None
    assert narrow.generate("early", SHORT, timeout_s=1000.0)[0].outputs[0].finish_reason == "length"


def test_an_expired_request_can_still_be_aborted(narrow):
    first = narrow.client.submit("first", SHORT)
    late = narrow.client.submit("late", SHORT, options=RequestOptions(timeout_s=0.0))
    narrow.client.abort(late)
    finish(narrow)
    assert first.finished and late.output().outputs[0].finish_reason == "abort"


def test_a_full_queue_refuses_with_its_numbers(narrow):
    with pytest.raises(QueueFull, match="3 requests are waiting, the limit is 3"):
        narrow.generate(["a", "b", "c", "d", "e"], SHORT)
    finish(narrow)
    assert len(narrow.generate(["a", "b", "c"], SHORT)) == 3


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("priority", [101, -101, 1.0, True, None, "1"]),
        ("tenant", [None, 5, b"x", "x" * 257]),
        ("cache_salt", [None, 5, [], "x" * 257]),
        ("timeout_s", [-1, float("nan"), float("inf"), "1", True]),
    ],
)
def test_invalid_request_options(narrow, name, values):
    for value in values:
        with pytest.raises(InvalidParameter) as caught:
            narrow.generate("x", SHORT, **{name: value})
        assert caught.value.param == name and name in caught.value.message


def test_no_two_pairs_of_tenant_and_salt_are_one_partition():
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("1:a", "b"), ("1", ":ab")]
    assert len({RequestOptions(tenant=tenant, cache_salt=salt).partition for tenant, salt in pairs}) == len(pairs)
    assert RequestOptions().partition == ""


def test_an_unknown_option_is_a_type_error(narrow):
    with pytest.raises(TypeError, match="urgency"):
        narrow.generate("x", SHORT, urgency=1)


def test_explain_lists_the_events_of_a_request(narrow):
    narrow.reset_prefix_cache()
    first, second = narrow.generate(["told twice", "told twice"], SHORT)
    events = narrow.explain(second.request_id)
    assert events.num_prompt == len(second.prompt_token_ids)
    assert events.waits and events.admissions[0].num_found == second.metrics.num_cached_tokens == 9
    assert any("waited" in line for line in events.lines())
    assert narrow.explain(first.request_id).ending is not None
    for unknown in ("999999", "9" * 5000, "x", 5, None):
        with pytest.raises(InvalidParameter) as caught:
            narrow.explain(unknown)
        assert caught.value.param == "request_id"


def test_an_itl_target_changes_no_token(narrow, tiny_folder):
    careful = LLM(str(tiny_folder), dtype="float32", itl_target_ms=5.0)
    prompts = [[5 + place] * 40 for place in range(3)]
    one, other = (engine.generate(prompts, SHORT) for engine in (careful, narrow))
    assert [output.outputs[0].token_ids for output in one] == [output.outputs[0].token_ids for output in other]


def test_an_unknown_parameter_is_named_with_the_known_ones(narrow):
    for ask in (narrow.generate, narrow.stream, narrow.embed):
        with pytest.raises(TypeError, match="There is no parameter prio; there are priority, tenant"):
            ask("a", prio=1)
    for ask in (narrow.generate, narrow.embed):
        with pytest.raises(TypeError, match="There is no parameter use_tqdm; use progress=True or False"):
            ask("a", use_tqdm=True)
    with pytest.raises(TypeError, match=r"sampling parameters: SamplingParams\(max_tokens=…\)"):
        narrow.generate("a", max_tokens=5)
    with pytest.raises(InvalidPrompt, match=r"not 'hello'; one question is \[\{\"role\": \"user\""):
        narrow.chat("hello")


def test_a_notebook_without_widgets_has_a_line_of_progress(narrow, monkeypatch, capsys, recwarn):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    narrow.generate([[5, 6], [7, 8], [9]], SHORT)
    said = capsys.readouterr().err
    assert said.startswith("\rgenerating ") and "generating 3/3, " in said and said.endswith(" tok/s\n")
    narrow.generate([[5, 6], [7, 8]], SHORT, progress=False)
    assert capsys.readouterr().err == "" and not recwarn.list


def test_a_stream_has_no_progress_bar(narrow):
    for ask, prompt in ((narrow.stream, "a"), (narrow.stream_chat, [{"role": "user", "content": "a"}])):
        with pytest.raises(TypeError, match="There is no parameter use_tqdm; no bar is drawn here"):
            ask(prompt, use_tqdm=False)
