"""Options of other engines that are not here: what whoever brings one along does instead."""

_ONE_DEVICE = "a model runs on one device; leave it away"
_LOG = "each request is one line on stdout, without its prompt, as --log-format says; leave it away"

INSTEAD = {
    "--tensor-parallel-size": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "--enforce-eager": "steps are recorded as CUDA graphs on GPUs alone, a few at the start; leave it away",
    "--enable-chunked-prefill": "prompts are always cut to the step; leave it away",
    "--quantization": "weights are taken as they are stored; give a .gguf file for packed ones",
    "--kv-cache-dtype": "the KV cache has the format of the weights, which --dtype says",
    "--trust-remote-code": "code of a model's folder is never run; leave it away",
    "--enable-auto-tool-choice": "tools are always on, as the chat template shows them; leave it away",
    "--generation-config": "the model's own is read, and a request's fields win over it; leave it away",
    "--seed": "each request brings its own seed; leave it away",
    "--max-num-queued-reqs": "say --max-waiting",
    "--swap-space": "say --host-kv-memory, with a unit such as 4GiB",
    "--disable-log-requests": _LOG,
    "--enable-log-requests": _LOG,
}
