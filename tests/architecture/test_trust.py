"""What no file of the package may do, read from its syntax: run foreign code, print, hide an import."""

import ast
from collections.abc import Callable, Collection

from tests.architecture.tree import dotted, imported_names, label, nodes, package_of, source_files, syntax

UNPICKLERS = {"pickle", "_pickle", "marshal", "dill", "shelve", "cloudpickle", "joblib"}
RUN_FOREIGN_CODE = {"eval", "exec", "torch.load", "torch.hub.load", "runpy.run_path", "runpy.run_module"}
RUN_FOREIGN_CODE |= {"ast.parse", "ast.literal_eval", "literal_eval", "compile"}  # a model's words are read by hand
TEMPLATE_FILES = {"text/template_sandbox.py"}  # who may know the template engine
SANDBOXES = {"SandboxedEnvironment", "ImmutableSandboxedEnvironment"}  # which one, or what is derived from it
# The command line starts in a blink, and the composition root picks one body of several.
LAZY = {
    "cli", "__init__", "engine/build_runner.py", "engine/open_model.py", "engine/build_scheduler.py",
    "engine/engine_main.py", "engine/rank_main.py", "kernels/select.py", "catalog/wheel.py",
}  # fmt: skip
# Where things lie is the user's to say; how quire behaves is a setting, not a variable.
READS_ENVIRONMENT = {
    "catalog/store.py": "XDG_CACHE_HOME; HF_HOME and HF_HUB_CACHE, as huggingface_hub reads them",
    "kernels/cpu/native_build.py": "XDG_CACHE_HOME, CXX, and for tests the set of instructions to compile for",
    "cli/main.py": "names that are almost an option's, for a warning",
    "core/worker_process.py": "handed on to the worker, with one thread of BLAS",
    "engine/build.py": "handed on to engine/machine.py, which names what MPS reads",
    "engine/build_ranks.py": "CUDA_VISIBLE_DEVICES: which GPU is the next one",
    "engine/rank_processes.py": "handed on to a rank, with CUDA_VISIBLE_DEVICES",
    "bench/race.py": "handed on to the processes that are measured",
    "bench/startup.py": "handed on to the process that is measured, with other folders for compiled kernels",
}


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in nodes(tree) if isinstance(node, ast.Call)]


def unpicklers(tree: ast.AST) -> set[str]:
    return {name for name in imported_names(tree) if name.split(".")[0] in UNPICKLERS}


def foreign_code(tree: ast.AST) -> list[str]:
    found = [dotted(call.func) for call in calls(tree) if dotted(call.func) in RUN_FOREIGN_CODE]
    for call in calls(tree):
        for keyword in call.keywords:
            trusted = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("trust_remote_code", "allow_pickle") and not trusted:
                found.append(keyword.arg)
    return found


def open_environments(tree: ast.AST) -> list[str]:
    """Template engines that a file makes or derives from, other than a sandbox."""
    classes = [node for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    used = [dotted(base) for each in classes for base in each.bases] + [dotted(call.func) for call in calls(tree)]
    safe = {each.name for each in classes if SANDBOXES & {dotted(base) for base in each.bases}} | SANDBOXES
    names = [name.rsplit(".", 1)[-1] for name in used]
    return [name for name in names if name.endswith(("Environment", "Template")) and name not in safe]


def template_engines(tree: ast.AST) -> list[str]:
    return [name for name in imported_names(tree) if name.split(".")[0] in ("jinja2", "mako")]


def prints(tree: ast.AST) -> list[int]:
    return [call.lineno for call in calls(tree) if dotted(call.func) == "print"]


def environment_reads(tree: ast.AST) -> list[int]:
    names = [node for node in nodes(tree) if isinstance(node, ast.Attribute)]
    return [node.lineno for node in names if dotted(node) in ("os.environ", "os.getenv")]


def nested_imports(tree: ast.AST) -> list[int]:
    """Lines of imports inside a function."""
    functions = [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted(
        {
            node.lineno
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
    )


def offenders(law: Callable[[ast.Module], Collection[object]], spared: Collection[str] = ()) -> dict[str, object]:
    """What a rule finds, by file. A file is exempt by its own name or by its package's."""
    found = {
        label(path): law(syntax(path))
        for path in source_files()
        if label(path) not in spared and package_of(path) not in spared
    }
    return {name: sins for name, sins in found.items() if sins}


def test_nothing_unpickles() -> None:
    assert not offenders(unpicklers)


def test_nothing_runs_foreign_code() -> None:
    assert not offenders(foreign_code)


def test_templates_run_in_a_sandbox() -> None:
    assert not offenders(template_engines, spared=TEMPLATE_FILES)
    assert not offenders(open_environments)


def test_only_the_command_line_prints() -> None:
    assert not offenders(prints, spared={"cli"})


def test_imports_stand_at_the_top() -> None:
    assert not offenders(nested_imports, spared=LAZY)


def test_no_behaviour_hides_in_the_environment() -> None:
    assert not offenders(environment_reads, spared=READS_ENVIRONMENT)


def test_a_module_opens_with_its_job() -> None:
    assert not offenders(lambda tree: [] if ast.get_docstring(tree) else ["no docstring"])


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "misc", "common"}
    assert not [label(path) for path in source_files() if path.stem in drawers]


def test_the_gates_see_what_they_are_for() -> None:
    tree = ast.parse(
        "import pickle, jinja2\nfrom dill import loads\nimport torch, os\n"
        "def f(x):\n    import json\n    torch.load(x)\n    eval(x)\n    model.eval()\n    print(x)\n"
        "    np.load(x, allow_pickle=True)\n    np.load(x, allow_pickle=False)\n    os.environ['X']\n"
        "    jinja2.Environment()\n    BoxedEnvironment()\n"
        "class BoxedEnvironment(SandboxedEnvironment): ...\nclass Open(jinja2.Environment): ...\n"
    )
    assert unpicklers(tree) == {"pickle", "dill"}
    assert sorted(foreign_code(tree)) == ["allow_pickle", "eval", "torch.load"]
    assert template_engines(tree) == ["jinja2"]
    assert open_environments(tree) == ["Environment", "Environment"]
    assert nested_imports(tree) == [5]
    assert prints(tree) == [9]
    assert environment_reads(tree) == [12]
