"""Commands, and options of benchmarks, of other engines: what does the same here. Those of engines are in `config`."""

# Commands of earlier versions, of Ollama, vLLM, SGLang and llama.cpp.
OTHER_COMMANDS = {
    "models": "quire list lists models, quire pull fetches one",
    "help": "use quire --help, or quire COMMAND --help",
    "version": "use quire --version",
    "ps": "quire top shows what a server does",
    "stop": "a server ends with Ctrl-C or SIGTERM; quire rm deletes a model",
    "create": "quire serve takes a folder, a .gguf file or a hub id as it is",
    "cp": "quire serve --served-model-name NAME gives a model another name",
    "generate": 'use quire run "PROMPT"',
    "complete": 'use quire run "PROMPT"',
    "cli": "use quire chat",
    "download": "use quire pull",
    "run-batch": "use quire batch",
    "server": "use quire serve",
    "plan": "quire bench capacity finds the rate that a machine serves within a latency",
    "sim": "quire bench serve --simulate runs the scheduler alone",
    "simulate": "quire bench serve --simulate runs the scheduler alone",
    "quantize": "--quantization int8 or int4 quantizes at load, on a CPU; GGUF files are read as they are",
    "convert": "safetensors and GGUF files are read as they are",
    "embed": "a server answers /v1/embeddings, and LLM.embed returns vectors",
    "completion": 'eval "$(_QUIRE_COMPLETE=bash_source quire)" completes commands in bash',
    "explain": "the page /engine explains a request, and GET /requests/ID/explain",
}

# Options of the benchmarks of vLLM, SGLang and llama.cpp.
OTHER_BENCH_OPTIONS = {
    "--num-prompts": "a trace has its own number of requests; --requests N shortens a workload, --seconds N a trace",
    "--request-rate": "use --rate R, requests a second; --scale X keeps the trace's own times",
    "--max-concurrency": "requests come when the trace says, whatever is open; quire bench capacity finds the limit",
    "--base-url": "use --url http://HOST:PORT",
    "--host": "use --url http://HOST:PORT",
    "--endpoint": "requests go to /v1/completions of --url",
    "--backend": "any server with /v1/completions is measured by quire bench serve --url, peers by quire bench race",
    "--dataset-name": "use --trace: a name such as sharegpt, or a file; throughput and latency have --workload",
    "--dataset-path": "use --trace FILE; throughput and latency have --workload",
    "--random-input-len": "lengths are those of the trace; throughput has --workload, such as 1k1k",
    "--input-len": "use --workload, such as 1k1k",
    "--output-len": "use --workload, such as 1k1k",
    "--batch-size": "use --workload bs8, or another number of requests at once: bs64, bs256",
    "--num-iters": "use --repeats N",
    "--num-iters-warmup": "one repeat more warms up; --repeats N counts the others",
    "--save-result": "use --json, and > FILE",
    "--output-json": "use --json, and > FILE",
    "--output-file": "use --json, and > FILE",
    "--percentile-metrics": "all of them are printed: TTFT, ITL, TPOT and end to end",
    "--goodput": "use --level TTFT/TPOT in ms, such as --level 500/30",
    "--burstiness": "requests come as in the trace",
    "--ignore-eos": "answers always have the length that the trace or workload says",
    "--tokenizer": "prompts are token ids, of --vocab-size",
    "-p": "use --workload, such as 1k1k",
    "-n": "use --workload, such as 1k1k",
    "-r": "use --repeats N",
}  # fmt: skip

OTHER_BENCH_COMMANDS = {
    "serving": "use quire bench serve",
    "one_batch": "use quire bench latency",
    "one_batch_server": "use quire bench serve --url, or --simulate",
    "offline_throughput": "use quire bench throughput",
    "sweep": "quire bench capacity finds the rate that a server keeps up with",
}
