"""Random tokens of any bytes: text, stream, offsets and bytes agree."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, TopLogprobs
from quire.core.step_output import FinishedSequence
from quire.engine.messages import RequestOptions
from quire.engine.outputs import Delta, Logprob, RequestMetrics, RequestOutput
from quire.engine.request_state import SequenceOutput, logprob_entry
from quire.server.chat.logprobs import TokenText, chat_logprobs
from quire.server.context import ServedModel
from quire.server.openai.chunks import ChunkHeader
from quire.server.openai.completions import CompletionPrompt, CompletionResponse
from quire.server.request.params import GenerationRequest
from quire.text.detokenizer import decode_whole
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer
from tests.server.api_server import named_events
from tests.server.local_server import LocalServer
from tests.server.scripted_app import bodies
from tests.tiers import examples

STOPPING = "aé"  # what stop strings are made of
LETTERS = STOPPING * 4 + "你🙂\ufffd"
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(frozen=True)
class OutputWithDeltas:
    """A model's output for a prompt, as the engine reports it: whole, and in deltas."""

    deltas: list[list[Delta]]  # of each choice
    output: RequestOutput


def scores_of(token: int) -> TopLogprobs:
    ids = np.array([token, token + 1], dtype=np.int32)
    return TopLogprobs(token, -0.5, 1, ids, np.array([-0.5, -1.5], dtype=np.float32))


def output_of(
    tokenizer: Tokenizer, prompt: list[int], choices: list[list[int]], params: SamplingParams
) -> OutputWithDeltas:
    """Each to its length, or to its stop string: as a stream, and as a whole."""
    deltas, outputs = [], []
    for index, tokens in enumerate(choices):
        for streaming in (True, False):
            transcript = SequenceOutput("0", index, params, tokenizer, prompt_ids=prompt,
                                    stop_strings=StopStrings(params.stop_strings), streaming=streaming)  # fmt: skip
            received = []
            for token in tokens:
                received.append(transcript.push(token, scores_of(token), None))
                if transcript.stopped:
                    received[-1] = received[-1].then(transcript.close(FinishReason.STOP))
                    break
            else:
                end = FinishedSequence(0, index, FinishReason.LENGTH, np.array(tokens), None, 0)
                received[-1] = received[-1].then(transcript.end(end))
            if streaming:
                deltas.append(received)
            else:
                outputs.append(transcript.output())
    scored: list[dict[int, Logprob] | None] = [
        None,
        *(logprob_entry(scores_of(token), tokenizer) for token in prompt[1:]),
    ]
    return OutputWithDeltas(deltas, RequestOutput("0", None, prompt, outputs, RequestMetrics(0.0, 0), True, scored))


def streamed(answer: CompletionResponse, deltas: list[list[Delta]], cuts: list[int]) -> list[dict[str, Any]]:
    """For a reader that is sometimes late: several deltas are then merged."""
    chunks = b""
    for received in deltas:
        waiting: Delta | None = None
        for place, delta in enumerate(received):
            waiting = delta if waiting is None else waiting.then(delta)
            if place not in cuts or place == len(received) - 1:
                chunks += answer.chunk(0, waiting)
                waiting = None
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks.decode().split("\n\n")[:-1]]


pieces = st.lists(
    st.one_of(st.sampled_from(LETTERS).map(str.encode), st.integers(0, 299), st.integers(0, 49_000)),
    min_size=1,
    max_size=12,
)


def tokens_of(drawn: list[int | bytes], tokenizer: Tokenizer) -> list[int]:
    """Tokens, and characters that are spelled byte by byte."""
    byte_ids = {tokenizer.piece_bytes(token): token for token in range(300) if len(tokenizer.piece_bytes(token)) == 1}
    shown = []
    for each in drawn:
        shown += [each] if isinstance(each, int) else [byte_ids[bytes([byte])] for byte in each]
    return shown


