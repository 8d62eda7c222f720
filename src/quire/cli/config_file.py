"""A file of options, `quire serve --config FILE`, and the options in force as such a file, `--print-config`.

The file is TOML: a line `max-model-len = "32k"` for each option. It is below environment variables, which are below
flags. Its only tables are `[models.NAME]`, one for each of several models, with options of that model; these are above
all others. Does not depend on a command.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from quire.cli.options import grouped_options, model_options, option_name
from quire.core.errors import ConfigError

_SECRET = ("api-key", "admin-key", "token")
_SOURCES = {ParameterSource.ENVIRONMENT: "environment", ParameterSource.DEFAULT_MAP: "config file"}


def config_name(param: click.Parameter) -> str:
    """The key of an option or argument in a file."""
    return param.name or "" if isinstance(param, click.Argument) else option_name(param).removeprefix("--")


_MODELS = "models"  # the table of tables
_PINNED = "pinned"  # a key of a model's table that is not an option
_LONGEST_NAME = 200


class ModelTable(NamedTuple):
    """One of several models, by the table `[models.NAME]`."""

    name: str
    given: Mapping[str, Any]  # its options: those of the table, checked, and all others as they are for the server
    pinned: bool
    lines: Mapping[str, Any]  # as written


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
    tables = values.pop(_MODELS, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"--config {path} has models that are not tables; write [models.NAME].", param="config")
    for key, value in values.items():
        if isinstance(value, dict):
            raise _not_a_table(path, key, value, known)
    found = dict(_parameter(path, key, value, known) for key, value in values.items())
    return {**found, _MODELS: tables} if tables else found


def _not_a_table(path: Path, key: str, table: Mapping[str, Any], known: Mapping[str, click.Parameter]) -> ConfigError:
    inner = next((name for name, value in table.items() if isinstance(value, dict)), None)
    written = f"[{key}]" if inner is None else f"[{key}.{inner}]"
    if get_close_matches(key.lower(), [_MODELS], n=1):
        hint = f"Did you mean [{_MODELS}.{inner or 'NAME'}]?"
    elif key.replace("_", "-") in known:
        hint = f"Write {key} = … on a line of its own, above all tables."
    else:
        hint = (
            "Its only tables are [models.NAME], one for each of several models; options stand above them, without one."
        )
    return ConfigError(
        f"--config {path} has the table {written:.80}, which quire serve does not read. {hint}", param="config"
    )


def read_tables(ctx: click.Context) -> tuple[ModelTable, ...]:
    """The models of the file's tables, with their options."""
    path, tables = ctx.meta.get(_MODELS, (None, {}))
    known = {config_name(param): param for param in model_options(ctx.command)}
    return tuple(_read_table(ctx, path, name, table, known) for name, table in tables.items())


def _read_table(
    ctx: click.Context, path: Path, name: str, table: Mapping[str, Any], known: Mapping[str, click.Parameter]
) -> ModelTable:
    where = f"{path}, [models.{name}],"
    if not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"--config {path} names a model {name[:40]!r}; a name has 1 to {_LONGEST_NAME} printable characters.",
            param="config",
        )
    pinned = table.get(_PINNED, False)
    if not isinstance(pinned, bool):
        raise ConfigError(f"--config {where} has {pinned!r:.60} for pinned, which is true or false.", param="config")
    given = {**ctx.params, "aliases": ()}
    for key, value in table.items():
        if key != _PINNED:
            parameter, text = _parameter(where, key, value, known, "an option of one model")
            param = next(each for each in known.values() if each.name == parameter)
            try:
                given[parameter] = param.process_value(ctx, text)
            except click.BadParameter as error:
                raise ConfigError(f"--config {where} has {key}: {error.message}", param="config") from error
    return ModelTable(name, given, pinned, table)


def _parameter(
    path: Path | str, key: str, value: Any, known: Mapping[str, click.Parameter], kind: str = "an option of quire serve"
) -> tuple[str, Any]:
    param = known.get(key.replace("_", "-"))
    if param is None:
        near = get_close_matches(key.replace("_", "-"), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else " quire serve --print-config lists all of them."
        raise ConfigError(f"--config {path} has {key!r:.60}, which is not {kind}.{hint}", param="config")
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
        values = read_config(path, ctx.command.params)
        ctx.meta[_MODELS] = path, values.pop(_MODELS, {})
        ctx.default_map = values
    return path


def describe_config(ctx: click.Context) -> str:
    """All options with their values, as a file for `--config`. Keys are not shown."""
    lines = [
        "# Options of quire serve, for --config. A variable of the environment overrides a line, a flag overrides both."
    ]
    for group, params in grouped_options(ctx.command).items():
        lines += ["", f"# {group}"]
        lines += [_line(ctx, param) for param in params if param.name not in ("config", "print_config", "help")]
    for table in read_tables(ctx):
        lines += ["", f"[models.{json.dumps(table.name, ensure_ascii=False)}]"]
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.lines.items()]
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
