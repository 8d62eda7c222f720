"""transformers' `generate` with static batches on the weights that quire runs, compared in one process.

Repeats are interleaved (A-B-A-B), so that noise of the machine reaches both. A separate file: it needs the optional
package transformers.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quire.bench.workload import BenchJob, mixed_jobs
from quire.core.errors import UnsupportedModel
from quire.core.model import ModelSpec, RopeKind
from quire.core.sampling import SamplingParams
from quire.llm import LLM
from quire.models.parameters import DecoderWeights, as_tensor


def as_llama(spec: ModelSpec, weights: DecoderWeights, dtype: torch.dtype) -> LlamaForCausalLM:
    """A transformers model with the same weights. Only Llama shapes without rope scaling."""
    if spec.family != "llama" or spec.rope.kind is not RopeKind.PLAIN:
        raise UnsupportedModel(
            f"quire bench transformers compares plain Llama shapes, not {spec.family} with {spec.rope.kind.value} rope."
        )
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=spec.tied_embeddings,
        attention_bias=spec.qkv_bias,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu")
    state = _state(spec, weights)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, strict=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    return model.eval()


def _state(spec: ModelSpec, weights: DecoderWeights) -> dict[str, Tensor]:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    state = {
        "model.embed_tokens.weight": as_tensor(weights.embedding),
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": as_tensor(weights.head),
    }
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        query, key, value = torch.split(as_tensor(layer.qkv), [queries, keys, keys])
        gate, up = as_tensor(layer.gate_up).chunk(2)
        state |= {
            prefix + "input_layernorm.weight": layer.attention_norm,
            prefix + "self_attn.q_proj.weight": query,
            prefix + "self_attn.k_proj.weight": key,
            prefix + "self_attn.v_proj.weight": value,
            prefix + "self_attn.o_proj.weight": as_tensor(layer.output),
            prefix + "post_attention_layernorm.weight": layer.mlp_norm,
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": as_tensor(layer.down),
        }
    return state


@torch.inference_mode()
def generate_static(model: LlamaForCausalLM, jobs: list[BenchJob], batch_size: int) -> list[list[int]]:
    """Static batches in order of arrival, padded on the left, each run to its longest output. Greedy."""
    outputs: list[list[int]] = []
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        width = max(len(job.prompt) for job in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        longest = max(job.num_output for job in batch)
        generated = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
        )
        for row, job in enumerate(batch):
            outputs.append(generated[row, width : width + job.num_output].tolist())
    return outputs


@dataclass(slots=True)
class EngineTimes:
    """The seconds of one engine in each repeat of a workload."""

    name: str
    tokens: int
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class EngineComparison:
    """Both engines on one workload, repeat by repeat."""

    workload: str
    quire: EngineTimes
    baseline: EngineTimes

    @property
    def ratios(self) -> list[float]:
        """How many times faster quire is, in each repeat."""
        return [theirs / ours for ours, theirs in zip(self.quire.seconds, self.baseline.seconds, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def compare_with_transformers(
    llm: LLM,
    baseline: LlamaForCausalLM,
    *,
    num_requests: int,
    batch_size: int,
    repeats: int,
    say: Callable[[str], None],
) -> list[EngineComparison]:
    """One request alone, then many of mixed lengths, `repeats` times each, interleaved, after a warm-up."""
    vocab_size = llm.built.checkpoint.spec.vocab_size
    single = [BenchJob(mixed_jobs(1, vocab_size, seed=7)[0].prompt[:64], 64)]
    many = mixed_jobs(num_requests, vocab_size, seed=0)
    comparisons = [
        EngineComparison("one request", EngineTimes("quire", 64), EngineTimes("transformers", 64)),
        EngineComparison(
            f"{num_requests} mixed requests",
            EngineTimes("quire", sum(job.num_output for job in many)),
            EngineTimes(f"transformers, static batches of {batch_size}", sum(job.num_output for job in many)),
        ),
    ]
    say("warm-up")
    warm = [BenchJob(job.prompt[:16], 4) for job in many[:2]]
    _run_quire(llm, warm)
    generate_static(baseline, warm, 2)
    for repeat in range(repeats):
        for current, jobs in zip(comparisons, (single, many), strict=True):
            say(f"repeat {repeat + 1} of {repeats}: {current.workload}")
            current.quire.seconds.append(_timed(lambda jobs=jobs: _run_quire(llm, jobs)))  # type: ignore[misc]
            current.baseline.seconds.append(
                _timed(lambda jobs=jobs: generate_static(baseline, jobs, batch_size))  # type: ignore[misc]
            )
    return comparisons


def _run_quire(llm: LLM, jobs: list[BenchJob]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True) for job in jobs]
    outputs = llm.generate([{"prompt_token_ids": job.prompt} for job in jobs], params, progress=False)
    for job, output in zip(jobs, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == job.num_output, output


def _timed(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
