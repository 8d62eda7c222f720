"""The integer model behind the real runner, as a body for `quire check`."""

import torch

from quire.models.oracle import OracleModel
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sim.world import VOCAB_SIZE, World


def torch_oracle(world: World, device: str = "cpu") -> ModelRunner:
    """Real rows, slots, tables, moves and sampler on a device; only the model is made of integers."""
    model = OracleModel(VOCAB_SIZE)
    stores = new_store(
        model.kv_geometry, world.num_blocks, world.block_size, torch.device(device), world.num_host_blocks
    )
    return ModelRunner(model, stores, max_rows=world.max_rows, max_length=world.max_prompt + world.max_output)
