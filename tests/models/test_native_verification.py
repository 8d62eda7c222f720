"""Greedy rows with drafts on the native kernels: right or wrong drafts, the tokens are those without any."""

from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.step import Drafts, FinishReason, RowStart, StepPlan, StepResult
from quire.kernels.interface import StepLayout
from quire.models.decoder import Decoder
from quire.models.parameters import DecoderWeights
from quire.runner.draft_model import DraftModelConfig
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from tests.kernels.cpu_kernels import native_kernels, needs_native
from tests.models.families import VOCAB
from tests.models.test_native_decoder import BLOCK, continued, decoder, prompts, twin
from tests.runner.plans import grants, row_start, sample
from tests.tiers import examples

pytestmark = needs_native

NUM_NEW = 24
LENGTHS = [9, 4, 30]
MODELS = [
    ("llama3", None, None),
    ("gemma2", "Q4_0", torch.int8),
    ("phi3-longrope", "Q8_0", None),
    ("mistral", "Q5_1", None),
]


class Foretold:
    """Drafts what a row is going to say; a token in so many is another one."""

    source = "ngram"

    def __init__(self, texts: list[list[int]], wrong: float, seed: int, wrong_token: int | None = None) -> None:
        self._texts, self._wrong, self._random = texts, wrong, np.random.default_rng(seed)
        self._wrong_token = wrong_token
        self.num_wrong = 0

    def start(self, row_start: RowStart) -> None: ...

    def release(self, row: Row) -> None: ...

    def propose(self, row: Row, tokens: IntArray, count: int) -> IntArray:
        drafts = np.array(self._texts[row][len(tokens) :][:count], dtype=np.int32)
        assert self._texts[row][: len(tokens)] == tokens.tolist(), "the row said something else"
        drafts = drafts[: self._random.integers(len(drafts) + 1)]
        others = (drafts + 1) % VOCAB if self._wrong_token is None else np.full_like(drafts, self._wrong_token)
        wrong = self._random.random(len(drafts)) < self._wrong
        self.num_wrong += np.count_nonzero(wrong)
        return np.where(wrong, others, drafts).astype(np.int32)


@cache
def answers(family: str, encoding: str | None, kv_dtype: torch.dtype | None) -> list[list[int]]:
    return continued(family, prompts(LENGTHS), NUM_NEW, encoding, kv_dtype)


