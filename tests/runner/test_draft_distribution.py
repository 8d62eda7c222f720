"""Drawn tokens have the same distribution with drafts as without: that of each position's logits, by chi-square.

The logits of the model here depend on the token before alone, so the tokens behind each token are draws from one known
distribution. A rule that accepted too many drafts, or too few of some, would show in them.
"""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.core.model import DraftHeadSpec, ModelSpec, RopeSpec
from quire.core.sampling import RowSampling, SamplingParams
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.request_validator import RequestValidator
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.draft_interface import verify_rows_reference
from quire.kernels.interface import LayerCapture, StepLayout
from quire.kernels.row_interface import EndColumns, RowState, Sampled
from quire.kv.manager import KVManager
from quire.models.draft_head import DraftHead, DraftHeadWeights
from quire.models.interface import KvGeometry
from quire.models.parameters import DecoderWeights, LayerWeights
from quire.runner.device_drafting import DraftConfig
from quire.runner.draft_model import DraftFeatures, DraftModelConfig, feature_geometry
from quire.runner.drafters import drafters_of
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS
from tests.sampling.reference import Case, Floats, probabilities
from tests.tiers import examples, long_only

VOCAB, ROWS, LENGTH = 6, 48, 90
CPU = torch.device("cpu")
RARE = 5.0  # cells in which fewer are expected count as one


class MarkovModel:
    """The logits after a token are its line of a table, whatever came before."""

    row_decoder = None

    def __init__(self, table: Tensor) -> None:  # [VOCAB, VOCAB] float32
        self._table = table
        self.capture = LayerCapture((0,))

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def kv_geometry(self) -> KvGeometry:
        return KvGeometry(num_layers=1, kv_heads=1, head_dim=1, dtype=torch.float32)

    def truncated(self) -> "MarkovModel":
        return self

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, selected: Tensor | None = None) -> Tensor:
        self.capture.take(self._table[tokens], layout.slots)
        return tokens[:, None] if selected is None else tokens[selected, None]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self._table[hidden[:, 0]]
        return logits if out is None else out.copy_(logits)


def random_head() -> DraftHead:
    """Its states are as wide as the model's logits."""
    generator = torch.Generator().manual_seed(6)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layer = ModelSpec("eagle3", 1, 8, 2, 1, 4, 8, VOCAB, LENGTH, 1e-6, RopeSpec(100.0, 4), tied_embeddings=False)
    weights: dict[str, Tensor | None] = dict.fromkeys(field.name for field in fields(LayerWeights))
    weights |= {"attention_norm": torch.ones(8), "mlp_norm": torch.ones(8), "qkv": drawn(16, 16)}
    weights |= {"output": drawn(8, 8), "gate_up": drawn(16, 8), "down": drawn(8, 8)}
    own = LayerWeights(**weights)  # type: ignore[arg-type]
    table, decoder = drawn(VOCAB, 8), DecoderWeights(torch.empty(0, 8), (own,), torch.ones(8), drawn(VOCAB, 8))
    spec = DraftHeadSpec(layer, VOCAB, VOCAB, (0,))
    weights_of_head = DraftHeadWeights(drawn(8, VOCAB), torch.ones(8), decoder, None)
    return DraftHead(spec, weights_of_head, TorchCpuKernels(), LENGTH, lambda tokens: table[tokens])


def runner_of(table: Tensor, drafted_by: str, num_blocks: int, block_size: int, captured: bool) -> ModelRunner:
    """Drafts are from the text, from a model whose probabilities are others, or from an EAGLE head. `captured`: in
    captured passes, as on a GPU."""
    model = MarkovModel(table)
    stores, drafts = (new_store(model.kv_geometry, num_blocks, block_size, CPU) for _ in range(2))
    if drafted_by == "ngram":
        return ModelRunner(model, stores, max_rows=ROWS, max_length=LENGTH, drafters=drafters_of(["ngram"]))
    config = DraftModelConfig(MarkovModel(table + 0.7 * table_of(1001)), drafts, LENGTH, VOCAB)
    if drafted_by == "eagle":
        head = random_head()
        drafts = new_store(head.kv_geometry, num_blocks, block_size, CPU)
        features = new_store(feature_geometry(head.hidden_size, torch.float32), num_blocks, block_size, CPU)
        config = DraftModelConfig(head, drafts, LENGTH, VOCAB, DraftFeatures(model.capture, head.fuse, features))
    if captured:
        runner = ModelRunner(
            model, stores, max_rows=ROWS, max_length=LENGTH, row_kernels=REFERENCE_ROW_KERNELS, max_step_tokens=512,
            device_drafts=DraftConfig(None, model=config),
        )  # fmt: skip
        while not runner.prepared:
            runner.prepare()
        return runner
    return ModelRunner(model, stores, max_rows=ROWS, max_length=LENGTH, draft_model=config)


def drawn_texts(
    table: Tensor, params: dict[str, float], max_drafts: int, drafted_by: str, captured: bool = False
) -> tuple[list[list[int]], int]:
    """Texts of independent requests, each with the last token of its prompt, and how many drafts were accepted."""
    num_blocks, block_size = 1200, 4
    runner = runner_of(table, drafted_by, num_blocks, block_size, captured)
    policy = Policy(speculation=SpeculationPolicy(max_drafts, governed=False, max_verified=512 * captured))
    scheduler = Scheduler(KVManager(num_blocks, block_size, ROWS), max_rows=ROWS, max_step_tokens=512, policy=policy)
    door = RequestValidator(VOCAB, (), LENGTH, ROWS, num_blocks, block_size)
    front = LocalClient(Engine(scheduler, runner, door, depth=int(captured), seed=0, clock=lambda: 0.0), None)
    wanted = [SamplingParams(max_tokens=LENGTH - 2, seed=row, ignore_eos=True, **params) for row in range(ROWS)]  # type: ignore[arg-type]
    tickets = [front.submit([0, row % VOCAB], each) for row, each in enumerate(wanted)]
    while not all(ticket.finished for ticket in tickets):
        front.step()
    texts = [[row % VOCAB, *ticket.output().outputs[0].token_ids] for row, ticket in enumerate(tickets)]
    return texts, scheduler.counters.accepted_tokens


