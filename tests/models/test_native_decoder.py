"""Whole decoders on the native kernels: equal bits in every batch, quantized weights within bounds, greedy steps."""

from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import quants
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.core.step import StepPlan
from quire.kernels.interface import QuantizedWeight, StoredRows
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.models.parameters import DecoderWeights, LayerWeights
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from tests.kernels.cpu_kernels import native_kernels, needs_native
from tests.models.families import FAMILIES, VOCAB, Family, Twin, build
from tests.models.running import Schedule, in_chunks, run
from tests.runner.plans import emitted, grants, row_start, sample
from tests.tiers import examples

pytestmark = needs_native

BY_NAME = {family.name: family for family in FAMILIES}
LENGTHS = [21, 13, 1, 30]
# What each encoding may lose in mean KL against float32 on the same unpacked weights: only its 16-bit activations.
LOST_BY_ACTIVATIONS = 2e-6


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@cache
def twin(name: str) -> Twin:
    return build(BY_NAME[name])


def as_stored_weight(weight: Tensor, encoding: str) -> QuantizedWeight:
    values = weight.float().contiguous().numpy()
    rows = quants.quantize(values, GGMLQuantizationType[encoding]).view(np.uint8).reshape(len(values), -1)
    return QuantizedWeight((StoredRows(encoding, len(rows), rows.shape[1], lambda: rows),), tuple(weight.shape))


def stored_as(weights: DecoderWeights, encoding: str) -> DecoderWeights:
    """Every matrix in this encoding."""

    def convert(value: Tensor | None) -> Tensor | QuantizedWeight | None:
        return value if value is None or value.dim() == 1 else as_stored_weight(value, encoding)

    layers = tuple(
        LayerWeights(**{name: convert(getattr(layer, name)) for name in LayerWeights.__slots__})
        for layer in weights.layers
    )
    embedding = convert(weights.embedding)
    head = embedding if weights.head is weights.embedding else convert(weights.head)
    return DecoderWeights(embedding, layers, weights.final_norm, head)


def unpacked(weights: DecoderWeights) -> DecoderWeights:
    """The same values as float32 tensors."""
    kernels = native_kernels()

    def values(weight: Tensor | QuantizedWeight | None) -> Tensor | None:
        if weight is None or (isinstance(weight, Tensor) and weight.dim() == 1):
            return weight
        return kernels.embed(torch.arange(weight.shape[0]), kernels.pack(weight))

    layers = tuple(
        LayerWeights(**{name: values(getattr(layer, name)) for name in LayerWeights.__slots__})
        for layer in weights.layers
    )
    embedding = values(weights.embedding)
    head = embedding if weights.head is weights.embedding else values(weights.head)
    return DecoderWeights(embedding, layers, weights.final_norm, head)


