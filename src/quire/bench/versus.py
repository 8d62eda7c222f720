"""Two commands in turns on one machine: ours, theirs, ours. Reads what each prints, and knows neither's insides.

A command prints lines; those that are JSON objects with a workload, its seconds and its output tokens are results. All
else it says is passed over.

transformers' `generate` on the very weights that quire runs, for races in one process.

Races in one process, side by side: A-B-A-B, so that a noisy machine is noisy for both.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quire.bench.workload import BenchJob, mixed_jobs
from quire.core.errors import ConfigError, UnsupportedModel
from quire.core.model import ModelSpec, RopeKind
from quire.core.sampling import SamplingParams
from quire.llm import LLM
from quire.models.parameters import DecoderWeights

# How scripts call the same thing; the first of each is how ours do.
_SECONDS = ("seconds", "wall_s", "elapsed_s")
_OUTPUT = ("output_tokens", "out_tok")


class DuelResult(NamedTuple):
    """A workload as one command ran it once."""

    workload: str
    seconds: float
    num_output: int


@dataclass(slots=True)
class DuelHeat:
    """One workload: the seconds of each of our turns and of each of theirs, which lie between two of ours."""

    workload: str
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    num_output: set[int] = field(default_factory=set)  # one number, if both did the same work

    @property
    def ratios(self) -> list[float]:
        """How many times as long they took as our turns before and after, for each of their turns."""
        around = zip(self.ours_s, self.ours_s[1:], strict=False)
        return [theirs / ((before + after) / 2) for theirs, (before, after) in zip(self.theirs_s, around, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def drift(self) -> float:
        """Our slowest turn by our fastest: what the machine itself did to the figures."""
        return max(self.ours_s) / min(self.ours_s)

    @property
    def same_work(self) -> bool:
        return len(self.num_output) == 1


def duel(ours: Many[str], theirs: Many[str], *, rounds: int, say: Callable[[str], None]) -> list[DuelHeat]:
    """Ours, then `rounds` times theirs and ours; a heat for each workload that both named in every turn."""
    turns = [_run("quire", ours, say)]
    rival_turns = []
    for _ in range(rounds):
        rival_turns.append(_run("the rival", theirs, say))
        turns.append(_run("quire", ours, say))
    heats = []
    for workload in turns[0]:
        if all(workload in turn for turn in (*turns, *rival_turns)):
            mine, other = [turn[workload] for turn in turns], [turn[workload] for turn in rival_turns]
            num_output = {result.num_output for result in (*mine, *other)}
            heats.append(DuelHeat(workload, [r.seconds for r in mine], [r.seconds for r in other], num_output))
    if not heats:
        named = [", ".join(turn) or "none" for turn in (turns[0], rival_turns[0])]
        raise ConfigError(f"The two have no workload in common: quire ran {named[0]}; the rival, {named[1]}.")
    return heats


def _run(who: str, command: Many[str], say: Callable[[str], None]) -> dict[str, DuelResult]:
    """What a command's turn gave, by workload; of a workload that it ran several times, the median."""
    say(f"{who}'s turn")
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="replace", check=False)
    except OSError as error:
        raise ConfigError(f"The command of {who} cannot be run: {error}.") from None
    if ended.returncode != 0:
        raise ConfigError(f"The command of {who} ended with status {ended.returncode}: {' '.join(command)}")
    found: dict[str, list[DuelResult]] = {}
    for line in ended.stdout.splitlines():
        result = read_result(line)
        if result is not None:
            found.setdefault(result.workload, []).append(result)
    return {
        name: DuelResult(name, statistics.median(r.seconds for r in results), results[0].num_output)
        for name, results in found.items()
    }


def read_result(line: str) -> DuelResult | None:
    """None if the line is something else."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    if not isinstance(told, dict) or not isinstance(told.get("workload"), str):
        return None
    seconds = next((told[name] for name in _SECONDS if name in told), None)
    num_output = next((told[name] for name in _OUTPUT if name in told), None)
    if not isinstance(seconds, int | float) or not isinstance(num_output, int):
        return None
    return DuelResult(told["workload"], float(seconds), num_output)


def as_llama(spec: ModelSpec, weights: DecoderWeights, dtype: torch.dtype) -> LlamaForCausalLM:
    """A transformers model over the same numbers. Only plain Llama shapes, such as the default model's."""
    if spec.family != "llama" or spec.rope.kind is not RopeKind.PLAIN:
        raise UnsupportedModel(
            f"The race knows plain Llama shapes, not {spec.family} with {spec.rope.kind.value} rope."
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
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.head,
    }
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        query, key, value = torch.split(layer.qkv, [queries, keys, keys])
        gate, up = layer.gate_up.chunk(2)
        state |= {
            prefix + "input_layernorm.weight": layer.attention_norm,
            prefix + "self_attn.q_proj.weight": query,
            prefix + "self_attn.k_proj.weight": key,
            prefix + "self_attn.v_proj.weight": value,
            prefix + "self_attn.o_proj.weight": layer.output,
            prefix + "post_attention_layernorm.weight": layer.mlp_norm,
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": layer.down,
        }
    return state


@torch.inference_mode()
def generate_static(model: LlamaForCausalLM, jobs: list[BenchJob], batch_size: int) -> list[list[int]]:
    """Sealed batches in order of arrival, padded on the left, each run to its longest member. Greedy."""
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
class RaceEntry:
    """One contestant in one discipline: seconds per repeat."""

    name: str
    tokens: int
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Race:
    """Both contestants, repeat by repeat."""

    discipline: str
    quire: RaceEntry
    rival: RaceEntry

    @property
    def ratios(self) -> list[float]:
        """How many times faster quire was, in each repeat."""
        return [theirs / ours for ours, theirs in zip(self.quire.seconds, self.rival.seconds, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def race(
    llm: LLM,
    rival: LlamaForCausalLM,
    *,
    num_requests: int,
    batch_size: int,
    repeats: int,
    say: Callable[[str], None],
) -> list[Race]:
    """One request alone, then many of mixed lengths, `repeats` times each, interleaved, after a warm-up."""
    vocab_size = llm.built.checkpoint.spec.vocab_size
    single = [BenchJob(mixed_jobs(1, vocab_size, seed=7)[0].prompt[:64], 64)]
    many = mixed_jobs(num_requests, vocab_size, seed=0)
    races = [
        Race("one request", RaceEntry("quire", 64), RaceEntry("transformers", 64)),
        Race(
            f"{num_requests} mixed requests",
            RaceEntry("quire", sum(job.num_output for job in many)),
            RaceEntry(f"transformers, static batches of {batch_size}", sum(job.num_output for job in many)),
        ),
    ]
    say("warm-up")
    warm = [BenchJob(job.prompt[:16], 4) for job in many[:2]]
    _run_quire(llm, warm)
    generate_static(rival, warm, 2)
    for repeat in range(repeats):
        for current, jobs in zip(races, (single, many), strict=True):
            say(f"repeat {repeat + 1} of {repeats}: {current.discipline}")
            current.quire.seconds.append(_timed(lambda jobs=jobs: _run_quire(llm, jobs)))  # type: ignore[misc]
            current.rival.seconds.append(
                _timed(lambda jobs=jobs: generate_static(rival, jobs, batch_size))  # type: ignore[misc]
            )
    return races


def _run_quire(llm: LLM, jobs: list[BenchJob]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True) for job in jobs]
    outputs = llm.generate([{"prompt_token_ids": job.prompt} for job in jobs], params, progress=False)
    for job, output in zip(jobs, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == job.num_output, output


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
