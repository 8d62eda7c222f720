"""Every family from a folder, through the whole engine, against transformers: greedy ids and log-probabilities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from quire.formats.open_checkpoint import open_checkpoint
from quire.sched.audit import audit_rest
from tests.llm.drafting import always, on_device
from tests.llm.tiny import write_model
from tests.models.families import FAMILIES, MAX_POSITIONS, VOCAB, WINDOW, build
from tests.tiers import long_only

NAMES = ["llama2", "llama-tied", "llama3", "yarn", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]
FEWER = ("llama3", "yarn", "gemma3")  # for what depends little on the family
NUM_NEW = 14
NEVER = VOCAB + 7  # an end token that no row of logits has


def _prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    lengths = [1, 3, WINDOW, 17, 40, 25]
    return [torch.randint(3, VOCAB, (length,), generator=random).tolist() for length in lengths]


PROMPTS = _prompts()


@dataclass(frozen=True)
class Saved:
    peer: PreTrainedModel
    folder: Path
    expected: list[list[int]]

    def open(self, **settings: object) -> LLM:
        return LLM(str(self.folder), dtype="float32", **settings)


@pytest.fixture(scope="module")
def shelf() -> dict[str, Saved]:
    """Each family is built once, when its first test comes."""
    return {}


@pytest.fixture
def saved(request: pytest.FixtureRequest, shelf: dict[str, Saved], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    if request.param not in shelf:
        family = next(family for family in FAMILIES if family.name == request.param)
        peer = build(family).peer
        folder = write_model(tmp_path_factory.mktemp(request.param), peer, num_tokens=VOCAB)
        shelf[request.param] = Saved(peer, folder, [_continuation(peer, prompt) for prompt in PROMPTS])
    return shelf[request.param]


@torch.inference_mode()
def _continuation(peer: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    generated = peer.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False,
        eos_token_id=NEVER, pad_token_id=0,
    )  # fmt: skip
    return generated[0, len(prompt) :].tolist()


@torch.inference_mode()
def _log_probabilities(peer: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    return torch.log_softmax(peer(torch.tensor([tokens])).logits[0].float(), dim=-1)


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)


each_family = pytest.mark.parametrize("saved", NAMES, indirect=True)


def each_family_with(name: str, values: Mapping[str, object], short: Sequence[str] = NAMES) -> pytest.MarkDecorator:
    """The short tier tries the first value with some families, and all values with the one that has most features."""
    first = next(iter(values))
    grid = [
        pytest.param(
            family,
            value,
            id=f"{family}-{label}",
            marks=marks_of((label == first and family in short) or family == "gemma3"),
        )
        for family in NAMES
        for label, value in values.items()
    ]
    return pytest.mark.parametrize(("saved", name), grid, indirect=["saved"])


def marks_of(is_short: bool) -> list[pytest.MarkDecorator]:
    return [] if is_short else [pytest.mark.long]


@each_family_with(
    "settings",
    {
        "blocks of 4": {"block_size": 4, "max_num_batched_tokens": 6, "max_num_seqs": 6, "run_ahead": 1},
        "as it comes": {},
        "blocks of 1": {"block_size": 1, "max_num_batched_tokens": 7, "max_num_seqs": 4},
        "chunks of 3": {"block_size": 16, "max_num_batched_tokens": 3, "max_num_seqs": 2, "run_ahead": 2},
    },
)
def test_greedy_ids_are_those_of_transformers(saved, settings):
    llm = saved.open(**settings)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == saved.expected
    audit_rest(llm.built.engine.scheduler)


@each_family_with("where", {"host": "host", "device": "device"})
def test_greedy_ids_with_drafts_are_those_of_transformers(saved, where, monkeypatch):
    """Twice: the second time the prefix tree has what the first said, and most drafts are right."""
    settings = {"speculative": "auto", "block_size": 4, "run_ahead": 1 if where == "device" else 0}
    llm = on_device(saved.folder, monkeypatch, **settings) if where == "device" else saved.open(**settings)
    always(llm)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == saved.expected
    engine = llm.built.engine
    counters = engine.scheduler.counters
    assert counters.drafted_tokens > counters.accepted_tokens > len(PROMPTS)
    while not engine.idle:  # a step was in flight when the last row ended
        engine.step()
    audit_rest(engine.scheduler)


@each_family_with("block_size", {"4": 4, "1": 1, "16": 16}, FEWER)
def test_preemption_changes_no_token(saved, block_size):
    """The cache holds the longest request and little more: the others are preempted and resumed."""
    bytes_per_token = open_checkpoint(saved.folder).spec.kv_bytes_per_token(4)
    llm = saved.open(block_size=block_size, kv_cache_memory=64 * bytes_per_token, run_ahead=1)
    repeated = [*PROMPTS, *PROMPTS]
    outputs = llm.generate(repeated, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [*saved.expected, *saved.expected]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    audit_rest(llm.built.engine.scheduler)


@each_family
def test_log_probabilities_are_those_of_transformers(saved):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=5, prompt_logprobs=3)
    llm = saved.open(max_num_batched_tokens=11, max_num_seqs=4, block_size=4)
    for output in llm.generate(PROMPTS, params):
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        truth = _log_probabilities(saved.peer, [*prompt, *completion.token_ids])
        assert output.prompt_logprobs[0] is None
        scored = [*output.prompt_logprobs[1:], *completion.logprobs]
        tokens = [*prompt[1:], *completion.token_ids]
        for place, (token, entry) in enumerate(zip(tokens, scored, strict=True)):
            num_top = 3 if place < len(prompt) - 1 else 5
            likeliest = truth[place].topk(num_top).indices.tolist()
            assert set(entry) == {token, *likeliest}
            for candidate, score in entry.items():
                assert score.logprob == pytest.approx(truth[place, candidate].item(), abs=1e-4)
                assert score.rank == 1 + int((truth[place] > truth[place, candidate]).sum())


@pytest.mark.parametrize("saved", [*FEWER, *long_only(name for name in NAMES if name not in FEWER)], indirect=True)
def test_a_whole_context_is_usable(saved):
    llm = saved.open()
    assert llm.built.resolved.max_model_len == MAX_POSITIONS
    prompt = (PROMPTS[4] * 7)[: MAX_POSITIONS - NUM_NEW]
    output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))[0]
    assert output.outputs[0].token_ids == _continuation(saved.peer, prompt)


def test_longrope_short_and_long_requests_side_by_side(tmp_path: Path) -> None:
    """Each by the factors of its own length, as transformers; the original length is 32."""
    peer = build(next(family for family in FAMILIES if family.name == "phi3-longrope")).peer
    folder = write_model(tmp_path, peer, num_tokens=VOCAB)
    prompts = [prompt for prompt in PROMPTS if len(prompt) + NUM_NEW <= 32 or len(prompt) > 32]
    assert {len(prompt) > 32 for prompt in prompts} == {True, False}
    outputs = LLM(str(folder), dtype="float32", max_num_batched_tokens=9, max_num_seqs=9).generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [_continuation(peer, prompt) for prompt in prompts]
