"""Engine properties (`EngineInfo`, sent once), statistics (`EngineStats`, sent between steps), usage of memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from quire.core.speculative import DRAFTERS
from quire.sched.pacing import StepBound

if TYPE_CHECKING:
    from quire.engine.engine import Engine  # a server reads statistics, and imports no engine

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Device memory by use, in bytes, once an engine is ready: of one rank, if there are several. On a CPU, only the
    first two are known."""

    weights: int = 0
    kv: int = 0
    graphs: int = 0  # captured CUDA graphs
    workspace: int = 0  # left free for activations
    other: int = 0  # the driver, other programs, and anything else
    free: int = 0  # beyond the workspace

    def with_graphs(self, num_bytes: int) -> "MemoryUsage":
        """When captured graphs have taken so much: more of the free memory than when the engine became ready."""
        more = max(num_bytes - self.graphs, 0)
        of_free = min(more, self.free)
        kept = max(self.workspace - (more - of_free), 0)
        return replace(self, graphs=self.graphs + more, free=self.free - of_free, workspace=kept)

    def describe(self, num_ranks: int = 1) -> str:
        parts = [(each.name, getattr(self, each.name)) for each in fields(self)]
        text = " · ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in parts if size)
        return text if num_ranks == 1 else f"{text}, on each of {num_ranks} ranks"


def account_memory(*, weights: int, kv: int, graphs: int, workspace: int, free: int, total: int) -> MemoryUsage:
    """Memory breakdown of a GPU, of which `free` bytes are free now."""
    kept = min(workspace, free)
    other = max(total - free - weights - kv - graphs, 0)
    return MemoryUsage(weights, kv, graphs, kept, other, free - kept)


_PLAIN_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class WeightUsage:
    """The matrices of a model in memory and in its file, by encoding: ggml's names, torch's dtypes, int8 and int4."""

    num_bytes: int  # in memory, vectors included
    encodings: Mapping[str, int]  # number of matrices in memory
    dtype: str  # of weights that are not quantized
    dtype_bytes: int  # what all weights would take in it
    stored: Mapping[str, int] = field(default_factory=dict)  # number of matrices in the file; empty: dummy weights
    stored_bytes: int = 0
    quantization: str = "auto"  # as asked for

    @property
    def name(self) -> str:
        """Short: "Q4_1 and Q8_0", "int8", "bfloat16"."""
        return " and ".join(_by_count(self.encodings))

    def describe(self) -> str:
        """What was chosen, why, and the bytes before and after."""
        counted = _by_count(self.encodings)
        found = self.name
        if len(counted) > 1:
            (first, number), *others = counted.items()
            found = f"{number} matrices as {first}, " + ", ".join(f"{count} as {name}" for name, count in others)
        size = f"{self.num_bytes / _GIB:.2f} GiB"
        return f"{size}{':' if len(counted) > 1 else ''} {found}{self._origin()}"

    def _origin(self) -> str:
        before = " and ".join(_by_count(self.stored)) or self.dtype
        before_bytes = self.stored_bytes or self.dtype_bytes
        if set(_by_count(self.encodings)) == set(before.split(" and ")):
            return self._as_stored() if self.stored else ""
        if self.quantization in ("int8", "int4"):
            return f", quantized from {before_bytes / _GIB:.2f} GiB {before}"
        asked = f"dtype {self.dtype}" if self.quantization == "auto" else "quantization none"
        return f", from {before_bytes / _GIB:.2f} GiB {before} in the file ({asked})"

    def _as_stored(self) -> str:
        if self.quantization in ("int8", "int4"):
            return f", as the file stores them: {self.quantization} is not smaller"
        unlike = f" ({self.dtype_bytes / _GIB:.2f} GiB as {self.dtype})" if self.name != self.dtype else ""
        return f", as the file stores them{unlike}"


