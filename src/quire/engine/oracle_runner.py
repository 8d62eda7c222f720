"""The integer model behind the real runner, as a body for `quire check`."""

import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.ids import IntArray, Row
from quire.core.moves import Move, Place, Tier
from quire.core.oracle import mix, planted_drafts
from quire.core.sharding import Shard
from quire.core.step import Pending, RowStart, Runner, StepPlan, StepResult
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS, DraftKernels
from quire.kernels.interface import LayerCapture, StepLayout
from quire.kernels.row_interface import RowKernels
from quire.kernels.select import select_kernels
from quire.models.draft_head import DraftHead
from quire.models.interface import KvGeometry, Model
from quire.models.oracle import OracleModel
from quire.runner.device_drafting import DraftConfig, RowHistory
from quire.runner.draft_model import DraftFeatures, DraftModelConfig, feature_geometry
from quire.runner.kv_store import CopyBlocks, new_store
from quire.runner.model_runner import ModelRunner
from quire.runner.pipeline_parallel import PipelineParallelRunner, StageRunner, full_answer
from quire.runner.tensor_parallel import TensorParallelRunner, follow, summary
from quire.sim.check.scenario import VOCAB_SIZE, Scenario
from quire.sim.check.trial import RunnerFactory

_ERASED = -7  # no token and no position
_DRAFT_WRONG_OF = 6


class PlantedDrafter:
    """Drafts that are right, wrong or right up to some place."""

    source = "ngram"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._branches: dict[Row, int] = {}

    def start(self, row_start: RowStart) -> None:
        self._branches[row_start.row] = row_start.branch

    def release(self, row: Row) -> None:
        del self._branches[row]

    def propose(self, row: Row, tokens: IntArray, count: int) -> IntArray:
        return np.array(planted_drafts(tokens, self._vocab_size, self._branches[row], count), dtype=np.int32)


