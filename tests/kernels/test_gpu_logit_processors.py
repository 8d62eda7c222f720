"""Masks, offsets, early ends and penalties in one launch against the chain of tensor operations: the same bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.core.sampling import RowSampling
from quire.core.step import Masks
from quire.kernels.gpu.sampling.logit_processors import count_tokens, process_logits
from quire.sampling.logit_processors import count_tokens_reference
from quire.sampling.row_params import DraftedLines, SamplingBatch
from quire.sampling.sampler import Sampler
from tests.kernels.gpu_row_kernels import GPU_ROW_KERNELS
from tests.sampling.reference import Case, row_start
from tests.sampling.strategies import VOCAB, cases
from tests.tiers import choices, examples, long_only

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

WORN = RowSampling(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.3)
BIASED = RowSampling(logit_bias=((3, 2.5), (2100, -1.25)), allowed_ids=tuple(range(1, 4000, 3)))
PDL = RowSampling(min_tokens=4, end_ids=(7, 2500, 9, 11, 4000), presence_penalty=-1.0)
WARY = RowSampling(bad_words=((5,), (1, 8), (1, 2, 3077)))


def samplers(assigned: list[Case], vocab_size: int) -> tuple[Sampler, Sampler]:
    """One that has the kernels and one that has not."""
    pair = Sampler(len(assigned), vocab_size, DEVICE, GPU_ROW_KERNELS), Sampler(len(assigned), vocab_size, DEVICE)
    for sampler in pair:
        for row, case in enumerate(assigned):
            row_start(sampler, row, case)
    return pair


def batch_of(assigned: list[Case], grown: int = 0) -> SamplingBatch:
    rows = np.arange(len(assigned), dtype=np.int32)
    positions = torch.tensor([len(case.tokens) + grown for case in assigned], device=DEVICE)
    return SamplingBatch(torch.arange(len(assigned), device=DEVICE), rows, positions)


def masks_of(allowed: dict[int, Tensor], vocab_size: int) -> Masks:
    """By row; [vocab] bool each."""
    flags = np.zeros((len(allowed), 32 * math.ceil(vocab_size / 32)), dtype=np.uint8)
    for place, each in enumerate(allowed.values()):
        flags[place, :vocab_size] = each.numpy()
    words = np.packbits(flags, axis=1, bitorder="little").view("<i4").astype(np.int32)
    return Masks(np.array([*allowed], dtype=np.int32), words)


def normal(num_rows: int, vocab_size: int) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 4


def agree(quick: Sampler, plain: Sampler, logits: Tensor, batch: SamplingBatch, masks: Masks | None = None) -> Tensor:
    """The tokens, and what they are chosen from, bit for bit."""
    untouched = logits.clone()
    shaped, truth = quick._process_logits_fused(logits, batch, masks), plain._process_logits(logits, batch, masks)
    assert torch.equal(shaped.view(torch.int32), truth.view(torch.int32))
    chosen, expected = quick.sample(logits, batch, masks), plain.sample(logits, batch, masks)
    assert torch.equal(logits, untouched)
    assert chosen.tokens.tolist() == expected.tokens.tolist() and chosen.finite.tolist() == expected.finite.tolist()
    return chosen.tokens


@pytest.mark.parametrize("vocab_size", [4001, 4096])
def test_masks_alone_are_applied_in_place_and_to_no_other_row(vocab_size: int) -> None:
    """The same bits as in a copy, for rows anywhere in the logits; NaN and inf survive, also where they are masked."""
    quick, _ = samplers([Case(RowSampling(masked=row != 1), (1, 8), 2) for row in range(3)], vocab_size)
    masks = masks_of({2: torch.arange(vocab_size) % 5 > 1, 0: torch.arange(vocab_size) > 3900}, vocab_size)
    logits = normal(6, vocab_size)
    logits[4, 9], logits[5, 2], logits[1, 7] = math.inf, math.nan, math.inf
    lines, before = np.array([4, 1, 5]), logits.clone()
    batch = SamplingBatch(torch.arange(3, device=DEVICE), np.arange(3, dtype=np.int32), torch.zeros(3, device=DEVICE))
    for _ in range(2):  # the second time into the same buffer
        logits.copy_(before)
        quick.mask(logits, np.arange(3, dtype=np.int32), lines, masks)
        truth = before.clone()
        truth[[4, 5]] = quick._process_logits_fused(before[[4, 1, 5]], batch, masks)[[0, 2]]
        assert torch.equal(logits.view(torch.int32), truth.view(torch.int32))
    quick.mask(logits, np.arange(3, dtype=np.int32), lines, masks_of({}, vocab_size))
    assert torch.equal(logits.view(torch.int32), truth.view(torch.int32)), "no row has a mask"


@pytest.mark.parametrize("vocab_size", [4001, *long_only([4096], gpu=True)])
def test_each_processor_and_all_together_agree(vocab_size: int) -> None:
    tokens = (1, 8, 4000, 9, 9, 9, 1)
    assigned = [Case(wish, tokens, num_prompt=2) for wish in (WORN, BIASED, PDL, WARY, RowSampling())]
    quick, plain = samplers(assigned, vocab_size)
    some = masks_of({0: torch.arange(vocab_size) % 5 > 1, 4: torch.arange(vocab_size) > 3900}, vocab_size)
    for grown in range(4):
        batch, logits = batch_of(assigned, grown), normal(len(assigned), vocab_size) - grown
        chosen = agree(quick, plain, logits, batch, some if grown % 2 else None)
        for sampler in (quick, plain):
            sampler.commit(batch, chosen)
    assert torch.equal(quick._penalties.generated, plain._penalties.generated)
    assert int(quick._penalties.generated.sum()) == 2 * (5 + 4), "of the two rows that have penalties"


@settings(max_examples=examples(3, 6, gpu=True))
@given(st.lists(cases(), min_size=1, max_size=5), st.integers(0, 2**32), st.booleans())
def test_any_mixture_of_rows_agrees_with_the_tensor_operations(assigned: list[Case], seed: int, masked: bool) -> None:
    quick, plain = samplers(assigned, VOCAB)
    numbers = torch.Generator().manual_seed(seed)
    for grown in range(3):
        logits = (torch.randint(-40, 40, (len(assigned), VOCAB), generator=numbers) / 8).to(DEVICE)
        allowed = {0: torch.rand(VOCAB, generator=numbers) < 0.7}
        batch = batch_of(assigned, grown)
        chosen = agree(quick, plain, logits, batch, masks_of(allowed, VOCAB) if masked else None)
        for sampler in (quick, plain):
            sampler.commit(batch, chosen)
    assert torch.equal(quick._penalties.generated, plain._penalties.generated)


@pytest.mark.parametrize("damage", [math.nan, math.inf])
@pytest.mark.parametrize("wish", [WORN, BIASED, PDL, WARY, RowSampling(masked=True)])
def test_nan_and_inf_survive_masking(wish: RowSampling, damage: float) -> None:
    """Ids that bias, early ends, bad words and the mask forbid, or penalties change."""
    assigned = [Case(wish, (1, 7, 1), num_prompt=1), Case(RowSampling())]
    masks = masks_of({0: torch.arange(4001) == 20}, 4001) if wish.masked else None
    for token in choices((1, 5, 2500), (1, 5, 7, 8, 2500), gpu=True):
        quick, plain = samplers(assigned, 4001)
        logits = normal(2, 4001)
        logits[0, token] = damage
        for sampler in (quick, plain):
            chosen = sampler.sample(logits, batch_of(assigned), masks)
            assert chosen.finite.tolist() == [False, True] and chosen.tokens[0] == 0, (wish, token)


def test_rows_are_found_by_number_and_padding_is_ignored() -> None:
    assigned = [Case(RowSampling()), Case(WORN, (1, 2, 2)), Case(BIASED), Case(WORN, (3, 4, 4))]
    quick, plain = samplers(assigned, 4001)
    logits = normal(3, 4001)
    rows = np.array([3, 0, 1], dtype=np.int32)
    batch = SamplingBatch(torch.tensor(rows, device=DEVICE).long(), rows, torch.full((3,), 3, device=DEVICE))
    agree(quick, plain, logits, batch)
    places = torch.tensor([[-1, -1, -1], [-1, -1, -1], [1, -1, 0]], device=DEVICE)
    padded = SamplingBatch(torch.tensor([3, -1, 1], device=DEVICE), rows, batch.positions)
    shaped = process_logits(logits, padded.rows, padded.positions, quick._rows.table, quick._shaping(places, None))
    assert torch.equal(shaped[[0, 2]], plain._process_logits(logits, batch)[[0, 2]])


def test_lines_behind_drafts_are_processed_as_if_the_drafts_had_been_sampled() -> None:
    """The same bits as one line after the other, and the same state behind what was accepted."""
    text, drafts = (1, 8, 4000, 9, 9, 9, 1), ((8, 3077, 7), (), (9, 9), (2, 8))
    every = RowSampling(
        repetition_penalty=1.2, frequency_penalty=0.5, bad_words=((8, 3077), (9, 9, 1), (9, 4000), (8,)),
        logit_bias=((5, 1.5),), min_tokens=7, end_ids=(7, 3000),
    )  # fmt: skip
    assigned = [Case(wish, text, num_prompt=2) for wish in (every, RowSampling(), WORN, WARY)]
    quick, plain = samplers(assigned, 4001)
    rows, counts = np.arange(4, dtype=np.int32), np.array([len(each) for each in drafts])
    lines = DraftedLines.of(rows, counts)
    logits = normal(len(lines.lines) + 2, 4001)
    tokens = torch.tensor([token for each in drafts for token in (text[-1], *each)] + [0, 0], device=DEVICE)
    numbers = torch.tensor(lines.numbers, device=DEVICE)
    device_rows = torch.tensor(lines.line_rows, device=DEVICE).long()
    found = logits.clone()
    quick.process_drafted(found, lines, tokens, device_rows, numbers + len(text))
    truth = logits.clone()
    for number in range(4):
        at = np.flatnonzero(lines.numbers == number)
        batch = SamplingBatch(device_rows[at], lines.line_rows[at], numbers[at] + len(text))
        truth[at] = plain._process_logits(logits[at], batch)
        going_on = [row for row in lines.line_rows[at].tolist() if number < len(drafts[row])]
        on_device, on_host = torch.tensor(going_on, device=DEVICE).long(), np.array(going_on, dtype=np.int32)
        plain.commit(
            SamplingBatch(on_device, on_host, batch.positions),
            torch.tensor([drafts[row][number] for row in going_on], device=DEVICE).long(),
        )
    assert torch.equal(found.view(torch.int32), truth.view(torch.int32))
    assert not torch.equal(found[:4], logits[:4]) and torch.equal(found[4], logits[4]), "the second row needs nothing"

    quick, plain = samplers(assigned, 4001)
    sampled = torch.tensor([[8, 5, 9, 2], [9, 6, 9, 8], [9, 1, 4, 7]], device=DEVICE)
    emitted = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0]], device=DEVICE)
    quick.commit_drafted(rows, torch.stack([sampled, emitted, torch.ones_like(sampled)]))
    for token, counted in zip(sampled, emitted, strict=True):
        at = counted.nonzero()[:, 0]
        plain.commit(SamplingBatch(at, at.cpu().numpy().astype(np.int32), at), token[at])
    assert torch.equal(quick._penalties.generated, plain._penalties.generated)
    assert torch.equal(quick._bad_words._tails, plain._bad_words._tails)


def test_more_tokens_are_counted_than_one_program_takes() -> None:
    """Some of them twice in the same place."""
    numbers = torch.Generator().manual_seed(0)
    places = torch.randperm(150, generator=numbers)
    places[torch.arange(0, 150, 4)] = -1
    places[1:40] = places[1]
    tokens = torch.randint(0, 37, (150,), generator=numbers)
    assert len(set(tokens[1:40].tolist())) < 39
    before = torch.randint(0, 9, (150, 37), generator=numbers, dtype=torch.int32)
    counted, truth = before.clone().to(DEVICE), before.clone()
    count_tokens(tokens.to(DEVICE), places.to(DEVICE), counted)
    count_tokens_reference(tokens, places, truth)
    assert torch.equal(counted.cpu(), truth) and int((truth - before).sum()) == int((places >= 0).sum())
