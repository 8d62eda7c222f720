"""Runs in its own process, where kernels are compiled and not interpreted, for a GPU that need not exist.

Prints a line of JSON: how many kernels were compiled ahead and by whom, what failed, and which of a runner's kernels a
rehearsal of a few shapes and layers finds, and which all shapes and layers have.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from triton import AsyncCompileMode, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import max_shared_mem
from triton.runtime import driver
from triton.runtime._async_compile import active_mode

from quire.core.ids import Row, SequenceId
from quire.core.model import ModelSpec, RopeSpec
from quire.core.sampling import RowSampling
from quire.core.step import Masks, RowStart
from quire.formats.draft_head import dummy_head
from quire.kernels.gpu import compile_workers, drafts
from quire.kernels.gpu.activation import act_and_mul
from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.attention.hopper_dispatch import HopperPrefill
from quire.kernels.gpu.attention.split_merge import shared_memory_budget
from quire.kernels.gpu.copy_blocks import copy_blocks
from quire.kernels.gpu.gemm.hopper_dispatch import HopperGemm
from quire.kernels.gpu.launch import dry_run_launches, launch, supports_pdl
from quire.kernels.gpu.precompile import compile_launched, compiling_launched
from quire.kernels.gpu.sampling.finish import finish_rows
from quire.kernels.interface import AttentionRule, StepLayout
from quire.kernels.row_interface import EndColumns, RowColumns, RowState, Sampled
from quire.kernels.select import select_kernels
from quire.models.decoder import Decoder
from quire.models.draft_head import DraftHead
from quire.runner.device_draft_model import DeviceDraftModel
from quire.runner.device_drafting import DraftConfig
from quire.runner.draft_model import DraftFeatures, DraftModelConfig, feature_geometry
from quire.runner.graph_shapes import shapes_to_capture
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sampling.row_params import SamplingBatch
from quire.weights.allocate import empty_weights
from quire.weights.draft_head_weights import load_draft_head
from tests.tiers import is_long

WINDOWS = (0, 40, 40, 0, 40, 0, 40)
SPEC = ModelSpec(
    "llama", len(WINDOWS), 256, 4, 2, 64, 2048, 997, 4096, 1e-5, RopeSpec(10_000.0, 64),
    tied_embeddings=True, windows=WINDOWS,
)  # fmt: skip
META = torch.device("meta")
HERE = os.getpid()


class FakeGpu:
    """A driver that knows its target, and takes code without running any. No child of this process may ask it."""

    capability, shared_bytes = 90, 232_448

    class utils:  # noqa: N801 -- as Triton's drivers have it
        @staticmethod
        def get_device_properties(device):
            assert os.getpid() == HERE
            return {"max_shared_mem": FakeGpu.shared_bytes}

        @staticmethod
        def load_binary(name, code, shared, device):
            assert os.getpid() == HERE
            return "module", "function", 32, 0, 1024

        @staticmethod
        def unload_module(module):
            pass

    @staticmethod
    def launcher_cls(source, metadata):
        return lambda *args: None

    def get_current_target(self):
        assert os.getpid() == HERE
        return GPUTarget("cuda", FakeGpu.capability, 32)

    def get_current_device(self):
        assert os.getpid() == HERE
        return 0

    def get_current_stream(self, device):
        return 0


@triton.jit
def nonsense(x):
    x.is_no_method_of_a_pointer()


@triton.jit
def fill(x, NUMBER: tl.constexpr):
    tl.store(x, NUMBER)


@contextmanager
def heard_of() -> Iterator[list[bool]]:
    """Of every kernel that this process itself comes to: whether it was on disk already."""
    on_disk: list[bool] = []
    knobs.compilation.listener = lambda **heard: on_disk.append(heard["cache_hit"])
    try:
        yield on_disk
    finally:
        knobs.compilation.listener = None


def compiled_again() -> dict[str, object]:
    """Two kernels that nobody has compiled before, the same two, one of them with another, and one at a time: what is
    said of each, and what this process did itself."""
    x = torch.empty(1, dtype=torch.int32, device=META)
    told = []
    for first, second, num_at_once in ((1, 2, 2), (1, 2, 2), (2, 3, 2), (4, 5, 1)):

        def play(first: int = first, second: int = second) -> None:
            launch(fill, (1,), x, NUMBER=first)
            launch(fill, (1,), x, NUMBER=second)

        fill.device_caches.clear()  # as in a process that begins
        with heard_of() as on_disk:
            told.append((compile_launched(play, num_at_once).describe(), on_disk))
    return {"again": told}


def interrupted() -> dict[str, object]:
    """Somebody who has had enough, with kernels that nobody will compile any more."""

    def play() -> None:
        launch(fill, (1,), torch.empty(1, dtype=torch.int64, device=META), NUMBER=1)
        raise KeyboardInterrupt

    try:
        compile_launched(play, 2)
    except KeyboardInterrupt:
        return {"interrupted": True}
    return {"interrupted": False}


def left_early() -> dict[str, object]:
    """Somebody who launches another kernel while some are compiled, and has then to do with something else."""
    x, other = (torch.empty(1, dtype=dtype, device=META) for dtype in (torch.int16, torch.uint8))

    def play() -> None:
        launch(fill, (1,), x, NUMBER=1)
        launch(fill, (1,), x, NUMBER=2)

    fill.device_caches.clear()
    made: list[bool] = []
    with suppress(ZeroDivisionError), compiling_launched(play, 2), heard_of() as on_disk:
        if active_mode.get() is None:  # else this would wait for ever
            launch(fill, (1,), other, NUMBER=1)
        made.extend(on_disk)
        _ = 1 // 0
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        alone = True
    else:
        alone = False
    num_left = sum(len(cache) for cache, *_ in fill.device_caches.values())
    again = compile_launched(play, 2)
    return {"made between": made, "alone": alone, "left of two": num_left - 1,
            "again of two": (again.num_kernels, again.errors)}  # fmt: skip


def compiled() -> dict[str, object]:
    def play() -> None:
        for width in (64, 128, 64):
            act_and_mul(torch.empty(2, width, dtype=torch.bfloat16, device=META), "silu")
        launch(nonsense, (1,), torch.empty(1, device=META))
        store = torch.empty(4, 32, device=META)
        copy_blocks(store, store, *torch.zeros(2, 1, dtype=torch.int64, device=META))

    done = compile_launched(play, 2)
    num_stamps = len(list(Path(knobs.cache.dir).glob("quire-*")))
    left = [entry for cache, *_ in nonsense.device_caches.values() for entry in cache.values()]
    broken = compile_launched(lambda: 1 // 0, 1)  # type: ignore[arg-type, return-value]
    return {"num_kernels": done.num_kernels, "errors": done.errors, "broken": broken.errors, "left": len(left),
            "workers": done.workers, "num_stamps": num_stamps}  # fmt: skip


def compiled_for_hopper() -> dict[str, object]:
    """Chunks over their pages, and gemm cut in each of three ways: the kernels that no interpreter runs."""
    nothing = torch.zeros(64, dtype=torch.int64, device=META)
    tables, starts = (torch.zeros(size, dtype=torch.int32, device=META) for size in ((2, 8), (3,)))
    layout = StepLayout(nothing, nothing, tables, starts, starts[:2], nothing)
    query = torch.empty(64, 8, 64, dtype=torch.bfloat16, device=META)
    kv_layer = torch.empty(9, 2, 16, 2, 64, dtype=torch.bfloat16, device=META)
    odd_query = torch.empty(64, 6, 192, dtype=torch.float16, device=META)
    odd_kv_layer = torch.empty(9, 2, 32, 2, 192, dtype=torch.float16, device=META)
    gemm = HopperGemm(132, META)
    x, bias = torch.empty(16, 1024, dtype=torch.bfloat16, device=META), torch.empty(4096, device=META)
    whole, many, few = (torch.empty(out, 1024, dtype=x.dtype, device=META) for out in (4096, 16_384, 1024))

    def play() -> None:
        GpuAttention(layout, 0, hopper=HopperPrefill(1)).attend(query, kv_layer, AttentionRule(0.1))
        GpuAttention(layout, 0, hopper=HopperPrefill(1)).attend(query, kv_layer, AttentionRule(0.1, window=40))
        odd_rule = AttentionRule(0.1, window=40, softcap=30.0)
        GpuAttention(layout, 0, hopper=HopperPrefill(1)).attend(odd_query, odd_kv_layer, odd_rule)
        assert None not in (gemm.matmul(x, whole, bias), gemm.matmul(x, many, None))
        assert gemm.matmul_unreduced(x, few, None) is not None

    with heard_of() as on_disk:
        done = compile_launched(play, 2)
    return {"num_for_hopper": done.num_kernels, "errors_for_hopper": done.errors, "by children": all(on_disk)}


@contextmanager
def small_gpu() -> Iterator[None]:
    """As most are that are not Hopper's: an L4, an A10, any RTX."""

    def take(capability: int, shared_bytes: int) -> None:
        FakeGpu.capability, FakeGpu.shared_bytes = capability, shared_bytes
        shared_memory_budget.cache_clear()
        supports_pdl.cache_clear()
        max_shared_mem.cache_clear()  # Triton checks kernels against it, and queries the GPU once
        for name in [name for name in sys.modules if name.startswith("quire.kernels.gpu.")]:
            for each in vars(sys.modules[name]).values():
                if isinstance(each, triton.JITFunction):
                    each.device_caches.clear()  # a kernel keeps the target of its first launch

    take(89, 101_376)
    try:
        yield
    finally:
        take(90, 232_448)


