"""Products that are left in parts: only where a sum with the residual follows, and nothing comes out different."""

import pytest
import torch
from torch import Tensor

from quire.kernels.interface import PartialSums
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from tests.kernels.layouts import Pages, Part
from tests.models.families import FAMILIES, VOCAB, Family, build
from tests.models.running import in_chunks, run

LENGTHS = [5, 3]
PROMPTS = [[(7 * place + row) % VOCAB for place in range(length)] for row, length in enumerate(LENGTHS)]


class InParts(ReferenceKernels):
    """Leaves what it may in three parts, of which the first has the bias."""

    num_left = 0

    def linear_unreduced(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> PartialSums:  # type: ignore[override]
        self.num_left += 1
        sums = torch.stack([part @ rows.T for part, rows in zip(x.chunk(3, 1), packed.chunk(3, 1), strict=True)])
        if bias is not None:
            sums[0] += bias
        return PartialSums(sums, x.dtype)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_logits_agree_and_matmuls_before_a_post_norm_are_reduced(family: Family) -> None:
    twin, kernels = build(family), InParts()
    schedule = in_chunks(LENGTHS, 2)
    plain = run(Decoder(twin.spec, twin.weights, ReferenceKernels(), 32), PROMPTS, schedule)
    parted = run(Decoder(twin.spec, twin.weights, kernels, 32), PROMPTS, schedule)
    assert kernels.num_left == (0 if twin.spec.sandwich_norms else 2 * twin.spec.num_layers * len(schedule))
    torch.testing.assert_close(torch.cat(parted), torch.cat(plain), atol=1e-5, rtol=1e-5)


def test_selected_states_agree_with_partial_sums() -> None:
    twin = build(FAMILIES[0])
    pages = Pages.shuffled(LENGTHS, 4, seed=0)
    layout = pages.layout({row: Part(0, length) for row, length in enumerate(LENGTHS)})
    tokens, wanted = torch.tensor([token for prompt in PROMPTS for token in prompt]), torch.tensor([4, 7])
    states = []
    for kernels in (ReferenceKernels(), InParts()):
        model = Decoder(twin.spec, twin.weights, kernels, 32)
        store = torch.zeros(model.kv_geometry.store_shape(pages.num_blocks, 4))
        states.append(model.forward(tokens, layout, store, wanted))
    assert states[1].shape[0] == 2
    torch.testing.assert_close(*states, atol=1e-5, rtol=1e-5)
