"""Random scenarios of `quire check` on a copy of the package, until one fails: `dose.py SRC STEPS`. Exit 1 if so."""

import random
import sys
from pathlib import Path

import quire
from quire.sim.check.check import numpy_oracle
from quire.sim.check.scenario import draw_scenario
from quire.sim.check.trial import CheckRun

SEED = 20_000_000


def main() -> int:
    source, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    assert quire.__file__ is not None
    if not Path(quire.__file__).resolve().is_relative_to(source.resolve()):
        print(f"this is not the copy but {quire.__file__}")
        return 2
    seed, steps, preemptions = SEED, 0, 0
    while steps < num_steps:
        seed += 1
        dice = random.Random(seed)
        trial = CheckRun(draw_scenario(dice), dice, numpy_oracle)
        try:
            trial.run()
        except Exception as broken:  # any exception of a valid workload detects the mutant
            print(f"{type(broken).__name__}: {broken}".replace("\n", " "))
            return 1
        steps += trial.steps
        preemptions += trial.scheduler.counters.preemptions
    print(f"{steps} steps, {preemptions} preemptions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
