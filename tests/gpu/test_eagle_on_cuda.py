"""Heads that draft on the GPU, in captured passes with steps in flight: no draft is wrong, and no output changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.oracle_runner import TorchOracleRunner, torch_oracle
from quire.engine.request_validator import RequestValidator
from quire.formats.draft_head import dummy_head
from quire.formats.presets import SHAPES
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS
from quire.kernels.select import KernelChoice, select_kernels
from quire.kv.manager import KVManager
from quire.models.decoder import Decoder
from quire.models.draft_head import DraftHead
from quire.runner.device_draft_model import DeviceDraftModel
from quire.runner.device_drafting import DraftConfig, SuffixDrafter
from quire.runner.draft_model import DraftFeatures, DraftModelConfig, feature_geometry
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy
from quire.sim.check.check import CheckReport, run_trial
from quire.sim.check.scenario import Scenario
from quire.weights.allocate import dummy_weights
from quire.weights.draft_head_weights import load_draft_head
from tests.llm.drafting import BLOCK_TOKENS, CROWDED, NUM_BLOCKS, assert_drafts_are_those, note_proposals
from tests.llm.test_speculation import FREE, PROMPTS
from tests.llm.tiny import byte_ids, tiny_llama, write_model
from tests.models.eagle_reference import ReferenceHead
from tests.models.mtp_reference import ReferenceMtpLayer, tiny_qwen2
from tests.runner.test_device_draft_model import WatchedRunner
from tests.runner.test_device_head import TRIALS

CUDA = torch.device("cuda")
BLOCKS, BLOCK_SIZE, LENGTH, ROWS = 512, 16, 512, 12
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cuda"}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.7, "top_k": 20},
    {"temperature": 0, "logprobs": 2},
]


@pytest.fixture(scope="module")
def choice() -> KernelChoice:
    chosen = select_kernels("cuda")
    assert chosen.row_kernels is not None and chosen.draft_kernels is not None, chosen.reason
    return chosen


@pytest.mark.parametrize("reference", [True, False], ids=["tensor operations", "kernels"])
def test_no_draft_of_the_integer_oracle_is_wrong(choice: KernelChoice, reference: bool) -> None:
    """Through forks, copies, preemptions, swaps, aborts and lost steps: no state, key or value is stale."""
    kernels = REFERENCE_DRAFT_KERNELS if reference else choice.draft_kernels
    assert kernels is not None
    counts, runners = [0, 0], list[TorchOracleRunner]()

    def watched(scenario: Scenario) -> WatchedRunner:
        facts = (choice.row_kernels, choice.copy_blocks, kernels)
        runners.append(torch_oracle(scenario, "cuda", *facts, draft_head=True))
        return WatchedRunner(runners[-1], counts)

    report = CheckReport(3)
    for trial in (*TRIALS, 1, 6, 25, 62, 70, 100, 115):
        run_trial(3_000_000 + trial, report, watched, min_tokens=False)  # type: ignore[arg-type]
    assert report.violations == [] and report.preemptions > 0
    assert counts[0] == counts[1] > 200, "a draft was computed from a stale state or block"
    assert sum(runner.num_replayed for runner in runners) > 100


class Reference(Protocol):
    """A head in plain torch, and how it becomes files."""

    def drafts(self, text: list[int], count: int) -> list[int]: ...

    def write(self, folder: Path) -> Path: ...


class Trained(NamedTuple):
    """A tiny model, a head that was trained on what it says, and the setting with which it drafts."""

    folder: Path
    head: Reference
    speculative: str


@pytest.fixture(scope="module", params=["eagle", "mtp"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    is_eagle = request.param == "eagle"
    peer = tiny_llama() if is_eagle else tiny_qwen2()
    folder = write_model(tmp_path_factory.mktemp(request.param), peer)
    outputs = LLM(str(folder), **SETTINGS).generate(PROMPTS, SamplingParams(**FREE), progress=False)
    texts = [byte_ids(text) + list(each.outputs[0].token_ids) for text, each in zip(PROMPTS, outputs, strict=True)]
    if is_eagle:
        head = ReferenceHead(tiny_llama(), (0, 1, 1)).train_on(texts, 20)
        return Trained(folder, head, f"eagle:{head.write(tmp_path_factory.mktemp('head'))}")
    layer = ReferenceMtpLayer(tiny_qwen2()).train_on(texts, 40)
    return Trained(layer.write(tmp_path_factory.mktemp("mimo")), layer, "mtp")


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_drafts_are_those_of_the_reference(trained: Trained, monkeypatch: pytest.MonkeyPatch, run_ahead: int) -> None:
    """Prompts in chunks, steps without drafts, cached prefixes, preemptions and swaps."""
    size, token_bytes = NUM_BLOCKS * BLOCK_TOKENS, 2 * 2 * 2 * 16 * 4
    settings: dict[str, Any] = SETTINGS | CROWDED | {"run_ahead": run_ahead}
    plain = LLM(str(trained.folder), kv_cache_memory=size * token_bytes, **settings)
    memory = size * (token_bytes + (2 * 2 * 16 + 64) * 4)  # keys and values of the head, and a state
    drafting = LLM(str(trained.folder), kv_cache_memory=memory, speculative=trained.speculative, **settings)
    assert drafting._built.resolved.num_blocks == NUM_BLOCKS
    found = note_proposals(monkeypatch)
    assert_drafts_are_those(trained.head, plain, drafting, PROMPTS, found, num_ties=1)
    assert drafting._built.engine._loop._runner.num_replayed > 40  # type: ignore[attr-defined]


class Ran(NamedTuple):
    """What the requests said, and how many drafts they had."""

    said: list[list[int]]
    drafted: int


def run(choice: KernelChoice, *, drafts: bool, text: bool = False, depth: int = 1) -> Ran:
    """Run requests of all kinds twice, with drafts of a head with random weights."""
    torch.backends.cuda.matmul.allow_tf32 = False
    spec = SHAPES["smollm2-135m"]
    model = Decoder(spec, dummy_weights(spec, torch.float32, CUDA, 3).filled(), choice.kernels, LENGTH)
    stores = new_store(model.kv_geometry, BLOCKS, BLOCK_SIZE, CUDA)
    stores.device.fill_(torch.nan)  # nothing that was not written is read
    setup = None
    if drafts:
        assert choice.draft_kernels is not None
        checkpoint = dummy_head(spec)
        weights = load_draft_head(checkpoint, torch.float32, CUDA)
        head = DraftHead(checkpoint.spec, weights, choice.kernels, LENGTH, model.embed)
        keys, states = (
            new_store(each, BLOCKS, BLOCK_SIZE, CUDA)
            for each in (head.kv_geometry, feature_geometry(head.hidden_size, torch.float32))
        )
        keys.device.zero_()
        states.device.fill_(torch.nan)
        features = DraftFeatures(model.capture(checkpoint.spec.captured_layers), head.fuse, states)
        config = DraftModelConfig(head, keys, LENGTH, spec.vocab_size, features)
        drafter = SuffixDrafter(ROWS, LENGTH, CUDA, kernels=choice.draft_kernels) if text else None
        setup = DraftConfig(drafter, choice.draft_kernels, model=config)
    runner = ModelRunner(
        model, stores, max_rows=ROWS, max_length=LENGTH, row_kernels=choice.row_kernels, max_step_tokens=96,
        device_drafts=setup,
    )  # fmt: skip
    while not runner.prepared:
        runner.prepare()
    speculation = SpeculationPolicy(7, governed=False, tree=text, max_verified=512) if drafts else SpeculationPolicy()
    scheduler = Scheduler(
        KVManager(BLOCKS, BLOCK_SIZE, ROWS), max_rows=ROWS, max_step_tokens=96, policy=Policy(speculation=speculation)
    )
    door = RequestValidator(spec.vocab_size, (), LENGTH, ROWS, BLOCKS, BLOCK_SIZE)
    front = LocalClient(Engine(scheduler, runner, door, depth=depth, seed=0, clock=lambda: 0.0), None)
    said: list[list[int]] = []
    for _ in range(2):
        prompts = [[(7 * i + 13 * j) % 97 for i in range(3 + 9 * j)] for j in range(9)]
        params = [SamplingParams(max_tokens=20 + place, **KINDS[place % 4]) for place in range(9)]
        tickets = [front.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        while not all(ticket.finished for ticket in tickets):
            front.step()
        said.extend(list(ticket.output().outputs[0].token_ids) for ticket in tickets)
    return Ran(said, scheduler.counters.drafted_tokens)


@pytest.fixture(scope="module")
def plain(choice: KernelChoice) -> list[list[int]]:
    return run(choice, drafts=False).said


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_head_changes_no_output(choice: KernelChoice, plain: list[list[int]], depth: int) -> None:
    """Greedy and drawn, with prompts in captured steps and in eager ones."""
    found = run(choice, drafts=True, depth=depth)
    assert found.said == plain and found.drafted > 100


def test_a_head_behind_the_text_changes_no_output(choice: KernelChoice, plain: list[list[int]]) -> None:
    found = run(choice, drafts=True, text=True)
    assert found.said == plain and found.drafted > 100


def test_no_step_waits_for_the_device(
    choice: KernelChoice, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch raises at any operation that does."""
    calls = []

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append(work)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return work(*given)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    watch = [(DeviceDraftModel, name) for name in ("carry", "apply", "draft")]
    for owner, name in (*watch, (DraftFeatures, "_put")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    assert run(choice, drafts=True).said == plain
    assert len(set(calls)) == 4 and len(calls) > 30


@pytest.mark.parametrize("beside", ["", "ngram+"])
def test_an_engine_sizes_compiles_times_and_runs_it(beside: str) -> None:
    """In bfloat16, with random weights: next to no draft is right, and all are counted."""
    llm = LLM(
        "smollm2-135m",
        load_format="dummy",
        device="cuda",
        speculative=f"{beside}eagle:dummy",
        max_num_seqs=8,
        max_model_len=512,
        kv_cache_memory="512MiB",
    )
    scheduler = llm._built.engine.scheduler
    assert scheduler.cost.constants.seconds_per_draft_pass > 0
    usual = scheduler.policy.speculation
    assert usual.max_drafts == 7 and not usual.hindsight
    scheduler.replace_speculation(SpeculationPolicy(4, governed=False, max_verified=512), forget=True)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate([[5 + i, 6, 7, 8 * i] for i in range(6)], params, progress=False)
    assert all(len(output.outputs[0].token_ids) == 64 for output in outputs)
    assert scheduler.counters.drafted_tokens > 50