class PlantedDeviceDrafter:
    """The same on the device, for steps in flight; always as many as are asked for."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._branches = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)

    def start(self, starts: Sequence[RowStart]) -> None:
        rows, branches = torch.tensor([(start.row, start.branch) for start in starts]).to(self._branches.device).T
        self._branches[rows] = branches

    def propose(self, texts: RowHistory, count: int) -> Tensor:
        places = torch.arange(texts.history.shape[1], device=texts.rows.device)
        known = places < texts.lengths[:, None]
        totals = (mix(texts.history[texts.rows].long(), places) * known).sum(1)
        wrong_from = (totals + 31 * texts.lengths) // 3 % (count + 3)  # mostly behind the last
        drafts = []
        for number in range(count):
            token = (totals + self._branches[texts.rows]) % self._vocab_size
            drafts.append((token + (wrong_from == number)) % self._vocab_size)
            totals = totals + mix(token, texts.lengths + number)
        return torch.stack(drafts, dim=1)


class DraftOracle(OracleModel):
    """A draft model that says what the oracle says, from keys and values of its own; in one of `wrong_of` places
    another token."""

    def __init__(self, vocab_size: int, index_of_block: Tensor, wrong_of: int = 0) -> None:
        super().__init__(vocab_size, index_of_block)
        self._wrong_of = wrong_of  # 0: never

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        wrong = hidden // 3 % self._wrong_of == 0 if self._wrong_of else torch.zeros_like(hidden)
        return super().logits(hidden + wrong, out)


class CapturedOracle(OracleModel):
    """Leaves its sums for a head: [tokens, 2] int64, the sum up to each token twice, without the index."""

    def __init__(self, vocab_size: int, index_of_block: Tensor) -> None:
        super().__init__(vocab_size)
        self._indices = index_of_block
        self.capture = LayerCapture((0,))

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, selected: Tensor | None = None) -> Tensor:
        sums = super().forward(tokens, layout, kv)
        self.capture.take(sums.expand(-1, 2), layout.slots)
        sums = sums + self._indices[layout.slots // kv.shape[3]][:, None]
        return sums if selected is None else sums[selected]


class HeadOracle(DraftHead):
    """A head that says what the oracle says. Its sum is that of the state before and of its token: a stale state, and a
    token beside another's state, makes it wrong. It keeps both as key and value, and where one pair does not follow
    from the one before, it is wrong, too: so its own slots may not be stale either. A block may be shared up to its
    last slot, whose pair is not compared with the next one."""

    def __init__(self, vocab_size: int, index_of_block: Tensor) -> None:
        self._vocab_size, self._indices = vocab_size, index_of_block

    source = "eagle"
    hidden_size = 2
    kv_geometry = KvGeometry(num_layers=1, kv_heads=1, head_dim=1, dtype=torch.int32)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def forward(
        self,
        tokens: Tensor,
        layout: StepLayout,
        kv: Tensor,
        selected: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """[n, 2] int64: the sum, and with the index of the sequence, or one more."""
        assert features is not None
        before, store = features[:, 0].long(), kv[:, 0, :, :, 0, 0].transpose(1, 2)  # [blocks, block_size, 2]
        size, positions = store.shape[1], layout.positions
        pairs = torch.stack([tokens, before], dim=1).to(store.dtype)
        store.index_put_((layout.slots // size, layout.slots % size), pairs)
        places = torch.arange(layout.tables.shape[1] * size, device=kv.device)
        blocks = layout.tables[:, places // size].long().clamp(max=len(store) - 1)
        token, state = store[blocks, places % size].long().unbind(dim=-1)  # each [sequences, width]
        follows = state[:, 1:] == state[:, :-1] + mix(token[:, :-1], places[1:])
        wrong = (~follows & (places[1:] % size != 0)).long().cumsum(dim=1)
        flat = torch.arange(len(tokens), dtype=torch.int32, device=kv.device)
        sequence = torch.searchsorted(layout.query_starts[1:-1], flat, right=True)
        compared = wrong[sequence, (positions - 1).clamp(0, wrong.shape[1] - 1)] * (positions > 0)
        total = before + mix(tokens, positions + 1)
        at = (positions + 1).clamp(max=len(places) - 1) // size
        index = self._indices[layout.tables[sequence, at].long().clamp(max=len(store) - 1)]
        found = torch.stack([total, total + index + (compared > 0)], dim=1)
        return found if selected is None else found[selected]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return OracleModel(self._vocab_size).logits(hidden[:, 1:].long(), out)


class TorchOracleRunner:
    """Real rows, slots, tables, moves and sampler on a device; only the model is made of integers.

    It reads plans only to pass the model the index of the sequence that writes each block.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        max_rows: int,
        max_length: int,
        device: str = "cpu",
        row_kernels: RowKernels | None = None,
        copy_blocks: CopyBlocks | None = None,
        draft_kernels: DraftKernels = REFERENCE_DRAFT_KERNELS,
        wrap: Callable[[OracleModel], Model] = lambda model: model,
        draft_wrong_of: int | None = None,  # drafts by a model that is wrong in one of so many places; None: planted
        draft_head: bool = False,  # drafts by a head that is never wrong
    ) -> None:
        where = torch.device(device)
        self._index_of_block = torch.zeros(num_blocks + 1, dtype=torch.int64, device=where)
        self._index_of_row: dict[Row, int] = {}
        captured = CapturedOracle(vocab_size, self._index_of_block)
        model = captured if draft_head else wrap(OracleModel(vocab_size, self._index_of_block))
        self._stores = new_store(model.kv_geometry, num_blocks, block_size, where, num_host_blocks, copy_blocks)
        on_host = where.type == "cpu" and row_kernels is None
        draft_model = None
        sizes = (num_blocks, block_size, where, num_host_blocks, copy_blocks)
        if draft_head:
            head = HeadOracle(vocab_size, self._index_of_block)
            stores = [new_store(each, *sizes) for each in (head.kv_geometry, feature_geometry(2, torch.int32))]
            features = DraftFeatures(captured.capture, head.fuse, stores[1])
            draft_model = DraftModelConfig(head, stores[0], max_length, vocab_size, features)
        elif draft_wrong_of is not None:
            drafter = DraftOracle(vocab_size, self._index_of_block, draft_wrong_of)
            drafts = new_store(drafter.kv_geometry, *sizes)
            draft_model = DraftModelConfig(drafter, drafts, max_length, vocab_size)
        planted = PlantedDeviceDrafter(vocab_size, max_rows, where) if draft_model is None else None
        on_device = DraftConfig(planted, draft_kernels, model=draft_model)
        self._runner = ModelRunner(
            model,
            self._stores,
            max_rows=max_rows,
            max_length=max_length,
            row_kernels=row_kernels,
            max_step_tokens=16,
            drafters=[PlantedDrafter(vocab_size)] if on_host and draft_model is None else [],
            draft_model=draft_model if on_host else None,
            device_drafts=None if row_kernels is None else on_device,
        )
        while not self._runner.prepared:
            self._runner.prepare()

    @property
    def num_replayed(self) -> int:
        return self._runner.num_replayed

    def read(self, tier: Tier, blocks: Iterable[int]) -> list[tuple[int, int]]:
        """The contents of some blocks' slots, one after the other."""
        slots = self._slots(tier)[list(blocks)].transpose(1, 2).reshape(-1, 2)
        return [(token, position) for token, position in slots.tolist()]

    def erase(self, place: Place, slots: range) -> None:
        """Nothing is known of what these slots hold from now on."""
        self._slots(place.tier)[place.block, :, slots.start : slots.stop] = _ERASED

    def fill(self, blocks: IntArray, tokens: IntArray, start: int) -> None:
        """Another engine writes these tokens, from position `start` on, into whole blocks."""
        slots = np.stack([tokens, np.arange(start, start + len(tokens))]).reshape(2, len(blocks), -1)
        store = self._slots(Tier.DEVICE)
        store[torch.from_numpy(blocks).long()] = torch.from_numpy(slots).transpose(0, 1).to(store)
        self._runner.note_imported(blocks)

    def carry(self, moves: Iterable[Move]) -> None:
        self._stores.carry(moves)

    def _slots(self, tier: Tier) -> Tensor:
        """[blocks, 2, block_size]: tokens and positions, when every copy in flight is done."""
        store = self._stores.device if tier is Tier.DEVICE else self._stores.host
        assert store is not None, "there is no host tier"
        if self._stores.device.is_cuda:
            torch.cuda.synchronize()
        return store[:, 0, :, :, 0, 0]

    def stage(self, scenario: Scenario) -> StageRunner:
        """The same model and stores as a pipeline stage that does not sample."""
        max_length = scenario.max_prompt + scenario.max_output
        return StageRunner(self._runner.model, self._stores, max_rows=scenario.max_rows, max_length=max_length)

    def launch(self, plan: StepPlan) -> Pending:
        self.note_writers(plan)
        return self._runner.launch(plan)

    def note_writers(self, plan: StepPlan) -> None:
        for row_start in plan.starts:
            searches = row_start.sampling.num_candidates > 0  # a beam's row says nothing of the beam
            self._index_of_row[row_start.row] = 0 if searches else row_start.branch
        if len(plan.grants):
            indices = [self._index_of_row[Row(row)] for row in plan.grants.rows.tolist()]
            blocks = torch.from_numpy(plan.grants.blocks).long().to(self._index_of_block.device)
            self._index_of_block[blocks] = torch.tensor(indices, device=self._index_of_block.device)


