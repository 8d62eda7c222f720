"""Reads the private state of a scheduler, for tests alone. `tests/architecture/test_scheduler_state.py` allows it here.

A test uses the public queries of `Scheduler` where there is one.
"""

from quire.sched.admission import Admission
from quire.sched.scheduler import Scheduler
from quire.sched.state import SchedulerState


def state_of(scheduler: Scheduler) -> SchedulerState:
    return scheduler._state


def admission_of(scheduler: Scheduler) -> Admission:
    return scheduler._admission
