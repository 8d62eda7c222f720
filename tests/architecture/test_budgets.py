"""Sizes: a file is one noun, a function fits a screen. An exception is a row here, with its reason."""

import ast

from tests.architecture.tree import label, nodes, source_files, syntax

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

MIN_FILE_LINES = 60
MAX_FILES = 375

FILE_EXCEPTIONS: dict[str, str] = {}  # file: reason
SMALL_FILES = {  # file: why it does not belong into a neighbour
    "__main__.py": "entry point of python -m quire",
    "version.py": "read by the build and by every layer",
    "bench/engine_alone.py": "a program of its own: the engine without HTTP, measured in its own process",
    "cli/build_info.py": "imports no torch: quire --version answers at once",
    "cli/entry.py": "must import nothing: Ctrl-C during the imports ends quietly",
    "core/ids.py": "the id types of every layer",
    "formats/open_checkpoint.py": "chooses between folder and GGUF: imports both readers",
    "kernels/cpu/weight_memory.py": "pages of the system; knows no format",
    "kernels/gpu/activation.py": "one kernel",
    "kernels/gpu/backends/interface.py": "the protocol of three backends; imports none",
    "kernels/gpu/copy_blocks.py": "one kernel",
    "kernels/gpu/gluon_compat.py": "what Triton releases call differently",
    "kernels/gpu/hopper_support.py": "must load where Gluon is missing",
    "layers/attention.py": "one layer",
    "layers/linear.py": "two layers",
    "sched/pipelining.py": "one rule: which rows of a pipeline decode in a step",
    "server/openai/embeddings.py": "one endpoint; its work is in server/prompt_group.py, shared with Ollama's",
    "server/static_files.py": "the only file that serves files",
    "weights/dequantize.py": "the protocol, loaded without gguf",
    "weights/gguf_dequantize.py": "imports gguf, which the offline engine does not need",
}
FUNCTION_EXCEPTIONS: dict[str, str] = {}  # file:function: reason


def test_a_file_is_short() -> None:
    lengths = {label(path): len(path.read_text().splitlines()) for path in source_files()}
    assert not {
        name: length for name, length in lengths.items() if length > MAX_FILE_LINES and name not in FILE_EXCEPTIONS
    }


def test_a_small_file_has_its_reason() -> None:
    """A fragment makes the reader jump: it belongs into the file that uses it, unless there is a reason."""
    lengths = {label(path): len(path.read_text().splitlines()) for path in source_files() if path.name != "__init__.py"}
    assert {name for name, length in lengths.items() if length < MIN_FILE_LINES} == set(SMALL_FILES)
    assert len(SMALL_FILES) <= 35


def test_the_package_has_few_files() -> None:
    """Packages aside: an `__init__.py` of one line is not a file to read."""
    assert len([path for path in source_files() if path.name != "__init__.py"]) <= MAX_FILES


def test_a_function_fits_a_screen() -> None:
    lengths = {}
    for path in source_files():
        for node in nodes(syntax(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lengths[f"{label(path)}:{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1
    assert not {
        name: length
        for name, length in lengths.items()
        if length >= MAX_FUNCTION_LINES and name.rsplit(":", 1)[0] not in FUNCTION_EXCEPTIONS
    }
