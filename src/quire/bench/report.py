"""A measurement as plain data, for JSON: the figures, and the raw values that they were derived from."""

from quire.bench.closed import Measurement, Run
from quire.bench.observer import Busy, StepEvent
from quire.bench.percentiles import percentiles_ms

Report = dict[str, object]

NO_GPU = "not measured: the device is the CPU, which has no clock of its own and computes each step in the loop's time"


def throughput(measured: Measurement) -> Report:
    return {
        "bench": "throughput",
        **_work(measured),
        "output_tokens_per_s": measured.num_output / measured.seconds,
        "requests_per_s": measured.num_requests / measured.seconds,
        "repeats": [_repeat(run) for run in measured.runs],
    }


def latency(measured: Measurement) -> Report:
    """Percentiles are over the tokens of all repeats, first tokens over the requests of all."""
    gaps_s = [gap for run in measured.runs for gap in run.gaps_s]
    first_s = [first for run in measured.runs for first in run.first_tokens_s]
    gaps, first = percentiles_ms(gaps_s), percentiles_ms(first_s)
    return {
        "bench": "latency",
        **_work(measured),
        "ms_per_token": 1000 * measured.seconds / measured.runs[0].longest_output,
        "first_token_ms": None if first is None else first._asdict(),
        "gap_ms": None if gaps is None else gaps._asdict(),
        "repeats": [
            {**_repeat(run), "steps": [_step(step, run.steps[0]) for step in run.steps]} for run in measured.runs
        ],
    }


def _work(measured: Measurement) -> Report:
    return {
        "workload": measured.workload,
        "whole": measured.part.whole,  # if not, it is no figure of the workload
        "scale": measured.part.scale,
        "seed": measured.seed,
        "requests": measured.num_requests,
        "input_tokens": measured.num_input,
        "output_tokens": measured.num_output,
        "seconds": measured.seconds,
    }


def _repeat(run: Run) -> Report:
    return {
        "seconds": run.seconds,
        "output_tokens_per_s": run.output_tokens_per_s,
        "ms_per_token": run.ms_per_token,
        "first_token_s": run.first_tokens_s,
        "num_steps": len(run.steps),
        "preemptions": sum(request.num_preemptions for request in run.requests),
        "cached_tokens": sum(request.num_cached_tokens for request in run.requests),
        "gpu_busy": _busy(run.gpu_busy),
        "gpu_busy_in_decode": _busy(run.gpu_busy_in_decode),
        "gpu_busy_note": NO_GPU if run.gpu_busy is None else None,
    }


def _busy(found: Busy | None) -> Report | None:
    return None if found is None else found._asdict()


def _step(step: StepEvent, first: StepEvent) -> Report:
    """Times in seconds since the first step was launched."""
    span = step.span
    return {
        "launched_s": step.launched_s - first.launched_s,
        "done_s": step.done_s - first.launched_s,
        "prompt_tokens": step.num_prompt,
        "output_tokens": len(step.rows),
        "device_s": None if span is None else span.last.seconds_since(span.first),
    }
