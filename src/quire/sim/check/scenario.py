"""Random scenarios for `quire check`: a machine, a policy, a workload, and faults."""

import random
from dataclasses import dataclass, fields, replace
from enum import Enum

import numpy as np

from quire.core.ids import IntArray, RequestId
from quire.core.request import BeamParams, EarlyStopping, Request, partition_name
from quire.core.sampling import RowSampling
from quire.kv.manager import count_blocks
from quire.sched.policy import REGIMES, Policy
from quire.sched.queue import OrderPolicy
from quire.sched.reservation import Overcommit, most_blocks
from quire.sched.speculation import SpeculationPolicy

VOCAB_SIZE = 97


class ScenarioEvent(Enum):
    """The events of a check."""

    ARRIVE = "arrive"
    ARRIVE_FAMILY = "arrive_family"
    ARRIVE_BEAMS = "arrive_beams"
    ARRIVE_FOLLOWUP = "arrive_followup"  # the prompt continues an earlier conversation
    ARRIVE_POOLED = "arrive_pooled"  # an embedding request
    ARRIVE_MASKED = "arrive_masked"  # every token is sampled under a grammar mask
    ABORT = "abort"
    STOP = "stop"  # a stop string, found by the front end
    DELAY = "delay"  # a result is late
    LOSE = "lose"  # a step is lost
    DIE = "die"  # the worker dies with its memory
    STARVE = "starve"  # out of device memory in a step
    POISON = "poison"  # a row's logits are not finite
    RESET = "reset"  # of the cache
    SHRINK = "shrink"  # of the pool
    DUPLICATE = "duplicate"  # an id that is in use
    OVERFLOW = "overflow"  # the queue is full
    DRAIN = "drain"
    JUMP = "jump"  # of the clock
    EXPIRE = "expire"  # a deadline passed in the queue
    PREEMPT = "preempt"
    DEMOTE = "demote"  # blocks moved between tiers


@dataclass(frozen=True, slots=True)
class EventRates:
    """The probability of each fault per step."""

    abort: float
    stop: float
    delay: float
    lose: float
    die: float
    starve: float
    poison: float
    reset: float
    shrink: float
    duplicate: float
    jump: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One machine and its workload. The torch oracle samples, and so ignores `min_tokens`."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    resident_limit: int | None
    max_rows: int
    max_step_tokens: int
    depth: int
    policy: Policy
    num_requests: int
    max_prompt: int
    max_output: int
    arrival_chance: float
    shared_prefix: IntArray
    partitions: tuple[str, ...]
    priorities: tuple[int, ...]
    tenants: tuple[str, ...]
    deadlines: bool
    groups: bool
    beams: bool
    embeddings: bool
    grammars: bool
    prompt_logprobs: bool  # of some requests, which compute their whole prompt
    transfers: bool  # other engines read and fill prefixes
    repeats: bool  # all prompts begin alike
    end_ids: tuple[int, ...]
    min_tokens: bool
    drains: bool
    chances: EventRates


