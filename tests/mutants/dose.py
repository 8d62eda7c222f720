"""A dose of random worlds for a copy of the package, until something breaks: `dose.py SRC STEPS`. Exit 1 if it does.

Every second world is made crowded: most bugs hide where rows fight for blocks.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

import quire
from quire.kv.manager import count_blocks
from quire.sched.reserve import Stance
from quire.sim.check import numpy_oracle
from quire.sim.trial import Trial
from quire.sim.world import World, draw_world

SEED = 20_000_000


def crowded(world: World, dice: random.Random) -> World:
    """The same world with small blocks, more rows than fit the cache, and a policy that takes the risk."""
    block_size, max_prompt = min(world.block_size, 5), min(world.max_prompt, 20)
    max_output, max_rows = max(world.max_output, 16), dice.choice((3, 5, 8))
    return replace(
        world,
        block_size=block_size,
        max_prompt=max_prompt,
        max_output=max_output,
        max_rows=max_rows,
        max_step_tokens=max_rows + dice.choice((1, 7, 31)),
        num_blocks=count_blocks(max_prompt + max_output, block_size) + dice.choice((0, 1, 4)),
        num_requests=max(world.num_requests, 12),
        arrival_chance=1.0,
        shared_prefix=world.shared_prefix[:max_prompt],
        policy=replace(world.policy, stance=Stance.OPTIMISTIC, max_preemptions=dice.choice((1, 3)), max_waiting=None),
    )


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
        world = draw_world(dice)
        trial = Trial(crowded(world, dice) if seed % 2 else world, dice, numpy_oracle)
        try:
            trial.run()
        except Exception as broken:  # whatever escapes from a legal workload is seen
            print(f"{type(broken).__name__}: {broken}".replace("\n", " "))
            return 1
        steps += trial.steps
        preemptions += trial.scheduler.books.tally.preemptions
    print(f"{steps} steps, {preemptions} preemptions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
