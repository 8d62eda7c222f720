"""Initial step costs, before any request: a roofline of model and device.

With CUDA graphs, and on a CPU, two steps are timed, and the roofline follows from that. On a GPU without graphs the
device's numbers are stated, not measured. They decide only the first steps; the table corrects itself by the median of
what steps of a kind really took. What copying a block to the host and back takes is measured by `measure_transfer`.
"""

from typing import NamedTuple

from quire.runner.cuda_graphs import StepTimes
from quire.sched.cost_model import Constants, CostTable, roofline


class DeviceRates(NamedTuple):
    """What a device sustains."""

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float  # of one step


# Half of an A100's specification (312 TFLOP/s in bf16, 2 TB/s), and a few hundred eager launches per step: sustained
# rates of an ordinary GPU, within a factor of three or so.
_UNTIMED_GPU = DeviceRates(1.5e14, 1e12, 3e-3)


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
    pace: StepTimes | None,
    *,
    num_parameters: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    largest_chunk: int,
) -> CostTable:
    """The table an engine starts with. `num_parameters`: those used per token."""
    if pace is not None:
        measured = measured_costs(
            pace, weight_bytes=weight_bytes, kv_bytes_per_token=kv_bytes_per_token, num_parameters=num_parameters
        )
        return CostTable(measured, largest_chunk)
    constants = roofline(
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        flops_per_s=_UNTIMED_GPU.flops_per_s,
        bytes_per_s=_UNTIMED_GPU.bytes_per_s,
        overhead_s=_UNTIMED_GPU.overhead_s,
    )
    return CostTable(constants, largest_chunk)