def draw_scenario(rng: random.Random, *, min_tokens: bool = True) -> Scenario:
    """Tiny pools, odd block sizes and all depths are as likely as ample ones; most faults are off in most scenarios."""
    scenario = _draw_scenario(rng, min_tokens=min_tokens)
    chosen = int(scenario.shared_prefix.sum())  # without random numbers: old seeds keep their scenarios
    policy = scenario.policy
    if chosen % 5 == 0:
        policy = replace(policy, max_waiting_tokens=2 * scenario.max_prompt)
    if chosen % 6 == 1:
        policy = replace(policy, max_step_s=0.015)
    if chosen % 3 < 2:
        policy = replace(policy, order=replace(policy.order, share_patience_s=0.0))
    if chosen % 4 < 2:
        policy = replace(policy, order=replace(policy.order, share_slice_s=(0.0, 1.0)[chosen % 4]))
    if chosen % 2 == 0:
        speculation = SpeculationPolicy((1, 2, 3, 5, 8)[chosen // 2 % 5], chosen // 10 % 2 == 0)
        hindsight, after_hits = chosen // 8 % 2 == 0, chosen // 16 % 8 == 0
        speculation = replace(speculation, text=chosen // 12 % 4 != 0, hindsight=hindsight, after_hits=after_hits)
        policy = replace(policy, speculation=speculation)
    scenario = replace(
        scenario,
        embeddings=chosen % 4 == 0,
        grammars=chosen % 3 == 0,
        prompt_logprobs=chosen % 7 == 0,
        transfers=chosen % 12 in (2, 11),  # none of the seeds that are kept
        resident_limit=scenario.num_blocks // 3 if chosen % 5 < 2 else None,
        policy=policy,
    )
    if rng.random() < 0.4:
        scenario = with_contention(scenario, rng)
    if chosen % 9 == 5:  # none of the seeds that are kept
        scenario = with_rivals(scenario)
    if scenario.transfers:
        scenario = with_transfers(scenario)
    return with_copies(scenario) if chosen % 8 == 0 and scenario.max_prompt > 1 else scenario


def _draw_scenario(rng: random.Random, *, min_tokens: bool) -> Scenario:
    block_size = rng.choice((1, 2, 3, 4, 5, 8, 16, 32))
    max_prompt = rng.choice((1, 5, 20, 80))
    max_output = rng.choice((1, 4, 16, 48))
    max_rows = rng.choice((1, 2, 3, 5, 8, 16))
    largest = count_blocks(max_prompt + max_output, block_size)
    regime = REGIMES[rng.choice(("prefix",) * 9 + tuple(REGIMES))]
    return Scenario(
        block_size=block_size,
        num_blocks=largest + rng.choice((0, 0, 1, 2, largest, 4 * largest, max_rows * largest)),
        num_host_blocks=rng.choice((0, 0, 1, 4, largest)) if regime.prefix else 0,
        resident_limit=None,
        max_rows=max_rows,
        max_step_tokens=max_rows + rng.choice((0, 1, 3, 7, 31, 255)),
        depth=rng.choice((0, 1, 2)),
        policy=_draw_policy(rng).with_regime(regime),
        num_requests=rng.randint(1, 30),
        max_prompt=max_prompt,
        max_output=max_output,
        arrival_chance=rng.choice((0.05, 0.3, 1.0)),
        shared_prefix=np.array([rng.randrange(VOCAB_SIZE) for _ in range(max_prompt)], dtype=np.int32),
        partitions=rng.choice((("",), ("",), ("", "salt"), ("a", "b", "c"))),
        priorities=rng.choice(((0,), (0,), (0, 1), (-1, 0, 5))),
        tenants=rng.choice((("",), ("",), ("x", "y"))),
        deadlines=rng.random() < 0.2,
        groups=rng.random() < 0.4,
        beams=rng.random() < 0.3,
        embeddings=False,
        grammars=False,
        prompt_logprobs=False,
        transfers=False,
        repeats=False,
        end_ids=rng.choice(((), (), (3,), tuple(range(0, VOCAB_SIZE, 7)))),
        min_tokens=min_tokens,
        drains=rng.random() < 0.1,
        chances=EventRates(**{field.name: rng.choice((0.0, 0.0, 0.0, 0.01, 0.1)) for field in fields(EventRates)}),
    )


def with_stages(scenario: Scenario, num_stages: int) -> Scenario:
    """The same scenario for a pipeline, which verifies no drafts: with a step in every stage, or fewer."""
    policy = replace(scenario.policy, num_stages=num_stages, speculation=SpeculationPolicy())
    return replace(scenario, policy=policy, depth=scenario.depth or num_stages - 1)


def with_contention(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same scenario with small blocks, more rows than fit the cache, and optimistic overcommit.

    Most bugs are where rows compete for blocks.
    """
    block_size, max_prompt = min(scenario.block_size, 5), min(scenario.max_prompt, 20)
    max_output, max_rows = max(scenario.max_output, 16), rng.choice((3, 5, 8))
    return replace(
        scenario,
        block_size=block_size,
        max_prompt=max_prompt,
        max_output=max_output,
        max_rows=max_rows,
        max_step_tokens=max_rows + rng.choice((1, 7, 31)),
        num_blocks=count_blocks(max_prompt + max_output, block_size) + rng.choice((0, 1, 4)),
        num_requests=max(scenario.num_requests, 12),
        arrival_chance=1.0,
        shared_prefix=scenario.shared_prefix[:max_prompt],
        policy=replace(
            scenario.policy,
            overcommit=Overcommit.OPTIMISTIC,
            max_preemptions=rng.choice((1, 3)),
            max_waiting=None,
            max_waiting_tokens=None,
        ),
    )


def with_rivals(scenario: Scenario) -> Scenario:
    """The same scenario with three tenants of one class and long outputs: each may come above its share of the blocks
    while there are rows for all."""
    block_size, max_prompt, max_output = min(scenario.block_size, 4), max(scenario.max_prompt, 20), 48
    order = replace(scenario.policy.order, fair=True, share_patience_s=0.0)
    return replace(
        scenario,
        block_size=block_size,
        max_prompt=max_prompt,
        max_output=max_output,
        max_rows=16,
        max_step_tokens=47,
        num_blocks=2 * count_blocks(max_prompt + max_output, block_size),
        num_requests=max(scenario.num_requests, 20),
        arrival_chance=0.3,
        priorities=(0,),
        tenants=("x", "y", "z"),
        partitions=tuple(partition_name(tenant, salt) for tenant in "xyz" for salt in ("", "salt")),
        beams=False,
        policy=replace(
            scenario.policy, regime=REGIMES["prefix"], order=order, max_preemptions=3, max_waiting=None,
            max_waiting_tokens=None,
        ),
    )  # fmt: skip


def with_transfers(scenario: Scenario) -> Scenario:
    """The same scenario with a prefix cache, and a host tier that blocks are demoted to."""
    policy = scenario.policy.with_regime(REGIMES["prefix"])
    return replace(scenario, num_host_blocks=max(scenario.num_host_blocks, 4), policy=policy)


def with_copies(scenario: Scenario) -> Scenario:
    """The same scenario with groups of one prompt, under grammars. Half of them compute the whole prompt.

    Rows then write what the prefix tree has other copies of, which siblings share.
    """
    block_size = min(scenario.block_size, 2)
    return replace(
        scenario,
        block_size=block_size,
        num_blocks=count_blocks(scenario.max_prompt + scenario.max_output, block_size) + 4,
        max_rows=8,
        max_step_tokens=15,
        num_requests=max(scenario.num_requests, 12),
        arrival_chance=1.0,
        partitions=("",),
        groups=True,
        beams=False,
        grammars=True,
        prompt_logprobs=True,
        repeats=True,
        end_ids=(),
        policy=replace(scenario.policy, regime=REGIMES["prefix"], overcommit=Overcommit.OPTIMISTIC, max_waiting=None),
    )


def _draw_policy(rng: random.Random) -> Policy:
    return Policy(
        order=OrderPolicy(
            fair=rng.random() < 0.7,
            weights=rng.choice(({}, {"x": 3.0})),
            ageing_s=rng.choice((0.0, 1.0, 30.0)),
            long_prompt=rng.choice((4, 30, 8192)),
            lane_patience_s=(lane_patience_s := rng.choice((0.0, 2.0, 100.0))),
            overtaking={0.0: 0.5, 2.0: 0.05, 100.0: 2.0}[lane_patience_s],
        ),
        overcommit=rng.choice(tuple(Overcommit)),
        itl_target_s=(itl_target_s := rng.choice((None, None, 0.015, 1.0))),
        ttft_target_s=itl_target_s,
        max_preemptions=rng.choice((0, 1, 3)),
        max_waiting=rng.choice((None, None, None, 1, 5)),
    )


def draw_request(rng: random.Random, scenario: Scenario, number: int, now_s: float, past: IntArray | None) -> Request:
    """One request that this scenario can serve. `past` is a conversation that its prompt may continue."""
    prompt = _draw_prompt(rng, scenario, past)
    max_tokens = rng.randint(1, scenario.max_output)
    kind = rng.random()
    num_sequences, beam = 1, None
    if scenario.groups and kind < 0.4:
        num_sequences = rng.randint(2, 4)
    elif scenario.beams and kind > 0.6:
        num_sequences = rng.randint(1, 3)
        returned = rng.randint(1, num_sequences)
        beam = BeamParams(num_sequences, rng.choice((0.0, 1.0, 2.0)), rng.choice(tuple(EarlyStopping)), returned)
    end_ids = scenario.end_ids if rng.random() < 0.7 else ()
    min_tokens = 0
    if scenario.min_tokens and beam is None:
        min_tokens = rng.choice((0, 0, max_tokens))
    elif scenario.min_tokens and number % 3 == 0:  # without random numbers: old seeds keep their scenarios
        min_tokens = max_tokens // 2
    request = Request(
        id=RequestId(number),
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=RowSampling(
            end_ids=end_ids,
            min_tokens=min_tokens,
            num_candidates=0 if beam is None else max(2, 1 + len(set(end_ids))) * beam.width,
        ),
        num_sequences=num_sequences,
        beam=beam,
        partition=rng.choice(scenario.partitions),
        tenant=rng.choice(scenario.tenants),
        priority=rng.choice(scenario.priorities),
        deadline_s=now_s + rng.choice((0.0, 1.0, 20.0)) if scenario.deadlines and rng.random() < 0.5 else None,
    )
    if scenario.embeddings and number % 3 == 1:
        return replace(_alone(request), max_tokens=1, sampling=RowSampling(pooled=True))
    if scenario.grammars and beam is None and number % 2 == 0:
        request = replace(request, sampling=replace(request.sampling, masked=True))
    if scenario.prompt_logprobs and beam is None and number // 2 % 2 == 0:
        request = replace(request, sampling=replace(request.sampling, num_prompt_logprobs=0))
    fits = num_sequences <= scenario.max_rows and most_blocks(request, scenario.block_size) <= scenario.num_blocks
    return request if fits else _alone(request)


def _alone(request: Request) -> Request:
    """The same without its siblings."""
    return Request(
        id=request.id,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        sampling=replace(request.sampling, num_candidates=0),
        partition=request.partition,
        tenant=request.tenant,
        priority=request.priority,
        deadline_s=request.deadline_s,
    )


def _draw_prompt(rng: random.Random, scenario: Scenario, past: IntArray | None) -> IntArray:
    length = rng.randint(1, scenario.max_prompt)
    if scenario.repeats:
        return scenario.shared_prefix[: max(length, scenario.max_prompt - 2)]
    known = past if past is not None else scenario.shared_prefix
    num_shared = rng.choice((0, rng.randint(0, length), length))
    fresh = [rng.randrange(VOCAB_SIZE) for _ in range(length - min(num_shared, len(known)))]
    return np.concatenate([known[: min(num_shared, length)], np.array(fresh, dtype=np.int32)])
