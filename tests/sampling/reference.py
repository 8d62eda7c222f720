"""The slow truth: one row at a time, float64, plain Python. And what seats rows in the real sampler."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.core.ids import Row, SequenceId
from quire.core.sampling import RowSampling
from quire.core.step import RowStart
from quire.sampling.row_params import SamplingBatch
from quire.sampling.sampler import Sampler

CPU = torch.device("cpu")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A row as the tests think of it."""

    sampling: RowSampling
    tokens: tuple[int, ...] = (0,)
    num_prompt: int = 1
    index: int = 0
    max_length: int = 1000


def row_start(sampler: Sampler, row: int, case: Case) -> None:
    tokens = np.array(case.tokens, dtype=np.int32)
    sampler.assign(
        [RowStart(Row(row), SequenceId(row), case.index, tokens, case.num_prompt, case.max_length, case.sampling)]
    )


def batch_of(rows: list[int], positions: list[int]) -> SamplingBatch:
    return SamplingBatch(torch.tensor(rows), np.array(rows, dtype=np.int32), torch.tensor(positions))


def sampler_of(cases: list[Case], vocab_size: int) -> tuple[Sampler, SamplingBatch]:
    """A sampler in which case i sits in row i, and the batch of all of them."""
    sampler = Sampler(len(cases), vocab_size, CPU)
    for row, case in enumerate(cases):
        row_start(sampler, row, case)
    return sampler, batch_of(list(range(len(cases))), [len(case.tokens) for case in cases])


def shaped_logits(logits: Floats, case: Case) -> Floats:
    """Everything before temperature."""
    sampling, logits = case.sampling, logits.astype(np.float64).copy()
    generated = case.tokens[case.num_prompt :]
    for token in range(len(logits)):
        if sampling.allowed_ids is not None and token not in sampling.allowed_ids:
            logits[token] = -math.inf
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    for word in sampling.bad_words:
        beginning = word[:-1]
        if len(beginning) <= len(case.tokens) and case.tokens[len(case.tokens) - len(beginning) :] == beginning:
            logits[word[-1]] = -math.inf
    if len(generated) < sampling.min_tokens:
        logits[list(sampling.end_ids)] = -math.inf
    for token in set(case.tokens):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(generated):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * generated.count(token)
    return logits


def probabilities(logits: Floats, case: Case) -> Floats:
    """The distribution that the row's token must be drawn from."""
    sampling, logits = case.sampling, shaped_logits(logits, case)
    if sampling.temperature == 0:
        certain = np.zeros(len(logits))
        certain[int(np.argmax(logits))] = 1.0
        return certain
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    weights[weights < sampling.min_p] = 0.0
    order = sorted(range(len(weights)), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0.0
    goal, reached = sampling.top_p * weights.sum(), 0.0
    for token in order:
        if sampling.top_p < 1 and reached >= goal:
            weights[token] = 0.0
        reached += weights[token]
    return weights / weights.sum()
