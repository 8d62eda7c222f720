"""Multi-token-prediction layers in whole engines: outputs are those without, and drafts are those of transformers'
modules. The model that has one, MiMo, says what a Qwen2 with its weights says."""

import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.speculative import DRAFTERS
from quire.engine.build import build
from quire.engine.open_model import open_model
from quire.engine.prefix_transfer import EngineRole
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
from tests.llm.tiny import byte_ids, write_model
from tests.models.mtp_reference import ReferenceMtpLayer, tiny_qwen2
from tests.tiers import choices

SETTINGS = {"dtype": "float32", "quantization": "none"}


@pytest.fixture(scope="module")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), tiny_qwen2())


@pytest.fixture(scope="module")
def reference(qwen2_folder: Path) -> ReferenceMtpLayer:
    """Trained on what the model says after some prompts, so that some of its drafts are right."""
    outputs = LLM(str(qwen2_folder), **SETTINGS).generate(PROMPTS, SamplingParams(**FREE))
    texts = [byte_ids(text) + list(each.outputs[0].token_ids) for text, each in zip(PROMPTS, outputs, strict=True)]
    return ReferenceMtpLayer(tiny_qwen2()).train_on(texts, 40)


@pytest.fixture(scope="module")
def folder(reference: ReferenceMtpLayer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write(tmp_path_factory.mktemp("mimo"))


@torch.inference_mode()
def test_a_mimo_says_what_a_qwen2_with_its_weights_says(
    qwen2_folder: Path, folder: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """To the bit, in chunks too, and what transformers says. The layer that drafts is skipped without a word."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    with caplog.at_level(logging.WARNING):
        mimo = LLM(str(folder), **SETTINGS, max_num_batched_tokens=16)
        outputs = mimo.generate(PROMPTS, params)
    assert not caplog.records and not recwarn.list
    assert said(outputs) == said(LLM(str(qwen2_folder), **SETTINGS).generate(PROMPTS, params))
    assert open_model(EngineConfig(str(folder))).checkpoint.spec.family == "mimo"
    peer = tiny_qwen2()
    for text, output in zip(PROMPTS, outputs, strict=True):
        known, (answer,) = byte_ids(text), output.outputs
        truth = torch.log_softmax(peer(torch.tensor([known + list(answer.token_ids)])).logits[0], dim=-1)
        for place, (token, scores) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True), len(known) - 1):
            assert token == int(truth[place].argmax())
            assert scores[token].logprob == pytest.approx(truth[place, token].item(), abs=1e-4)


TOKEN_BYTES = (2 * 2 * 2 * 16 + 2 * 2 * 16 + 64) * 4  # keys and values of two layers, and of its one; a state


def test_drafts_are_those_of_the_reference(
    folder: Path, reference: ReferenceMtpLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, size = SETTINGS | CROWDED, NUM_BLOCKS * BLOCK_TOKENS
    plain = LLM(str(folder), kv_cache_memory=size * 2 * 2 * 2 * 16 * 4, **settings)
    drafting = LLM(str(folder), kv_cache_memory=size * TOKEN_BYTES, speculative="mtp", **settings)
    assert drafting._built.resolved.num_blocks == 12 and drafting._built.resolved.drafters == ("mtp",)
    assert drafting._built.memory.weights > plain._built.memory.weights
    assert_drafts_are_those(reference, plain, drafting, PROMPTS, note_proposals(monkeypatch))
    audit_rest(drafting._built.engine.scheduler)
    counters = drafting._built.engine.scheduler.counters
    assert counters.moved_blocks > 0
    by_drafter = dict(zip(DRAFTERS, counters.drafted_by, strict=True))
    assert by_drafter["mtp"] == counters.drafted_tokens


@pytest.mark.parametrize("run_ahead", choices((1,), (0, 1, 2)))
def test_drafts_in_captured_passes_are_those_of_the_reference(
    folder: Path, reference: ReferenceMtpLayer, monkeypatch: pytest.MonkeyPatch, run_ahead: int
) -> None:
    """As on a GPU, with steps in flight."""
    settings, size = SETTINGS | CROWDED, NUM_BLOCKS * BLOCK_TOKENS
    plain = LLM(str(folder), kv_cache_memory=size * 2 * 2 * 2 * 16 * 4, **settings)
    memory, name = size * TOKEN_BYTES, "mtp"
    settings |= {"kv_cache_memory": memory, "run_ahead": run_ahead, "speculative": name}
    drafting = on_device(folder, monkeypatch, **settings)
    assert drafting._built.resolved.num_blocks == 12
    assert_drafts_are_those(reference, plain, drafting, PROMPTS, note_proposals(monkeypatch))
    assert drafting._built.engine.scheduler.counters.moved_blocks > 0
    assert drafting._built.engine._loop._runner.num_replayed > 40


def test_the_layer_has_the_states_of_every_token_that_the_model_computed(folder: Path) -> None:
    """Of prompts, of which one token is sampled, and of repeated steps; they are those of transformers."""
    built = LLM(str(folder), speculative="mtp", **SETTINGS)._built
    llm, runner = LLM.over(built), built.engine._loop._runner
    runner._features.stores.device.zero_()  # as allocated, it holds any numbers
    (alone,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    known = [*alone.prompt_token_ids, *alone.outputs[0].token_ids][:-1]
    runner._features._write()
    store = runner._features.stores.device[1:, 0]  # without the null block
    found = store.flatten(-2).transpose(1, 2).flatten(2).flatten(0, 1)  # [tokens, hidden]
    wanted = ReferenceMtpLayer(tiny_qwen2()).states(known)
    assert torch.allclose(found[: len(known)], wanted, atol=1e-3) and not found[len(known) :].any()
    assert runner._greedy_step is not None


def test_outputs_with_a_layer_are_the_same(folder: Path) -> None:
    plain = LLM(str(folder), **SETTINGS, block_size=4)
    drafting = always(LLM(str(folder), **SETTINGS, block_size=4, speculative="ngram+mtp"))
    for kind in choices(("siblings", "cut"), tuple(KINDS)):
        params = SamplingParams(**{"max_tokens": 24} | KINDS[kind])
        assert said(drafting.generate(PROMPTS, params)) == said(plain.generate(PROMPTS, params))
    counters = drafting._built.engine.scheduler.counters
    assert counters.drafted_tokens > counters.accepted_tokens > 0


def test_outputs_with_captured_passes_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests of all kinds beside each other, with a step in flight. The text and the tree draft first."""
    kinds = choices(("greedy", "penalties", "logprobs", "json drawn", "siblings"), tuple(KINDS))
    params = [SamplingParams(**{"max_tokens": 16} | KINDS[kind]) for kind in kinds]
    prompts = [PROMPTS[place % len(PROMPTS)] for place in range(len(params))]

    def said_by(llm: LLM) -> list[tuple[object, ...]]:
        outputs = [each for output in llm.generate(prompts, params) for each in output.outputs]
        return [(each.token_ids, each.text, each.finish_reason) for each in outputs]

    wanted = said_by(on_device(folder, monkeypatch))
    drafting = always(on_device(folder, monkeypatch, speculative="auto+mtp", run_ahead=1))
    for _ in range(2):
        assert said_by(drafting) == wanted
    counters = drafting._built.engine.scheduler.counters
    drafted, accepted = (dict(zip(DRAFTERS, each, strict=True)) for each in (counters.drafted_by, counters.accepted_by))
    assert drafted["mtp"] > accepted["mtp"] and min(accepted["text"], accepted["grammar"]) > 0


def test_text_and_tree_draft_before_the_layer(folder: Path) -> None:
    plain, drafting = LLM(str(folder), **SETTINGS), LLM(str(folder), **SETTINGS, speculative="auto+mtp")
    assert drafting._built.resolved.drafters == ("ngram", "tree", "mtp")
    for _ in range(2):
        outputs = always(drafting).generate(PROMPTS, SamplingParams(**FREE))
        assert said(outputs) == said(plain.generate(PROMPTS, SamplingParams(**FREE)))
    drafted = dict(zip(DRAFTERS, drafting._built.engine.scheduler.counters.drafted_by, strict=True))
    assert min(drafted["tree"], drafted["mtp"]) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2: a draft model runs beside a model in one"),
        (
            {"enable_prefix_caching": False, "speculative": "tree+mtp"},
            "speculative is tree+mtp, which drafts from the prefix cache, and prefix caching is off. Use "
            "--speculative mtp, or omit",
        ),
        ({"speculative": "mtp+ngram"}, "speculative must be one of off, grammar, ngram, tree, ngram+tree, auto, mtp"),
        ({"speculative": "+mtp"}, "the last three also behind ngram+, tree+ or auto+, not '+mtp'."),
        ({"speculative": "grammar+mtp"}, "the last three also behind ngram+, tree+ or auto+, not"),
    ],
)  # fmt: skip
def test_where_layers_are_refused(settings: dict[str, object], message: str, folder: Path) -> None:
    with pytest.raises(QuireError, match=re.escape(message)):
        config = EngineConfig(str(folder), **({"speculative": "mtp"} | settings))  # type: ignore[arg-type]
        open_model(config)
        build(config)


def test_models_without_a_layer_are_told_so(qwen2_folder: Path, folder: Path, tmp_path: Path) -> None:
    """Before weights are loaded. A model that was trained further may have lost its layer: it runs without."""
    with pytest.raises(ConfigError, match=r"is a qwen2: it has no multi-token-prediction layer\. Such layers are read"):
        open_model(EngineConfig(str(qwen2_folder), speculative="mtp"))
    bare = shutil.copytree(folder, tmp_path / "bare")
    shutil.copy(qwen2_folder / "model.safetensors", bare)
    with pytest.raises(ConfigError, match=r"holds no tensors model\.mtp_layers\.\*: it .* of MiMoForCausalLM\. Use"):
        open_model(EngineConfig(str(bare), speculative="ngram+mtp"))
    assert LLM(str(bare), **SETTINGS).generate("x", SamplingParams(max_tokens=2, ignore_eos=True))


def test_a_prefill_engine_has_no_layer(folder: Path) -> None:
    config = EngineConfig(str(folder), device="cpu", speculative="mtp")
    with pytest.raises(ConfigError, match=r"copies the KV blocks of one model, and --speculative mtp has two; omit"):
        build(config, role=EngineRole.DECODE)
