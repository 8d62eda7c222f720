"""Heads that draft against plain torch, and what the decoder copies for them against transformers."""

from pathlib import Path

import pytest
import torch

from quire.formats.draft_head import open_eagle_head, open_mtp_layer
from quire.formats.hf_folder import open_folder
from quire.models.decoder import Decoder
from quire.models.draft_head import DraftHead
from quire.runner.kv_store import new_store
from quire.weights.draft_head_weights import load_draft_head
from tests.kernels.cpu_kernels import cpu_kernels, each_kernels
from tests.kernels.layouts import Pages, Part
from tests.models.eagle_reference import ReferenceHead
from tests.models.families import FAMILIES, VOCAB, build
from tests.models.mtp_reference import ReferenceMtpLayer
from tests.tiers import choices

LENGTHS = [9, 1, 14]
CPU = torch.device("cpu")
BY_NAME = {family.name: family for family in FAMILIES}


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


@each_kernels
@pytest.mark.parametrize("family", choices(["gemma3"], list(BY_NAME)))
def test_what_enters_layers_is_copied_for_every_token(family: str, name: str) -> None:
    """Though only some tokens are selected; a layer may be asked for twice."""
    twin, layers = build(BY_NAME[family]), (0, 1, 1)
    decoder = Decoder(twin.spec, twin.weights, cpu_kernels(name), 32)
    pages = Pages.shuffled(LENGTHS, 4, 0)
    layout = pages.layout({number: Part(0, length) for number, length in enumerate(LENGTHS)})
    store = torch.zeros(decoder.kv_geometry.store_shape(pages.num_blocks, 4))
    tokens = torch.tensor([token for text in texts() for token in text])
    capture = decoder.capture(layers)
    decoder.forward(tokens, layout, store, torch.tensor([8, 9, 23]))
    with torch.inference_mode():
        states = [twin.peer(torch.tensor([text]), output_hidden_states=True).hidden_states for text in texts()]
    wanted = torch.cat([torch.cat([each[layer][0] for layer in layers], dim=-1) for each in states])
    assert capture.states is not None
    assert torch.allclose(capture.states, wanted, atol=1e-4)


@each_kernels
@pytest.mark.parametrize("family", choices(["gemma3", "qwen2"], list(BY_NAME)))
def test_what_leaves_the_last_layer_is_copied_for_every_token(family: str, name: str) -> None:
    """Before the final norm, though only some tokens are selected, whose outputs stay the same."""
    twin, selected = build(BY_NAME[family]), torch.tensor([8, 9, 23])
    pages = Pages.shuffled(LENGTHS, 4, 0)
    layout = pages.layout({number: Part(0, length) for number, length in enumerate(LENGTHS)})
    tokens = torch.tensor([token for text in texts() for token in text])
    plain, capturing = (Decoder(twin.spec, twin.weights, cpu_kernels(name), 32) for _ in range(2))
    layers = (twin.spec.num_layers, 1)
    capture = capturing.capture(layers)
    outputs = [
        decoder.forward(tokens, layout, torch.zeros(decoder.kv_geometry.store_shape(pages.num_blocks, 4)), selected)
        for decoder in (plain, capturing)
    ]
    assert torch.allclose(*outputs, atol=1e-6)
    found: list[torch.Tensor] = []
    hook = twin.peer.model.layers[-1].register_forward_hook(lambda _, __, output: found.append(output[0]))
    with torch.inference_mode():
        entering = [twin.peer(torch.tensor([text]), output_hidden_states=True).hidden_states[1][0] for text in texts()]
    hook.remove()
    assert capture.states is not None
    assert torch.allclose(capture.states, torch.cat([torch.cat(found), torch.cat(entering)], dim=-1), atol=1e-3)


@each_kernels
def test_the_head_says_what_the_reference_says(tmp_path: Path, name: str) -> None:
    """With an embedding of its own, and tensors named as in a model."""
    twin = build(BY_NAME["llama3"])
    reference = ReferenceHead(twin.peer, (0, 1, 1), seed=4)
    folder = reference.write(tmp_path, embed_tokens=True, prefix="model.")
    checkpoint = open_eagle_head(folder, twin.spec, "the model")
    kernels, text = cpu_kernels(name), texts()[2]
    weights = load_draft_head(checkpoint, torch.float32, CPU)
    head = DraftHead(checkpoint.spec, weights, kernels, 32, lambda tokens: pytest.fail("it has an embedding"))
    pages = Pages.shuffled([len(text) - 1], 4, 1)
    store = new_store(head.kv_geometry, pages.num_blocks, 4, CPU).device
    with torch.inference_mode():
        tokens, states = torch.tensor(text[1:]), reference.states(text)[:-1]
        wanted = reference.pairs(tokens, states)
        hidden = head.forward(tokens, pages.layout({0: Part(0, len(tokens))}), store, None, states)
        assert torch.allclose(hidden, wanted, atol=1e-4)
        logits, drafted = head.logits(hidden), reference.t2d
        assert torch.allclose(logits[:, drafted], reference.logits(wanted), atol=1e-3)
    assert logits.shape == (len(tokens), VOCAB) and bool((logits[:, ~drafted] == -torch.inf).all())


@each_kernels
def test_a_multi_token_prediction_layer_says_what_the_reference_says(tmp_path: Path, name: str) -> None:
    """Behind the tokens of a text, and behind its own output; with the embedding and the head of the model."""
    twin, kernels, text = build(BY_NAME["qwen2"]), cpu_kernels(name), texts()[2]
    reference = ReferenceMtpLayer(twin.peer, seed=4)
    checkpoint = open_mtp_layer(open_folder(reference.write(tmp_path)), "the model", "mtp")
    assert checkpoint.spec.captured_layers == (twin.spec.num_layers,)
    target = Decoder(twin.spec, twin.weights, kernels, 32)
    weights = load_draft_head(checkpoint, torch.float32, CPU)
    head = DraftHead(checkpoint.spec, weights, kernels, 32, target.embed, target.logits)
    pages = Pages.shuffled([len(text)], 4, 1)
    store = new_store(head.kv_geometry, pages.num_blocks, 4, CPU).device
    with torch.inference_mode():
        tokens, states = torch.tensor(text[1:]), head.fuse(reference.states(text)[:-1])
        wanted = reference.pairs(tokens, states)
        hidden = head.forward(tokens, pages.layout({0: Part(0, len(tokens))}), store, None, states)
        assert torch.allclose(hidden, wanted, atol=1e-4)
        assert torch.allclose(head.logits(hidden), reference.logits(wanted), atol=1e-3)
        draft = head.logits(hidden[-1:]).argmax(-1)
        layout = pages.layout({0: Part(len(tokens), 1)})
        following = head.forward(draft, layout, store, None, hidden[-1:])
        wanted = reference.pairs(torch.cat([tokens, draft]), torch.cat([states, wanted[-1:]]))
        assert torch.allclose(following, wanted[-1:], atol=1e-4)
    matrices = (
        weights.join,
        *(getattr(weights.layer.layers[0], each) for each in ("qkv", "output", "gate_up", "down")),
    )
    assert weights.fuse is None and head.num_bytes >= sum(each.nbytes for each in matrices) > 0
