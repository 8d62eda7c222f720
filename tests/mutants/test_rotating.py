"""All mutants still apply; a few of them, chosen by commit, are still detected."""

import subprocess
from pathlib import Path
from types import CodeType

import pytest

from tests import children
from tests.mutants.run import DOSE, ROOT, Bench, Mutant, read_mutants
from tests.tiers import examples

NUM_TRIED = examples(1, 3)  # `make test-mutants` tries all
MUTANTS = read_mutants()
PAPER_FILES = {path.relative_to(ROOT / "src/quire").as_posix() for path in (ROOT / "src/quire").rglob("*.py")}


def turn() -> int:
    """A number that changes with every commit; 0 without a git history."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    try:
        head = children.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(head, 16)


def tried() -> list[Mutant]:
    """Mutants that random scenarios detect, spread over the list."""
    quick = [mutant for mutant in MUTANTS if mutant.killer == DOSE]
    first, stride = turn() % len(quick), len(quick) // NUM_TRIED
    return [quick[(first + number * stride) % len(quick)] for number in range(NUM_TRIED)]


def test_there_are_enough_mutants_with_unique_names() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= 75
    assert len(set(names)) == len(names)
    assert {mutant.file for mutant in MUTANTS} <= PAPER_FILES


def operations(code: CodeType) -> object:
    """What a module does, wherever its lines are."""
    inner = [operations(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, inner


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_the_mutants_of_a_file_still_apply(file: str) -> None:
    source = (ROOT / "src" / "quire" / file).read_text(encoding="utf-8")
    unchanged = operations(compile(source, "", "exec"))
    for mutant in (mutant for mutant in MUTANTS if mutant.file == file):
        assert operations(compile(mutant.apply(source), "", "exec")) != unchanged, mutant.name
        assert mutant.killer == DOSE or (ROOT / mutant.killer).exists(), mutant.name


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(Path(tmp_path_factory.mktemp("bench")))
    bench.fill()
    return bench


@pytest.mark.parametrize("mutant", tried(), ids=lambda mutant: mutant.name)
def test_a_mutant_is_detected(bench: Bench, mutant: Mutant) -> None:
    seen = bench.kill(mutant, [DOSE])
    assert seen is not None, f"not detected: {mutant.name}: {mutant.bug}"
