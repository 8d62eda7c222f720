"""Precompilation: a dry run launches nothing, and finds each variant that steps launch, once."""

import json
import os
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from quire.kernels.gpu.copy_blocks import copy_blocks
from quire.kernels.gpu.launch import dry_run_launches
from quire.kernels.gpu.precompile import _CompileQueue
from tests import children

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/kernels/compile_in_process.py prints, and what it says besides."""
    told = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("kernels")), "PYTHONPATH": ":".join(filter(None, sys.path))}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | told
    child = children.run(
        [sys.executable, "-m", "tests.kernels.compile_in_process"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1]) | {"stderr": child.stderr}


def test_no_triton_default_that_will_change_is_relied_on(apart: dict[str, Any]) -> None:
    assert "FP_FUSION" not in apart["stderr"], "it would be read by whoever serves"


def copied() -> bool:
    store = torch.arange(2, device=DEVICE)[:, None].repeat(1, 8)
    copy_blocks(store, store, *torch.tensor([[1], [0]], device=DEVICE))
    return store[0, 0].item() == 1


def test_an_uncompiled_queue_may_be_shut_down_twice() -> None:
    wanted = _CompileQueue()
    kernel = wanted.submit(dict)
    for _ in range(2):
        wanted.shutdown()
        assert kernel.cancelled()


def test_a_dry_run_launches_nothing_and_other_threads_launch() -> None:
    seen = []
    with dry_run_launches():
        seen.append(copied())
        other = Thread(target=lambda: seen.append(copied()))
        other.start()
        other.join()
    seen.append(copied())
    assert seen == [False, True, True]


def test_each_variant_is_compiled_once_and_a_failure_is_isolated(apart: dict[str, Any]) -> None:
    assert apart["num_kernels"] == 2, "one gate for both widths, and a copy; nonsense is none"
    assert apart["left"] == 0, "whoever launches what failed has it compiled again"
    [error] = apart["errors"]
    assert "is_no_method_of_a_pointer" in error
    assert apart["broken"] == ["integer division or modulo by zero"], "a rehearsal that breaks off is told, not raised"


def test_a_failure_in_a_worker_is_retried_at_the_next_start(apart: dict[str, Any]) -> None:
    assert apart["workers"] == "2 processes"
    assert apart["num_stamps"] == 0, "not all is on disk, and nothing says so"


def test_an_interrupt_does_not_wait_for_uncompiled_kernels(apart: dict[str, Any]) -> None:
    assert apart["interrupted"]


def test_a_launch_during_precompilation_compiles_immediately(apart: dict[str, Any]) -> None:
    assert apart["made between"] == [False], "not found on disk, and not left for later"


def test_an_abandoned_precompilation_leaves_nothing_behind(apart: dict[str, Any]) -> None:
    assert apart["alone"], "no child"
    assert apart["left of two"] == 0, "whoever launches them would wait for ever, or fail"
    assert apart["again of two"] == [2, []]


def test_workers_put_kernels_on_disk_and_threads_load_them(apart: dict[str, Any]) -> None:
    cold, warm, other, single = apart["again"]
    assert cold == ["2 compiled in 2 processes", [True, True]], "this process itself has compiled nothing"
    assert warm == ["2 found compiled", [True, True]]
    assert other == ["1 compiled in 2 processes, 1 found compiled", [True, True]], "one is not enough to know others by"
    assert single == ["2 compiled in 1 threads", [False, False]]


@pytest.mark.long(gpu=True)  # most of a minute
def test_the_kernels_for_hopper_are_compiled_with_this_triton(apart: dict[str, Any]) -> None:
    assert apart["errors_for_hopper"] == []
    assert apart["by children"], "none of them queries the GPU while it is compiled"
    assert apart["num_for_hopper"] == 8, "that for chunks in three ways, two of its lists, a product cut in three ways"


@pytest.mark.long(gpu=True)
def test_attention_fits_gpus_with_less_shared_memory_than_hopper(apart: dict[str, Any]) -> None:
    assert apart["errors_for_small_gpus"] == []
    assert apart["num_for_small_gpus"] == 4, "two lists, for decodes; decodes, and a chunk"


@pytest.mark.long(gpu=True)
def test_rows_with_one_query_and_with_several_are_compiled(apart: dict[str, Any]) -> None:
    assert apart["errors_with_drafts"] == []
    assert apart["num_with_drafts"] == 10, "a list; decodes in four ways; drafts in three, one of them in two; ends"


@pytest.mark.long(gpu=True)
def test_the_passes_of_a_draft_model_are_compiled(apart: dict[str, Any]) -> None:
    assert apart["errors_with_a_draft_model"] == []
    assert apart["num_with_a_draft_model"] >= 20, "of its layers, attention with one query and with two, and sampling"


@pytest.mark.long(gpu=True)
def test_the_passes_of_a_head_are_compiled(apart: dict[str, Any]) -> None:
    assert apart["errors_with_a_head"] == []
    assert apart["num_with_a_head"] >= 15, "of its layer, attention with one query and with eight, and sampling"


@pytest.mark.parametrize(
    "its_kernels", [{"_prefill_kernel", "_gathered_kernel"}, {"_list_kernel", "_hopper_kernel", "_ring_kernel"}]
)
def test_the_dry_run_covers_all_kernels_of_all_cuda_graphs(apart: dict[str, Any], its_kernels: set[str]) -> None:
    told = apart["on hopper"] if "_hopper_kernel" in its_kernels else apart
    few, everything = told["few"], told["all"]
    assert set(few) == set(everything)
    assert len(set(few)) == len(few), "no variant is compiled twice"
    names = {variant.split()[0] for variant in few}
    assert {"_decode_kernel", "_draw", "_sum_kernel", "_dot_kernel"} | its_kernels <= names
    unusual = told["chosen at length"]
    its_names = {variant.split()[0] for variant in unusual}
    assert {"_shape", "_count", "_tile_logprobs", "_row_logprobs", "_draw", "_finish"} <= its_names
    assert set(unusual) <= set(few), "nobody who asks for something unusual waits for a compiler"
