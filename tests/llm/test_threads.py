"""One LLM, many threads: their prompts run in one batch, and each thread gets its own outputs. Closing it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, EngineFailed
from quire.sched.audit import audit, audit_rest

NUM_THREADS = 6
PARAMS = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in (3, 17, 40)]
PROMPTS = ["one", "and two", "and more than two"]


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS, progress=False)]


def streamed(llm: LLM) -> list[str]:
    """Read alternately."""
    streams = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    said = ["", "", ""]
    for _ in range(max(params.max_tokens or 0 for params in PARAMS) + 1):
        for place, stream in enumerate(streams):
            said[place] += next((delta.text for delta in stream), "")
    return said


@pytest.mark.parametrize("ways", [(texts,), (streamed,), (texts, streamed)], ids=["whole", "streamed", "both"])
def test_every_thread_gets_its_own_outputs(llm: LLM, ways: tuple[Callable[[LLM], list[str]], ...]) -> None:
    alone = texts(llm)
    together = threading.Barrier(NUM_THREADS)

    def ask(number: int) -> list[str]:
        together.wait(60)
        return ways[number % len(ways)](llm)

    with ThreadPoolExecutor(NUM_THREADS) as crew:
        assert list(crew.map(ask, range(NUM_THREADS))) == [alone] * NUM_THREADS
    assert llm.client.idle
    audit(llm.built.engine.scheduler)
    audit_rest(llm.built.engine.scheduler)


def test_several_continuations_of_one_prompt_in_two_threads(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    alone = [each.token_ids for each in llm.generate("three", params)[0].outputs]
    with ThreadPoolExecutor(2) as crew:
        for [output] in crew.map(lambda _: llm.generate("three", params, progress=False), range(4)):
            assert [each.token_ids for each in output.outputs] == alone


def test_a_closed_llm_raises_a_clear_error(tiny_folder: Path) -> None:
    with LLM(tiny_folder, dtype="float32", kv_cache_memory=1 << 20) as llm:
        assert llm.generate("a", PARAMS[0])[0].finished
    for use in (lambda: llm.generate("a"), lambda: llm.stream("a"), llm.get_tokenizer, llm.reset_prefix_cache):
        with pytest.raises(EngineFailed, match="is closed"):
            use()
    llm.close()


@pytest.mark.parametrize("model", [123, "", "  ", b"x", ["a"]])
def test_an_invalid_model_name_is_refused(model: object) -> None:
    with pytest.raises(ConfigError, match="model must be a path"):
        LLM(model)  # type: ignore[arg-type]
