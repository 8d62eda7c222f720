"""`python -m quire.bench.engine_alone`: the offline engine, timed without any server around it."""

import time
from typing import Any

from quire.bench.serving import serve_stdin
from quire.core.sampling import SamplingParams
from quire.llm import LLM


class EngineAlone:
    """Loads at the first request, `{"load": settings}`; each later request has prompts and their number of tokens."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    def handle(self, request: Any) -> dict[str, object]:
        if self._llm is None:
            self._llm = LLM(**request["load"])
            return {}
        params = SamplingParams(temperature=0.0, max_tokens=request["num_output"], ignore_eos=True)
        started_s = time.perf_counter()
        outputs = self._llm.generate(request["prompts"], params, progress=False)
        seconds = time.perf_counter() - started_s
        return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


if __name__ == "__main__":
    serve_stdin(EngineAlone().handle)
