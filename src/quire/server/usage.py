"""What an answer cost, in tokens, as OpenAI's clients read it."""

from collections.abc import Sequence

from quire.engine.outputs import RequestOutput


def usage(outputs: Sequence[RequestOutput], *, num_thought: int = 0, without_tokens: bool = False) -> dict[str, object]:
    """Of all prompts of a request together. `without_tokens`: the one token that was computed is not counted."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    told = running_usage(prompt, 0 if without_tokens else completion)
    told["prompt_tokens_details"] = {"cached_tokens": cached}
    if num_thought:
        told["completion_tokens_details"] = {"reasoning_tokens": num_thought}
    return told


def running_usage(num_prompt: int, num_completion: int) -> dict[str, object]:
    """While an answer is under way; what the cache gave is known at its end."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