def torch_oracle(
    scenario: Scenario,
    device: str = "cpu",
    row_kernels: RowKernels | None = None,
    copy_blocks: CopyBlocks | None = None,
    draft_kernels: DraftKernels = REFERENCE_DRAFT_KERNELS,
    wrap: Callable[[OracleModel], Model] = lambda model: model,
    draft_wrong_of: int | None = None,
    draft_head: bool = False,
) -> TorchOracleRunner:
    """The drafts of every second scenario come from a draft model."""
    if draft_wrong_of is None and scenario.num_requests % 2:
        draft_wrong_of = _DRAFT_WRONG_OF
    return TorchOracleRunner(
        vocab_size=VOCAB_SIZE,
        num_blocks=scenario.num_blocks,
        block_size=scenario.block_size,
        num_host_blocks=scenario.num_host_blocks,
        max_rows=scenario.max_rows,
        max_length=scenario.max_prompt + scenario.max_output,
        device=device,
        row_kernels=row_kernels,
        copy_blocks=copy_blocks,
        draft_kernels=draft_kernels,
        wrap=wrap,
        draft_wrong_of=draft_wrong_of,
        draft_head=draft_head,
    )


class RankOracle:
    """The same behind the fan-out of tensor parallelism: a second rank, with rows and blocks of its own, on a thread.

    What a check erases is erased on rank 0 only: a rank that reads it samples other tokens than the other one.
    """

    def __init__(self, local: TorchOracleRunner, follower: TorchOracleRunner) -> None:
        self._local = local
        ours, theirs = socket.socketpair()
        Thread(target=_follow, args=(follower, theirs), name="rank 1", daemon=True).start()
        self._runner = TensorParallelRunner(local, [ours], lambda: None)
        self.read, self.erase, self.carry = local.read, local.erase, local.carry

    def launch(self, plan: StepPlan) -> Pending:
        return self._runner.launch(plan)


