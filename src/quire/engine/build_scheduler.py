"""Builds the request validator, the cost table and the scheduler of an engine from resolved settings. Needs no torch.

The cost table starts as a roofline of model and device, before any request. With CUDA graphs, and on a CPU, two steps
are timed, and the roofline follows from that. On a GPU without graphs the device's numbers are stated, not measured.
They decide only the first steps; the table corrects itself by the median of what steps of a kind really took. What
copying a block to the host and back takes is measured by `measure_transfer`.
"""

import importlib.util
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from quire.config import EngineConfig
from quire.core.errors import QuireError
from quire.core.speculative import MODEL_DRAFTERS
from quire.engine.open_model import OpenedModel
from quire.engine.request_validator import RequestValidator
from quire.engine.resolved_config import ResolvedConfig
from quire.kernels.cpu.usable_cores import usable_cores
from quire.kv.manager import count_blocks
from quire.runner.graph_shapes import MAX_QUERIES, MAX_VERIFIED, prompt_sizes, rows_beside
from quire.sched.cost_model import DRAFTS_DIFFER, Constants, CostTable, roofline
from quire.sched.journal.recorder import MAX_JOURNAL_BYTES, JournaledScheduler
from quire.sched.pacing import PER_DECODE, TTFT_PER_ITL
from quire.sched.policy import REGIMES, CapturedSizes, Policy, SchedulerSpec
from quire.sched.queue import OrderPolicy
from quire.sched.reservation import Overcommit
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import MAX_DRAFTS, SpeculationPolicy

_MAX_GRAMMAR_THREADS = 8  # of masks that take long

if TYPE_CHECKING:
    from quire.engine.grammar_masks import GrammarMasks
    from quire.runner.cuda_graphs import StepTimes


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
    if not opened.has_tokenizer or importlib.util.find_spec("llguidance") is None:
        return None
    from quire.engine.grammar_masks import GrammarMasks

    num_threads = min(usable_cores().num_threads, _MAX_GRAMMAR_THREADS)
    return GrammarMasks(opened, vocab_size, num_threads=num_threads)


def load_vocabulary(grammars: "GrammarMasks") -> None:
    """Read the vocabulary, which blocks all threads. Where it cannot be read, requests with a grammar are refused."""
    with suppress(QuireError):
        grammars.load_vocabulary()


class DeviceRates(NamedTuple):
    """What a device sustains."""

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float  # of one step


# Half of an A100's specification (312 TFLOP/s in bf16, 2 TB/s), and a few hundred eager launches per step: sustained
# rates of an ordinary GPU, within a factor of three or so.
_UNTIMED_GPU = DeviceRates(1.5e14, 1e12, 3e-3)


def measured_costs(
    pace: "StepTimes",
    *,
    weight_bytes: int,
    kv_bytes_per_token: int,
    num_parameters: int,
    context_per_draft: float = 1.0,
) -> Constants:
    """A step with one row reads the weights once; a full one multiplies by them."""
    return roofline(
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        flops_per_s=2 * num_parameters / pace.token_s,
        bytes_per_s=weight_bytes / pace.decode_s,
        overhead_s=0.0,
        context_per_draft=context_per_draft,
    )


def first_costs(
    pace: "StepTimes | None",
    *,
    num_parameters: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    largest_chunk: int,
    context_per_draft: float = 1.0,
    drafts_dearer: float = DRAFTS_DIFFER,
    draft_times: "StepTimes | None" = None,
) -> CostTable:
    """The table an engine starts with. `num_parameters`: those used per token; `draft_times`: of a draft model."""
    if pace is not None:
        measured = measured_costs(
            pace,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=kv_bytes_per_token,
            num_parameters=num_parameters,
            context_per_draft=context_per_draft,
        )
        measured = replace(measured, drafts_dearer=drafts_dearer)
        if draft_times is not None:
            measured = replace(
                measured,
                seconds_per_draft_pass=draft_times.decode_s,
                seconds_per_draft_token=draft_times.token_s,
            )
        return CostTable(measured, largest_chunk)
    constants = roofline(
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        flops_per_s=_UNTIMED_GPU.flops_per_s,
        bytes_per_s=_UNTIMED_GPU.bytes_per_s,
        overhead_s=_UNTIMED_GPU.overhead_s,
    )
    return CostTable(constants, largest_chunk)