def _by_count(encodings: Mapping[str, int]) -> dict[str, int]:
    """The most frequent first, under the names that are shown."""
    ordered = sorted(encodings.items(), key=lambda each: (-each[1], each[0]))
    return {_PLAIN_NAMES.get(name, name): count for name, count in ordered}


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Engine properties that the front process needs."""

    name: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str  # of the weights in memory: "bfloat16", "int8", "Q4_1 and Q8_0"
    memory: MemoryUsage
    run_ahead: int
    pid: int
    caches_prefixes: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def kv_bytes_per_token(self) -> float:
        """Of all ranks."""
        return self.num_ranks * self.memory.kv / max(self.num_blocks * self.block_size, 1)

    @property
    def num_ranks(self) -> int:
        """Each has the memory above, or less."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges are of this moment, counters since the engine's start."""

    step: int
    num_running: int  # requests with rows
    num_waiting: int
    num_waiting_tokens: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int  # in the prefix tree
    num_evictable_blocks: int  # of those, evictable
    num_reserved_blocks: int  # reserved for running requests, beyond what they hold
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
    drafted_tokens: int  # speculative decoding: verified
    accepted_tokens: int
    accepted_at_1: int  # of those, first drafts of a row in a step, and so on
    accepted_at_2: int
    accepted_at_3: int
    accepted_at_4: int
    accepted_at_5: int
    accepted_at_6: int
    accepted_at_7: int
    accepted_at_8: int
    accepted_at_9: int
    accepted_at_10: int
    accepted_at_11: int
    drafted_by_grammar: int  # by drafter
    drafted_by_tree: int
    drafted_by_ngram: int
    drafted_by_text: int
    drafted_by_draft: int
    drafted_by_eagle: int
    drafted_by_mtp: int
    drafted_by_unknown: int
    accepted_by_grammar: int
    accepted_by_tree: int
    accepted_by_ngram: int
    accepted_by_text: int
    accepted_by_draft: int
    accepted_by_eagle: int
    accepted_by_mtp: int
    accepted_by_unknown: int
    steps_itl: int  # steps whose prompt tokens this bound limited
    steps_load: int
    steps_backlog: int
    steps_long_prompt: int
    steps_saturated: int
    steps_efficient: int
    steps_max_step: int
    replayed_steps: int  # as a CUDA graph
    eager_steps: int  # launched kernel by kernel, on a device that is not a CPU
    eager_s: float  # host time of these launches
    capture_s: float  # host time of capturing graphs
    captured_shapes: int
    captured_bytes: int
    waiting_for: str | None  # why the queue head is not admitted


def stats_of(engine: "Engine") -> EngineStats:
    scheduler = engine.scheduler
    kv, pool = scheduler.kv, scheduler.kv.pool
    counters, cause, launches = scheduler.counters, scheduler.wait_cause, engine.launches
    paced = counters.paced_steps
    return EngineStats(
        step=scheduler.last_absorbed,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_waiting_tokens=scheduler.num_waiting_tokens,
        block_size=kv.block_size,
        num_blocks=pool.num_in_service,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_evictable_blocks=pool.num_evictable,
        num_reserved_blocks=kv.num_reserved,
        num_host_blocks=0 if kv.host is None else kv.host.num_blocks - kv.host.num_free,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        computed_tokens=counters.computed_tokens,
        sampled_tokens=engine.num_sampled,
        recomputed_tokens=counters.recomputed_tokens,
        preemptions=counters.preemptions,
        forks=counters.forks,
        moved_blocks=counters.moved_blocks,
        lost_steps=counters.lost_steps,
        drafted_tokens=counters.drafted_tokens,
        accepted_tokens=counters.accepted_tokens,
        **{f"accepted_at_{place}": count for place, count in enumerate(counters.accepted_at, 1)},
        **{f"drafted_by_{name}": count for name, count in zip(DRAFTERS, counters.drafted_by, strict=True)},
        **{f"accepted_by_{name}": count for name, count in zip(DRAFTERS, counters.accepted_by, strict=True)},
        steps_itl=paced.get(StepBound.ITL, 0),
        steps_load=paced.get(StepBound.LOAD, 0),
        steps_backlog=paced.get(StepBound.BACKLOG, 0),
        steps_long_prompt=paced.get(StepBound.LONG_PROMPT, 0),
        steps_saturated=paced.get(StepBound.SATURATED, 0),
        steps_efficient=paced.get(StepBound.EFFICIENT, 0),
        steps_max_step=paced.get(StepBound.MAX_STEP, 0),
        replayed_steps=launches.replayed,
        eager_steps=launches.eager,
        eager_s=launches.eager_s,
        capture_s=launches.capture_s,
        captured_shapes=launches.captured,
        captured_bytes=launches.captured_bytes,
        waiting_for=None if cause is None else cause.value,
    )
