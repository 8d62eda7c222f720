"""EAGLE-3 heads in whole engines: outputs are those without, and drafts are those of a head in plain torch."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.ids import IntArray
from quire.engine.build import build
from quire.engine.open_model import open_model
from quire.engine.prefix_transfer import EngineRole
from quire.runner.draft_model import DraftModel
from tests.llm.drafting import always
from tests.llm.test_speculation import FREE, KINDS, PROMPTS, said
from tests.llm.tiny import byte_ids, tiny_llama
from tests.models.eagle_reference import ReferenceHead
from tests.tiers import choices, examples

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


Proposal = tuple[list[int], list[int]]  # a text, and its drafts


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proposal]]:
    found: list[Proposal] = []
    propose = DraftModel.propose

    def noting(self: DraftModel, rows: list[int], counts: list[int], texts: list[IntArray]) -> list[IntArray]:
        drafted = propose(self, rows, counts, texts)  # type: ignore[arg-type]
        found.extend((text.tolist(), drafts.tolist()) for text, drafts in zip(texts, drafted, strict=True))
        return drafted

    monkeypatch.setattr(DraftModel, "propose", noting)
    yield found


def test_drafts_are_those_of_the_reference(
    tiny_folder: Path, reference: ReferenceHead, head: Path, proposals: list[Proposal]
) -> None:
    """Prompts in chunks beside rows that draft, steps without drafts, prefixes that are found again, and a cache for
    two of five: preempted and swapped."""
    settings = SETTINGS | {"max_num_seqs": 5, "max_num_batched_tokens": 24, "max_model_len": 128}
    settings |= {"host_kv_memory": "1MiB", "overcommit": "optimistic"}
    plain = LLM(str(tiny_folder), kv_cache_memory=12 * 16 * 2 * 2 * 2 * 16 * 4, **settings)
    token_bytes = (2 * 2 * 2 * 16 + 2 * 2 * 16 + 64) * 4  # keys and values of two layers, and of the head's; a state
    name = f"eagle:{head}"
    drafting = LLM(str(tiny_folder), kv_cache_memory=12 * 16 * token_bytes, speculative=name, **settings)
    assert drafting._built.resolved.num_blocks == 12 and drafting._built.resolved.drafters == ("eagle",)
    assert drafting._built.memory.weights > plain._built.memory.weights
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [text * 2 for text in PROMPTS]
    wanted = said(plain.generate(prompts, params))
    (alone,) = drafting.generate(prompts[0], params)  # steps without drafts, most of them repeated
    assert said([alone]) == wanted[:1]
    known = byte_ids(prompts[0]) + list(alone.outputs[0].token_ids)
    always(drafting).generate([known], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    for _ in range(2):
        assert said(drafting.generate(prompts, params)) == wanted
    counters = drafting._built.engine.scheduler.counters
    assert counters.preemptions > 0 and counters.moved_blocks > 0
    assert counters.drafted_tokens > counters.accepted_tokens > 20
    tested = [(text, drafts) for text, drafts in proposals if drafts][:: examples(9, 1)]
    assert len(tested) > 15
    assert [reference.drafts(text, len(drafts)) for text, drafts in tested] == [drafts for _, drafts in tested]


def test_a_head_has_the_states_of_every_token_that_the_model_computed(tiny_folder: Path, head: Path) -> None:
    """Of repeated steps, too: the tokens of one answer are found in the cache by the next prompt, and not computed."""
    built = LLM(str(tiny_folder), speculative=f"eagle:{head}", **SETTINGS)._built
    llm, runner = LLM.over(built), built.engine._loop._runner
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
        ({"device": "cuda"}, "the device is a GPU: so far, EAGLE heads run on CPUs only. Use --speculative auto"),
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
