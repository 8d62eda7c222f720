"""A step that runs out of GPU memory fails only the largest request, which succeeds once there is memory again.

The allocator is limited to a little more than it holds, and what it holds free is taken; the GPU is not filled, as
other processes may use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.request_validator import RequestValidator
from quire.formats.presets import SHAPES
from quire.kernels.select import select_kernels
from quire.kv.manager import KVManager
from quire.models.decoder import Decoder
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.scheduler import Scheduler
from quire.weights.allocate import dummy_weights

CUDA = torch.device("cuda")
NUM_BLOCKS, BLOCK_SIZE, LENGTH, ROWS = 600, 16, 8192, 8
PIECE = 16 << 20
LEFT = 96 << 20  # bytes: enough for a few tokens, and not for the 6,144 numbers of each of thousands
SMALL = [[11 * place + token for token in range(20 + place)] for place in range(4)]
LARGE = [token % 1000 for token in range(6000)]
PARAMS = SamplingParams(temperature=0, max_tokens=24)


@contextmanager
def almost_full() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + LEFT) / total)
    taken: list[torch.Tensor] = []
    with suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(PIECE, dtype=torch.uint8, device=CUDA))
    del taken[-LEFT // PIECE :]
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def outputs(client: LocalClient, prompts: list[list[int]]) -> list[tuple[list[int], str | None]]:
    states = [client.submit(prompt, PARAMS) for prompt in prompts]
    while not all(state.finished for state in states):
        client.step()
    return [(state.output().outputs[0].token_ids, state.output().outputs[0].finish_reason) for state in states]


def test_a_full_gpu_fails_only_the_largest_request() -> None:
    spec = replace(SHAPES["qwen3-0.6b"], num_layers=2)
    model = Decoder(spec, dummy_weights(spec, torch.float32, CUDA, 3).filled(), select_kernels("cuda").kernels, LENGTH)
    stores = new_store(model.kv_geometry, NUM_BLOCKS, BLOCK_SIZE, CUDA)
    runner = ModelRunner(model, stores, max_rows=ROWS, max_length=LENGTH)
    scheduler = Scheduler(KVManager(NUM_BLOCKS, BLOCK_SIZE, ROWS), max_rows=ROWS, max_step_tokens=LENGTH)
    validator = RequestValidator(spec.vocab_size, (), LENGTH, ROWS, NUM_BLOCKS, BLOCK_SIZE)
    client = LocalClient(Engine(scheduler, runner, validator, depth=1, seed=0, clock=lambda: 0.0), None)

    alone = outputs(client, SMALL)
    with almost_full():
        *small, (tokens, reason) = outputs(client, [*SMALL, LARGE])
    assert (tokens, reason) == ([], FinishReason.OUT_OF_MEMORY.value)
    assert small == alone, (small, alone)
    assert all(len(tokens) == PARAMS.max_tokens for tokens, _ in small)
    [(tokens, reason)] = outputs(client, [LARGE])
    assert (len(tokens), reason) == (PARAMS.max_tokens, "length"), "it succeeds once there is memory"
