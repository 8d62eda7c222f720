"""A conversation: its messages, its sampling settings, and its file. Neither prints nor depends on a model."""

import json
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import click

from quire.cli.options import SAMPLING_NAMES, check_sampling, parse_value
from quire.core.errors import ConfigError, QuireError

_SETTINGS = ("max_tokens", *SAMPLING_NAMES)
_NAME = re.compile(r"[\w][\w .-]{0,99}")
_VERSION = 1


class ChatSession:
    """The messages and settings of a conversation."""

    def __init__(self, system: str | None, settings: Mapping[str, object]) -> None:
        self.messages: list[dict[str, object]] = []
        self.settings = {name: settings[name] for name in _SETTINGS if settings.get(name) not in (None, ())}
        self.path: Path | None = None  # where it was saved, or loaded from
        self._system = system
        self.clear()

    def clear(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def set_system(self, text: str) -> None:
        self._system = text or None
        self.clear()

    def undo(self) -> bool:
        """Remove the last question and its reply; whether there was one."""
        while self.messages and self.messages[-1]["role"] != "system":
            if self.messages.pop()["role"] == "user":
                return True
        return False

    def set(self, name: str, text: str) -> None:
        """Change a sampling setting; `default` or nothing removes it."""
        name = name.replace("-", "_")
        if name not in _SETTINGS:
            near = get_close_matches(name, _SETTINGS, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(_SETTINGS)}."
            raise ConfigError(f"There is no setting {name!r}. {hint}", param=name)
        changed = dict(self.settings)
        changed.pop(name, None)
        if text not in ("", "default"):
            changed[name] = [text] if name == "stop" else parse_value(text)
        check_sampling({"max_tokens": None, **changed})
        self.settings = changed

    def save(self, name: str, model: str) -> Path:
        """Write the conversation. A file is overwritten only by the conversation that it holds."""
        path = self.path if not name and self.path is not None else file_of(name)
        content = {
            "quire_chat": _VERSION, "model": model, "system": self._system, "settings": self.settings,
            "messages": self.messages,
        }  # fmt: skip
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(content, file, ensure_ascii=False, indent=1)
            if path != self.path and path.exists():
                unfinished.unlink()
                raise ConfigError(f"{path} exists: /load {name} continues it; or save under another name.")
            unfinished.replace(path)
        except OSError as error:
            raise ConfigError(f"Cannot write {path}: {error.strerror}.") from None
        self.path = path
        return path

    def load(self, name: str) -> str:
        """Replace this conversation by a saved one; the name of the model that it was with."""
        path = file_of(name)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"There is no {path}. {_describe(saved_names())}") from None
        except OSError as error:
            raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
        except (ValueError, RecursionError):
            raise ConfigError(f"{path} is not a saved chat: it is not JSON.") from None
        try:
            system, settings, messages, model = _check(found)
        except QuireError as error:
            raise ConfigError(f"{path} has wrong settings: {error.message}") from None
        except (TypeError, KeyError, ValueError):
            raise ConfigError(f"{path} is not a saved chat.") from None
        self._system, self.settings, self.messages, self.path = system, settings, messages, path
        return model


def _check(found: object) -> tuple[str | None, dict[str, object], list[dict[str, object]], str]:
    if not isinstance(found, dict) or found["quire_chat"] != _VERSION:
        raise ValueError
    system, settings, messages = found["system"], found["settings"], found["messages"]
    if not isinstance(system, str | None) or not settings.keys() <= set(_SETTINGS):
        raise ValueError
    check_sampling({"max_tokens": None, **settings})
    for message in messages:
        known = message["role"] in ("system", "user", "assistant") and isinstance(message["content"], str)
        if not known or message.keys() != {"role", "content"}:
            raise ValueError
    return system, dict(settings), list(messages), str(found["model"])


def chats_folder() -> Path:
    """Where chats are saved by name; click knows the place on each platform."""
    return Path(click.get_app_dir("quire")) / "chats"


def file_of(name: str) -> Path:
    """The file of a saved chat: a path if it looks like one, else a name in the folder of chats."""
    if "/" in name or os.sep in name or name.endswith(".json"):
        if name.endswith(("/", os.sep)):
            raise ConfigError(f"{name} is a folder; name a file in it, such as {name}chat.json.")
        return Path(name).expanduser()
    if not _NAME.fullmatch(name):
        raise ConfigError("A saved chat needs a name of letters, digits, spaces, dots and dashes, or a path.")
    return chats_folder() / f"{name}.json"


def saved_names() -> list[str]:
    return sorted(path.stem for path in chats_folder().glob("*.json") if not path.name.startswith("."))


def _describe(names: list[str]) -> str:
    return f"Saved chats: {', '.join(names)}." if names else "No chat is saved yet; /save NAME saves one."
