"""Writes answers as clients of text-generation-inference read them: whole, and a frame for each token. No HTTP."""

from collections.abc import Mapping

import msgspec

from quire.engine.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from quire.server.bodies.tgi import TgiParameters
from quire.server.edge import as_told
from quire.server.replies import reply_to
from quire.server.scores import finite
from quire.text.tokenizer import Tokenizer

Body = dict[str, object]
Entry = Mapping[int, Logprob]

PATH = "/generate"


class TgiAnswer:
    """The bodies of one answer."""

    def __init__(self, prompt: str, num_prompt: int, said: TgiParameters, tokenizer: Tokenizer) -> None:
        self._prefix = prompt if said.return_full_text else ""
        self._num_prompt = num_prompt
        self._said = said
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._num_tokens = 0

    def whole(self, output: RequestOutput) -> Body:
        [said] = output.outputs
        body: Body = {"generated_text": self._prefix + said.text}
        if self._said.details:
            scores = said.logprobs or []
            body["details"] = {
                **self._details(said, len(said.token_ids)),
                "prefill": self._prefill(output),
                "tokens": [self._token(token, entry) for token, entry in zip(said.token_ids, scores, strict=True)],
                **({"top_tokens": [self._top(entry) for entry in scores]} if self._said.top_n_tokens else {}),
            }
        return body

    def frames(self, delta: Delta) -> bytes:
        """One for each token. Text that several tokens make together comes with the last of them."""
        told = []
        self._text.append(delta.text)
        tokens = list(zip(delta.token_ids, delta.logprobs, strict=True))
        for place, (token, entry) in enumerate(tokens):
            self._num_tokens += 1
            last = place == len(tokens) - 1
            frame: Body = {
                "index": self._num_tokens,
                "token": self._token(token, entry, delta.text if last else ""),
                "generated_text": None,
                "details": None,
            }
            if self._said.top_n_tokens:
                frame["top_tokens"] = self._top(entry)
            if last and delta.finish_reason is not None:
                details = self._details(delta, self._num_tokens)
                frame["generated_text"] = self._prefix + "".join(self._text)
                frame["details"] = {**details, "input_length": self._num_prompt}
            told.append(b"data:" + msgspec.json.encode(frame) + b"\n\n")
        return b"".join(told)

    def failed(self, error: Exception) -> bytes:
        return b"data:" + reply_to(as_told(error), path=PATH).body + b"\n\n"

    def _details(self, ended: CompletionOutput | Delta, num_tokens: int) -> Body:
        reason = "length" if ended.finish_reason == "length" else "eos_token"
        if ended.stop_reason is not None:
            reason = "stop_sequence"
        return {"finish_reason": reason, "generated_tokens": num_tokens, "seed": self._said.seed}

    def _prefill(self, output: RequestOutput) -> list[Body]:
        """The first token of a prompt has no score."""
        told = []
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False):
            text = self._tokenizer.spell(token)
            told.append({"id": token, "text": text, "logprob": None if entry is None else finite(entry[token].logprob)})
        return told

    def _token(self, token: int, entry: Entry, text: str | None = None) -> Body:
        spelled = entry[token].decoded_token if text is None else text
        special = token in self._tokenizer.special_ids
        return {"id": token, "text": spelled or "", "logprob": finite(entry[token].logprob), "special": special}

    def _top(self, entry: Entry) -> list[Body]:
        num_top = self._said.top_n_tokens or 0
        likeliest = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
        return [self._token(token, entry) for token, _ in likeliest]
