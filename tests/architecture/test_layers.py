"""Import layers: the contracts hold in this tree, and each breaks when a file imports across its line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import children
from tests.architecture.tree import NEUTRAL, ROOT, TENSOR, TORCH_FREE, module_name, package_of, source_files
from tests.tiers import long_only

CONTRACTS = ROOT / ".importlinter"
LINT = "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(sys.argv[1], no_cache=True))"
PACKAGES = (
    *TORCH_FREE,
    *("engine", "cli", "server", "bench"),
    *TENSOR[:6],
    *("formats", "catalog", "workload", "text", "grammar", "output_parsing"),
)
SERVER_BROKEN = "A file of the server imports only from layers below it BROKEN"
SERVER_FOLDERS = ("http", "request", "chat", "openai", "anthropic", "tgi", "ollama", "llamacpp", "batch")
SERVER_FILES = (
    *("async_engine", "engine_state", "engine_supervisor", "admission", "metrics", "grammar_precompiler"),
    *("context", "prompt_group", "admin", "app", "server", "tracing", "fair_shares"),
    *("response_store", "static_files", "examples", "model_router", "router_app", "file_store", "batch_store"),
    *("replay_view", "engine_client", "replicas", "autoscaling", "prefill_decode", "request_stream"),
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", LINT, str(CONTRACTS)]
    return children.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_this_tree_keeps_its_contracts() -> None:
    result = lint(ROOT / "src")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 kept, 0 broken" in result.stdout


def build_package(folder: Path, package: str, line: str) -> None:
    """Every sub-package, empty but for one import."""
    for name in (*PACKAGES, *(f"server/{name}" for name in SERVER_FOLDERS)):
        (folder / "quire" / name).mkdir(parents=True)
        (folder / "quire" / name / "__init__.py").touch()
    for name in ("__init__", "version", "config", "llm", "async_llm", *(f"server/{name}" for name in SERVER_FILES)):
        (folder / "quire" / f"{name}.py").touch()
    (folder / "quire" / package / "added.py").write_text(f"{line}\n")


@pytest.mark.parametrize(
    ("package", "line", "broken"),
    [
        ("kv", "import quire.sched", "A package imports only from layers below it BROKEN"),
        ("sim", "import quire.kernels", "The scheduler packages never import tensor packages BROKEN"),
        ("runner", "import quire.kv", "The tensor packages never import the scheduler BROKEN"),
        ("text", "import transformers", "Scheduler, formats and text never import torch BROKEN"),
        ("server/http", "import quire.server.async_engine", SERVER_BROKEN),
        *long_only(
            [
                ("core", "import quire.formats", "A package imports only from layers below it BROKEN"),
                ("catalog", "import quire.formats", "A package imports only from layers below it BROKEN"),
                ("sched", "import torch", "Scheduler, formats and text never import torch BROKEN"),
                ("server/tgi", "import quire.server.openai", SERVER_BROKEN),
                ("server/chat", "import quire.server.openai", SERVER_BROKEN),
            ]
        ),
        ("runner", "import quire.core, quire.models, torch", "5 kept, 0 broken"),
    ],
)
def test_a_crossed_line_is_seen(tmp_path: Path, package: str, line: str, broken: str) -> None:
    build_package(tmp_path, package, line)
    assert broken in lint(tmp_path).stdout


@pytest.mark.parametrize("name", ["attic", "server/attic"])
def test_a_package_without_a_layer_is_seen(tmp_path: Path, name: str) -> None:
    build_package(tmp_path, "core", "")
    (tmp_path / "quire" / f"{name}.py").touch()
    assert f"quire.{name.replace('/', '.')}" in lint(tmp_path).stdout


def loaded_by(code: str, *unwanted: str) -> str:
    """Which of these modules a fresh Python has loaded after some code, comma-separated."""
    check = f"{code}\nimport sys\nprint(','.join(m for m in {unwanted!r} if m in sys.modules), file=sys.stderr)"
    result = children.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr.strip().splitlines()[-1] if result.stderr.strip() else ""


def test_importing_quire_is_light() -> None:
    assert loaded_by("import quire", "torch", "transformers", "huggingface_hub", "tokenizers") == ""


def test_a_model_on_this_disk_is_opened_without_the_hub() -> None:
    assert loaded_by("import quire.engine.open_model", "torch", "huggingface_hub") == ""


def test_help_is_light() -> None:
    code = (
        "import sys\nsys.argv = ['quire', '--help']\nfrom quire.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert loaded_by(code, "torch", "transformers", "huggingface_hub", "tokenizers") == ""


def test_torch_free_packages_load_no_torch_even_through_others() -> None:
    quiet = [module_name(path) for path in source_files() if package_of(path) in (*TORCH_FREE, *NEUTRAL)]
    imports = "\n".join(f"import {name}" for name in quiet)
    assert loaded_by(imports, "torch", "triton", "transformers") == ""


def test_a_server_loads_no_scheduler_and_no_block_manager() -> None:
    """Its engines have them: a server talks to them in messages."""
    code = "import quire.cli.serve, quire.server.app, quire.server.server"
    assert loaded_by(code, "torch", "quire.engine.engine", "quire.sched.scheduler", "quire.kv.manager") == ""


def test_an_engine_starts_without_the_compiler_of_torch() -> None:
    """Nor does the choice of kernels, which finds torch's own attention without using it."""
    code = """
import sys
import torch
by_torch = {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)
from quire.engine.build import build
from quire.kernels.attention_backends import USUAL_NEEDS, AttentionPlatform
from quire.kernels.attention_backends import find_backends
from quire.kernels.select import select_kernels, select_attention
select_kernels("cpu"), select_kernels("cuda")
select_attention("auto", USUAL_NEEDS, AttentionPlatform((9, 0), find_backends()), torch.device("cpu"))
for name in by_torch:
    del sys.modules[name]
"""
    assert loaded_by(code, "torch._dynamo", "torch._inductor", "sympy") == ""
