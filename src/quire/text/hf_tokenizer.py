"""Reads the tokenizer of a Hugging Face folder. Does not depend on weights or downloads.

`TokenizerFiles`, the result, is the same for GGUF files.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from quire.core.errors import BrokenModelFile, UnsupportedModel


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A `tokenizers` object, and the special tokens and chat template that it does not store."""

    backend: Backend
    bos_id: int | None
    eos_id: int | None
    end_ids: tuple[int, ...]  # all end-of-turn tokens; eos_id first if there is one
    chat_template: str | None
    named_tokens: Mapping[str, str] = field(default_factory=dict)  # what templates call bos_token, eos_token, …


def frame(backend: Backend, before: Iterable[int], after: Iterable[int]) -> None:
    """Make `encode` add these tokens before and after every text."""
    first = [(_piece(backend, token_id), token_id) for token_id in before]
    last = [(_piece(backend, token_id), token_id) for token_id in after]
    if first or last:
        template = [*(piece for piece, _ in first), "$A", *(piece for piece, _ in last)]
        backend.post_processor = TemplateProcessing(single=template, special_tokens=list({*first, *last}))


def _piece(backend: Backend, token_id: int) -> str:
    piece = backend.id_to_token(token_id)
    assert piece is not None, token_id
    return piece


_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def vocabulary_from_folder(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json and the configuration files beside it."""
    backend = _backend(folder)
    config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    _add_listed_tokens(backend, config)
    named = {name: text for name in _NAMED if (text := _token_text(config.get(name))) is not None}
    bos_id = _id_of(backend, named.get("bos_token"))
    eos_id = _id_of(backend, named.get("eos_token"))
    _apply_framing(backend, config, bos_id, eos_id)
    return TokenizerFiles(
        backend=backend,
        bos_id=bos_id,
        eos_id=eos_id,
        end_ids=() if eos_id is None else (eos_id,),
        chat_template=_chat_template(folder, config),
        named_tokens=named,
    )


def _backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise UnsupportedModel(
                f"{folder} has only a SentencePiece tokenizer.model, and quire reads tokenizer.json. Save "
                f"one with transformers (AutoTokenizer.from_pretrained, then save_pretrained), or use GGUF."
            )
        raise UnsupportedModel(f"{folder} has no tokenizer.json, so its text cannot be read. Download that file too.")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any invalid file
        raise BrokenModelFile(f"{path} cannot be read as a tokenizer: {error}.") from error
    # Files may carry truncation settings from training; prompt length is validated elsewhere, with an error.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_listed_tokens(backend: Backend, config: Mapping[str, object]) -> None:
    """Tokens that tokenizer_config.json lists and tokenizer.json lacks."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for key in sorted((key for key in listed if key.isdigit()), key=int):
        entry = listed[key]
        if not isinstance(entry, dict) or backend.id_to_token(int(key)) is not None:
            continue
        special = entry.get("special") is True
        token = AddedToken(
            str(entry.get("content", "")),
            lstrip=entry.get("lstrip") is True,
            rstrip=entry.get("rstrip") is True,
            normalized=entry.get("normalized") is True,
            special=special,
        )
        if special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])


def _apply_framing(backend: Backend, config: Mapping[str, object], bos_id: int | None, eos_id: int | None) -> None:
    """add_bos_token and add_eos_token of tokenizer_config.json override tokenizer.json's post-processor."""
    stated = [config.get("add_bos_token"), config.get("add_eos_token")]
    if not any(isinstance(value, bool) for value in stated):
        return
    backend.post_processor = None
    frame(
        backend,
        before=[bos_id] if stated[0] is True and bos_id is not None else [],
        after=[eos_id] if stated[1] is True and eos_id is not None else [],
    )


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """chat_template.jinja if present, else the configuration's, which may be a list of named templates."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BrokenModelFile(f"{path} is not UTF-8 text: {error}.") from error
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenModelFile(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise BrokenModelFile(f"{path} must hold a JSON object, not {type(content).__name__}.")
    return content


def _token_text(value: object) -> str | None:
    """A special token is given as text or as an object with a `content` field."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _id_of(backend: Backend, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)
