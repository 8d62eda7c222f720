"""The invariants of a scheduler between two calls. Looks at every sequence: for tests and `quire check`."""

from quire.core.ids import SequenceId
from quire.core.request import Family, Sequence, State
from quire.core.step import StepPlan
from quire.kv.manager import count_blocks
from quire.sched.scheduler import Scheduler

_ROWLESS = (State.WAITING, State.FINISHED)


def audit(scheduler: Scheduler, *, tree: bool = True) -> None:
    """Raise AssertionError at the first law that does not hold. The numbers are those of the promises (I1–I18)."""
    books = scheduler.books
    scheduler.kv.audit(tree=tree)  # I1–I5
    books.seating.audit()
    seated = books.seating.seated
    running = [sequence for sequence in seated.values() if sequence.state is State.RUNNING]
    resting = _resting(scheduler)
    lengths, promised = scheduler.kv.tables.lengths.tolist(), scheduler.kv.promised.tolist()
    cruise = books.cruise
    num_cruising = num_coasting = 0
    for sequence in running:  # I7
        row = sequence.row
        assert row is not None, sequence
        held = lengths[row]
        planned = 0 if sequence.id in resting else _blocks_planned(scheduler, sequence)
        assert held == planned, f"{sequence} holds {held} blocks, not {planned}"
        kept = held + promised[row]
        most = count_blocks(sequence.last_position + 1, scheduler.kv.block_size)
        assert kept <= most, f"{kept} blocks are kept for {sequence}, which needs {most} at most"
        num_cruising += cruise.cruises(row)
        num_coasting += cruise.coasts(row)
    assert (cruise.num_cruising, cruise.num_coasting) == (num_cruising, num_coasting), "cruising miscounted"  # I18
    for number, (held, kept) in enumerate(zip(lengths, promised, strict=True)):  # I8
        assert (held == 0 and kept == 0) or number in seated, f"nobody sits in row {number}, which owns blocks"
    lowest = max([sequence.request.priority for sequence in seated.values()], default=0)
    assert books.seating.lowest_class == lowest, "the lowest class that sits is not who sits"  # I18
    _audit_families(scheduler)
    working = {s.id for s in (*books.prefilling, *books.tethered)}
    unplanned = {s.id for s in running if s.num_planned < s.num_tokens}
    assert working <= unplanned and unplanned - working <= resting, "somebody's tokens are forgotten"
    order = [s.id for s in books.prefilling]
    assert order == sorted(order), "prefills out of order"


def _audit_families(scheduler: Scheduler) -> None:
    """A family is in one place: it sits, waits in the queue, or waits for a prefix (I10)."""
    books = scheduler.books
    room, aside = books.room, books.aside
    parked = {family.order for family in books.leaders.followers}
    num_waiting = 0
    for family in books.families.values():
        request = family.request
        sits = finished = 0
        for member in family.members:
            assert (member.row is None) == (member.state in _ROWLESS), member
            sits += member.row is not None
            finished += member.finish_reason is not None
        if request.beam is not None:
            _audit_offers(family, books.beams.offered(family))
        waits = family in room or family in aside
        num_waiting += waits
        places = (sits > 0) + waits + (family.order in parked)
        assert places == 1, f"{family} is in {places} places"
        assert sits or finished < len(family.members), f"{family} is finished and not forgotten"
        deadline_s = request.deadline_s
        in_time = family.was_seated or deadline_s is None or deadline_s > books.now_s
        assert in_time, f"the deadline of {family} has passed, and it waits on"  # I17
    num_aside = sum([not family.finished for family in aside])
    assert num_waiting == len(room) + num_aside, "the waiting are miscounted"


def _audit_offers(family: Family, offered: frozenset[SequenceId]) -> None:
    """A beam that has offered has computed all that it knows."""
    for member in family.unfinished if offered else ():
        ready = member.state is State.RUNNING and member.num_computed == member.num_tokens
        assert ready or member.id not in offered, f"{member} has offered and goes on computing"


def audit_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Budget and row limits hold (I9)."""
    num_tokens = plan.num_tokens
    assert num_tokens > 0, f"nothing to compute in step {plan.step}"
    if scheduler.policy.regime.chunked:
        assert num_tokens <= scheduler.max_step_tokens, f"{num_tokens} tokens in step {plan.step}"
    assert len(scheduler.books.seating.seated) <= scheduler.max_rows, "too many rows"


def audit_rest(scheduler: Scheduler) -> None:
    """With nothing to do, everything is free or cached (I15)."""
    assert scheduler.idle, "not at rest"
    pool = scheduler.kv.pool
    assert scheduler.kv.num_available == pool.num_in_service, "blocks were lost"
    assert pool.num_idle == pool.num_cached, "a cached block is held by nobody who is here"
    assert scheduler.books.seating.num_free == scheduler.max_rows, "rows were lost"
    assert not list(scheduler.books.leaders.followers), "somebody waits for a leader that is gone"
    books = scheduler.books
    assert not books.beams.num_searches and not books.forks.waiting, "a family that is gone is remembered"
    assert not books.leaders.num_leading, "somebody leads who is gone"
    assert books.only is None and not books.aside and not len(books.masked), "somebody stands aside for nobody"
    assert books.shares.num_active == 0, "a tenant with nothing here counts as active"
    scheduler.reset_cache()
    assert pool.num_free == pool.num_in_service, "the cache cannot be emptied"
    host = scheduler.kv.host
    assert host is None or host.num_free == host.num_blocks, "the host tier cannot be emptied"


def _resting(scheduler: Scheduler) -> set[int]:
    """Those that sit and wait for others of their family: siblings for the prompt, beams for each other."""
    books = scheduler.books
    awaiting: set[int] = set(books.forks.waiting)
    for family in books.families.values():
        if family.request.beam is not None:
            awaiting |= {m.id for m in family.members} - {m.id for m in books.beams.live(family)}
    return awaiting


def _blocks_planned(scheduler: Scheduler, sequence: Sequence) -> int:
    """A table covers exactly what was computed or planned."""
    positions = scheduler.books.num_computed(sequence)
    return count_blocks(positions, scheduler.kv.block_size)