def transitions(texts: list[list[int]]) -> Floats:
    """[VOCAB, VOCAB]: how often a token followed another."""
    counts: Floats = np.zeros((VOCAB, VOCAB))
    for text in texts:
        np.add.at(counts, (text[:-1], text[1:]), 1)
    return counts


def excess(counts: Floats, wanted: Floats) -> float:
    """By how many standard deviations the chi-square of all lines together is too large."""
    chi_square, degrees = 0.0, 0
    for found, chances in zip(counts, wanted, strict=True):
        assert found[chances == 0].sum() == 0, "a token that cannot follow did"
        expected = chances * found.sum()
        rare = expected < RARE
        cells = np.append(expected[~rare], expected[rare].sum()), np.append(found[~rare], found[rare].sum())
        expected, found = (each[cells[0] > 0] for each in cells)
        chi_square += float(((found - expected) ** 2 / expected).sum())
        degrees += max(len(expected) - 1, 0)
    assert degrees >= VOCAB, "too few draws to tell"
    return (chi_square - degrees) / math.sqrt(2 * degrees)


def chances_of(table: Tensor, sampling: RowSampling) -> Floats:
    return np.stack([probabilities(line, Case(sampling)) for line in table.double().numpy()])


def table_of(seed: int) -> Tensor:
    return 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("drafted_by", ["ngram", "model", *long_only(["eagle"])])
@settings(max_examples=examples(1, 40))
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.7, 1.6),
    top_k=st.sampled_from([0, 3, 5]),
    top_p=st.sampled_from([1.0, 0.95, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    max_drafts=st.integers(2, 8),
)
def test_tokens_with_drafts_are_drawn_as_without(
    drafted_by, seed, temperature, top_k, top_p, min_p, max_drafts
) -> None:
    table, params = table_of(seed), {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    texts, num_accepted = drawn_texts(table, params, max_drafts, drafted_by)
    assert num_accepted > 150, "some hundred of four thousand"
    assert excess(transitions(texts), chances_of(table, RowSampling(**params))) < 5


def test_tokens_with_drafts_of_a_captured_head_are_drawn_as_without() -> None:
    """With a step in flight. Drafts are drawn with the random numbers of their positions: with others 491 are right."""
    table, params = table_of(7), {"temperature": 0.9}
    texts, num_accepted = drawn_texts(table, params, 4, "eagle", captured=True)
    assert num_accepted > 600
    assert excess(transitions(texts), chances_of(table, RowSampling(**params))) < 5


def verified_on_the_device(table: Tensor, chances: Tensor, *, greedy_drafts: bool) -> list[list[int]]:
    """Texts whose drafts are verified on the device. What each line samples is drawn from its own logits.

    greedy_drafts: with the rule that a draft is accepted where it is likelier than what was sampled.
    """
    generator = torch.Generator().manual_seed(5)
    rows, queries, width = torch.arange(64), 4, 200
    starts = torch.arange(65) * queries
    history = torch.zeros(65, width, dtype=torch.int32)
    state = RowState(
        torch.zeros(65, dtype=torch.int64), torch.ones(65, dtype=torch.int64), rows.new_ones(65).bool(), history
    )
    ends = EndColumns(torch.full((65,), width), torch.full((65, 1), -1))
    texts = [[0] for _ in range(64)]
    while state.alive[:64].any():
        drafts = chances[state.last_tokens[:64]].multinomial(queries - 1, replacement=True, generator=generator)
        tokens = torch.cat([state.last_tokens[:64, None], drafts], dim=1)
        sampled = chances[tokens.flatten()].multinomial(1, generator=generator).view(64, queries)
        if greedy_drafts:
            logits, ahead = table[tokens[:, :-1]], (drafts, sampled[:, :-1])
            likelier, other = (logits.gather(2, each[:, :, None])[:, :, 0] for each in ahead)
            sampled[:, :-1] = torch.where(likelier > other, *ahead)
        positions = (state.lengths[:64, None] + torch.arange(queries)).clamp(max=width - 1)
        chosen = Sampled(sampled.flatten(), torch.ones(64 * queries, dtype=torch.bool))
        found, reached, *_ = verify_rows_reference(
            chosen, tokens.flatten(), rows, starts, positions.flatten(), ends, state, queries
        )
        for row, text in enumerate(texts):
            text += found[:, row][reached[:, row].bool()].tolist()
    return texts


@pytest.mark.parametrize("sampling", [RowSampling(temperature=1.0), RowSampling(temperature=0.8, top_k=4, top_p=0.9)])
def test_tokens_that_the_device_accepts_are_drawn_as_without(sampling: RowSampling) -> None:
    """And the same count of tokens tells a wrong rule from the right one."""
    table = table_of(7)
    wanted = chances_of(table, sampling)
    texts = verified_on_the_device(table, torch.from_numpy(wanted), greedy_drafts=False)
    assert excess(transitions(texts), wanted) < 5
    wrong = verified_on_the_device(table, torch.from_numpy(wanted), greedy_drafts=True)
    assert excess(transitions(wrong), wanted) > 20
