"""Audits the invariants of a scheduler between two calls. Scans every sequence: for tests and `quire check`."""

from quire.core.ids import SequenceId
from quire.core.request import RequestGroup, SequenceState
from quire.core.step import StepPlan
from quire.kv.manager import count_blocks
from quire.sched.scheduler import Scheduler

_MOST_IN_FLIGHT = 4  # steps whose drafts a row's table may be ahead by
_ROWLESS = (SequenceState.WAITING, SequenceState.FINISHED)


def audit(scheduler: Scheduler, *, tree: bool = True) -> None:
    """Raise AssertionError at the first invariant that does not hold. I1 to I18 number the invariants."""
    state = scheduler._state
    scheduler.kv.audit(tree=tree)  # I1–I5
    state.rows.audit()
    assigned = state.rows.assigned
    running = [sequence for sequence in assigned.values() if sequence.state is SequenceState.RUNNING]
    awaiting = _awaiting(scheduler)
    lengths, reserved = scheduler.kv.tables.lengths.tolist(), scheduler.kv.tables.reserved.tolist()
    calendar = state.calendar
    num_decoding = num_finishing = 0
    for sequence in running:  # I7
        row = sequence.row
        assert row is not None, sequence
        held = lengths[row]
        num_positions = 0 if sequence.id in awaiting else state.num_computed(sequence)
        planned = count_blocks(num_positions, scheduler.kv.block_size)
        most_ahead = calendar.is_active(row) * scheduler.policy.speculation.max_drafts * _MOST_IN_FLIGHT
        ahead = count_blocks(min(num_positions + most_ahead, sequence.last_position + 1), scheduler.kv.block_size)
        assert planned <= held <= max(planned, ahead), f"{sequence} holds {held} blocks, not {planned}"
        kept = held + reserved[row]
        most = count_blocks(sequence.last_position + 1, scheduler.kv.block_size)
        assert kept <= most, f"{kept} blocks are kept for {sequence}, which needs {most} at most"
        num_decoding += calendar.is_decoding(row)
        num_finishing += calendar.is_finishing(row)
    assert (calendar.num_decoding, calendar.num_finishing) == (num_decoding, num_finishing), (
        "decoding rows are miscounted"
    )  # I18
    for number, (held, kept) in enumerate(zip(lengths, reserved, strict=True)):  # I8
        assert (held == 0 and kept == 0) or number in assigned, f"row {number} is free and owns blocks"
    drafting = {row for row in assigned if calendar.is_drafting(row) or calendar.is_ahead(row)}
    assert not drafting or scheduler.policy.speculation.max_drafts, f"rows {drafting} draft without speculation"
    lowest = max([sequence.request.priority for sequence in assigned.values()], default=0)
    assert state.rows.lowest_class == lowest, "the lowest class with a row is wrong"  # I18
    _audit_groups(scheduler)
    working = {s.id for s in (*state.prefilling, *state.host_driven)}
    unplanned = {s.id for s in running if s.num_planned < s.num_tokens}
    assert working <= unplanned and unplanned - working <= awaiting, "known tokens are not planned"
    order = [s.id for s in state.prefilling]
    assert order == sorted(order), "prefills out of order"


def _audit_groups(scheduler: Scheduler) -> None:
    """A group is in one place: it has rows, is queued, or waits for an in-flight prefix (I10)."""
    state = scheduler._state
    waiting, aside = state.waiting, state.excluded
    parked = {group.order for group in state.inflight_prefixes.followers}
    num_waiting = 0
    for group in state.groups.values():
        request = group.request
        num_rows = finished = 0
        for sequence in group.sequences:
            assert (sequence.row is None) == (sequence.state in _ROWLESS), sequence
            num_rows += sequence.row is not None
            finished += sequence.finish_reason is not None
        if request.beam is not None:
            _audit_offers(group, state.beams.offered(group))
        waits = group in waiting or group in aside
        num_waiting += waits
        places = (num_rows > 0) + waits + (group.order in parked)
        assert places == 1, f"{group} is in {places} places"
        assert num_rows or finished < len(group.sequences), f"{group} is finished and not forgotten"
        deadline_s = request.deadline_s
        in_time = group.was_assigned or deadline_s is None or deadline_s > state.now_s
        assert in_time, f"the deadline of {group} has passed, and it still waits"  # I17
    num_aside = sum([not group.finished for group in aside])
    assert num_waiting == len(waiting) + num_aside, "waiting groups are miscounted"


def _audit_offers(group: RequestGroup, offered: frozenset[SequenceId]) -> None:
    """A beam with candidates has computed all its known tokens."""
    for sequence in group.unfinished if offered else ():
        ready = sequence.state is SequenceState.RUNNING and sequence.num_computed == sequence.num_tokens
        assert ready or sequence.id not in offered, f"{sequence} has candidates and still computes"


def audit_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Budget and row limits hold (I9), and no budget is left while short prompts wait to be computed."""
    num_tokens = plan.num_tokens
    assert num_tokens > 0, f"nothing to compute in step {plan.step}"
    if scheduler.policy.regime.chunked:
        assert num_tokens <= scheduler.max_step_tokens, f"{num_tokens} tokens in step {plan.step}"
    state = scheduler._state
    assert len(state.rows.assigned) <= scheduler.max_rows, "too many rows"
    unplanned, policy = [*state.prefilling, *state.host_driven], scheduler.policy
    chunked = [state.rows.assigned[chunk.row] for chunk in plan.chunks]
    longest = max([sequence.num_tokens for sequence in (*unplanned, *chunked)], default=0)
    timed = policy.itl_target_s is not None or policy.max_step_s is not None
    if unplanned and longest < policy.order.long_prompt and not timed and policy.regime.chunked:
        assert num_tokens == scheduler.max_step_tokens, f"{num_tokens} tokens in step {plan.step}, and {unplanned} wait"


def audit_rest(scheduler: Scheduler) -> None:
    """With nothing to do, everything is free or cached (I15)."""
    assert scheduler.idle, "the scheduler is not idle"
    pool = scheduler.kv.pool
    assert scheduler.kv.num_available == pool.num_in_service, "blocks were lost"
    assert pool.num_evictable == pool.num_cached, "a cached block is held, and no request is left"
    assert scheduler._state.rows.num_free == scheduler.max_rows, "rows were lost"
    assert not list(scheduler._state.inflight_prefixes.followers), "a group waits for a prefix that is gone"
    state = scheduler._state
    assert not state.beams.num_searches and not state.forks.waiting, "a group that is gone is remembered"
    assert not state.inflight_prefixes.num_leading, "a prefix in flight belongs to no request"
    assert state.admissible is None and not state.excluded and not state.masked_rows and not state.num_masked, (
        "a restriction outlives its requests"
    )
    assert state.shares.num_active == 0, "a tenant without requests counts as active"
    scheduler.reset_cache()
    assert pool.num_free == pool.num_in_service, "the cache cannot be emptied"
    host = scheduler.kv.host
    assert host is None or host.num_free == host.num_blocks, "the host tier cannot be emptied"


def _awaiting(scheduler: Scheduler) -> set[int]:
    """Sequences with rows that wait for others of their group: siblings for the prompt, beams for each other."""
    state = scheduler._state
    awaiting: set[int] = set(state.forks.waiting)
    for group in state.groups.values():
        if group.request.beam is not None:
            awaiting |= {m.id for m in group.sequences} - {m.id for m in state.beams.live(group)}
    return awaiting
