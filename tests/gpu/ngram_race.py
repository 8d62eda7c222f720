"""A race of prompt lookup: the same checkpoint and prompts through quire and through another engine's n-gram drafts.

    python -m tests.gpu.ngram_race write FOLDER          a Llama-3.1-8B whose next token is a function of the last one
    python -m tests.gpu.ngram_race quire FOLDER [ngram|off|auto]
    python -m tests.gpu.ngram_race vllm FOLDER [ngram|ngram_gpu|off]   with vLLM on PYTHONPATH

The checkpoint has random weights of the usual sizes, whose layers add next to nothing to the residual: the head has
for each token the embedding of the one before it. So both engines do all the work of the model, and what they must
answer is known: every output is compared. A line of JSON per task and number of requests.

    repeat    text of period 48: from the second period on every draft is right
    quote     the prompt has the answer in pieces of 8 tokens in another order, with other tokens between them
    new       nothing occurs twice: no draft is right
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

VOCAB = 128_256
HALF = VOCAB // 2
PERIOD, LONG_PERIOD = 48, 2_004  # of the first half of the tokens, and of the second
PROMPT, ANSWER, PIECE, BETWEEN = 320, 192, 8, 4
NUM_REQUESTS = (1, 8, 64, 256)
TASKS = ("repeat", "quote", "new")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": VOCAB, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
Jobs = list[list[int]]


def successors() -> np.ndarray:
    """Token by token, the one that follows: a permutation of short and of long cycles."""
    order = np.random.default_rng(5).permutation(VOCAB)
    following = np.empty(VOCAB, dtype=np.int64)
    for half, period in ((order[:HALF], PERIOD), (order[HALF:], LONG_PERIOD)):
        for start in range(0, HALF, period):
            cycle = half[start : start + period]
            following[cycle] = np.roll(cycle, -1)
    return following


def chain(following: np.ndarray, token: int, length: int) -> list[int]:
    tokens = []
    for _ in range(length):
        token = int(following[token])
        tokens.append(token)
    return tokens


def prompts(task: str, number: int, turn: int, following: np.ndarray) -> Jobs:
    """Of one turn; no two turns have a prompt in common."""
    chance = np.random.default_rng([TASKS.index(task), number, turn])
    order = np.random.default_rng(5).permutation(VOCAB)
    half = order[:HALF] if task == "repeat" else order[HALF:]
    found = []
    for _ in range(number):
        last = int(chance.choice(half))
        begun = [int(each) for each in chance.integers(0, VOCAB, PROMPT - 1)]
        if task == "quote":
            answer = chain(following, last, ANSWER)
            pieces = [answer[start : start + PIECE] for start in range(0, ANSWER, PIECE)]
            for place, piece in enumerate(chance.permutation(len(pieces))):
                start = place * (PIECE + BETWEEN)
                begun[start : start + PIECE] = pieces[int(piece)]
        found.append([*begun, last])
    return found


def write(folder: Path) -> None:
    """16 GB of safetensors."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = {f"t{number}": number for number in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    random = torch.Generator("cuda").manual_seed(7)

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random, device="cuda", dtype=torch.bfloat16).mul_(scale).cpu()

    ones = torch.ones(4096, dtype=torch.bfloat16)
    embedding = matrix(VOCAB, 4096, 1.0)
    head = torch.empty_like(embedding)
    head[torch.from_numpy(successors())] = embedding
    outside = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": ones}
    save_file(outside, str(folder / "model-00000.safetensors"))
    index = dict.fromkeys(outside, "model-00000.safetensors")
    sizes = {
        "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
    }  # fmt: skip
    for layer in range(32):
        name = f"model-{layer + 1:05d}.safetensors"
        tensors = {
            f"model.layers.{layer}.{each}.weight": matrix(
                *size, 2e-5 if each.endswith(("o_proj", "down_proj")) else 0.02
            )
            for each, size in sizes.items()
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = ones.clone()
        save_file(tensors, str(folder / name))
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def quire_engine(folder: Path, speculative: str) -> Callable[[Jobs], Sequence[Sequence[int]]]:
    from quire import LLM, SamplingParams

    llm = LLM(
        folder,
        device="cuda",
        max_model_len=4096,
        max_num_seqs=256,
        enable_prefix_caching=False,
        speculative=speculative,
    )
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)

    def answer(jobs: Jobs) -> list[Sequence[int]]:
        return [each.outputs[0].token_ids for each in llm.generate(jobs, params)]

    return answer


def vllm_engine(folder: Path, method: str) -> Callable[[Jobs], Sequence[Sequence[int]]]:
    from vllm import LLM, SamplingParams

    lookup = {"method": method, "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    extra = {} if method == "off" else {"speculative_config": lookup}
    llm = LLM(
        model=str(folder), dtype="bfloat16", max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192,
        gpu_memory_utilization=0.9, enable_prefix_caching=False, skip_tokenizer_init=True, generation_config="vllm",
        disable_log_stats=True, **extra,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, min_tokens=ANSWER, ignore_eos=True, detokenize=False)

    def answer(jobs: Jobs) -> list[Sequence[int]]:
        asked = [{"prompt_token_ids": job} for job in jobs]
        return [each.outputs[0].token_ids for each in llm.generate(asked, params, use_tqdm=False)]

    return answer


def race(engine: str, folder: Path, method: str, repeats: int = 2) -> None:
    begun_s = time.perf_counter()
    answer = {"quire": quire_engine, "vllm": vllm_engine}[engine](folder, method)
    following = successors()
    for task in TASKS:  # what is compiled or captured once
        answer(prompts(task, 32, 99, following))
    answer(prompts("quote", 256, 98, following))
    print(
        json.dumps({"engine": engine, "method": method, "start_s": round(time.perf_counter() - begun_s, 1)}), flush=True
    )
    for task in TASKS:
        for number in NUM_REQUESTS:
            speeds, num_wrong = [], 0
            for turn in range(repeats):
                jobs = prompts(task, number, turn, following)
                began_s = time.perf_counter()
                answers = answer(jobs)
                speeds.append(round(number * ANSWER / (time.perf_counter() - began_s), 1))
                expected = [chain(following, job[-1], ANSWER) for job in jobs]
                num_wrong += sum(list(got) != right for got, right in zip(answers, expected, strict=True))
            line = {"engine": engine, "method": method, "task": task, "requests": number, "tok_s": speeds}
            print(json.dumps(line | {"wrong": num_wrong}), flush=True)


if __name__ == "__main__":
    what, place, *chosen = sys.argv[1:]
    if what == "write":
        write(Path(place))
    else:
        race(what, Path(place), *(chosen or ["ngram"]))
