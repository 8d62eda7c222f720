"""The one decoder body against transformers, family by family."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import models
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.models.parameters import LayerWeights
from quire.weights.allocate import empty_weights
from tests.kernels.cpu_kernels import cpu_kernels, each_kernels
from tests.kernels.layouts import Pages, Part
from tests.models.families import FAMILIES, VOCAB, Family, Twin, build
from tests.models.running import Schedule, in_chunks, run
from tests.tiers import choices, examples

TOLERANCE = 1e-4
LENGTHS = [21, 13, 1, 30]
BY_NAME = {family.name: family for family in FAMILIES}


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@cache
def twin(name: str) -> Twin:
    return build(BY_NAME[name])


@cache
def expected(name: str, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [twin(name).peer(torch.tensor([prompt])).logits[0].float() for prompt in prompts(list(lengths))]


@cache
def decoder(family: str, kernels: str, max_length: int = 32) -> Decoder:
    model = twin(family)
    return Decoder(model.spec, model.weights, cpu_kernels(kernels), max_length)


def assert_equal(
    family: str, kernels: str, schedule: Schedule, lengths: list[int], max_length: int = 32, block_size: int = 4
) -> None:
    ours = run(decoder(family, kernels, max_length), prompts(lengths), schedule, block_size)
    for mine, theirs in zip(ours, expected(family, tuple(lengths)), strict=True):
        assert (mine - theirs).abs().max().item() <= TOLERANCE


@each_kernels
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_whole_prompts_in_one_flat_batch_give_the_same_logits(family: Family, name: str):
    assert_equal(family.name, name, [dict(enumerate(LENGTHS))], LENGTHS)


@each_kernels
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_token_by_token_gives_the_same_logits(family: Family, name: str):
    assert_equal(family.name, name, in_chunks(LENGTHS, 1), LENGTHS)


@each_kernels
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_chunks_of_every_size_give_the_same_logits(family: Family, name: str):
    for size in choices([2, 5, 11], range(2, 13)):
        assert_equal(family.name, name, in_chunks([12], size), [12])


@each_kernels
@pytest.mark.parametrize("family", ["llama3", "mistral", "gemma2", "gemma3"])
@settings(max_examples=examples(5, 15))
@given(data=st.data(), block_size=st.sampled_from([1, 3, 16, 32]))
def test_any_interleaving_of_chunks_and_decodes_gives_the_same_logits(family: str, name: str, data, block_size: int):
    left = dict(enumerate(LENGTHS))
    schedule: Schedule = []
    while left:
        sequences = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        step = {s: data.draw(st.integers(1, min(left[s], 9))) for s in sequences}
        schedule.append(step)
        left = {s: count - step.get(s, 0) for s, count in left.items() if count > step.get(s, 0)}
    assert_equal(family, name, schedule, LENGTHS, block_size=block_size)


@each_kernels
def test_longrope_uses_short_and_long_factors_in_one_batch(name: str):
    lengths = [40, 7, 35, 32]  # the original length is 32
    assert_equal("phi3-longrope", name, in_chunks(lengths, 7), lengths, max_length=64)


@each_kernels
def test_only_selected_rows_get_logits(name: str):
    model = decoder("llama2", name)
    prompt = prompts([9])
    whole = run(model, prompt, in_chunks([9], 9))[0]
    hidden = torch.randn(5, model._spec.hidden_size)
    assert model.logits(hidden[[1, 3]]).shape == (2, VOCAB)
    torch.testing.assert_close(model.logits(hidden[[1, 3]]), model.logits(hidden)[[1, 3]])
    assert whole.dtype == torch.float32


@each_kernels
@pytest.mark.parametrize("family", ["llama2", "gemma3"])
def test_selected_states_equal_those_of_the_full_forward(family: str, name: str):
    """Of two chunks the wanted states, in any order, are those of the whole; keys and values are all there."""
    model, pages = decoder(family, name), Pages.shuffled([9, 5], 4, seed=0)
    layout, tokens = pages.layout({0: Part(0, 9), 1: Part(0, 5)}), torch.tensor([*prompts([9])[0], *prompts([5])[0]])
    stores = [torch.zeros(model.kv_geometry.store_shape(pages.num_blocks, 4)) for _ in range(2)]
    whole = model.forward(tokens, layout, stores[0])
    wanted = torch.tensor([13, 8, 2])
    torch.testing.assert_close(model.forward(tokens, layout, stores[1], wanted), whole[wanted])
    torch.testing.assert_close(stores[0], stores[1])
    out = torch.empty(3, VOCAB)
    assert model.logits(whole[wanted], out=out) is out
    torch.testing.assert_close(out, model.logits(whole)[wanted])


@each_kernels
def test_the_cpu_kernels_and_the_reference_agree_through_a_whole_model(name: str):
    model = twin("gemma3")
    lengths = [10, 6]
    fast, slow = (
        run(Decoder(model.spec, model.weights, kernels, 32), prompts(lengths), in_chunks(lengths, 4))
        for kernels in (cpu_kernels(name), ReferenceKernels())
    )
    for left, right in zip(fast, slow, strict=True):
        torch.testing.assert_close(left, right, atol=TOLERANCE, rtol=0)


@each_kernels
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_in_bfloat16_every_family_is_within_its_error_bounds(family: Family, name: str):
    """Against float32 on the same rounded weights: mean KL, the likeliest token but for near-ties, and the noise."""
    rounded = build(family, torch.bfloat16)
    exact = build(family, torch.bfloat16).peer.float()
    ids = prompts(LENGTHS)
    mine = torch.cat(run(Decoder(rounded.spec, rounded.weights, cpu_kernels(name), 32), ids, in_chunks(LENGTHS, 5)))
    with torch.inference_mode():
        truth = torch.cat([exact(torch.tensor([prompt])).logits[0] for prompt in ids])
        peer = torch.cat([rounded.peer(torch.tensor([prompt])).logits[0].float() for prompt in ids])
    divergence = F.kl_div(mine.log_softmax(-1), truth.log_softmax(-1), log_target=True, reduction="batchmean")
    assert divergence.item() <= 1e-3
    noise = (peer - truth).abs().max()
    assert (mine - truth).abs().max() <= 1.5 * noise
    lost = truth.amax(dim=1) - truth.gather(1, mine.argmax(1, keepdim=True))[:, 0]
    assert lost.max() <= noise, "a disagreement that is no near-tie"
    highest, second = truth.topk(2, dim=1).values.unbind(dim=1)
    clear = highest - second > noise
    assert clear.float().mean() > 0.5, "too many ties to say anything"
    assert (lost[clear] == 0).all()


@pytest.mark.parametrize(("name", "num_tables"), [("llama3", 1), ("gemma3", 2)])
def test_layers_with_the_same_rope_share_a_table(name: str, num_tables: int, monkeypatch: pytest.MonkeyPatch):
    """A table of 131,072 positions takes a tenth of a second, and a model has many layers."""
    made = []
    monkeypatch.setattr(models.decoder, "RopeTable", lambda *args: made.append(args))
    model = twin(name)
    Decoder(model.spec, model.weights, ReferenceKernels(), 32)
    assert model.spec.num_layers > len(made) == num_tables


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_weights_may_be_loaded_after_the_decoder_was_built(family: Family):
    model = twin(family.name)
    weights = empty_weights(model.spec, torch.float32, "cpu")
    places = [weights.embedding, weights.final_norm, weights.head, *tensors_of(weights.layers)]
    for place in places:
        place.fill_(torch.nan)
    late = Decoder(model.spec, weights, ReferenceKernels(), 32)
    filled = model.weights
    values = [filled.embedding, filled.final_norm, filled.head, *tensors_of(filled.layers)]
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
    late.refresh_norms(weights)
    [ours] = run(late, prompts([12]), [{0: 12}])
    assert (ours - expected(family.name, (12,))[0]).abs().max().item() <= TOLERANCE


def tensors_of(layers: tuple[LayerWeights, ...]) -> list[torch.Tensor]:
    return [tensor for layer in layers for name in layer.__slots__ if (tensor := getattr(layer, name)) is not None]


class CopyingKernels(ReferenceKernels):
    """Their packed weight is a copy, on every CPU."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()


def test_packed_weights_cannot_be_refreshed():
    spec = twin("llama2").spec
    packed = Decoder(spec, empty_weights(spec, torch.bfloat16, "cpu"), CopyingKernels(), 32)
    with pytest.raises(AssertionError, match="packed"):
        packed.refresh_norms(empty_weights(spec, torch.bfloat16, "cpu"))
