"""Streams and interruptions: deltas join to the whole output, and the engine stays usable after closed streams."""

import gc
import signal
from itertools import islice
from types import SimpleNamespace

import pytest

from quire import LLM, SamplingParams
from quire.runner.model_runner import ModelRunner
from quire.sched.audit import audit, audit_rest
from tests.llm.tiny import byte_ids

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
ACCENTS = SamplingParams(seed=3, max_tokens=60, ignore_eos=True, allowed_token_ids=[*byte_ids("é語"), *byte_ids("x")])


def drain(llm: LLM) -> None:
    """No stream is open: a few steps release everything."""
    for _ in range(5):
        llm._step(SimpleNamespace(ready=False))
    audit(llm.built.engine.scheduler)
    audit_rest(llm.built.engine.scheduler)


@pytest.mark.parametrize(
    "params",
    [
        LONG,
        ACCENTS,
        SamplingParams(seed=7, max_tokens=40, logprobs=2),
        SamplingParams(seed=3, max_tokens=60, stop=["é", "xx"], allowed_token_ids=byte_ids("éx")),
    ],
    ids=["greedy", "characters of several tokens", "logprobs", "stop strings"],
)
def test_the_deltas_join_to_the_output_of_generate(llm, params):
    llm.reset_prefix_cache()  # a prompt of which less is computed has other rounding errors
    whole = llm.generate("stream", params)[0].outputs[0]
    llm.reset_prefix_cache()
    deltas = list(llm.stream("stream", params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs] == (whole.logprobs or [])
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
    drain(llm)


def test_no_delta_has_half_a_character(llm):
    two_bytes = byte_ids("é")
    alternating = SamplingParams(temperature=0.0, max_tokens=2, allowed_token_ids=[two_bytes[0]])
    pieces = [delta.text for delta in llm.stream("x", alternating)]
    assert pieces[0] == ""  # the first byte alone is held back
    text = "".join(delta.text for delta in llm.stream("stream", ACCENTS))
    assert "語" in text and not text.endswith("\ufffd\ufffd")


def test_a_stream_of_chat_is_the_chat(llm):
    messages = [{"role": "u", "content": "hi"}]
    whole = llm.chat(messages, LONG)[0].outputs[0].text
    assert "".join(delta.text for delta in llm.stream_chat(messages, LONG)) == whole


def test_deltas_of_several_continuations_have_their_index(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=12)
    whole = llm.generate("several", params)[0].outputs
    texts = ["", "", ""]
    for delta in llm.stream("several", params):
        texts[delta.index] += delta.text
    assert texts == [completion.text for completion in whole]
    drain(llm)


def test_closing_a_stream_early_releases_everything(llm):
    stream = llm.stream("early", LONG)
    assert len(list(islice(stream, 3))) == 3
    assert not llm.client.idle
    stream.close()
    drain(llm)


def test_a_stream_that_was_not_started_can_be_closed(llm):
    stream = llm.stream("never", LONG)
    stream.close()
    del stream
    drain(llm)


def test_generate_beside_an_open_stream(llm):
    expected = "".join(delta.text for delta in llm.stream("open", LONG))
    stream = llm.stream("open", LONG)
    said = next(stream).text
    llm.generate(["beside"], SamplingParams(temperature=0.0, max_tokens=5))
    said += "".join(delta.text for delta in stream)
    assert said == expected
    drain(llm)


class Interrupting:
    """A runner that is interrupted in the middle of one of its steps, as Ctrl-C would."""

    def __init__(self, runner, at_step: int) -> None:
        self._runner = runner
        self._countdown = at_step

    def launch(self, plan):
        self._countdown -= 1
        pending = self._runner.launch(plan)
        if self._countdown == 0:
            signal.raise_signal(signal.SIGINT)
            sum(range(1000))  # bytecodes, where Python would raise
        return pending


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("at_step", [1, 2, 7])
def test_an_interrupt_stops_the_batch_and_not_the_engine(tiny_folder, at_step, run_ahead):
    llm = LLM(str(tiny_folder), dtype="float32", run_ahead=run_ahead)
    expected = [output.outputs[0].token_ids for output in llm.generate(["one", "two"], LONG)]
    loop = llm.built.engine._loop
    runner = loop._runner
    loop._runner = Interrupting(runner, at_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], LONG)
    loop._runner = runner
    drain(llm)
    assert [output.outputs[0].token_ids for output in llm.generate(["one", "two"], LONG)] == expected
    drain(llm)


def test_an_interrupt_while_reading_stops_the_reply_only(llm):
    with pytest.raises(KeyboardInterrupt):
        for place, _ in enumerate(llm.stream("reply", LONG)):
            if place == 2:
                signal.raise_signal(signal.SIGINT)
    drain(llm)
    assert llm.generate("reply", LONG)[0].finished


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stream_garbage_collected_during_a_step_affects_no_other(tiny_folder, monkeypatch, depth):
    llm = LLM(str(tiny_folder), dtype="float32", run_ahead=depth)
    expected = llm.generate("abc", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].token_ids

    class Job:
        """Garbage that only the collector can find."""

        def __init__(self) -> None:
            self.me = self
            self.stream = llm.stream("dropped", SamplingParams(temperature=0, max_tokens=40))
            next(self.stream)

    original = ModelRunner.launch

    def launch(self, plan):
        gc.collect()
        return original(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", launch)
    gc.disable()
    gc.freeze()  # what was here before is not looked at again in every step
    try:
        for _ in range(3):
            Job()
            output = llm.generate("abc", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
            assert output.token_ids == expected
    finally:
        gc.enable()
    drain(llm)


class Garbage:
    """What a web framework leaves of a request whose client has gone: a cycle that holds its generator."""

    def __init__(self, llm: LLM) -> None:
        self.me = self
        self.pieces = (delta.text for delta in llm.stream("left", ENDLESS))
        next(self.pieces)


ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def test_a_stream_that_its_reader_has_left_is_let_go(llm, monkeypatch):
    """Without its garbage being collected by Python, and long before its last token."""
    collections = []
    monkeypatch.setattr(gc, "collect", lambda collect=gc.collect: collections.append(collect()))
    gc.disable()
    gc.freeze()
    try:
        for _ in range(3):
            Garbage(llm)
        kept, later = llm.stream("kept", ENDLESS), [Garbage(llm)]
        llm.generate("beside", SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
        assert len(collections) == 1  # for all of them: a collection takes long
        assert len(llm._readers) == llm.built.engine.scheduler.num_running == 2
        later.clear()
        llm.generate("beside", SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
        assert len(collections) == 2  # at twice as many
        assert list(llm._readers.values()) == [kept]
        assert llm.built.engine.scheduler.num_running == 1
        assert len(list(kept)) == 400
    finally:
        gc.enable()
    drain(llm)


def test_the_end_of_a_with_aborts_a_stream(llm):
    with llm.stream("within", ENDLESS) as stream:
        next(stream)
    drain(llm)
    assert list(stream) == []
