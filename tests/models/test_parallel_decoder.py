"""A decoder that is divided among ranks gives the logits of the whole, and every rank has the same bits."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quire.core.model import ModelSpec, RopeSpec
from quire.core.sharding import Shard, check_divisible
from quire.dist.process_group import ProcessGroup
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.interface import Kernels
from quire.layers.parallel import StageEnds
from quire.models.decoder import Decoder
from quire.models.parameters import DecoderWeights, LayerWeights, layer_shapes
from tests.kernels.cpu_kernels import each_kernels, native_kernels
from tests.models.families import FAMILIES, VOCAB, Family, Twin, build
from tests.models.running import in_chunks, run
from tests.models.shards import cut, on_ranks, on_stages

LENGTHS = [11, 1, 19]


class RandomModel(NamedTuple):
    """A model that transformers has no class for."""

    spec: ModelSpec
    weights: DecoderWeights


def kernels_of(name: str) -> Kernels:
    """Of one thread each: a kernel set serves one decoder at a time."""
    return native_kernels.__wrapped__(1) if name == "native" else TorchCpuKernels()


def prompts(twin: Twin | RandomModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(twin.spec.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def whole_logits(twin: Twin | RandomModel, kernels: str) -> Tensor:
    decoder = Decoder(twin.spec, twin.weights, kernels_of(kernels), 32)
    return torch.cat(run(decoder, prompts(twin), in_chunks(LENGTHS, 7)))


def rank_logits(twin: Twin | RandomModel, kernels: str, size: int) -> list[Tensor]:
    def logits(group: ProcessGroup) -> Tensor:
        spec, weights = group.shard.spec(twin.spec), cut(twin.weights, twin.spec, group.shard)
        decoder = Decoder(spec, weights, kernels_of(kernels), 32, group)
        return torch.cat(run(decoder, prompts(twin), in_chunks(LENGTHS, 7)))

    return on_ranks(size, logits)


@each_kernels
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_two_ranks_give_the_logits_of_one(family: Family, name: str) -> None:
    twin = build(family)
    first, second = rank_logits(twin, name, 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole_logits(twin, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "phi3"])
def test_four_ranks_hold_two_key_heads_twice(family: str) -> None:
    twin = build(next(each for each in FAMILIES if each.name == family))
    assert [list(Shard(rank, 4).kv_heads(twin.spec)) for rank in range(4)] == [[0], [0], [1], [1]]
    found = rank_logits(twin, "torch", 4)
    assert all(torch.equal(found[0], each) for each in found)
    torch.testing.assert_close(found[0], whole_logits(twin, "torch"), rtol=1e-4, atol=1e-4)


def test_biases_behind_a_sum_are_added_once() -> None:
    twin = build(next(each for each in FAMILIES if each.name == "llama2"))
    generator = torch.Generator().manual_seed(3)
    biased = tuple(
        replace(
            layer,
            output_bias=torch.randn(twin.spec.hidden_size, generator=generator),
            gate_up_bias=torch.randn(2 * twin.spec.ffn_size, generator=generator),
            down_bias=torch.randn(twin.spec.hidden_size, generator=generator),
        )
        for layer in twin.weights.layers
    )
    twin = replace(twin, weights=replace(twin.weights, layers=biased))
    found = rank_logits(twin, "torch", 2)[0]
    torch.testing.assert_close(found, whole_logits(twin, "torch"), rtol=1e-4, atol=1e-4)


def test_a_vocabulary_that_no_number_divides_is_padded_and_cut() -> None:
    """121 tokens: 61 and 60."""
    twin = build(next(each for each in FAMILIES if each.name == "llama2"))
    extra = torch.randn(1, twin.spec.hidden_size, generator=torch.Generator().manual_seed(4))
    tables = {name: torch.cat([getattr(twin.weights, name), extra]) for name in ("embedding", "head")}
    spec = replace(twin.spec, vocab_size=VOCAB + 1)
    twin = replace(twin, spec=spec, weights=replace(twin.weights, **tables))
    first, second = rank_logits(twin, "torch", 2)
    assert first.shape[1] == VOCAB + 1
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole_logits(twin, "torch"), rtol=1e-4, atol=1e-4)


def stage_logits(twin: Twin | RandomModel, kernels: str, size: int, num_stages: int) -> list[Tensor]:
    """Of the ranks of the last stage; the others have none."""

    def logits(shard: Shard, group: ProcessGroup | None, everyone: ProcessGroup) -> Tensor | None:
        ends = StageEnds(shard, twin.spec.hidden_size, everyone)
        weights = cut(twin.weights, twin.spec, shard)
        decoder = Decoder(shard.spec(twin.spec), weights, kernels_of(kernels), 32, group, ends)
        found = run(decoder, prompts(twin), in_chunks(LENGTHS, 7), samples=shard.is_last)
        return torch.cat(found) if shard.is_last else None

    return [each for each in on_stages(size, num_stages, logits) if each is not None]


@each_kernels
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_two_stages_give_the_bits_of_one_process(family: Family, name: str) -> None:
    """Of the same kernels layer by layer, which a group of one rank has."""
    twin = build(family)
    [found] = stage_logits(twin, name, 1, 2)
    assert torch.equal(found, rank_logits(twin, name, 1)[0])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_two_stages_of_two_ranks_give_the_logits_of_one_process(family: Family) -> None:
    twin = build(family)
    first, second = stage_logits(twin, "torch", 2, 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole_logits(twin, "torch"), rtol=1e-4, atol=1e-4)


PLAIN = ModelSpec(
    family="plain",
    num_layers=2,
    hidden_size=40,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,
    ffn_size=36,
    vocab_size=101,
    max_positions=64,
    norm_eps=1e-5,
    rope=RopeSpec(10000.0, 16),
    tied_embeddings=False,
)
ALTERNATING = (8, 0, 5, 0, 8)
MODELS = {
    "one key head on four ranks, one token on the last": (
        replace(PLAIN, num_heads=4, num_kv_heads=1, ffn_size=12, vocab_size=13, tied_embeddings=True),
        Shard(0, 4),
    ),
    "three key heads, two stages of five layers, soft caps": (
        replace(
            PLAIN,
            num_layers=5,
            windows=ALTERNATING,
            sandwich_norms=True,
            activation="gelu_tanh",
            embedding_scale=6.3,
            attention_softcap=3.0,
            final_softcap=2.0,
            tied_embeddings=True,
        ),
        Shard(0, 3, 0, 2),
    ),
    "three key heads on six ranks, all biases": (
        replace(PLAIN, num_heads=12, qkv_bias=True, output_bias=True, mlp_bias=True),
        Shard(0, 6),
    ),
    "four stages of five layers, two ropes, norms of heads": (
        replace(PLAIN, num_layers=5, windows=ALTERNATING, qk_norm=True, local_rope=RopeSpec(1e6, 8)),
        Shard(0, 1, 0, 4),
    ),
}


def random_weights(spec: ModelSpec) -> DecoderWeights:
    generator = torch.Generator().manual_seed(5)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)

    def layer() -> LayerWeights:
        made = {name: drawn(shape) for name, shape in layer_shapes(spec).items()}
        made |= {name: 1 + each for name, each in made.items() if name.endswith("norm")}
        return LayerWeights(**dict.fromkeys(LayerWeights.__slots__) | made)

    layers = tuple(layer() for _ in range(spec.num_layers))
    embedding = drawn((spec.vocab_size, spec.hidden_size))
    head = embedding if spec.tied_embeddings else drawn((spec.vocab_size, spec.hidden_size))
    return DecoderWeights(embedding, layers, 1 + drawn((spec.hidden_size,)), head)


@each_kernels
@pytest.mark.parametrize(("spec", "shard"), MODELS.values(), ids=MODELS)
def test_uneven_parts_give_the_logits_of_one_process(spec: ModelSpec, shard: Shard, name: str) -> None:
    check_divisible(spec, shard.size)
    twin = RandomModel(spec, random_weights(spec))
    whole = whole_logits(twin, name)
    size, num_stages = shard.size, shard.num_stages
    found = rank_logits(twin, name, size) if num_stages == 1 else stage_logits(twin, name, size, num_stages)
    assert all(torch.equal(found[0], each) for each in found)
    torch.testing.assert_close(found[0], whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0].argmax(-1), whole.argmax(-1))
