"""Complete many prompts in one batch and print results and throughput."""

import time

from quire import LLM, SamplingParams

SUBJECTS = ("rain", "the sea", "mountains", "bread", "trains", "winter", "music", "the moon")


def main() -> None:
    prompts = [f"The best thing about {subject} is" for subject in SUBJECTS]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=16)
    with LLM() as llm:  # or LLM("path, short name or hub id")
        start_s = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start_s
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"{prompt} …{output.outputs[0].text!r}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(outputs)} requests, {num_tokens} tokens, {num_tokens / seconds:.0f} tok/s")


if __name__ == "__main__":
    main()
