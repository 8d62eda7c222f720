"""The text of one sequence as its tokens come: detokenized, and ended by stop strings."""

from collections.abc import Sequence
from typing import NamedTuple

from quire.text.detok import Detokenizer
from quire.text.stop import StopMatcher, StopStrings
from quire.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """New text that is certain; the stop string, once complete; and how many tokens the text rests on."""

    text: str
    stop: str | None
    num_tokens: int


class SequenceText:
    """Push tokens, get text. After a stop string further tokens are ignored."""

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_tokens", "_pieces", "_stop")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: StopStrings,
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        include_stop_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self._matcher = StopMatcher(stop_strings, include_stop_in_output)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._stop: str | None = None

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        released = []
        for token_id in token_ids:
            if self._stop is not None:
                break
            self._num_tokens += 1
            released.append(self._advance(self._detokenizer.push((token_id,))))
        return TextDelta("".join(released), self._stop, self._num_tokens)

    def finish(self) -> TextDelta:
        """No more tokens come: give out what was held back. It may still complete a stop string."""
        rest = ""
        if self._stop is None:
            rest = self._advance(self._detokenizer.finish())
        if self._stop is None:
            held = self._matcher.finish()
            self._pieces.append(held)
            rest += held
        return TextDelta(rest, self._stop, self._num_tokens)

    def _advance(self, text: str) -> str:
        if not text:
            return ""
        released = self._matcher.push(text, armed=self._num_tokens >= self._min_tokens)
        self._stop = released.stop
        self._pieces.append(released.text)
        return released.text