def compiled_for_small_gpus() -> dict[str, object]:
    """Decodes, and a chunk, whose tiles, tuned on Hopper, exceed the shared memory of such a GPU."""
    nothing = torch.zeros(61, dtype=torch.int64, device=META)
    tables, starts = (torch.zeros(size, dtype=torch.int32, device=META) for size in ((61, 8), (62,)))
    decodes = StepLayout(nothing, nothing, tables, starts, starts[:61], nothing)
    chunk = StepLayout(nothing, nothing, tables[:1], starts[:2], starts[:1], nothing)

    def play() -> None:
        for layout, num_decodes, dim in ((decodes, 61, 128), (chunk, 0, 256)):
            query = torch.empty(61, 16, dim, dtype=torch.bfloat16, device=META)
            kv_layer = torch.empty(9, 2, 16, 4, dim, dtype=torch.bfloat16, device=META)
            GpuAttention(layout, num_decodes).attend(query, kv_layer, AttentionRule(0.1))

    with small_gpu():
        done = compile_launched(play, 2)
    return {"num_for_small_gpus": done.num_kernels, "errors_for_small_gpus": done.errors}


def compiled_with_drafts() -> dict[str, object]:
    """Decodes with one query and with several, and the kernels that draft and verify: the interpreter minds less."""
    numbers, tables, starts = (
        torch.zeros(size, dtype=dtype, device=META)
        for size, dtype in ((24, torch.int64), ((6, 8), torch.int32), (7, torch.int32))
    )
    states = RowState(numbers, numbers, numbers.bool(), torch.zeros(24, 99, dtype=torch.int32, device=META))
    columns = RowColumns(tables.new_zeros(24, 8), numbers, numbers, numbers, numbers.bool())
    ends = EndColumns(numbers, numbers[:, None])

    def play() -> None:
        for num_decodes, max_queries, group in ((6, 0, 3), (0, 2, 4), (0, 4, 3), (0, 4, 4)):
            layout = StepLayout(numbers, numbers, tables, starts, starts[:6], numbers, num_decodes, max_queries)
            query = torch.empty(num_decodes or 24, 2 * group, 64, dtype=torch.bfloat16, device=META)
            kv_layer = torch.empty(9, 2, 16, 2, 64, dtype=torch.bfloat16, device=META)
            GpuAttention(layout, num_decodes).attend(query, kv_layer, AttentionRule(0.1, window=40))
        tails = torch.zeros(6, 12, dtype=torch.int32, device=META)
        drafts.match_suffix(tables, numbers[:6], numbers[:6], numbers[:6], tails)
        drafts.verify_inputs(numbers[:6], numbers[:7], numbers[:18].view(6, 3), columns, 16, 24)
        sampled = Sampled(numbers, numbers.bool())
        for planted in (None, numbers[0]):
            drafts.verify_rows(sampled, numbers, numbers[:6], numbers[:7], numbers, ends, states, 4, planted)
        finish_rows(sampled, numbers, numbers, ends, states)

    done = compile_launched(play, 2)
    return {"num_with_drafts": done.num_kernels, "errors_with_drafts": done.errors}


