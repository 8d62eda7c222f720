"""What a chunk must give back."""

from quire.core.request import Sequence
from quire.core.step import Output


def output_of(sequence: Sequence, start: int, length: int) -> Output:
    """Scores of the prompt where asked for; with the last known token, the next one or the candidates for it. Of a
    prompt that is pooled, nothing else."""
    request = sequence.request
    if request.sampling.pooled:
        return Output.POOLED
    following = Output.NONE
    if start + length == len(sequence.tokens):
        following = Output.SAMPLE if request.beam is None else Output.CANDIDATES
    if request.sampling.num_prompt_logprobs is not None and start < len(request.prompt):
        return following | Output.PROMPT_LOGPROBS
    return following
