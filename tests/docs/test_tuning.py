"""docs/tuning.md has every setting of the engine and every flag of `quire serve`, and none that does not exist."""

import re
from dataclasses import fields

import click

from quire.cli.main import app
from quire.config import EngineConfig, setting_of
from tests.docs.pages import DOCS, table_rows

ROWS = table_rows(DOCS / "tuning.md")
SETTINGS = {field.name for field in fields(EngineConfig)}


def flags(*words: str) -> set[str]:
    """Every spelling of every option of a command."""
    command: click.Command = app
    for word in words:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None, word
        command = found
    return {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--") and name != "--help"
    }


def documented() -> set[str]:
    """The flags in the first two columns, where a row is about them."""
    return {flag for row in ROWS if len(row) >= 4 for cell in row[:2] for flag in re.findall(r"`(--[a-z-]+)`", cell)}


def test_every_setting_has_a_row_and_every_row_a_setting() -> None:
    named = {row[0].strip("`") for row in ROWS if len(row) == 5 and re.fullmatch(r"`[a-z_]+`", row[0])}
    assert named == SETTINGS


def test_rows_have_the_flag_and_the_default_that_are_declared() -> None:
    rows = {row[0].strip("`"): row for row in ROWS if len(row) == 5}
    for declared in fields(EngineConfig):
        flag, default = rows[declared.name][1:3]
        setting = setting_of(declared)
        negated = f" / `--no-{(setting.flag or '').removeprefix('--')}`" if setting.kind == "switch" else ""
        if setting.flag is not None:
            assert flag == f"`{setting.flag}`{negated}", declared.name
        if isinstance(declared.default, str):
            assert default.startswith(f"`{declared.default}`"), declared.name
        elif isinstance(declared.default, int):
            assert default == (
                "on" if declared.default is True else "off" if declared.default is False else str(declared.default)
            ), declared.name


def test_every_flag_of_serve_has_a_row_and_every_row_a_flag() -> None:
    assert documented() == flags("serve")


def test_every_row_has_the_default_and_the_effect() -> None:
    for row in ROWS:
        if len(row) == 5 and row[0].strip("`") in SETTINGS:
            assert row[2] and row[3] and row[4], row


def test_flags_named_anywhere_on_the_page_exist() -> None:
    text = (DOCS / "tuning.md").read_text()
    shown = set(re.findall(r"(--[a-z][a-z-]+)", text))
    known = flags("serve") | {
        flag
        for verb in ("throughput", "latency", "serve", "startup", "pacing", "race", "goodput")
        for flag in flags("bench", verb)
    }
    assert shown <= known, shown - known