def decoder(
    family: str,
    encoding: str | None = None,
    num_threads: int = 2,
    quantization: str | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    model = twin(family)
    weights = model.weights if encoding is None else stored_as(model.weights, encoding)
    return Decoder(model.spec, weights, native_kernels(num_threads, quantization, kv_dtype), 64)


def divergence(exact: Tensor, other: Tensor) -> float:
    return F.kl_div(other.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean").item()


@cache
def alone(family: str, encoding: str | None) -> list[Tensor]:
    """Each prompt by itself, token by token, on one thread."""
    model = decoder(family, encoding, num_threads=1)
    return [run(model, [prompt], in_chunks([len(prompt)], 1))[0] for prompt in prompts(LENGTHS)]


@pytest.mark.parametrize(
    ("family", "encoding"),
    [("llama3", None), ("gemma3", None), ("gemma2", "Q4_0"), ("qwen3", "Q8_0"), ("qwen2", "Q5_1"), ("mistral", "F16")],
)
@settings(max_examples=examples(6, 30), deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 3, 16]))
def test_logits_have_the_same_bits_in_every_batch(family: str, encoding: str | None, data, block_size: int) -> None:
    """However prompts are chunked and whichever decodes run beside them, on one thread and on two."""
    left = dict(enumerate(LENGTHS))
    schedule: Schedule = []
    while left:
        sequences = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        step = {s: data.draw(st.integers(1, left[s])) for s in sequences}
        schedule.append(step)
        left = {s: count - step.get(s, 0) for s, count in left.items() if count > step.get(s, 0)}
    found = run(two_threads(family, encoding), prompts(LENGTHS), schedule, block_size)
    for mine, expected in zip(found, alone(family, encoding), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(("family", "encoding"), [("llama3", None), ("gemma2", "Q4_0"), ("qwen2", "Q5_1")])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_blocks_of_a_long_step_have_the_bits_of_short_ones(family: str, encoding: str | None, num_threads: int) -> None:
    """With 48 tokens for each thread, a step is computed in blocks of tokens, one thread for each."""
    lengths = [60, 33, 1, 64]
    found = run(decoder(family, encoding, num_threads), prompts(lengths), [dict(enumerate(lengths))])
    expected = run(decoder(family, encoding), prompts(lengths), in_chunks(lengths, 5))
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


@cache
def two_threads(family: str, encoding: str | None) -> Decoder:
    return decoder(family, encoding, num_threads=2)


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights_compute_as_their_unpacked_values(encoding: str) -> None:
    model = twin("llama-tied")
    weights = stored_as(model.weights, encoding)
    exact = Decoder(model.spec, unpacked(weights), native_kernels(), 64)
    packed = Decoder(model.spec, weights, native_kernels(), 64)
    truth, found = (torch.cat(run(each, prompts(LENGTHS), in_chunks(LENGTHS, 7))) for each in (exact, packed))
    lost = divergence(truth, found)
    assert 0 < lost <= (1e-5 if encoding in ("F16", "BF16") else LOST_BY_ACTIVATIONS), lost  # keys are halves in all


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_computes_with_8_bit_weights(family: Family) -> None:
    model = twin(family.name)
    weights = stored_as(model.weights, "Q8_0")
    exact = Decoder(model.spec, unpacked(weights), native_kernels(), 64)
    packed = Decoder(model.spec, weights, native_kernels(), 64)
    truth, found = (torch.cat(run(each, prompts(LENGTHS), in_chunks(LENGTHS, 7))) for each in (exact, packed))
    assert divergence(truth, found) <= LOST_BY_ACTIVATIONS


@pytest.mark.parametrize(("quantization", "most"), [("int8", 4e-3), ("int4", 0.6)])
def test_quantization_at_load_loses_little(quantization: str, most: float) -> None:
    """Random weights of a tiny model are the worst case: real ones lose far less (docs/performance/cpu.md)."""
    truth = torch.cat(run(decoder("llama2"), prompts(LENGTHS), in_chunks(LENGTHS, 7)))
    found = torch.cat(run(decoder("llama2", quantization=quantization), prompts(LENGTHS), in_chunks(LENGTHS, 7)))
    assert 0 < divergence(truth, found) <= most


@pytest.mark.parametrize("family", ["llama3", "gemma2", "qwen3", "qwen2"])
def test_an_int8_kv_store_computes_as_the_reference_does(family: str) -> None:
    """The same logits, but for codes that rounding moves to their neighbour; and the same bits in every batch."""
    model = twin(family)
    reference = Decoder(model.spec, model.weights, ReferenceKernels(torch.int8), 64)
    native = decoder(family, kv_dtype=torch.int8)
    truth, found = (run(each, prompts(LENGTHS), in_chunks(LENGTHS, 7)) for each in (reference, native))
    exact = torch.cat(run(decoder(family), prompts(LENGTHS), in_chunks(LENGTHS, 7)))
    assert divergence(torch.cat(truth), torch.cat(found)) <= 0.05 * divergence(exact, torch.cat(found))
    assert divergence(exact, torch.cat(found)) <= 1e-3
    one_thread = decoder(family, num_threads=1, kv_dtype=torch.int8)
    by_token = run(one_thread, prompts(LENGTHS), in_chunks(LENGTHS, 1), block_size=16)
    assert all(torch.equal(mine, other) for mine, other in zip(by_token, found, strict=True))


BLOCK = 4


def continued(
    family: str,
    known: list[list[int]],
    num_new: int,
    encoding: str | None = None,
    kv_dtype: torch.dtype | None = None,
) -> list[list[int]]:
    """Greedy tokens by the runner: one step of chunks, then steps of decodes. One sequence is long for LongRoPE."""
    model = decoder(family, encoding, kv_dtype=kv_dtype)
    per_row = -(-(max(map(len, known)) + num_new) // BLOCK)
    stores = new_store(model.kv_geometry, 1 + per_row * len(known), BLOCK, torch.device("cpu"))
    stores.device.view(torch.uint8).fill_(255)  # NaN, and in an int8 store scales that are
    stores.device[0] = 0
    runner = ModelRunner(model, stores, max_rows=len(known), max_length=64)
    tables = {row: range(1 + row * per_row, 1 + (row + 1) * per_row) for row in range(len(known))}
    starts = [row_start(row, prompt, len(prompt) + num_new, temperature=0.0) for row, prompt in enumerate(known)]
    chunks = [sample(row, 0, len(prompt)) for row, prompt in enumerate(known)]
    plan = StepPlan(0, starts=tuple(starts), grants=grants(tables), chunks=tuple(chunks))
    results = [runner.launch(plan).wait()]
    with patch.object(model, "greedy_step", wraps=model.greedy_step) as prepared:
        results += [runner.launch(StepPlan(step, num_decoding=len(known))).wait() for step in range(1, num_new)]
    assert prepared.call_count == 1, "steps of the same rows have the same arguments"
    return [[emitted(result)[row] for result in results] for row in range(len(known))]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@torch.inference_mode()
def test_greedy_steps_choose_the_tokens_of_transformers(family: Family) -> None:
    known = prompts([9, 4, 30])
    found = continued(family.name, known, 12)
    for prompt, tokens in zip(known, found, strict=True):
        logits = twin(family.name).peer(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("family", "encoding", "kv_dtype"),
    [
        ("gemma2", "Q4_0", None),
        ("phi3-longrope", "Q8_0", None),
        ("llama3", "Q5_0", None),
        ("gemma2", None, torch.int8),
        ("llama3", "Q4_0", torch.int8),
    ],
)
def test_greedy_steps_choose_what_a_forward_of_the_whole_chooses(
    family: str, encoding: str | None, kv_dtype: torch.dtype | None
) -> None:
    known = prompts([9, 4, 30])
    found = continued(family, known, 14, encoding, kv_dtype)
    assert found[1] == continued(family, known[1:2], 14, encoding, kv_dtype)[0], "as alone"
    model = decoder(family, encoding, kv_dtype=kv_dtype)
    for prompt, tokens in zip(known, found, strict=True):
        whole = [*prompt, *tokens]
        logits = run(model, [whole], in_chunks([len(whole)], len(whole)))[0]
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
