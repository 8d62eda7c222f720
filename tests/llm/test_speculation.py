"""Outputs with and without drafts are the same, token by token and score by score, on real models."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.ids import IndexArray
from quire.core.speculative import DRAFTERS
from quire.engine import build_draft
from quire.engine.build import build
from quire.engine.open_model import open_model
from quire.engine.prefix_transfer import EngineRole
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS
from quire.kernels.select import KernelChoice
from quire.runner import draft_model
from quire.sched.speculation import DraftGovernor
from tests.llm.drafting import always, on_device
from tests.llm.tiny import byte_ids, tiny_llama, write_model
from tests.tiers import choices, long_only

PROMPTS = ["the cat sat on the mat, the cat sat", "abcabcabcabc", "x", "zyxwvutsrqponm zyxwvutsr"]
SCHEMA = {
    "type": "object",
    "properties": {"is_member": {"type": "boolean"}, "age": {"type": "integer", "maximum": 99}},
    "required": ["is_member", "age"],
    "additionalProperties": False,
}
FREE = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
KINDS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "seed": 3},
    "cut": {"temperature": 0.7, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.5, "seed": 9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "bias": {"temperature": 0, "logit_bias": {70: 4.0, 71: -3.0}, "bad_words": ["ab"]},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
    "ends": {"temperature": 1.0, "seed": 4, "min_tokens": 6, "stop_token_ids": list(range(60, 90))},
    "stop": {"temperature": 0, "stop": ["a", "e"]},
    "siblings": {"temperature": 0.9, "seed": 8, "n": 3},
    "json": {"temperature": 0, "json": SCHEMA},
    "json drawn": {"temperature": 1.0, "seed": 2, "n": 2, "json": SCHEMA, "logprobs": 2, "frequency_penalty": 0.4},
    "completed": {"temperature": 0, "choice": ["completed by the last draft"], "max_tokens": 40},
    "pattern": {"temperature": 0.8, "seed": 6, "regex": "(one|two) of three[!?] [a-z]{9}", "stop": ["three", "z"]},
}  # fmt: skip

SHORT_IN_BFLOAT16 = ("greedy", "siblings", "pattern")


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[tuple[LLM, LLM]]:
    settings = {"dtype": request.param, "max_num_seqs": 6, "quantization": "none"}
    yield LLM(str(tiny_folder), **settings), always(LLM(str(tiny_folder), speculative="auto", **settings))


def said(outputs: list[RequestOutput]) -> list[object]:
    return [
        (
            each.prompt_logprobs,
            [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in each.outputs],
        )
        for each in outputs
    ]


@pytest.mark.parametrize(
    ("pair", "kind"),
    [
        *(("float32", kind) for kind in KINDS),
        *(("bfloat16", kind) for kind in SHORT_IN_BFLOAT16),
        *long_only(("bfloat16", kind) for kind in KINDS if kind not in SHORT_IN_BFLOAT16),
    ],
    indirect=["pair"],
)
def test_outputs_are_the_same(pair: tuple[LLM, LLM], kind: str) -> None:
    """Twice: the second time the prefix tree has the outputs of the first, and most drafts are right."""
    plain, drafting = pair
    params = SamplingParams(**{"max_tokens": 24} | KINDS[kind])
    for _ in range(2):
        assert said(drafting.generate(PROMPTS, params)) == said(plain.generate(PROMPTS, params))
    counters = drafting._built.engine.scheduler.counters
    assert counters.drafted_tokens >= counters.accepted_tokens > 0
    assert plain._built.engine.scheduler.counters.drafted_tokens == 0


def test_a_forced_text_takes_one_step_for_several_tokens(tiny_folder: Path) -> None:
    """Each byte is a token here, so only one may follow: what is forced is always accepted."""
    plain = LLM(str(tiny_folder), dtype="float32")
    jumping = always(LLM(str(tiny_folder), dtype="float32", speculative="grammar"))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, regex="[ab]-favourite-colour-[0-9]{3}")
    (one,), (other,) = (llm.generate("x", params) for llm in (plain, jumping))
    assert said([one]) == said([other]) and one.outputs[0].finish_reason == "stop"
    metrics = other.metrics
    assert metrics.num_drafted_tokens == metrics.num_accepted_tokens >= 13
    steps = [llm._built.engine.scheduler.last_absorbed + 1 for llm in (plain, jumping)]
    assert steps[0] - steps[1] == metrics.num_accepted_tokens
    free = SamplingParams(temperature=0, max_tokens=20)
    assert said(jumping.generate(PROMPTS[:2], free)) == said(plain.generate(PROMPTS[:2], free))
    assert jumping._built.engine.scheduler.counters.drafted_tokens == metrics.num_drafted_tokens


@pytest.mark.parametrize("speculative", ["grammar", "auto"])
def test_forced_texts_are_the_same_with_a_step_in_flight(tiny_folder: Path, speculative: str) -> None:
    """What a grammar forces is known one step later, and blocks end inside of it."""
    plain = LLM(str(tiny_folder), dtype="float32")
    settings = {"speculative": speculative, "run_ahead": 1, "block_size": 4}
    jumping = always(LLM(str(tiny_folder), dtype="float32", **settings))
    for kind in ("json", "json drawn", "completed"):
        params = SamplingParams(**{"max_tokens": 33} | KINDS[kind])
        assert said(jumping.generate(PROMPTS[2:], params)) == said(plain.generate(PROMPTS[2:], params))
    assert jumping._built.engine.scheduler.counters.accepted_tokens > 50


def test_a_request_that_leaves_no_token_behind_an_accepted_draft_is_told_so(tiny_folder: Path) -> None:
    """The grammar wants "abcd", and d is a bad word: found in the step that emits b and c."""
    bad = SamplingParams(temperature=0, max_tokens=9, regex="[ax]bcd", bad_words=["d"])
    for speculative in ("off", "grammar"):
        llm = LLM(str(tiny_folder), dtype="float32", speculative=speculative)
        (output,) = (llm if speculative == "off" else always(llm)).generate("x", bad)
        assert output.outputs[0].finish_reason == "nothing_left" and len(output.outputs[0].token_ids) == 3
        assert output.metrics.num_accepted_tokens == (1 if speculative == "grammar" else 0)


def test_drafts_on_the_device_change_no_output(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests of all kinds beside each other."""
    plain = on_device(tiny_folder, monkeypatch)
    drafting = always(on_device(tiny_folder, monkeypatch, speculative="auto", run_ahead=1))
    kinds = choices(("greedy", "penalties", "bias", "logprobs", "json drawn", "completed"), tuple(KINDS))
    params = [SamplingParams(**{"max_tokens": 16} | KINDS[kind]) for kind in kinds]
    prompts = [PROMPTS[place % len(PROMPTS)] for place in range(len(params))]
    theirs = plain.generate(prompts, params)
    for _ in range(2):
        mine = drafting.generate(prompts, params)
        assert [(o.token_ids, o.text, o.finish_reason) for each in mine for o in each.outputs] == [
            (o.token_ids, o.text, o.finish_reason) for each in theirs for o in each.outputs
        ]
    counters = drafting._built.engine.scheduler.counters
    accepted = dict(zip(DRAFTERS, counters.accepted_by, strict=True))
    assert counters.drafted_tokens > counters.accepted_tokens and accepted["text"] > 30 and accepted["grammar"] > 10
    for kind, output in zip(kinds, mine, strict=True):
        assert output.metrics.num_drafted_tokens > 0, f"{kind} ran without drafts"