def captured_sizes(max_rows: int, max_step_tokens: int) -> tuple[CapturedSizes, ...]:
    """Chunk sizes on a device that replays CUDA graphs: the captured sizes."""
    return tuple(
        CapturedSizes(rows, tuple(prompt_sizes(rows, max_step_tokens))) for rows in sorted(rows_beside(max_rows))
    )


def _speculation(drafters: tuple[str, ...], captured: bool, scripted: bool = False) -> SpeculationPolicy:
    """`captured`: CUDA graphs verify the drafts; `scripted`: they are a script's, whatever a row's text is."""
    text, tree = drafters != ("grammar",), "tree" in drafters
    if not drafters:
        return SpeculationPolicy()
    reads_text = not set(MODEL_DRAFTERS) & set(drafters)  # what a model drafts is not known before it is asked
    if not captured:
        judged = text and reads_text and not scripted
        return SpeculationPolicy(MAX_DRAFTS, tree=tree, text=text, hindsight=judged, after_hits=judged)
    return SpeculationPolicy(MAX_QUERIES - 1, tree=tree, text=text, max_verified=MAX_VERIFIED, hindsight=reads_text)


def make_scheduler(
    config: EngineConfig,
    resolved: ResolvedConfig,
    costs: CostTable,
    usual_itl_s: float | None = None,
    captured_sizes: tuple[CapturedSizes, ...] = (),
    max_step_s: float | None = None,
    journal: BinaryIO | None = None,
    scripted: bool = False,
) -> Scheduler:
    """`usual_itl_s`: the ITL target of a server, where the settings name none. `journal`: where to record its calls."""
    regime = REGIMES[resolved.regime]
    said_s = None if config.itl_target_ms is None else config.itl_target_ms / 1000
    itl_s = usual_itl_s if said_s is None else said_s
    ttft_s = None if itl_s is None else TTFT_PER_ITL * itl_s
    policy = Policy(
        regime=regime,
        overcommit=Overcommit(config.overcommit),
        itl_target_s=itl_s,
        ttft_target_s=ttft_s if config.ttft_target_ms is None else config.ttft_target_ms / 1000,
        itl_per_decode=PER_DECODE if said_s is None else 0.0,
        max_step_s=max_step_s,
        captured_sizes=captured_sizes,
        max_waiting=config.max_waiting,
        order=OrderPolicy(weights=config.tenant_weights),
        speculation=_speculation(resolved.drafters, captured=bool(captured_sizes), scripted=scripted),
        num_stages=resolved.pipeline_parallel_size,
    )
    spec = SchedulerSpec(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_rows=resolved.max_num_seqs,
        max_step_tokens=resolved.max_num_batched_tokens,
        num_host_blocks=resolved.num_host_blocks,
        policy=policy,
        constants=costs.constants,
        largest_chunk=costs.largest_chunk,
        seconds_per_block=costs.seconds_per_block,
        resident_limit=resolved.resident_limit,
    )

    def worth_keeping(start: int, stop: int) -> bool:
        return costs.cheaper_to_swap(start, stop, count_blocks(stop - start, resolved.block_size))

    if journal is not None:
        return JournaledScheduler(spec, journal, worth_keeping, costs, MAX_JOURNAL_BYTES)
    return Scheduler(
        spec.kv(worth_keeping),
        max_rows=spec.max_rows,
        max_step_tokens=spec.max_step_tokens,
        policy=policy,
        cost=costs,
    )
