"""Initial step costs, before any measurement: a roofline of model and device.

With CUDA graphs, two captured steps are timed, and the roofline follows from that. Elsewhere the device numbers are
stated, not measured: sustained (not peak) rates of an ordinary machine of each kind, within a factor of three or so.
They decide only the first steps; the table corrects itself by the median of what steps of a kind really took. What
copying a block to the host and back takes is measured at the start, by `measure_transfer`.
"""

from typing import NamedTuple

from quire.config import MachineInfo
from quire.runner.cuda_graphs import StepTimes
from quire.sched.cost_model import Constants, CostTable, roofline


class DeviceRates(NamedTuple):
    """What a device sustains."""

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float  # of one step


# One core of a server CPU with AVX-512 multiplies bf16 at about 40 GFLOP/s in torch; its memory gives 20 GB/s.
_CPU_CORE_FLOPS_PER_S = 4e10
_CPU_BYTES_PER_S = 2e10
_CPU_OVERHEAD_S = 1e-3
# Half of an A100's specification (312 TFLOP/s in bf16, 2 TB/s), and a few hundred eager launches per step.
_CUDA = DeviceRates(1.5e14, 1e12, 3e-3)


def device_rates(machine: MachineInfo) -> DeviceRates:
    if machine.device == "cuda":
        return _CUDA
    return DeviceRates(_CPU_CORE_FLOPS_PER_S * machine.num_cores, _CPU_BYTES_PER_S, _CPU_OVERHEAD_S)


def measured_costs(pace: StepTimes, *, weight_bytes: int, kv_bytes_per_token: int, num_parameters: int) -> Constants:
    """A step with one row reads the weights once; a full one multiplies by them."""
    return roofline(
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        flops_per_s=2 * num_parameters / pace.token_s,
        bytes_per_s=weight_bytes / pace.decode_s,
        overhead_s=0.0,
    )


def first_costs(
    machine: MachineInfo,
    *,
    num_parameters: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    largest_chunk: int,
    pace: StepTimes | None = None,
) -> CostTable:
    """The table an engine starts with. `num_parameters`: those used per token."""
    if pace is not None:
        measured = measured_costs(
            pace, weight_bytes=weight_bytes, kv_bytes_per_token=kv_bytes_per_token, num_parameters=num_parameters
        )
        return CostTable(measured, largest_chunk)
    rates = device_rates(machine)
    constants = roofline(
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        flops_per_s=rates.flops_per_s,
        bytes_per_s=rates.bytes_per_s,
        overhead_s=rates.overhead_s,
    )
    return CostTable(constants, largest_chunk)