def test_jump_forward_on_the_device_takes_one_step_for_several_tokens(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--speculative grammar` as on a GPU, with a step in flight: what is forced is known one step later."""
    plain = on_device(tiny_folder, monkeypatch)
    jumping = on_device(tiny_folder, monkeypatch, speculative="grammar", run_ahead=1)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, regex="[ab]-favourite-colour-of-all-[0-9]{3}")
    (one,), (other,) = (llm.generate("x", params) for llm in (plain, always(jumping)))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids and other.outputs[0].finish_reason == "stop"
    metrics = other.metrics
    assert metrics.num_drafted_tokens == metrics.num_accepted_tokens >= 12
    steps = [llm._built.engine.scheduler.last_absorbed + 1 for llm in (plain, jumping)]
    assert steps[0] - steps[1] >= metrics.num_accepted_tokens - 1
    free = SamplingParams(temperature=0, max_tokens=20)
    texts = [[each.outputs[0].token_ids for each in llm.generate(PROMPTS[:2], free)] for llm in (plain, jumping)]
    assert texts[0] == texts[1]
    assert jumping._built.engine.scheduler.counters.drafted_tokens == metrics.num_drafted_tokens


def test_outputs_are_the_same_beside_prompts_and_under_pressure(tiny_folder: Path) -> None:
    """Long prompts in chunks beside rows that draft, and a cache for two of five: preemption and swapping."""
    settings = {"dtype": "float32", "max_num_seqs": 5, "max_num_batched_tokens": 16, "max_model_len": 128}
    settings |= {"kv_cache_memory": 12 * 16 * 2 * 2 * 2 * 16 * 4, "host_kv_memory": "1MiB"}
    settings |= {"overcommit": "optimistic", "block_size": 16}
    prompts = [text * 2 for text in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = LLM(str(tiny_folder), **settings).generate(prompts, params)
    drafting = always(LLM(str(tiny_folder), speculative="ngram+tree", **settings))
    for _ in range(2):
        assert said(drafting.generate(prompts, params)) == said(plain)
    counters = drafting._built.engine.scheduler.counters
    assert counters.preemptions > 0 and counters.accepted_tokens > 0


def test_a_repeated_request_is_drafted_from_the_tree(tiny_folder: Path) -> None:
    llm = always(LLM(str(tiny_folder), dtype="float32", speculative="tree"))
    params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    first = llm.generate("no letter twice", params)
    before = llm._built.engine.scheduler.last_absorbed
    again = llm.generate("no letter twice", params)
    assert said(first) == said(again)
    steps = llm._built.engine.scheduler.last_absorbed - before
    assert steps <= 1 + -(-30 // 6) + 1, "30 tokens of the tree in steps of 6; its last token was never computed"


def test_a_stop_string_drops_the_tokens_behind_it(tiny_folder: Path) -> None:
    """The tree drafts beyond the stop string, in the same step."""
    llm = always(LLM(str(tiny_folder), dtype="float32", speculative="tree"))
    whole = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    stop = next(letter for letter in whole.text[3:] if letter.isprintable() and letter not in whole.text[:3])
    cut = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=20, stop=[stop]))[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.stop_reason == stop
    assert list(cut.token_ids) == list(whole.token_ids)[: len(cut.token_ids)] and len(cut.token_ids) < 20


def test_a_stream_brings_every_token_once(tiny_folder: Path) -> None:
    llm = always(LLM(str(tiny_folder), dtype="float32", speculative="auto"))
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
    whole = llm.generate("abcabcabc", params)[0].outputs[0]
    deltas = list(llm.stream("abcabcabc", params))
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [entry for delta in deltas for entry in delta.logprobs] == whole.logprobs
    assert max(len(delta.token_ids) for delta in deltas) > 1, "some steps brought several"


def test_the_tree_needs_prefix_caching(tiny_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="speculative is tree, which drafts from the prefix cache, and prefix caching"
    ):
        LLM(str(tiny_folder), speculative="tree", enable_prefix_caching=False)
    assert LLM(str(tiny_folder), speculative="auto", enable_prefix_caching=False)._built.resolved.drafters == ("ngram",)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the weights of the other one, a little wrong: some of its drafts are right."""
    model = tiny_llama()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter) if parameter.dim() == 2 else 0
    return write_model(tmp_path_factory.mktemp("draft"), model)


def test_outputs_with_a_draft_model_are_the_same(tiny_folder: Path, draft_folder: Path) -> None:
    """Greedy ones are those of transformers, too."""
    settings = {"dtype": "float32", "max_num_seqs": 6, "block_size": 4, "quantization": "none"}
    plain = LLM(str(tiny_folder), **settings)
    drafting = always(LLM(str(tiny_folder), speculative=f"draft:{draft_folder}", **settings))
    model = tiny_llama()
    for prompt, output in zip(PROMPTS, drafting.generate(PROMPTS, SamplingParams(**FREE)), strict=True):
        ids = torch.tensor([byte_ids(prompt)])
        wanted = model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
        assert list(output.outputs[0].token_ids) == wanted[0, ids.shape[1] :].tolist()
    for kind in choices(("cut", "siblings"), tuple(KINDS)):
        params = SamplingParams(**{"max_tokens": 24} | KINDS[kind])
        assert said(drafting.generate(PROMPTS, params)) == said(plain.generate(PROMPTS, params))
    counters = drafting._built.engine.scheduler.counters
    assert counters.drafted_tokens > counters.accepted_tokens > 50


def test_a_model_that_drafts_for_itself_is_always_right(tiny_folder: Path) -> None:
    """Drawn tokens, too: drafts are drawn with the random numbers of their positions. The second time, keys and values
    of the prompts are found in the prefix tree; a cache for two of five preempts and swaps."""
    settings = {"dtype": "float32", "max_num_seqs": 5, "max_num_batched_tokens": 24, "max_model_len": 128}
    settings |= {"host_kv_memory": "1MiB", "overcommit": "optimistic", "block_size": 16}
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    plain = LLM(str(tiny_folder), kv_cache_memory=12 * block_bytes, **settings)
    name = f"draft:{tiny_folder}"
    drafting = always(LLM(str(tiny_folder), kv_cache_memory=24 * block_bytes, speculative=name, **settings))
    assert plain._built.resolved.num_blocks == drafting._built.resolved.num_blocks == 12, "a block holds both models'"
    assert drafting._built.memory.weights == 2 * plain._built.memory.weights
    for kind in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **kind)
        prompts = [text * 2 for text in PROMPTS]
        for _ in range(2):
            assert said(drafting.generate(prompts, params)) == said(plain.generate(prompts, params))
    counters = drafting._built.engine.scheduler.counters
    assert counters.preemptions > 0 and counters.moved_blocks > 0
    assert counters.drafted_tokens == counters.accepted_tokens > 200


def test_no_draft_is_of_a_block_that_was_granted_in_a_repeated_step(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is the model. What it knew of a request that is gone lies in blocks that the next one is granted
    while it decodes without drafts, in steps that repeat the step before. Then it catches up, a block in a step."""
    settings = {"dtype": "float32", "block_size": 4, "enable_prefix_caching": False, "max_num_seqs": 1}
    settings |= {"max_model_len": 72, "kv_cache_memory": 18 * 2 * 4 * 2 * 2 * 2 * 16 * 4}  # blocks for one request
    llm = always(LLM(str(tiny_folder), speculative=f"draft:{tiny_folder}", **settings))
    choose, is_drafting = DraftGovernor.choose, True

    def chosen(self: DraftGovernor, step: int, rows: IndexArray, *limits: Any) -> Any:
        return choose(self, step, rows, *limits) if is_drafting else np.zeros(len(rows), np.int64)

    monkeypatch.setattr(DraftGovernor, "choose", chosen)
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP", 4)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    for start in range(16, 20):
        is_drafting = True
        llm.generate("ponmlkjiabcdefgh", params)
        is_drafting = False
        for number, _ in enumerate(llm.stream("stuvwxyz", params)):
            is_drafting = number > start
        counters = llm._built.engine.scheduler.counters
        assert counters.drafted_tokens == counters.accepted_tokens > 20


def test_text_and_tree_draft_before_the_draft_model(tiny_folder: Path, draft_folder: Path) -> None:
    plain = LLM(str(tiny_folder), dtype="float32")
    drafting = LLM(str(tiny_folder), dtype="float32", speculative=f"ngram+tree+draft:{draft_folder}")
    assert drafting._built.resolved.drafters == ("ngram", "tree", "draft")
    for _ in range(2):
        outputs = always(drafting).generate(PROMPTS, SamplingParams(**FREE))
        assert said(outputs) == said(plain.generate(PROMPTS, SamplingParams(**FREE)))
    counters = drafting._built.engine.scheduler.counters
    assert counters.accepted_tokens > 50
    drafted, accepted = (dict(zip(DRAFTERS, each, strict=True)) for each in (counters.drafted_by, counters.accepted_by))
    assert min(drafted["tree"], drafted["ngram"], drafted["draft"]) > 0 == drafted["eagle"]
    assert sum(drafted.values()) == counters.drafted_tokens and sum(accepted.values()) == counters.accepted_tokens
    number, metrics = outputs[0].request_id, outputs[0].metrics
    gained = f"gained {metrics.num_accepted_tokens} tokens by {metrics.num_drafted_tokens} drafts (tree "
    assert gained in "\n".join(drafting.explain(number).lines())


def test_a_draft_model_on_the_device_changes_no_output(
    tiny_folder: Path, draft_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured passes, with a step in flight, of requests of all kinds beside each other; alone, and where the text
    and the tree say nothing."""
    plain = on_device(tiny_folder, monkeypatch)
    kinds = choices(("greedy", "penalties", "logprobs", "json drawn", "siblings"), tuple(KINDS))
    params = [SamplingParams(**{"max_tokens": 16} | KINDS[kind]) for kind in kinds]
    prompts = [PROMPTS[place % len(PROMPTS)] for place in range(len(params))]
    theirs = plain.generate(prompts, params)
    for beside in ("", "ngram+tree+"):
        name = f"{beside}draft:{draft_folder}"
        drafting = always(on_device(tiny_folder, monkeypatch, speculative=name, run_ahead=1))
        for _ in range(2):
            mine = drafting.generate(prompts, params)
            assert [(o.token_ids, o.text, o.finish_reason) for each in mine for o in each.outputs] == [
                (o.token_ids, o.text, o.finish_reason) for each in theirs for o in each.outputs
            ]
        counters = drafting._built.engine.scheduler.counters
        drafted, accepted = (
            dict(zip(DRAFTERS, each, strict=True)) for each in (counters.drafted_by, counters.accepted_by)
        )
        assert drafted["draft"] > accepted["draft"] > 0 and accepted["grammar"] > 0
        # Alone, a row under a grammar has its last token as a draft where nothing is forced, and may be right.
        assert accepted["text"] > 0 or not beside, "what the text says is drafted first"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_model_that_drafts_for_itself_on_the_device_is_always_right(
    depth: int, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn. The second time, prompts are found in the prefix tree; a cache for few preempts and swaps."""
    settings = {"max_model_len": 128, "host_kv_memory": "1MiB", "overcommit": "optimistic", "block_size": 16}
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    plain = on_device(tiny_folder, monkeypatch, kv_cache_memory=12 * block_bytes, **settings)
    name = f"draft:{tiny_folder}"
    settings |= {"kv_cache_memory": 24 * block_bytes, "run_ahead": depth}
    drafting = always(on_device(tiny_folder, monkeypatch, speculative=name, **settings))
    for kind in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **kind)
        prompts = [text * 2 for text in PROMPTS]
        for _ in range(2):
            assert said(drafting.generate(prompts, params)) == said(plain.generate(prompts, params))
    counters = drafting._built.engine.scheduler.counters
    assert counters.preemptions > 0 and counters.moved_blocks > 0 and counters.accepted_tokens > 200
    # With a step in flight, rows that have ended may have drafts.
    assert counters.drafted_tokens - counters.accepted_tokens <= (60 if depth else 0)


def test_a_draft_model_on_a_gpu_needs_kernels_that_can_be_captured(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(str(tiny_folder), speculative=f"draft:{tiny_folder}", attention_backend="fa3")
    kernels, opened = TorchCpuKernels(), open_model(config)
    for chosen, message in (
        (
            KernelChoice(kernels, "Triton is not installed"),
            "on a GPU a draft model needs Triton. Triton is not installed.",
        ),
        (
            KernelChoice(kernels, "", draft_kernels=REFERENCE_DRAFT_KERNELS, capturable=False),
            "attention_backend is fa3, which no CUDA graph can hold: on a GPU",
        ),
    ):
        monkeypatch.setattr(build_draft, "choose_kernels", lambda *args, chosen=chosen: chosen)
        with pytest.raises(ConfigError, match=message):
            build_draft.choose_draft_kernels(config, opened, torch.float32, torch.device("cuda"))


@pytest.mark.parametrize(
    ("speculative", "settings", "message"),
    [
        ("draft:{other}", {}, "has another tokenizer: token 70 is 'Ǵ' there and 'C' in"),
        ("draft:{missing}", {}, "missing"),
        ("draft:{same}", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2: a draft model runs beside a model"),
        ("tree+draft:{same}", {"enable_prefix_caching": False}, "prefix caching is off. Use --speculative draft:"),
        ("draft:", {}, "speculative must be one of off, grammar, ngram, tree, ngram+tree, auto, mtp, or draft:MODEL o"),
        ("grammar+draft:{same}", {}, "or eagle:PATH, the last three also behind ngram+, tree"),
        ("draft+ngram", {}, "or eagle:PATH, the last three also behind ngram+, tree"),
    ],
)  # fmt: skip
def test_draft_models_that_are_refused(
    speculative: str, settings: dict[str, object], message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    text = (other / "tokenizer.json").read_text()
    assert '"C": 70' in text
    (other / "tokenizer.json").write_text(text.replace('"C": 70', '"Ǵ": 70'))
    name = speculative.format(other=other, missing=tmp_path / "missing", same=tiny_folder)
    with pytest.raises(QuireError, match=re.escape(message)):
        config = EngineConfig(str(tiny_folder), speculative=name, **settings)  # type: ignore[arg-type]
        open_model(config)
        build(config)


def test_a_prefill_engine_has_no_draft_model(tiny_folder: Path) -> None:
    config = EngineConfig(str(tiny_folder), device="cpu", speculative=f"draft:{tiny_folder}")
    with pytest.raises(ConfigError, match=r"copies the KV blocks of one model, and --speculative .* has two; omit"):
        build(config, role=EngineRole.DECODE)
