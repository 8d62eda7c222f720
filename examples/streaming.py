"""Print tokens as they are generated, then stop a stream early."""

from quire import LLM, SamplingParams


def main() -> None:
    messages = [{"role": "user", "content": "Write one sentence about rivers."}]
    with LLM() as llm:
        for delta in llm.stream_chat(messages, SamplingParams(temperature=0, max_tokens=32)):
            print(delta.text, end="", flush=True)
        print(f"\n[{delta.finish_reason}]")

        num_tokens = 0
        for delta in llm.stream("Count: 1, 2, 3,", SamplingParams(temperature=0, max_tokens=1000)):
            num_tokens += len(delta.token_ids)
            if num_tokens >= 8:
                break  # leaving the loop aborts the request and frees its KV blocks
        print(f"stopped after {num_tokens} tokens")


if __name__ == "__main__":
    main()
