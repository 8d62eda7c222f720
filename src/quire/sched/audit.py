"""The invariants of a scheduler between two calls. Looks at every sequence: for tests and `quire check`."""

from quire.core.request import Sequence, State
from quire.core.step import StepPlan
from quire.kv.manager import count_blocks
from quire.sched.scheduler import Scheduler


def audit(scheduler: Scheduler) -> None:
    """Raise AssertionError at the first law that does not hold. The numbers are those of the promises (I1–I18)."""
    scheduler.kv.audit()  # I1–I4
    scheduler.seating.audit()
    seated = scheduler.seating.seated
    running = [sequence for sequence in seated.values() if sequence.state is State.RUNNING]
    for sequence in running:  # I7
        held = len(scheduler.kv.table(sequence.id))
        assert held == _blocks_planned(scheduler, sequence), f"{sequence} holds {held} blocks"
    assert scheduler.kv.num_tables == len(seated), "somebody who does not sit has a table"  # I8
    waiting = 0
    for siblings in scheduler.sequences_of.values():  # I10
        for sequence in siblings:
            assert sequence.state is not State.FINISHED, f"{sequence} is finished and not forgotten"
            waits = sequence.row is None
            assert waits == (sequence.state is State.WAITING), sequence
            waiting += waits
    assert waiting == scheduler.num_waiting, "the waiting are miscounted"  # I18
    assert scheduler.num_cruising == sum(s.cruising and s.due_step >= 0 for s in running), "cruising miscounted"
    assert scheduler.num_coasting == sum(s.cruising and s.due_step < 0 for s in running), "coasting miscounted"
    assert scheduler.prefilling == sorted((s for s in running if not s.cruising), key=lambda s: s.id)


def audit_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Budget and row limits hold (I9)."""
    assert 0 < plan.num_tokens <= scheduler.max_step_tokens, f"{plan.num_tokens} tokens in step {plan.step}"
    assert len(scheduler.seating.seated) <= scheduler.max_rows, "too many rows"


def audit_rest(scheduler: Scheduler) -> None:
    """With nothing to do, everything is free again (I15)."""
    assert scheduler.idle, "not at rest"
    assert scheduler.kv.num_available == scheduler.kv.pool.num_blocks, "blocks were lost"
    assert scheduler.seating.num_free == scheduler.max_rows, "rows were lost"


def _blocks_planned(scheduler: Scheduler, sequence: Sequence) -> int:
    """A table covers exactly what was computed or planned."""
    positions = sequence.num_planned
    if sequence.cruising:
        positions = min(sequence.position_at(scheduler.last_planned), sequence.last_position) + 1
    return count_blocks(positions, scheduler.kv.block_size)
