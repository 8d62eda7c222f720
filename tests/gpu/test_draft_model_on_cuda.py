"""A draft model on the GPU, in captured passes with a step in flight: no draft is wrong, and no output changes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.oracle_runner import TorchOracleRunner, torch_oracle
from quire.engine.request_validator import RequestValidator
from quire.formats.presets import SHAPES
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS
from quire.kernels.select import KernelChoice, select_kernels
from quire.kv.manager import KVManager
from quire.models.decoder import Decoder
from quire.runner.device_draft_model import DeviceDraftModel
from quire.runner.device_drafting import DraftConfig, SuffixDrafter
from quire.runner.draft_model import DraftModelConfig
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy
from quire.sim.check.check import CheckReport, run_trial
from quire.sim.check.scenario import Scenario
from quire.weights.allocate import dummy_weights
from tests.runner.test_device_draft_model import TRIALS, WatchedRunner

CUDA = torch.device("cuda")
NUM_BLOCKS, BLOCK_SIZE, LENGTH, ROWS = 512, 16, 512, 12
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
    """Through forks, copies, preemptions, swaps and lost steps."""
    kernels = REFERENCE_DRAFT_KERNELS if reference else choice.draft_kernels
    assert kernels is not None
    counts, runners = [0, 0], list[TorchOracleRunner]()

    def watched(scenario: Scenario) -> WatchedRunner:
        facts = (choice.row_kernels, choice.copy_blocks, kernels)
        runners.append(torch_oracle(scenario, "cuda", *facts, draft_wrong_of=0))
        return WatchedRunner(runners[-1], counts)

    report = CheckReport(3)
    for trial in (*TRIALS, 1, 2, 4, 5):
        run_trial(3_000_000 + trial, report, watched, min_tokens=False)  # type: ignore[arg-type]
    assert report.violations == [] and report.preemptions > 0
    assert counts[0] == counts[1] > 100, "a draft was computed from a stale block"
    assert sum(runner.num_replayed for runner in runners) > 100


class Ran(NamedTuple):
    """What the requests said, and their drafts."""

    said: list[list[int]]
    drafted: int
    accepted: int


def run(choice: KernelChoice, *, drafts: bool, seed: int = 3, text: bool = False, depth: int = 1) -> Ran:
    """Run requests of all kinds twice. `seed`: of the draft model's weights; those of the model have 3."""
    torch.backends.cuda.matmul.allow_tf32 = False
    spec = SHAPES["smollm2-135m"]
    models = [
        Decoder(spec, dummy_weights(spec, torch.float32, CUDA, each).filled(), choice.kernels, LENGTH)
        for each in (3, seed)
    ]
    stores = [new_store(model.kv_geometry, NUM_BLOCKS, BLOCK_SIZE, CUDA) for model in models]
    for store in stores:
        store.device.fill_(torch.nan)  # nothing that was not written is read
    setup = None
    if drafts:
        assert choice.draft_kernels is not None
        config = DraftModelConfig(models[1], stores[1], LENGTH, spec.vocab_size)
        drafter = SuffixDrafter(ROWS, LENGTH, CUDA, kernels=choice.draft_kernels) if text else None
        setup = DraftConfig(drafter, choice.draft_kernels, model=config)
    runner = ModelRunner(
        models[0], stores[0], max_rows=ROWS, max_length=LENGTH, row_kernels=choice.row_kernels, device_drafts=setup
    )
    while not runner.prepared:
        runner.prepare()
    speculation = SpeculationPolicy(7, governed=False, tree=text, max_verified=512) if drafts else SpeculationPolicy()
    scheduler = Scheduler(
        KVManager(NUM_BLOCKS, BLOCK_SIZE, ROWS),
        max_rows=ROWS,
        max_step_tokens=96,
        policy=Policy(speculation=speculation),
    )
    door = RequestValidator(spec.vocab_size, (), LENGTH, ROWS, NUM_BLOCKS, BLOCK_SIZE)
    front = LocalClient(Engine(scheduler, runner, door, depth=depth, seed=0, clock=lambda: 0.0), None)
    said: list[list[int]] = []
    for _ in range(2):
        prompts = [[(7 * i + 13 * j) % 97 for i in range(3 + 9 * j)] for j in range(9)]
        params = [SamplingParams(max_tokens=20 + place, **KINDS[place % 4]) for place in range(9)]
        tickets = [front.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        while not all(ticket.finished for ticket in tickets):
            front.step()
        said.extend(list(ticket.output().outputs[0].token_ids) for ticket in tickets)
    return Ran(said, scheduler.counters.drafted_tokens, scheduler.counters.accepted_tokens)


@pytest.fixture(scope="module")
def plain(choice: KernelChoice) -> list[list[int]]:
    return run(choice, drafts=False).said


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_model_that_drafts_for_itself_is_mostly_right(
    choice: KernelChoice, plain: list[list[int]], depth: int
) -> None:
    """Sums of another number of lines may round differently, and rows that have ended have drafts."""
    found = run(choice, drafts=True, depth=depth)
    assert found.said == plain
    assert found.accepted > 0.6 * found.drafted > 100


@pytest.mark.parametrize("text", [False, True])
def test_another_model_changes_no_output(choice: KernelChoice, plain: list[list[int]], text: bool) -> None:
    found = run(choice, drafts=True, seed=4, text=text)
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

    for name in ("carry", "apply", "draft"):
        monkeypatch.setattr(DeviceDraftModel, name, watched(getattr(DeviceDraftModel, name)))
    assert run(choice, drafts=True).said == plain
    assert len(set(calls)) == 3 and len(calls) > 30


@pytest.mark.parametrize("beside", ["", "ngram+"])
def test_an_engine_sizes_compiles_times_and_runs_it(beside: str) -> None:
    """Random weights of one seed: the model drafts for itself, but for roundings in bfloat16."""
    llm = LLM(
        "smollm2-135m",
        load_format="dummy",
        device="cuda",
        speculative=f"{beside}draft:smollm2-135m",
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
    counters = scheduler.counters
    assert counters.accepted_tokens > 0.5 * counters.drafted_tokens > 50