class Listing(Executor):
    """Compiles nothing, and has a list of what it should have compiled."""

    def __init__(self) -> None:
        self.variants: list[str] = []

    def submit(self, compile_kernel, /):
        [source] = [c.cell_contents for c in compile_kernel.__closure__ if hasattr(c.cell_contents, "constants")]
        self.variants.append(f"{source.fn.__name__} {source.signature} {source.constants} {source.attrs}")
        listed: Future[object] = Future()
        listed.set_exception(NotImplementedError())
        return listed


def variants_of(play: Callable[[], None]) -> list[str]:
    listing = Listing()
    with AsyncCompileMode(listing, ignore_errors=True), dry_run_launches():
        play()
    return listing.variants


def new_runner(hopper: HopperPrefill | None = None, gemm: HopperGemm | None = None) -> ModelRunner:
    choice = select_kernels("cuda")
    choice.kernels._hopper = hopper
    choice.kernels._gemm = gemm
    model = Decoder(SPEC, empty_weights(SPEC, torch.bfloat16, META), choice.kernels, 16)
    stores = new_store(model.kv_geometry, 1, 16, META)
    return ModelRunner(
        model, stores, max_rows=48, max_length=4096, row_kernels=choice.row_kernels, max_step_tokens=4096
    )


def found(runner: ModelRunner) -> dict[str, object]:
    few = variants_of(runner.dry_run)
    wanted = shapes_to_capture(48, 4096)
    runner._captured.representative = [*wanted.first, *wanted.later]
    model = runner._captured.model
    model.truncated = lambda: model
    return {"few": few, "all": variants_of(runner.dry_run), "chosen at length": variants_of(partial(choose, runner))}


