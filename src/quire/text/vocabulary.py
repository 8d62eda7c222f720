"""What a model's files say about its text, whichever format they are in. Knows nothing of how it is used."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A ready `tokenizers` object and the facts that it does not carry itself."""

    backend: Backend
    bos_id: int | None
    eos_id: int | None
    end_ids: tuple[int, ...]  # every token that ends a turn; eos_id first where there is one
    chat_template: str | None
    named_tokens: Mapping[str, str] = field(default_factory=dict)  # what templates call bos_token, eos_token, …


def frame(backend: Backend, before: Iterable[int], after: Iterable[int]) -> None:
    """Make `encode` put these tokens around every text."""
    first = [(_piece(backend, token_id), token_id) for token_id in before]
    last = [(_piece(backend, token_id), token_id) for token_id in after]
    if first or last:
        template = [*(piece for piece, _ in first), "$A", *(piece for piece, _ in last)]
        backend.post_processor = TemplateProcessing(single=template, special_tokens=list({*first, *last}))


def _piece(backend: Backend, token_id: int) -> str:
    piece = backend.id_to_token(token_id)
    assert piece is not None, token_id
    return piece
