"""Options of serve and batch about the served model: names, chat template, parsers, script. Read and checked.

A separate file: it loads jinja2, and batch does not load what serve does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import ChatTemplateError, ConfigError
from quire.output_parsing.reasoning import ReasoningTags, tags_by_name
from quire.output_parsing.tool_formats import ToolFormat, tool_format_by_name
from quire.text.template_worker import check_template


class ServedModelOptions(NamedTuple):
    """The fields of `ServerConfig` that both commands have options for."""

    aliases: tuple[str, ...]
    script: str | None
    chat_template: str | None
    tool_format: ToolFormat | None
    reasoning_tags: ReasoningTags | None


def read_served_model(given: Mapping[str, Any]) -> ServedModelOptions:
    """Raises `QuireError` for an invalid one, before a model is fetched."""
    tool_parser, reasoning_parser = given["tool_call_parser"], given["reasoning_parser"]
    template: Path | None = given["chat_template"]
    script: Path | None = given["script"]
    if not all(alias.strip() for alias in given["aliases"]):
        raise ConfigError("--served-model-name is empty; clients need a name to ask for.", param="served_model_name")
    return ServedModelOptions(
        aliases=tuple(given["aliases"]),
        script=None if script is None else str(script.absolute()),
        chat_template=None if template is None else _read_template(template),
        tool_format=None if tool_parser is None else tool_format_by_name(tool_parser),
        reasoning_tags=None if reasoning_parser is None else tags_by_name(reasoning_parser),
    )


def _read_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise _unusable(
            path, f"byte {error.start} (line {line}) is not UTF-8 ({error.reason}). Save it as UTF-8."
        ) from error
    if not text.strip():
        raise _unusable(path, "it is empty. Omit --chat-template to use the model's own.")
    try:
        check_template(text)
    except ChatTemplateError as error:
        raise _unusable(path, error.message) from error
    return text


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"--chat-template {path} cannot be used: {why}", param="chat_template")
