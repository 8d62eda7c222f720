"""The source tree as the tests of the architecture see it: files, packages and syntax trees."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "quire"

TORCH_FREE = ("core", "kv", "sched", "sim")
TENSOR = ("kernels", "layers", "models", "sampling", "weights", "runner", "dist", "transfer", "spec")
NEUTRAL = ("config", "formats", "catalog", "metrics", "workload", "text", "output_parsing", "grammar")


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a syntax tree, found once for all tests that look at them."""
    return tuple(ast.walk(tree))


def label(path: Path) -> str:
    """How the tests name a file: its path inside the package."""
    return path.relative_to(SOURCE).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    """The sub-package of a file, or its own name at the top level."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_names(tree: ast.AST) -> list[str]:
    """Every module that a syntax tree imports, dotted, wherever the import stands."""
    names: list[str] = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.append(node.module)
    return names


def dotted(node: ast.expr) -> str:
    """`torch.load` for the expression that spells it; empty for anything that is not a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""