def runner_of(model: Decoder, drafter: Foretold) -> tuple[ModelRunner, StepPlan]:
    """With the plan that computes the prompts."""
    known = prompts(LENGTHS)
    per_row = -(-(max(LENGTHS) + NUM_NEW) // BLOCK)
    stores = new_store(model.kv_geometry, 1 + per_row * len(known), BLOCK, torch.device("cpu"))
    stores.device.view(torch.uint8).fill_(255)  # NaN, and in an int8 store scales that are
    stores.device[0] = 0
    tables = {row: range(1 + row * per_row, 1 + (row + 1) * per_row) for row in range(len(known))}
    starts = [row_start(row, prompt, len(prompt) + NUM_NEW, temperature=0.0) for row, prompt in enumerate(known)]
    chunks = [sample(row, 0, len(prompt)) for row, prompt in enumerate(known)]
    runner = ModelRunner(model, stores, max_rows=len(known), max_length=64, drafters=[drafter])
    return runner, StepPlan(0, starts=tuple(starts), grants=grants(tables), chunks=tuple(chunks))


def note(result: StepResult, said: list[list[int]]) -> None:
    for rows, tokens in result.each_pass():
        assert len(set(rows.tolist())) == len(rows)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            said[row].append(token)


@pytest.mark.parametrize(("family", "encoding", "kv_dtype"), MODELS, ids=[name for name, *_ in MODELS])
@settings(max_examples=examples(6, 40), deadline=None)
@given(seed=st.integers(0, 1 << 30), wrong=st.sampled_from([0.0, 0.2, 1.0]), most=st.sampled_from([1, 3, 11, 23]))
def test_drafts_change_no_token(family, encoding, kv_dtype, seed: int, wrong: float, most: int) -> None:
    """In steps of one to three rows, of which some have drafts. Rows end at any number of them."""
    expected, random = answers(family, encoding, kv_dtype), np.random.default_rng(seed)
    texts = [prompt + tokens for prompt, tokens in zip(prompts(LENGTHS), expected, strict=True)]
    runner, plan = runner_of(model_of(family, encoding, kv_dtype), Foretold(texts, wrong, seed))
    said: list[list[int]] = [[], [], []]
    alive, ended, step = {0, 1, 2}, (), 0
    result = runner.launch(plan).wait()
    while alive:
        note(result, said)
        assert sorted(each.row for each in result.ended) == [row for row in sorted(alive) if len(said[row]) == NUM_NEW]
        assert all(each.reason is FinishReason.LENGTH for each in result.ended)
        ended = tuple(each.row for each in result.ended)
        alive -= set(ended)
        step += 1
        rows = np.array([row for row in sorted(alive) if random.random() < 0.7], dtype=np.int32)
        drafts = Drafts(rows, random.integers(1, most + 1, len(rows)).astype(np.int32))
        result = runner.launch(StepPlan(step, releases=ended, drafts=drafts, num_decoding=len(alive))).wait()
        assert (result.verified.accepted <= result.verified.drafted).all()
        assert (result.verified.drafted <= drafts.counts).all()
        assert result.verified.accepted.sum() + len(alive) == len(result.tokens)
    assert said == expected


@cache
def model_of(family: str, encoding: str | None, kv_dtype: torch.dtype | None) -> Decoder:
    return decoder(family, encoding, kv_dtype=kv_dtype)


def test_a_step_with_drafts_repeats_the_one_before() -> None:
    """Nothing is prepared anew, with drafts or without, and a row goes on where its drafts have brought it."""
    expected = answers("llama3", None, None)
    texts = [prompt + tokens for prompt, tokens in zip(prompts(LENGTHS), expected, strict=True)]
    model = decoder("llama3")
    runner, plan = runner_of(model, Foretold(texts, 0.0, 3))
    said: list[list[int]] = [[], [], []]
    note(runner.launch(plan).wait(), said)
    some = Drafts(np.array([0, 2], dtype=np.int32), np.array([2, 3], dtype=np.int32))
    with patch.object(model, "greedy_step", wraps=model.greedy_step) as prepared:
        for step in range(1, 6):
            drafts = some if step % 2 else Drafts()
            note(runner.launch(StepPlan(step, num_decoding=3, drafts=drafts)).wait(), said)
    assert prepared.call_count == 1
    assert len(said[1]) == 6 < len(said[2])
    assert all(tokens == answer[: len(tokens)] for tokens, answer in zip(said, expected, strict=True))


def test_what_is_emitted_in_passes_is_searched_for_drafts() -> None:
    """The texts that drafters are asked with are whole: `Foretold` compares them."""
    expected = answers("llama3", None, None)
    texts = [prompt + tokens for prompt, tokens in zip(prompts(LENGTHS), expected, strict=True)]
    runner, plan = runner_of(decoder("llama3"), Foretold(texts, 0.3, 5))
    runner.launch(plan)
    every = Drafts(np.arange(3, dtype=np.int32), np.full(3, 4, dtype=np.int32))
    for step in range(1, 5):
        runner.launch(StepPlan(step, num_decoding=3, drafts=every))
    for row in range(3):
        text = runner._drafting._text(Row(row))
        assert texts[row][: len(text)] == text.tolist() and len(text) > LENGTHS[row] + 4


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_a_draft_that_is_not_finite_is_rejected_and_harms_no_token_before_it(kv_dtype: torch.dtype | None) -> None:
    """The embedding of one token is NaN, and every wrong draft is that token."""
    expected = answers("llama3", None, kv_dtype)
    texts = [prompt + tokens for prompt, tokens in zip(prompts(LENGTHS), expected, strict=True)]
    bad = next(token for token in range(VOCAB) if all(token not in text for text in texts))
    weights = twin("llama3").weights
    assert weights.head is not weights.embedding
    embedding = weights.embedding.clone()
    embedding[bad] = torch.nan
    broken = DecoderWeights(embedding, weights.layers, weights.final_norm, weights.head)
    model = Decoder(twin("llama3").spec, broken, native_kernels(2, None, kv_dtype), 64)
    drafter = Foretold(texts, 0.3, 7, wrong_token=bad)
    runner, plan = runner_of(model, drafter)
    said: list[list[int]] = [[], [], []]
    note(runner.launch(plan).wait(), said)
    every = Drafts(np.arange(3, dtype=np.int32), np.full(3, 6, dtype=np.int32))
    for step in range(1, 5):
        result = runner.launch(StepPlan(step, num_decoding=3, drafts=every)).wait()
        assert not result.ended or all(each.reason is FinishReason.LENGTH for each in result.ended)
        note(result, said)
    assert drafter.num_wrong > 0 and min(map(len, said)) > 4
    assert all(tokens == answer[: len(tokens)] for tokens, answer in zip(said, expected, strict=True))


class Watched:
    """A draft model whose tokens may be made wrong, and the positions that it computed."""

    row_decoder = None

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.wrong = False
        self.computed: list[int] = []

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, selected: Tensor | None = None) -> Tensor:
        self.computed += layout.positions.tolist()
        return self._model.forward(tokens, layout, kv, selected)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        return logits.roll(1, -1) if self.wrong else logits


def test_a_draft_model_computes_rejected_drafts_anew_after_steps_that_repeat() -> None:
    """Steps without drafts repeat the one with wrong drafts: what was computed of these does not count as known."""
    model, drafting = decoder("llama3"), Watched(decoder("llama3"))
    [prompt] = prompts([9])
    stores = [new_store(model.kv_geometry, 20, BLOCK, torch.device("cpu")) for _ in range(2)]
    config = DraftModelConfig(drafting, stores[1], 999, VOCAB)  # type: ignore[arg-type]  # all that is asked of it
    runner = ModelRunner(model, stores[0], max_rows=1, max_length=64, draft_model=config)
    start, chunk = row_start(0, prompt, 60, temperature=0.0), sample(0, 0, len(prompt))
    runner.launch(StepPlan(0, starts=(start,), grants=grants({0: range(1, 17)}), chunks=(chunk,)))
    row = np.zeros(1, dtype=np.int32)
    with patch.object(model, "greedy_step", wraps=model.greedy_step) as prepared:
        for step, num_drafts in enumerate((0, 4, 0, 0, 0, 0, 3), 1):
            drafting.wrong = num_drafts == 4
            drafting.computed.clear()
            drafts = Drafts(row, row + num_drafts) if num_drafts else Drafts()
            result = runner.launch(StepPlan(step, num_decoding=1, drafts=drafts)).wait()
    assert prepared.call_count == 1
    assert drafting.computed[:5] == [11, 12, 13, 14, 15], "position 10 had the last right token; 15 have come since"
    assert result.verified.accepted.tolist() == [3], "a model that drafts for itself is right"
