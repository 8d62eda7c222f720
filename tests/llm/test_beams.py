"""Beam search through the whole engine against transformers' own: token ids and scores."""

from itertools import product

import pytest
import torch

from quire import LLM, SamplingParams
from quire.sched.audit import audit_rest
from tests.llm.tiny import END, VOCAB, byte_ids, tiny_llama, write_model
from tests.tiers import long_only

PROMPTS = ["beams", "a somewhat longer prompt to search from", "z"]
NUM_NEW = 12


@pytest.fixture(scope="module")
def peer():
    """As the shared model, but with flatter logits: its beams cross, and some of them end."""
    model = tiny_llama(seed=3)
    with torch.no_grad():
        model.lm_head.weight *= 0.3
        model.lm_head.weight[END] *= 6
    return model


@pytest.fixture(scope="module")
def searcher(peer, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(write_model(tmp_path_factory.mktemp("beams"), peer)), dtype="float32")


@torch.inference_mode()
def expected(peer, prompt: str, width: int, num_returned: int, penalty: float, stopping: bool | str, **masks: object):
    ids = torch.tensor([byte_ids(prompt)])
    found = peer.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=num_returned,
        length_penalty=penalty, early_stopping=stopping, max_new_tokens=NUM_NEW, do_sample=False,
        eos_token_id=END, pad_token_id=0, return_dict_in_generate=True, output_scores=True, **masks,
    )  # fmt: skip
    rows = [row[ids.shape[1] :].tolist() for row in found.sequences]
    tokens = [row[: row.index(END) + 1] if END in row else row[:NUM_NEW] for row in rows]
    return tokens, found.sequences_scores.tolist()


def search(
    width: int, num_returned: int = 1, penalty: float = 1.0, stopping: bool | str = False, **masks: object
) -> SamplingParams:
    return SamplingParams(
        n=num_returned, use_beam_search=True, beam_width=width, length_penalty=penalty, early_stopping=stopping,
        max_tokens=NUM_NEW, **masks,
    )  # fmt: skip


GRID = [*product([2, 4], [0.0, 1.0, -1.0], [False, True, "never"]), (7, 2.0, False)]
FEW = [(2, 1.0, False), (4, 0.0, True), (4, 1.0, "never"), (4, -1.0, "never"), (7, 2.0, False)]


@pytest.mark.parametrize(("width", "penalty", "stopping"), [*FEW, *long_only(each for each in GRID if each not in FEW)])
def test_beams_are_those_of_transformers(searcher, peer, width, penalty, stopping):
    num_returned = width // 2 + 1
    outputs = searcher.generate(PROMPTS, search(width, num_returned, penalty, stopping))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens, scores = expected(peer, prompt, width, num_returned, penalty, stopping)
        assert [beam.token_ids for beam in output.outputs] == tokens
        assert [beam.score for beam in output.outputs] == pytest.approx(scores, abs=1e-4)
        assert [beam.index for beam in output.outputs] == list(range(num_returned))
        for beam in output.outputs:
            assert beam.cumulative_logprob == pytest.approx(beam.score * len(beam.token_ids) ** penalty)
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] == END else "length")
    audit_rest(searcher.built.engine.scheduler)


def spelled(words: list[str]) -> list[list[int]]:
    """A bad word may come at the start of a text and after a space."""
    return [byte_ids(form) for word in words for form in (word, " " + word)]


LETTERS = [byte_ids(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]
MASKS = {
    "min_tokens": ({"min_tokens": 5}, {"min_new_tokens": 5}),
    "bad_words": ({"bad_words": ["e", "t", "aa", "xyz"]}, {"bad_words_ids": spelled(["e", "t", "aa", "xyz"])}),
    "bias": (
        {"logit_bias": {LETTERS[0]: 1.5, END: -2.0}},
        {"sequence_bias": {(LETTERS[0],): 1.5, (END,): -2.0}},
    ),
    "allowed": (
        {"allowed_token_ids": [END, *LETTERS]},
        {"suppress_tokens": [token for token in range(VOCAB) if token not in (END, *LETTERS)]},
    ),
}


@pytest.mark.parametrize("width", [3, *long_only([2, 5])])
@pytest.mark.parametrize("mask", MASKS)
def test_beams_under_masks_are_those_of_transformers(searcher, peer, mask, width):
    """Masked probability is not redistributed: those of the other tokens do not change."""
    ours, theirs = MASKS[mask]
    outputs = searcher.generate(PROMPTS, search(width, width, **ours))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens, scores = expected(peer, prompt, width, width, 1.0, False, **theirs)
        assert [beam.token_ids for beam in output.outputs] == tokens
        assert [beam.score for beam in output.outputs] == pytest.approx(scores, abs=1e-4)


def test_the_search_both_ends_early_and_runs_on(peer):
    """The comparison is meaningful: some hypotheses end, and beams differ from greedy decoding."""
    tokens = [each for prompt in PROMPTS for each in expected(peer, prompt, 4, 4, 1.0, False)[0]]
    assert {each[-1] == END for each in tokens} == {True, False}
    greedy = [expected(peer, prompt, 4, 4, 1.0, False)[0][0] for prompt in PROMPTS]
    assert any(each[:2] != other[:2] for each, other in zip(greedy, tokens[1::4], strict=True))


def test_a_small_cache_and_run_ahead_change_no_beam(searcher, peer, tmp_path):
    per_token = searcher.built.checkpoint.spec.kv_bytes_per_token(4)
    folder = write_model(tmp_path, peer)
    small = LLM(
        str(folder), dtype="float32", block_size=4, kv_cache_memory=150 * per_token, max_num_seqs=6,
        max_num_batched_tokens=16, run_ahead=1,
    )  # fmt: skip
    params = [search(4, 2), SamplingParams(temperature=0, max_tokens=NUM_NEW), search(3, 3)]
    wide = searcher.generate(PROMPTS, params)
    narrow = small.generate(PROMPTS, params)
    for one, other in zip(wide, narrow, strict=True):
        assert [beam.token_ids for beam in one.outputs] == [beam.token_ids for beam in other.outputs]
    audit_rest(small.built.engine.scheduler)


def test_the_width_may_be_given_as_in_vllm(searcher):
    by_n = searcher.generate("beams", SamplingParams(n=3, use_beam_search=True, max_tokens=6, temperature=0))[0]
    by_best_of = searcher.generate("beams", SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=6))[0]
    assert len(by_n.outputs) == 3 and len(by_best_of.outputs) == 2
    assert by_n.outputs[1].token_ids == by_best_of.outputs[1].token_ids


def test_beams_stream_at_the_end_and_can_be_aborted(searcher):
    deltas = list(searcher.stream("beams", search(3, 2)))
    whole = searcher.generate("beams", search(3, 2))[0]
    assert [(delta.index, delta.token_ids, delta.text) for delta in deltas] == [
        (beam.index, beam.token_ids, beam.text) for beam in whole.outputs
    ]
    assert whole.metrics.first_token_s == whole.metrics.finished_s
    stream = searcher.stream("beams", search(3, 2))
    for _ in range(3):
        searcher._step(stream)
    stream.close()
    while not searcher.client.idle:
        searcher.client.step()
    audit_rest(searcher.built.engine.scheduler)


def test_a_search_with_one_possible_output_returns_one(searcher):
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=4, allowed_token_ids=byte_ids("a"))
    outputs = searcher.generate("only", params)[0].outputs
    assert [beam.text for beam in outputs] == ["aaaa"]