@settings(max_examples=examples(60, 300))
@given(
    prompt=pieces,
    choices=st.lists(pieces, min_size=1, max_size=3),
    stop=st.lists(st.text(st.sampled_from(STOPPING), min_size=1, max_size=3), max_size=2),
    include_stop=st.booleans(),
    skip=st.booleans(),
    counting=st.booleans(),
    cuts=st.lists(st.integers(0, 20)),
)
def test_text_stream_offsets_and_bytes_agree(
    model: ServedModel,
    prompt: list[int | bytes],
    choices: list[list[int | bytes]],
    stop: list[str],
    include_stop: bool,
    skip: bool,
    counting: bool,
    cuts: list[int],
) -> None:
    tokenizer = model.text()
    params = SamplingParams(
        n=len(choices), logprobs=2, stop=stop, include_stop_str_in_output=include_stop, skip_special_tokens=skip
    )
    ids = tokens_of(prompt, tokenizer)
    run = output_of(tokenizer, ids, [tokens_of(choice, tokenizer) for choice in choices], params)
    generation = GenerationRequest(params, RequestOptions(), None, stream=True, continuous_usage=counting)
    token_text = TokenText(tokenizer, as_ids=False)

    def answer(echo: str | None) -> CompletionResponse:
        return CompletionResponse(ChunkHeader("m", "cmpl"), [CompletionPrompt(ids, echo)], generation, token_text)

    before = decode_whole(tokenizer, ids)
    chunks = streamed(answer(None), run.deltas, cuts)
    alone: Any = answer(None).whole([run.output])["choices"]
    echoed: Any = answer(before).whole([run.output])["choices"]
    for output, choice, echo in zip(run.output.outputs, alone, echoed, strict=True):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == output.index]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"] == output.text
        for column in COLUMNS:
            assert [item for chunk in mine for item in chunk["logprobs"][column]] == choice["logprobs"][column]
            assert len(choice["logprobs"][column]) == len(output.token_ids)
        assert echo["text"] == before + choice["text"]
        offsets = echo["logprobs"]["text_offset"]
        assert offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= len(echo["text"])
        assert offsets[len(ids) :] == [len(before) + offset for offset in choice["logprobs"]["text_offset"]]
        assert echo["logprobs"]["tokens"][len(ids) :] == choice["logprobs"]["tokens"]
        received = chat_logprobs(output.logprobs or [], 0, token_text)
        assert [bytes(each["bytes"]) for each in received] == [*map(tokenizer.piece_bytes, output.token_ids)]  # type: ignore[call-overload]
        if not stop and not skip:
            whole = ids + output.token_ids
            assert echo["text"] == decode_whole(tokenizer, whole)
            assert offsets == [len(decode_whole(tokenizer, whole[:place])) for place in range(len(whole))]


@pytest.mark.parametrize("num_tokens", range(4, 12))
def test_a_character_cut_by_length_is_omitted_in_every_api(scripted_server: LocalServer, num_tokens: int) -> None:
    ask = [{"role": "user", "content": "secret"}]
    with scripted_server.client() as client:

        def shown(path: str, **body: object) -> httpx.Response:
            return client.post(path, json={"max_tokens": num_tokens, "temperature": 0, **body})

        received = shown("/v1/completions", prompt="secret", logprobs=0).json()["choices"][0]
        chunks = bodies(shown("/v1/completions", prompt="secret", stream=True).text)
        events = named_events(shown("/v1/messages", messages=ask, stream=True).text)
        wish = {"input": "secret", "max_output_tokens": num_tokens, "temperature": 0}
        response = client.post("/v1/responses", json=wish).json()
        texts = {
            received["text"],
            "".join(chunk["choices"][0]["text"] for chunk in chunks),
            shown("/v1/chat/completions", messages=ask).json()["choices"][0]["message"]["content"],
            shown("/v1/messages", messages=ask).json()["content"][0]["text"],
            "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"),
            response["output"][0]["content"][0]["text"],
            shown("/generate", inputs="secret", parameters={"max_new_tokens": num_tokens}).json()["generated_text"],
        }
    [text] = texts
    assert "Nobody knows. 🙂 日本語".startswith(text) and text
    assert len(received["logprobs"]["tokens"]) == num_tokens
