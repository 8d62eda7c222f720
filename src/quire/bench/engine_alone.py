"""`python -m quire.bench.engine_alone`: the offline engine, timed without any server around it."""

import time
from typing import Any

from quire.bench.serving import answer_all
from quire.core.sampling import SamplingParams
from quire.llm import LLM


class EngineAlone:
    """Loads on the first question, `{"load": settings}`; after that each brings texts and how much must follow them."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    def answer(self, question: Any) -> dict[str, object]:
        if self._llm is None:
            self._llm = LLM(**question["load"])
            return {}
        params = SamplingParams(temperature=0.0, max_tokens=question["num_output"], ignore_eos=True)
        began_s = time.perf_counter()
        outputs = self._llm.generate(question["prompts"], params, progress=False)
        seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


if __name__ == "__main__":
    answer_all(EngineAlone().answer)
