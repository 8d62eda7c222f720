"""A file of options, `quire serve --config FILE`, and the options in force as such a file, `--print-config`.

The file is TOML without tables: a line `max-model-len = "32k"` for each option. It is below environment variables,
which are below flags. Does not depend on a command.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from quire.cli.options import grouped_options, option_name
from quire.core.errors import ConfigError

_SECRET = ("api-key", "admin-key", "token")
_SOURCES = {ParameterSource.ENVIRONMENT: "environment", ParameterSource.DEFAULT_MAP: "config file"}


def config_name(param: click.Parameter) -> str:
    """The key of an option or argument in a file."""
    return param.name or "" if isinstance(param, click.Argument) else option_name(param).removeprefix("--")


def read_config(path: Path, params: list[click.Parameter]) -> dict[str, Any]:
    """The values of a file, by the names of click's parameters. A key that is not an option is refused."""
    import tomllib

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.", param="config") from error
    known = {config_name(param): param for param in params if param.name not in ("config", "print_config")}
    return dict(_parameter(path, key, value, known) for key, value in values.items())


def _parameter(path: Path, key: str, value: Any, known: Mapping[str, click.Parameter]) -> tuple[str, Any]:
    param = known.get(key.replace("_", "-"))
    if param is None:
        near = get_close_matches(key.replace("_", "-"), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else " quire serve --print-config lists all of them."
        raise ConfigError(
            f"--config {path} has {key!r:.60}, which is not an option of quire serve.{hint}", param="config"
        )
    many = isinstance(param, click.Option) and param.multiple
    if isinstance(value, list) and not many:
        raise ConfigError(f"--config {path} has a list for {key}, which takes one value.", param="config")
    if not all(isinstance(each, str | int | float) for each in (value if isinstance(value, list) else [value])):
        raise ConfigError(
            f"--config {path} has {value!r:.60} for {key}; a value is a text, a number, true or false.", param="config"
        )
    texts = [_as_typed(each) for each in (value if isinstance(value, list) else [value])]
    return param.name or "", texts if many else texts[0]


def _as_typed(value: str | float) -> str | bool:
    """As on the command line, so that it is checked alike: click would take 1.5 for the integer 1."""
    return value if isinstance(value, bool) else str(value)


def load_config(ctx: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """The callback of `--config`: its values become defaults of this command."""
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = read_config(path, ctx.command.params)
    return path


def describe_config(ctx: click.Context) -> str:
    """All options with their values, as a file for `--config`. Keys are not shown."""
    lines = [
        "# Options of quire serve, for --config. A variable of the environment overrides a line, a flag overrides both."
    ]
    for group, params in grouped_options(ctx.command).items():
        lines += ["", f"# {group}"]
        lines += [_line(ctx, param) for param in params if param.name not in ("config", "print_config", "help")]
    return "\n".join(lines)


def _line(ctx: click.Context, param: click.Parameter) -> str:
    assert param.name is not None
    key, value, source = config_name(param), ctx.params.get(param.name), ctx.get_parameter_source(param.name)
    if value is None or value == ():
        return f"# {key} ="
    if key in _SECRET:
        return f"# {key} is set, and not shown"
    values = [
        str(each) if isinstance(each, Path) else each for each in (value if isinstance(value, tuple) else [value])
    ]
    text = json.dumps(values if isinstance(value, tuple) else values[0], ensure_ascii=False)
    note = _SOURCES.get(source) if source is not None else None
    return f"{key} = {text}" + (f"  # {note}" if note else "")
