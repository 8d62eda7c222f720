"""Requests with every sampling feature, on a model whose logits are a table, with drafts that were foretold.

The logits of a token follow from the token before it and its position, so they have the same bits in every batch: what
drafts change is a fault of the verification. A run without drafts tells what each request says; a drafter then proposes
that, and in every seventh place another token.
"""

from collections.abc import Sequence as Many
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.ids import IntArray, RequestId
from quire.core.request import Request, Sequence
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason, Masks, RowStart, TopLogprobs
from quire.core.step_output import StepOutput
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS, DraftKernels
from quire.kernels.interface import StepLayout
from quire.kernels.row_interface import RowKernels
from quire.kv.manager import KVManager
from quire.models.interface import KvGeometry
from quire.runner.device_drafting import DraftConfig, RowHistory
from quire.runner.graph_shapes import MAX_VERIFIED
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.audit import audit, audit_rest
from quire.sched.loop import Loop
from quire.sched.policy import Policy
from quire.sched.reservation import Overcommit
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy
from quire.sim.check.expected import grammar_goes_on, mask_after

ROWS, LENGTH, BLOCK_SIZE, STEP_TOKENS = 12, 60, 4, 128
MAX_DRAFTS = 7

Texts = dict[tuple[int, int], list[int]]  # of each continuation: by its prompt's first token, and its index


class TableModel:
    """The logits after a token are its line of a table, and one of its position."""

    row_decoder = None

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(11)
        self._vocab_size = vocab_size
        self._by_token = (2 * torch.randn(vocab_size, vocab_size, generator=generator)).to(device)
        self._by_position = torch.randn(LENGTH + 1, vocab_size, generator=generator).to(device)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def kv_geometry(self) -> KvGeometry:
        return KvGeometry(num_layers=1, kv_heads=1, head_dim=1, dtype=torch.float32)

    def truncated(self) -> "TableModel":
        return self

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, selected: Tensor | None = None) -> Tensor:
        hidden = torch.stack([tokens, layout.positions], dim=1)
        return hidden if selected is None else hidden[selected]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self._by_token[hidden[:, 0]] + self._by_position[hidden[:, 1]]
        return logits if out is None else out.copy_(logits)


class ForetoldDrafter:
    """Proposes what was foretold, and in every seventh place another token."""

    def __init__(self, texts: Texts, vocab_size: int, device: torch.device) -> None:
        self._texts, self._vocab_size = texts, vocab_size
        self._lines = torch.zeros(ROWS + 1, LENGTH, dtype=torch.int64, device=device)

    def start(self, starts: Many[RowStart]) -> None:
        for each in starts:
            prompt = each.tokens[: each.num_prompt].tolist()
            line = torch.tensor(prompt + self._texts[prompt[0], each.branch])
            self._lines[each.row, : len(line)] = line.to(self._lines.device)

    def propose(self, texts: RowHistory, count: int) -> Tensor:
        at = texts.lengths[:, None] + torch.arange(count, device=texts.rows.device)
        found = self._lines[texts.rows[:, None], at.clamp(max=LENGTH - 1)]
        return (found + ((3 * at + texts.rows[:, None]) % 7 == 0)) % self._vocab_size


class Kernels(NamedTuple):
    """What steps run on; without row kernels, the path without graphs."""

    device: torch.device
    rows: RowKernels | None
    drafts: DraftKernels = REFERENCE_DRAFT_KERNELS


class Said(NamedTuple):
    """What requests said, and what became of their drafts."""

    texts: Texts
    reasons: dict[tuple[int, int], FinishReason]
    scores: dict[tuple[int, int], list[TopLogprobs]]
    accepted: list[int]  # of each request
    rejected: int
    preemptions: int


