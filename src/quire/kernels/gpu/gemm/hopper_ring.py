"""Pipelined GEMM for Hopper, in Gluon: x @ weight.T for 2 to 128 rows. Bound by reading the weight from memory.

Warp-specialised: one loader warp fills a ring of shared-memory slots by TMA, four consumer warps multiply (WGMMA).
The loader issues weight loads before the input is ready, while other kernels still run (programmatic dependent launch).
For the tensor cores the weights are the rows, 64 at a time, and the rows of x are columns: 16 to 128, a power of two.
`hopper_split` decides the tiles and how programs share them. Sums are float32, in a fixed order whichever program
finishes first. Dispatch is in hopper_dispatch.py.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.gpu.gemm.hopper_split import COLUMNS, MAX_ROWS, OUTS, GemmSplit
from quire.kernels.gpu.gluon_compat import tensor_descriptor, tma_load, warps_barrier
from quire.kernels.gpu.launch import launch_with_pdl, pdl_launch_dependents, pdl_wait

_OUTS = gl.constexpr(OUTS)
_COLUMNS = gl.constexpr(COLUMNS)
_TRANSPOSED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))  # eight outputs of a row per thread
_WARPS = 4
_LOADER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _unit_range(program, total, num_programs):
    """First unit of a program, and the one behind its last."""
    return program * total // num_programs, (program + 1) * total // num_programs


@gluon.jit
def _last_program(tile, num_slices, total, num_programs):
    """The program that has the last unit of a tile."""
    return ((tile + 1) * num_slices * num_programs - 1) // total


@gluon.jit
def _load_weights(weight, unit, num_slices, ready, buffer, num_bytes: gl.constexpr):
    """TMA load of a unit's weights; the expected bytes include the rows of x, which follow."""
    mbarrier.expect(ready, num_bytes)
    tma_load(weight, [unit // num_slices * _OUTS, unit % num_slices * _COLUMNS], ready, buffer)


@gluon.jit
def _loader(
    weight, x, w_bufs, x_bufs, ready, empty, total, num_slices, num_programs,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loader warp: weights for the whole ring, then the rows of x, then both as slots are released."""
    num_bytes: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes
    first, end = _unit_range(gl.program_id(0), total, num_programs)
    ahead = gl.minimum(end - first, STAGES)
    pdl_launch_dependents(PDL)
    for i in range(ahead):
        _load_weights(weight, first + i, num_slices, ready.index(i), w_bufs.index(i), num_bytes)
    pdl_wait(PDL)
    for i in range(ahead):
        tma_load(x, [0, (first + i) % num_slices * _COLUMNS], ready.index(i), x_bufs.index(i))
    for i in range(ahead, end - first):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        _load_weights(weight, first + i, num_slices, ready.index(slot), w_bufs.index(slot), num_bytes)
        tma_load(x, [0, (first + i) % num_slices * _COLUMNS], ready.index(slot), x_bufs.index(slot))


@gluon.jit
def _store(sums, output, tile, num_rows, out_width, TRANSPOSED: gl.constexpr):
    """sums: [outputs, rows]. TRANSPOSED: first, so that a thread stores adjacent outputs."""
    layout: gl.constexpr = _TRANSPOSED if TRANSPOSED else sums.type.layout
    numbers = gl.convert_layout(sums.to(output.dtype.element_ty), layout)
    outs = gl.expand_dims(tile * _OUTS + gl.arange(0, _OUTS, layout=gl.SliceLayout(1, layout)), 1)
    rows = gl.expand_dims(gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    gl.store(output + rows * out_width + outs, numbers, mask=(rows < num_rows) & (outs < out_width))


@gluon.jit
def _add_partials(sums, places, partials, arrival, program, last_program):
    """Partial sums of this tile from the programs behind this one, in order, as soon as all have arrived."""
    arrived = gl.atomic_add(arrival, 0, sem="acquire", scope="gpu")
    while arrived < last_program - program:
        arrived = gl.atomic_add(arrival, 0, sem="acquire", scope="gpu")
    warps_barrier()
    for other in range(program + 1, last_program + 1):
        sums += gl.load(partials + other * (sums.shape[0] * sums.shape[1]) + places, cache_modifier=".cg")
    gl.store(arrival, 0)  # for the next launch
    return sums


@gluon.jit
def _multiply_run(w_bufs, x_bufs, ready, empty, sums, count, num_units, STAGES: gl.constexpr):
    """WGMMA over the units of one tile, as they arrive. `count`: units before them."""
    for unit in range(num_units):
        slot = count % STAGES
        mbarrier.wait(ready.index(slot), (count // STAGES) & 1)
        adding = warpgroup_mma(w_bufs.index(slot), x_bufs.index(slot).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[adding])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=unit > 0)
        count += 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
    return sums, count


@gluon.jit
def _consumer(
    bias, output, partials, arrivals, w_bufs, x_bufs, ready, empty, total, num_slices, num_programs, num_rows,
    out_width,
    ROWS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The consumer warpgroup. Tile by tile: sums of this program's run, then the reduction or the store."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    program = gl.program_id(0)
    first, end = _unit_range(program, total, num_programs)
    pdl_wait(PDL)  # before it nothing is written, and only weights are read
    outs = gl.arange(0, _OUTS, layout=gl.SliceLayout(1, layout))
    places = gl.expand_dims(outs * ROWS, 1) + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout)), 0)
    count = 0
    for tile in range(first // num_slices, (end + num_slices - 1) // num_slices):
        begin = gl.maximum(first, tile * num_slices)
        num_units = gl.minimum(end, (tile + 1) * num_slices) - begin
        sums = gl.zeros([_OUTS, ROWS], gl.float32, layout)
        sums, count = _multiply_run(w_bufs, x_bufs, ready, empty, sums, count, num_units, STAGES)
        has_first = begin == tile * num_slices
        if bias is not None:
            present = (tile * _OUTS + outs < out_width) & has_first
            offsets = gl.load(bias + tile * _OUTS + outs, mask=present, other=0.0).to(gl.float32)
            sums += gl.expand_dims(offsets, 1)
        if SPLITS > 1:
            _store(sums, output + program % SPLITS * (num_rows * out_width), tile, num_rows, out_width, False)
        elif SPLITS == 1:
            _store(sums, output, tile, num_rows, out_width, True)
        else:
            if has_first:
                last_program = _last_program(tile, num_slices, total, num_programs)
                if last_program > program:
                    sums = _add_partials(sums, places, partials, arrivals + tile, program, last_program)
                _store(sums, output, tile, num_rows, out_width, True)
            else:
                gl.store(partials + program * (_OUTS * ROWS) + places, sums)
                warps_barrier()
                gl.atomic_add(arrivals + tile, 1, sem="release", scope="gpu")


# One compilation serves every width and number of rows with the same split.
@gluon.jit(do_not_specialize=["total", "num_slices", "num_programs", "num_rows"])
def _ring_kernel(
    weight,  # TMA descriptor of [out_width, in_width]: boxes of tile x slice
    x,  # TMA descriptor of [num_rows, in_width]: boxes of ROWS x slice
    bias,  # [out_width] or None
    output,  # [num_rows, out_width], or [SPLITS, num_rows, out_width] float32
    partials,  # [programs, 64, ROWS] float32
    arrivals,  # [tiles] int32: zeros between launches
    total, num_slices, num_programs, num_rows, out_width,
    ROWS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    w_bufs = gl.allocate_shared_memory(weight.dtype, [STAGES, _OUTS, _COLUMNS], weight.layout)
    x_bufs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, _COLUMNS], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_consumer, (bias, output, partials, arrivals, w_bufs, x_bufs, ready, empty, total, num_slices, num_programs,
                     num_rows, out_width, ROWS, SPLITS, STAGES, PDL)),
        (_loader, (weight, x, w_bufs, x_bufs, ready, empty, total, num_slices, num_programs, STAGES, PDL)),
    ], [1], [_LOADER_REGISTERS])  # fmt: skip


def weight_descriptor(weight: Tensor) -> TensorDescriptor:
    """TMA descriptor of a weight [out, in]."""
    return tensor_descriptor(weight, OUTS, COLUMNS)


def ring_gemm(
    x: Tensor,  # [rows, in], contiguous
    weight: TensorDescriptor,  # of [out, in], by `weight_descriptor`
    bias: Tensor | None,  # [out]
    partials: Tensor,  # scratch for the partial sums of all programs
    arrivals: Tensor,  # [tiles] int32: zeros before and after
    how: GemmSplit,
) -> Tensor:
    """[rows, out], as x; or [splits, rows, out] float32."""
    num_rows, out_width = x.shape[0], weight.shape[0]
    shape = (how.splits, num_rows, out_width) if how.splits > 1 else (num_rows, out_width)
    output = torch.empty(shape, dtype=torch.float32 if how.splits > 1 else x.dtype, device=x.device)
    # Per thread: only what the accumulators need, so that programs of two kernels fit on an SM (PDL).
    num_registers = 128 if how.box_rows == MAX_ROWS else 80
    launch_with_pdl(
        _ring_kernel, (how.num_programs,),
        weight, tensor_descriptor(x, how.box_rows, COLUMNS), bias, output, partials, arrivals,
        how.num_tiles * how.num_slices, how.num_slices, how.num_programs, num_rows, out_width,
        ROWS=how.box_rows, SPLITS=how.splits, STAGES=how.stages,
        num_warps=_WARPS, maxnreg=num_registers,
    )  # fmt: skip
    return output
