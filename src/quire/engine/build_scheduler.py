"""Builds the request validator and the scheduler of an engine from resolved settings. Needs no torch."""

import importlib.util
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.config import EngineConfig, ResolvedConfig
from quire.core.errors import QuireError
from quire.engine.open_model import OpenedModel
from quire.engine.request_validator import RequestValidator
from quire.kv.manager import KVManager, count_blocks
from quire.runner.graph_shapes import prompt_sizes, rows_beside
from quire.sched.batching import MAX_STRETCH, PER_DECODE
from quire.sched.cost_model import CostTable
from quire.sched.policy import REGIMES, CapturedSizes, Policy
from quire.sched.queue import OrderPolicy
from quire.sched.reservation import Overcommit
from quire.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.engine.grammar_masks import GrammarMasks


def make_validator(vocab_size: int, end_ids: tuple[int, ...], resolved: ResolvedConfig) -> RequestValidator:
    return RequestValidator(
        vocab_size=vocab_size,
        end_ids=end_ids,
        max_length=resolved.max_model_len,
        max_rows=resolved.max_num_seqs,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
    )


def make_grammars(opened: OpenedModel, vocab_size: int) -> "GrammarMasks | None":
    """None without a tokenizer or without llguidance."""
    if opened.tokenizer is None or importlib.util.find_spec("llguidance") is None:
        return None
    from quire.engine.grammar_masks import GrammarMasks

    return GrammarMasks(opened.tokenizer, opened.end_ids, vocab_size)


def load_vocabulary(grammars: "GrammarMasks") -> None:
    """Read the vocabulary, which blocks the process: before the engine reports ready. Where it cannot be read, requests
    with a grammar are refused."""
    with suppress(QuireError):
        grammars.load_vocabulary()


def captured_sizes(max_rows: int, max_step_tokens: int) -> tuple[CapturedSizes, ...]:
    """Chunk sizes on a device that replays CUDA graphs: the captured sizes."""
    return tuple(
        CapturedSizes(rows, tuple(prompt_sizes(rows, max_step_tokens))) for rows in sorted(rows_beside(max_rows))
    )


def make_scheduler(
    config: EngineConfig,
    resolved: ResolvedConfig,
    costs: CostTable,
    usual_itl_s: float | None = None,
    captured_sizes: tuple[CapturedSizes, ...] = (),
    max_step_s: float | None = None,
) -> Scheduler:
    """`usual_itl_s`: the time between two tokens to aim at, where the settings name none."""
    regime = REGIMES[resolved.regime]
    said_s = None if config.itl_target_ms is None else config.itl_target_ms / 1000
    policy = Policy(
        regime=regime,
        overcommit=Overcommit(config.overcommit),
        itl_target_s=usual_itl_s if said_s is None else said_s,
        itl_stretch=MAX_STRETCH if said_s is None else 1.0,
        itl_per_decode=PER_DECODE if said_s is None else 0.0,
        max_step_s=max_step_s,
        captured_sizes=captured_sizes,
        max_waiting=config.max_waiting,
        order=OrderPolicy(weights=config.tenant_weights),
    )
    kv = KVManager(
        resolved.num_blocks,
        resolved.block_size,
        resolved.max_num_seqs,
        prefix=regime.prefix,
        num_host_blocks=resolved.num_host_blocks,
        worth_keeping=lambda start, stop: costs.cheaper_to_swap(
            start, stop, count_blocks(stop - start, resolved.block_size)
        ),
    )
    return Scheduler(
        kv,
        max_rows=resolved.max_num_seqs,
        max_step_tokens=resolved.max_num_batched_tokens,
        policy=policy,
        cost=costs,
    )