class _Requests:
    """What has been received of each request, and the grammar of those that have one."""

    def __init__(self, scheduler: Scheduler, vocab_size: int, foretold: Texts | None) -> None:
        self.scheduler, self.vocab_size, self.foretold = scheduler, vocab_size, foretold
        self.sequences: dict[int, Sequence] = {}
        self.received: dict[int, list[int]] = {}
        self.scores: dict[int, list[TopLogprobs]] = {}

    def add(self, number: int, sampling: RowSampling, max_tokens: int) -> None:
        prompt = np.array([number, 1, 2, 3 + number % 3], dtype=np.int32)
        num_sequences = 2 if sampling.temperature > 0 and number % 2 else 1
        request = Request(RequestId(number), prompt, max_tokens, sampling, num_sequences=num_sequences)
        for sequence in self.scheduler.add(request):
            self.sequences[sequence.id] = sequence
            self.received[sequence.id] = []
            self.scores[sequence.id] = []

    def receive(self, output: StepOutput) -> StepOutput:
        for name, token in zip(output.sequences.tolist(), output.tokens.tolist(), strict=True):
            self.received[name].append(token)
        for name, scores in output.logprobs.items():
            self.scores[name] += scores
        for name in set(output.sequences.tolist()):
            sequence = self.sequences[name]
            if self.foretold is not None and sequence.request.sampling.masked and not sequence.finished:
                self._expect(sequence, self.received[name])
        return output

    def _expect(self, sequence: Sequence, received: list[int]) -> None:
        """The grammar forces up to nine tokens, now and then none or a wrong one."""
        assert self.foretold is not None
        number = len(received)
        tokens = self.foretold[_key(sequence)][number : number + number % 10]
        if number % 4 == 3 and len(tokens) > 2:
            tokens[2] = (tokens[2] + 1) % self.vocab_size
        self.scheduler.expect(sequence, len(sequence.request.prompt) + number, np.array(tokens, dtype=np.int32))

    def masks(self, sequences: Many[Sequence], drafts: Many[IntArray]) -> Masks:
        passes: list[list[tuple[int, IntArray]]] = [[]]
        for sequence, ahead in zip(sequences, drafts, strict=True):
            known = list(self.received[sequence.id])
            assert sequence.row is not None
            passes[0].append((sequence.row, mask_after(known, self.vocab_size)))
            for number, token in enumerate(ahead.tolist(), 1):
                if not grammar_goes_on(known, token):
                    break
                known.append(token)
                passes[number:] = passes[number:] or [[]]
                passes[number].append((sequence.row, mask_after(known, self.vocab_size)))
        flat = [pair for each in passes for pair in each]
        words = -(-self.vocab_size // 32)
        return Masks(
            np.array([row for row, _ in flat], dtype=np.int32),
            np.array([bits for _, bits in flat], dtype=np.int32).reshape(-1, words),
            tuple(accumulate(len(each) for each in passes[:-1])),
        )


def _key(sequence: Sequence) -> tuple[int, int]:
    return int(sequence.request.prompt[0]), sequence.index


def say(
    wishes: Many[RowSampling],
    kernels: Kernels,
    *,
    vocab_size: int,
    foretold: Texts | None = None,  # None: without drafts
    depth: int = 0,
    num_blocks: int = 400,
) -> Said:
    """Run a request for each wish to its end."""
    device = kernels.device
    model = TableModel(vocab_size, device)
    stores = new_store(model.kv_geometry, num_blocks, BLOCK_SIZE, device)
    drafts = None
    if foretold is not None:
        drafts = DraftConfig(ForetoldDrafter(foretold, vocab_size, device), kernels.drafts)
    runner = ModelRunner(
        model, stores, max_rows=ROWS, max_length=LENGTH, row_kernels=kernels.rows, device_drafts=drafts,
        max_step_tokens=STEP_TOKENS if kernels.rows is not None else 0,
    )  # fmt: skip
    while not runner.prepared:
        runner.prepare()
    speculation = SpeculationPolicy()
    if foretold is not None:
        speculation = SpeculationPolicy(MAX_DRAFTS, governed=False, max_verified=MAX_VERIFIED)
    policy = Policy(overcommit=Overcommit.OPTIMISTIC, speculation=speculation)
    scheduler = Scheduler(
        KVManager(num_blocks, BLOCK_SIZE, ROWS), max_rows=ROWS, max_step_tokens=STEP_TOKENS, policy=policy
    )
    requests = _Requests(scheduler, vocab_size, foretold)
    loop = Loop(scheduler, runner, depth, lambda: 0.0, requests.masks, requests.receive)
    for number, wish in enumerate(wishes):
        requests.add(number, wish, 20 + number % 7)
    while not scheduler.idle:
        loop.step()
        audit(scheduler)
    audit_rest(scheduler)
    groups = {each.request.id: each.group for each in requests.sequences.values()}
    counters = scheduler.counters
    reasons = {_key(each): each.finish_reason for each in requests.sequences.values()}
    return Said(
        {_key(each): requests.received[each.id] for each in requests.sequences.values()},
        {key: reason for key, reason in reasons.items() if reason is not None},
        {_key(each): requests.scores[each.id] for each in requests.sequences.values()},
        [group.num_accepted for group in groups.values()],
        counters.drafted_tokens - counters.accepted_tokens,
        counters.preemptions,
    )


def all_wishes(vocab_size: int) -> list[RowSampling]:
    """Every sampling feature alone, greedy or drawn, and some together."""
    pairs = tuple((first, last) for first in range(0, vocab_size, 3) for last in range(first % 2, vocab_size, 5))
    threes = tuple((first, second, (first + second) % vocab_size) for first in range(12) for second in range(40))
    some = tuple(range(0, vocab_size, 2))
    bias = tuple((token, 3.0 - token % 5) for token in range(0, vocab_size, 7))
    few_ends = tuple(range(1, vocab_size, 29))
    return [
        RowSampling(),
        RowSampling(repetition_penalty=1.6),
        RowSampling(presence_penalty=1.5, frequency_penalty=0.7),
        RowSampling(bad_words=(*pairs[:900], (5,), (9,))),
        RowSampling(bad_words=(*pairs[:300], *threes), num_logprobs=1),
        RowSampling(logit_bias=bias, temperature=0.9, seed=3),
        RowSampling(allowed_ids=some, frequency_penalty=1.2, num_logprobs=0),
        RowSampling(min_tokens=11, end_ids=some),
        RowSampling(num_logprobs=4),
        RowSampling(num_logprobs=2, temperature=0.8, seed=5, top_k=9, top_p=0.9),
        RowSampling(temperature=0.7, seed=7, presence_penalty=-1.0, min_p=0.01),
        RowSampling(end_ids=few_ends, repetition_penalty=0.8, temperature=1.0, seed=9),
        RowSampling(masked=True),
        RowSampling(masked=True, temperature=0.9, seed=11, num_logprobs=2, end_ids=few_ends),
        RowSampling(masked=True, repetition_penalty=1.6, bad_words=pairs[:600], logit_bias=bias, num_logprobs=1),
        RowSampling(masked=True, min_tokens=9, end_ids=some, frequency_penalty=2.0, temperature=0.5, seed=13),
    ]


def assert_same(found: Said, truth: Said) -> None:
    """Tokens, ends and log-probabilities."""
    assert found.texts == truth.texts
    assert found.reasons == truth.reasons
    for key, scores in truth.scores.items():
        for ours, theirs in zip(found.scores[key], scores, strict=True):
            assert (ours.token, ours.rank, ours.ids.tolist()) == (theirs.token, theirs.rank, theirs.ids.tolist()), key
            assert np.allclose([ours.logprob, *ours.logprobs], [theirs.logprob, *theirs.logprobs], atol=1e-4), key
