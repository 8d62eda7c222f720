"""EAGLE-3 heads in whole engines: outputs are those without, and drafts are those of a head in plain torch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.speculative import DRAFTERS
from quire.engine import build_draft
from quire.engine.build import build
from quire.engine.open_model import open_model
from quire.engine.prefix_transfer import EngineRole
from quire.formats.presets import SHAPES
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS
from quire.kernels.select import KernelChoice, select_kernels
from quire.sched.audit import audit_rest
from tests.llm.drafting import (
    BLOCK_TOKENS,
    CROWDED,
    NUM_BLOCKS,
    always,
    assert_drafts_are_those,
    note_proposals,
    on_device,
)
from tests.llm.test_speculation import FREE, KINDS, PROMPTS, said
from tests.llm.tiny import byte_ids, tiny_llama
from tests.models.eagle_reference import ReferenceHead
from tests.tiers import choices

SETTINGS = {"dtype": "float32", "quantization": "none"}
LAYERS = (0, 1, 1)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> ReferenceHead:
    """Trained on what the model says after some prompts, so that some of its drafts are right."""
    outputs = LLM(str(tiny_folder), **SETTINGS).generate(PROMPTS, SamplingParams(**FREE))
    texts = [byte_ids(text) + list(each.outputs[0].token_ids) for text, each in zip(PROMPTS, outputs, strict=True)]
    return ReferenceHead(tiny_llama(), LAYERS).train_on(texts, 20)


@pytest.fixture(scope="module")
def head(reference: ReferenceHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write(tmp_path_factory.mktemp("head"))


TOKEN_BYTES = (2 * 2 * 2 * 16 + 2 * 2 * 16 + 64) * 4  # keys and values of two layers, and of the head's; a state


def test_drafts_are_those_of_the_reference(
    tiny_folder: Path, reference: ReferenceHead, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, size = SETTINGS | CROWDED, NUM_BLOCKS * BLOCK_TOKENS
    plain = LLM(str(tiny_folder), kv_cache_memory=size * 2 * 2 * 2 * 16 * 4, **settings)
    drafting = LLM(str(tiny_folder), kv_cache_memory=size * TOKEN_BYTES, speculative=f"eagle:{head}", **settings)
    assert drafting._built.resolved.num_blocks == 12 and drafting._built.resolved.drafters == ("eagle",)
    assert drafting._built.memory.weights > plain._built.memory.weights
    assert_drafts_are_those(reference, plain, drafting, PROMPTS, note_proposals(monkeypatch))
    audit_rest(drafting._built.engine.scheduler)
    counters = drafting._built.engine.scheduler.counters
    assert counters.moved_blocks > 0
    by_drafter = dict(zip(DRAFTERS, counters.drafted_by, strict=True))
    assert by_drafter["eagle"] == counters.drafted_tokens


@pytest.mark.parametrize("run_ahead", choices((1,), (0, 1, 2)))
def test_drafts_in_captured_passes_are_those_of_the_reference(
    tiny_folder: Path, reference: ReferenceHead, head: Path, monkeypatch: pytest.MonkeyPatch, run_ahead: int
) -> None:
    """As on a GPU, with steps in flight."""
    settings, size = SETTINGS | CROWDED, NUM_BLOCKS * BLOCK_TOKENS
    plain = LLM(str(tiny_folder), kv_cache_memory=size * 2 * 2 * 2 * 16 * 4, **settings)
    memory, name = size * TOKEN_BYTES, f"eagle:{head}"
    settings |= {"kv_cache_memory": memory, "run_ahead": run_ahead, "speculative": name}
    drafting = on_device(tiny_folder, monkeypatch, **settings)
    assert drafting._built.resolved.num_blocks == 12
    assert_drafts_are_those(reference, plain, drafting, PROMPTS, note_proposals(monkeypatch))
    assert drafting._built.engine.scheduler.counters.moved_blocks > 0
    assert drafting._built.engine._loop._runner.num_replayed > 40


@pytest.mark.long  # more than a minute
def test_the_kernels_of_a_gpu_draft_the_same(
    tiny_folder: Path, reference: ReferenceHead, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, with prompts in chunks and a step in flight."""
    params, prompts = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), ["the cat sat on th", "abcabc"]
    wanted = said(LLM(str(tiny_folder), **SETTINGS).generate(prompts, params))
    found, settings = note_proposals(monkeypatch), {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    drafting = on_device(
        tiny_folder, monkeypatch, select_kernels("cuda"), **settings, max_model_len=48, speculative=f"eagle:{head}"
    )
    assert said(always(drafting).generate(prompts, params)) == wanted
    assert len(found) > 4
    assert [reference.drafts(text, len(drafts)) for text, drafts in found] == [drafts for _, drafts in found]


def test_a_head_of_the_models_shape_has_dummy_weights(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For measurements. With weights of a model it is the name of a folder as any other."""
    monkeypatch.setitem(SHAPES, "smollm2-135m", replace(SHAPES["smollm2-135m"], num_layers=6, vocab_size=4096))
    settings = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_memory": "16MiB", "speculative": "eagle:dummy"}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    texts = []
    for _ in range(2):
        drafting = always(LLM("smollm2-135m", load_format="dummy", **settings))
        texts += said(drafting.generate([[5, 6, 7]], params))
        assert drafting._built.engine.scheduler.counters.drafted_tokens > 0
    assert texts[0] == texts[1]
    with pytest.raises(QuireError, match="dummy"):
        open_model(EngineConfig(str(tiny_folder), speculative="eagle:dummy"))


def test_a_head_on_a_gpu_needs_kernels_that_can_be_captured(
    tiny_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(str(tiny_folder), device="cuda", speculative=f"eagle:{head}", attention_backend="fa3")
    opened, kernels = open_model(config), TorchCpuKernels()
    for chosen, message in (
        (KernelChoice(kernels, "Triton is not installed"), "on a GPU a head that drafts needs Triton. Triton is not"),
        (
            KernelChoice(kernels, "", draft_kernels=REFERENCE_DRAFT_KERNELS, capturable=False),
            "which no CUDA graph can hold: on a GPU, a head that drafts runs in CUDA graphs",
        ),
    ):
        monkeypatch.setattr(build_draft, "choose_kernels", lambda *args, chosen=chosen: chosen)
        with pytest.raises(ConfigError, match=message):
            build_draft.choose_draft_kernels(config, opened, torch.float32, torch.device("cuda"))


def test_a_head_has_the_states_of_every_token_that_the_model_computed(tiny_folder: Path, head: Path) -> None:
    """Of repeated steps, too: the tokens of one answer are found in the cache by the next prompt, and not computed."""
    built = LLM(str(tiny_folder), speculative=f"eagle:{head}", **SETTINGS)._built
    llm, runner = LLM.over(built), built.engine._loop._runner
    runner._features.stores.device.zero_()  # as allocated, it holds any numbers
    (alone,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    runner._features._write()
    store = runner._features.stores.device[1:, 0]  # without the null block
    num_known = int(store.flatten(-1).any(-1).any(1).sum())
    assert num_known == len(alone.prompt_token_ids) + 39 and runner._greedy_step is not None


def test_outputs_with_a_head_are_the_same(tiny_folder: Path, head: Path) -> None:
    plain = LLM(str(tiny_folder), **SETTINGS, block_size=4)
    drafting = always(LLM(str(tiny_folder), **SETTINGS, block_size=4, speculative=f"ngram+eagle:{head}"))
    for kind in choices(("siblings",), tuple(KINDS)):
        params = SamplingParams(**{"max_tokens": 24} | KINDS[kind])
        assert said(drafting.generate(PROMPTS, params)) == said(plain.generate(PROMPTS, params))
    counters = drafting._built.engine.scheduler.counters
    assert counters.drafted_tokens > counters.accepted_tokens > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2: a draft model runs beside a model in one"),
    ],
)  # fmt: skip
def test_where_heads_are_refused(settings: dict[str, object], message: str, tiny_folder: Path, head: Path) -> None:
    with pytest.raises(QuireError, match=message):
        open_model(EngineConfig(str(tiny_folder), speculative=f"eagle:{head}", **settings))  # type: ignore[arg-type]


def test_what_is_no_head_is_refused_before_weights_are_loaded(tiny_folder: Path) -> None:
    for name, message in ((tiny_folder, "LlamaForCausalLM, and no EAGLE-3 head"), ("/no/such/head", "/no/such/head")):
        with pytest.raises(QuireError, match=message):
            open_model(EngineConfig(str(tiny_folder), speculative=f"eagle:{name}"))


def test_a_prefill_engine_has_no_head(tiny_folder: Path, head: Path) -> None:
    config = EngineConfig(str(tiny_folder), device="cpu", speculative=f"eagle:{head}")
    with pytest.raises(ConfigError, match=r"copies the KV blocks of one model, and --speculative .* has two; omit"):
        build(config, role=EngineRole.DECODE)
