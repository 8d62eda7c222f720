"""Drafts that are made and verified on the GPU, in captured steps, change no output."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.oracle_runner import TorchOracleRunner, torch_oracle
from quire.engine.request_validator import RequestValidator
from quire.formats.presets import SHAPES
from quire.kernels.draft_interface import (
    LENGTH_SHIFT,
    MAX_NGRAM,
    REFERENCE_DRAFT_KERNELS,
    DraftKernels,
    match_suffix_reference,
)
from quire.kernels.select import KernelChoice, select_kernels
from quire.kv.manager import KVManager
from quire.models.decoder import Decoder
from quire.runner.device_drafting import DraftConfig, SuffixDrafter
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy
from quire.sim.check.check import check
from quire.sim.check.scenario import Scenario
from quire.weights.allocate import dummy_weights

CUDA = torch.device("cuda")
NUM_BLOCKS, BLOCK_SIZE, LENGTH, ROWS = 512, 16, 512, 12


@pytest.fixture(scope="module")
def choice() -> KernelChoice:
    chosen = select_kernels("cuda")
    assert chosen.row_kernels is not None and chosen.draft_kernels is not None, chosen.reason
    return chosen


@pytest.mark.parametrize("reference", [True, False], ids=["tensor operations", "kernels"])
def test_the_integer_oracle_with_planted_drafts_in_cuda_graphs(choice: KernelChoice, reference: bool) -> None:
    runners: list[TorchOracleRunner] = []
    kernels = REFERENCE_DRAFT_KERNELS if reference else choice.draft_kernels
    assert kernels is not None

    def make_runner(scenario: Scenario) -> TorchOracleRunner:
        runners.append(torch_oracle(scenario, "cuda", choice.row_kernels, choice.copy_blocks, kernels))
        return runners[-1]

    report = check(600, 29, make_runner=make_runner, min_tokens=False)
    assert report.violations == [] and report.accepted > 30
    assert sum(runner.num_replayed for runner in runners) > 100


def run(
    choice: KernelChoice,
    params: Callable[[int], SamplingParams],
    drafts: DraftKernels | None,
    depth: int = 1,
) -> tuple[list[list[int]], int]:
    """What requests that repeat themselves say, and how many of their drafts were accepted."""
    torch.backends.cuda.matmul.allow_tf32 = False
    spec = SHAPES["smollm2-135m"]
    model = Decoder(spec, dummy_weights(spec, torch.float32, CUDA, 3).filled(), choice.kernels, LENGTH)
    stores = new_store(model.kv_geometry, NUM_BLOCKS, BLOCK_SIZE, CUDA)
    stores.device.fill_(torch.nan)  # nothing that was not written is read
    setup = None
    if drafts is not None:
        setup = DraftConfig(SuffixDrafter(ROWS, LENGTH, CUDA, kernels=drafts), drafts)
    runner = ModelRunner(
        model, stores, max_rows=ROWS, max_length=LENGTH, row_kernels=choice.row_kernels, device_drafts=setup
    )
    while not runner.prepared:
        runner.prepare()
    policy = Policy()
    if drafts is not None:
        policy = Policy(speculation=SpeculationPolicy(7, governed=False, tree=True, max_verified=512))
    door = RequestValidator(spec.vocab_size, (), LENGTH, ROWS, NUM_BLOCKS, BLOCK_SIZE)
    manager = KVManager(NUM_BLOCKS, BLOCK_SIZE, ROWS)
    scheduler = Scheduler(manager, max_rows=ROWS, max_step_tokens=96, policy=policy)
    front = LocalClient(Engine(scheduler, runner, door, depth=depth, seed=0, clock=lambda: 0.0), None)
    said: list[list[int]] = []
    for _ in range(2):  # the second time the tree has what the first said
        prompts = [[(7 * i + 13 * j) % 97 for i in range(3 + 5 * j)] * 2 for j in range(9)]
        tickets = [front.submit(prompt, params(place)) for place, prompt in enumerate(prompts)]
        while not all(ticket.finished for ticket in tickets):
            front.step()
        said += [ticket.output().outputs[0].token_ids for ticket in tickets]
    return said, scheduler.counters.accepted_tokens


def greedy(place: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=20 + place)


def mixed(place: int) -> SamplingParams:
    """Some draw; some ask for what is sampled apart."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": place},
        {"temperature": 0.9, "seed": place, "top_p": 0.7, "top_k": 20},
        {"temperature": 0.5, "seed": place, "presence_penalty": 0.4},
    ]
    return SamplingParams(max_tokens=20 + place, **kinds[place % 4])  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [greedy, mixed])
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_no_output(params: Callable[[int], SamplingParams], depth: int, choice: KernelChoice) -> None:
    plain, none = run(choice, params, None)
    drafted, accepted = run(choice, params, choice.draft_kernels, depth)
    assert none == 0 and accepted > 50
    assert drafted == plain


def test_suffixes_are_found_as_the_reference_finds_them(choice: KernelChoice) -> None:
    assert choice.draft_kernels is not None
    random = partial(torch.randint, generator=torch.Generator().manual_seed(5))
    texts = random(0, 3, (20, 3000)).int().to(CUDA)
    rows = torch.randperm(20)[:16].to(CUDA)
    begins, lengths = random(0, 5000, (16,)).to(CUDA), random(1, 3000, (16,)).to(CUDA)
    tails = random(0, 3, (16, MAX_NGRAM)).int().to(CUDA)
    found = choice.draft_kernels.match_suffix(texts, rows, begins, begins + lengths, tails)
    assert torch.equal(found, match_suffix_reference(texts, rows, begins, begins + lengths, tails))
    assert (found >> LENGTH_SHIFT).max() >= 6
