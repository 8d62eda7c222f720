"""Sizes: a file is one noun, a function fits a screen. An exception is a row here, with its reason."""

import ast

from tests.architecture.tree import label, source_files, syntax

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

FILE_EXCEPTIONS: dict[str, str] = {}  # file: reason
FUNCTION_EXCEPTIONS: dict[str, str] = {}  # file:function: reason


def test_a_file_is_short() -> None:
    lengths = {label(path): len(path.read_text().splitlines()) for path in source_files()}
    assert not {
        name: length for name, length in lengths.items() if length > MAX_FILE_LINES and name not in FILE_EXCEPTIONS
    }


def test_a_function_fits_a_screen() -> None:
    lengths = {}
    for path in source_files():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lengths[f"{label(path)}:{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1
    assert not {
        name: length
        for name, length in lengths.items()
        if length >= MAX_FUNCTION_LINES and name.rsplit(":", 1)[0] not in FUNCTION_EXCEPTIONS
    }
