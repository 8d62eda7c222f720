"""The offline engine and its benchmarks run where there is little: torch, numpy, tokenizers, jinja2, click and rich."""

import sys

from tests import children

CODE = """
import sys
from dataclasses import replace

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
import quire.cli.bench_engine, quire.cli.bench_processes, quire.cli.bench_scheduler, quire.cli.doctor, quire.cli.serve
from quire import LLM, SamplingParams
from quire.formats.presets import SHAPES
SHAPES["smollm2-135m"] = replace(SHAPES["smollm2-135m"], num_layers=1, vocab_size=999)
llm = LLM("smollm2-135m", load_format="dummy", max_model_len=64, kv_cache_memory=64 << 20)
outputs = llm.generate([[1, 2, 3], [4]], SamplingParams(temperature=0, max_tokens=3))
print([len(output.outputs[0].token_ids) for output in outputs])
"""

ABSENT = (
    "gguf",
    "safetensors",
    "transformers",
    "starlette",
    "uvicorn",
    "pydantic",
    "msgspec",
    "llguidance",
    "triton",
)


def test_the_offline_engine_needs_neither_web_stack_nor_gguf() -> None:
    """Nor do the commands, the server among them, to be imported: what an extra would bring is named when it lacks."""
    command = [sys.executable, "-c", CODE.format(absent=ABSENT)]
    result = children.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "[3, 3]\n", result.stderr[-2000:]