def _follow(follower: Runner, leader: socket.socket, answer: Callable[[StepResult], bytes] = summary) -> None:
    with leader:
        follow(follower, leader, answer)


def rank_oracle(scenario: Scenario) -> RankOracle:
    return RankOracle(torch_oracle(scenario), torch_oracle(scenario))


class StageOracle:
    """The integer model as one of two stages. Each computes all of it, and the second compares its sums with those of
    the first, which has rows and blocks of its own."""

    def __init__(self, model: OracleModel, sums: "SimpleQueue[Tensor]", *, first: bool) -> None:
        self._sums, self._first = sums, first
        self._whole = model
        self.vocab_size, self.kv_geometry, self.row_decoder = model.vocab_size, model.kv_geometry, model.row_decoder

    def truncated(self) -> "StageOracle":
        return self

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, selected: Tensor | None = None) -> Tensor:
        sums = self._whole.forward(tokens, layout, kv)
        if self._first:
            self._sums.put(sums)
        else:
            assert torch.equal(sums, self._sums.get()), "the stages computed other tokens, positions or blocks"
        return sums if selected is None else sums[selected]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._whole.logits(hidden, out)


class PipelineOracle:
    """Two stages behind the fan-out of a pipeline, the last of them on a thread. What a check erases is erased in the
    first stage only."""

    def __init__(self, scenario: Scenario) -> None:
        sums: SimpleQueue[Tensor] = SimpleQueue()
        self._first, last = (
            torch_oracle(scenario, wrap=partial(StageOracle, sums=sums, first=first)) for first in (True, False)
        )
        ours, theirs = socket.socketpair()
        Thread(target=_follow, args=(last, theirs, full_answer), name="stage 1", daemon=True).start()
        self._runner = PipelineParallelRunner(self._first.stage(scenario), [ours], Shard.of(0, 1, 2), lambda: None)
        self.read, self.erase, self.carry = self._first.read, self._first.erase, self._first.carry

    def launch(self, plan: StepPlan) -> Pending:
        self._first.note_writers(plan)
        return self._runner.launch(plan)


def cuda_oracle() -> RunnerFactory:
    """On the GPU, with the kernels and CUDA graphs that an engine uses there."""
    if not torch.cuda.is_available():
        raise ConfigError("runner is cuda, but torch finds no GPU on this machine; use --runner torch.", param="runner")
    choice = select_kernels("cuda")
    return partial(
        torch_oracle,
        device="cuda",
        row_kernels=choice.row_kernels,
        copy_blocks=choice.copy_blocks,
        draft_kernels=choice.draft_kernels or REFERENCE_DRAFT_KERNELS,
    )
