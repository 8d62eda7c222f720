"""How an engine stands, in numbers: what it is (`Facts`, once) and what it does (`Stats`, every moment)."""

from dataclasses import dataclass

from quire.engine.engine import Engine
from quire.engine.memory import MemoryLedger


@dataclass(frozen=True, slots=True)
class Facts:
    """What a front must know of the engine behind it."""

    name: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    memory: MemoryLedger
    run_ahead: int
    pid: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Gauges are of this moment, counters since the engine's start."""

    step: int
    num_running: int  # requests that sit
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int  # in the prefix tree
    num_idle_blocks: int  # of those, held by nobody: they can be had
    num_promised_blocks: int  # reserved for those who sit, beyond what they hold
    num_host_blocks: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    sampled_tokens: int  # of continuations, whether or not they have ended
    recomputed_tokens: int
    preemptions: int
    forks: int
    moved_blocks: int
    lost_steps: int
    waiting_for: str | None  # what keeps the head of the queue out


def stats_of(engine: Engine) -> Stats:
    scheduler = engine.scheduler
    books, kv = scheduler.books, scheduler.kv
    pool, tally, cause = kv.pool, books.tally, scheduler.admission.cause
    return Stats(
        step=books.last_absorbed,
        num_running=len(books.families) - scheduler.num_waiting,
        num_waiting=scheduler.num_waiting,
        num_waiting_tokens=books.room.num_tokens + books.leaders.num_waiting_tokens,
        num_blocks=pool.num_in_service,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_idle_blocks=pool.num_idle,
        num_promised_blocks=kv.num_promised,
        num_host_blocks=0 if kv.host is None else kv.host.num_blocks - kv.host.num_free,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        computed_tokens=tally.computed_tokens,
        sampled_tokens=engine.num_sampled,
        recomputed_tokens=tally.recomputed_tokens,
        preemptions=tally.preemptions,
        forks=tally.forks,
        moved_blocks=tally.moved_blocks,
        lost_steps=tally.lost_steps,
        waiting_for=None if cause is None else cause.value,
    )