UNUSUAL = (
    RowSampling(repetition_penalty=1.1, num_logprobs=2),
    RowSampling(temperature=0.5, logit_bias=((3, 1.0),)),
    RowSampling(temperature=0.5, top_p=0.9, min_tokens=3, end_ids=tuple(range(9))),
    RowSampling(masked=True),
)


def choose(runner: ModelRunner) -> None:
    """For rows that ask for what is not recorded, one after the other and all together."""
    for row, sampling in enumerate(UNUSUAL):
        tokens = np.zeros(3, dtype=np.int32)
        runner._sampler.assign([RowStart(Row(row), SequenceId(row), 0, tokens, 2, 1000, sampling)])
    for rows in ([0], [1], [2], [3], [0, 1, 3], [0, 1, 2, 3]):
        places = torch.tensor(rows, device=META)
        asking = SamplingBatch(places, np.array(rows, dtype=np.int32), places)
        masks = Masks(np.array([3], dtype=np.int32), np.zeros((1, 32), dtype=np.int32)) if 3 in rows else None
        runner._sample(torch.empty(len(rows), SPEC.vocab_size, device=META), asking, masks)
        if masks is not None:
            lines = torch.empty(4, SPEC.vocab_size, device=META)
            runner._sampler.mask(lines, asking.host_rows, np.arange(len(rows)), masks)


def draft_passes(what: str) -> Callable[[], None]:
    """The captured passes of a draft model or of a head, and pieces of text."""
    choice = select_kernels("cuda")
    assert choice.draft_kernels is not None
    model, draft = (Decoder(SPEC, empty_weights(SPEC, torch.bfloat16, META), choice.kernels, 16) for _ in range(2))
    stores = [new_store(each.kv_geometry, 1, 16, META) for each in (model, draft)]
    config = DraftModelConfig(draft, stores[1], 4096, SPEC.vocab_size)
    if what == "head":
        checkpoint = dummy_head(SPEC)
        weights = load_draft_head(checkpoint, torch.bfloat16, META)
        head = DraftHead(checkpoint.spec, weights, choice.kernels, 16, model.embed)
        geometries = (head.kv_geometry, feature_geometry(head.hidden_size, torch.bfloat16))
        keys, states = (new_store(each, 1, 16, META) for each in geometries)
        features = DraftFeatures(model.capture(checkpoint.spec.captured_layers), head.fuse, states)
        config = DraftModelConfig(head, keys, 4096, SPEC.vocab_size, features)
    runner = ModelRunner(
        model,
        stores[0],
        max_rows=48,
        max_length=4096,
        row_kernels=choice.row_kernels,
        device_drafts=DraftConfig(None, choice.draft_kernels, model=config),
    )
    assert isinstance(runner._draft_model, DeviceDraftModel)
    return torch.inference_mode()(partial(runner._draft_model.dry_run, (1, 2, 48)))


def compiled_draft_passes() -> dict[str, object]:
    passes = {what: draft_passes(what) for what in ("draft_model", "head")}
    counted = {f"num_with_a_{what}": len(variants_of(play)) for what, play in passes.items()}  # before any is compiled
    return counted | {f"errors_with_a_{what}": compile_launched(play, 2).errors for what, play in passes.items()}


if __name__ == "__main__":
    compile_workers._MAX_FORKING_S = 60.0  # on a busy machine too
    driver.set_active(FakeGpu())
    hopper = new_runner(HopperPrefill(8), HopperGemm(132, META))
    print(
        json.dumps(
            compiled()
            | compiled_again()
            | interrupted()
            | left_early()
            | found(new_runner())
            | {"on hopper": found(hopper)}
            | (compiled_for_hopper() | compiled_for_small_gpus() | compiled_with_drafts() if is_long(gpu=True) else {})
            | (compiled_draft_passes() if is_long(gpu=True) else {})
        )
    )
