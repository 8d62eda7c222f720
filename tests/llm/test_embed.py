"""Offline embeddings equal transformers' mean of the last hidden states, for any chunks and batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from quire import LLM, EmbeddingOutput, SamplingParams
from quire.core.errors import ContextLengthExceeded, InvalidPrompt, NumericalError
from quire.sched.audit import audit, audit_rest
from tests.llm.tiny import byte_ids, tiny_llama
from tests.tiers import long_only

TEXTS = ["Hello", "a", "The quick brown fox jumps over the lazy dog. " * 3, "语言 🙂 é"]


@pytest.fixture(scope="module")
def peer() -> LlamaForCausalLM:
    return tiny_llama()


def expected(peer: LlamaForCausalLM, text: str) -> np.ndarray:
    """transformers' own: its last hidden states come after the final norm."""
    with torch.inference_mode():
        states = peer(torch.tensor([byte_ids(text)]), output_hidden_states=True).hidden_states[-1][0]
    return torch.nn.functional.normalize(states.double().mean(dim=0), dim=0).float().numpy()


def test_embeddings_are_transformers_mean_of_the_last_hidden_states(llm: LLM, peer: LlamaForCausalLM) -> None:
    outputs = llm.embed(TEXTS)
    for text, output in zip(TEXTS, outputs, strict=True):
        assert isinstance(output, EmbeddingOutput)
        assert output.prompt == text and output.prompt_token_ids == byte_ids(text)
        assert output.embedding.dtype == np.float32
        np.testing.assert_allclose(output.embedding, expected(peer, text), rtol=0, atol=1e-4)
        assert np.linalg.norm(output.embedding) == pytest.approx(1.0, abs=1e-6)
    assert len({output.request_id for output in outputs}) == len(TEXTS)


@pytest.mark.parametrize("budget", [4, *long_only([7, 32])])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_chunked_prefill_gives_the_same_embedding(tiny_folder: Path, llm: LLM, budget: int, run_ahead: int) -> None:
    small = LLM(str(tiny_folder), dtype="float32", max_num_seqs=3, max_num_batched_tokens=budget, run_ahead=run_ahead)
    for piecewise, whole in zip(small.embed(TEXTS), llm.embed(TEXTS), strict=True):
        np.testing.assert_allclose(piecewise.embedding, whole.embedding, rtol=0, atol=1e-5)
    audit(small.built.engine.scheduler)
    audit_rest(small.built.engine.scheduler)


def test_a_cached_prompt_gives_the_same_and_generation_goes_on_beside_it(llm: LLM) -> None:
    (fresh,) = llm.embed(TEXTS[2])
    llm.generate(TEXTS[2], SamplingParams(temperature=0.0, max_tokens=4))
    stream = llm.stream("beside", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    next(stream)
    (again,) = llm.embed(TEXTS[2])
    np.testing.assert_allclose(again.embedding, fresh.embedding, rtol=0, atol=1e-5)
    assert again.metrics.num_cached_tokens == 0
    assert sum(len(delta.token_ids) for delta in stream) == 29


def test_the_times_of_an_embedding(llm: LLM) -> None:
    metrics = llm.embed("times")[0].metrics
    assert metrics.seated_s is not None and metrics.first_token_s is not None and metrics.finished_s is not None
    assert metrics.arrival_s <= metrics.seated_s <= metrics.first_token_s <= metrics.finished_s


def test_prompts_that_cannot_be_embedded_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.embed(["fine", "x" * 600])
    with pytest.raises(InvalidPrompt):
        llm.embed([[]])
    assert llm.built.engine.scheduler.idle and llm.embed([]) == []


def test_an_embedding_that_is_not_finite_is_an_error(tiny_folder: Path) -> None:
    broken = LLM(str(tiny_folder), dtype="float32")
    broken.built.engine._loop._runner._model._final_norm.fill_(float("nan"))
    with pytest.raises(NumericalError):
        broken.embed("hi")
    audit_rest(broken.built.engine.scheduler)
