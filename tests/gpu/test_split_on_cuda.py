"""Prefill/decode split on one GPU: the KV store of another process by CUDA IPC, and two engines."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from quire.config import EngineConfig
from quire.core.shared_blocks import BlockAddress, DeviceMemory, LeaseEnded
from quire.engine.prefix_transfer import TransferFailure
from quire.kernels.select import select_kernels
from quire.runner.cuda_ipc import PeerStores
from quire.runner.kv_store import KvStores
from quire.server.engine_supervisor import Health
from tests import children
from tests.server.test_prefill_decode import prompt_of, two_engines

BLOCK_SHAPE = (4, 2, 16, 8, 128)  # 256 KiB of bfloat16
BLOCK_BYTES = 1 << 18
OWNER = """
import json, sys
import torch
from quire.core.shared_blocks import SharedBlocks
from quire.runner.cuda_ipc import export_store

shape, size = json.loads(sys.argv[1]), int(sys.argv[2])
small = [torch.empty(2 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]  # in one segment of the allocator
for store in (small[1].view(-1, 1 << 18), torch.empty((size, *shape), dtype=torch.bfloat16, device="cuda")):
    for block in range(len(store)):
        store[block] = block % 251
    memory = export_store(store)
    torch.cuda.synchronize()
    shared = SharedBlocks(len(store), 1 << 18, memory)
    print(json.dumps(shared.grant()), flush=True)
sys.stdin.read()
"""


def test_a_store_of_another_process_is_copied_and_its_memory_is_free_after_its_end() -> None:
    num_blocks = 4096  # 1 GiB
    own = KvStores(
        torch.zeros((num_blocks, *BLOCK_SHAPE), dtype=torch.bfloat16, device="cuda"),
        copy_blocks=select_kernels("cuda").copy_blocks,
    )
    peers = PeerStores(own)
    command = [sys.executable, "-c", OWNER, json.dumps(BLOCK_SHAPE), str(num_blocks)]
    with children.started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        addresses = []
        for _ in range(2):
            address = BlockAddress(*json.loads(owner.stdout.readline()))
            assert address.memory is not None
            addresses.append(address._replace(memory=DeviceMemory(*address.memory)))
        small, large = addresses
        assert small.memory is not None and small.memory.offset > 0, "not at the beginning of its allocation"
        source = peers.source(small)
        source.copy([7, 2], [1, 4])
        assert source.device_s(wait=True) is not None
        assert own.raw_blocks[[1, 4, 2]].float().mean(1).tolist() == [7, 2, 0]
        source = peers.source(large)
        targets = torch.randperm(num_blocks).tolist()
        for _ in range(3):
            source.copy(range(num_blocks), targets)
            seconds = source.device_s(wait=True)
        assert seconds is not None
        print(f"\n1 GiB in blocks of 256 KiB: {num_blocks * BLOCK_BYTES / seconds / 1e9:,.0f} GB/s")
        values = own.device[targets].flatten(1)
        expected = torch.arange(num_blocks, device="cuda")[:, None] % 251
        assert (values == expected).all()
        source.copy(range(num_blocks), range(num_blocks))
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert source.device_s(wait=True) is not None, "what was leased is there as long as it is open"
        with pytest.raises(LeaseEnded):
            source.copy([1], [1])
        held = torch.cuda.mem_get_info()[0]
        peers.close_ended()
        assert peers.num_open == 0
        freed = torch.cuda.mem_get_info()[0] - held
        print(f"memory that the killed process had still taken: {freed >> 20} MiB")
        torch.cuda.synchronize()
        assert (own.device.flatten(1) == expected).all()


def config() -> EngineConfig:
    """The same bits in every batch: a prompt that was computed elsewhere gives the same tokens."""
    return EngineConfig(
        model="qwen3-0.6b", load_format="dummy", batch_invariant=True, max_num_seqs=8, max_model_len=8192,
        max_num_batched_tokens=2048, kv_cache_memory=2 << 30,
    )  # fmt: skip


def test_two_engines_on_one_gpu_answer_as_one_and_leave_no_block() -> None:
    async def body() -> None:
        async with two_engines(config(), None) as split:
            prompts = [prompt_of(seed, length) for seed, length in ((1, 4000), (2, 600), (3, 2049))]
            copied = await asyncio.gather(*(split.answer(split.submit(prompt)) for prompt in prompts))
            assert [each.failure for each in split.ends] == [None] * 3
            assert min(each.num_bytes for each in split.ends) > 600 * 28 * 2 * 8 * 128 * 2 * 0.9
            await split.engine.query("reset_prefix_cache")
            is_ready, split.split.is_ready = split.split.is_ready, lambda rank: False
            alone = await asyncio.gather(*(split.answer(split.submit(prompt)) for prompt in prompts))
            assert alone == copied and len(set(map(tuple, alone))) == 3
            split.split.is_ready = is_ready
            left = [split.submit(prompt_of(seed, 4000)) for seed in range(10, 14)]
            await asyncio.sleep(0.01)
            for stream in left:
                stream.close()
            await split.assert_nothing_is_held()
            split.ends.clear()
            killed = [split.submit(prompt_of(seed, 4000)) for seed in range(20, 24)]
            await asyncio.sleep(0.02)
            split.signal_prefill(signal.SIGKILL)
            answers = await asyncio.gather(*map(split.answer, killed))
            assert len(split.ends) == 4
            assert {each.failure for each in split.ends} <= {
                None, TransferFailure.ENGINE_LOST, TransferFailure.LEASE_ENDED
            }  # fmt: skip
            explained = [await split.explain(stream) for stream in killed]
            num_lost = sum(
                text in each for each in explained for text in ("prefill engine ended", "lease on its blocks")
            )
            assert num_lost == sum(each.failure is not None for each in split.ends) > 0
            await split.until(Health.READY)
            again = split.submit(prompt_of(30, 4000))
            await split.answer(again)
            assert split.ends[-1].failure is None, "with the engine that was started instead"
            await split.engine.query("reset_prefix_cache")
            split.split.is_ready = lambda rank: False
            assert (
                await asyncio.gather(*(split.answer(split.submit(each.state.request.prompt)) for each in killed))
                == answers
            )
            await split.assert_nothing_is_held()

    asyncio.run(body())
