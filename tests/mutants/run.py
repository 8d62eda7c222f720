"""Mutation testing: plants one bug at a time in a copy of the package and runs tests until one fails.

`make test-mutants`. Tests run from the cheapest to the most expensive: the `killer` that a mutant names, random
scenarios ("dose"), the tests of kv and sched, those of sim and core. A test that fails without a mutant is not used.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import children

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
DOSE = "dose"
DOSE_STEPS = 4_000
DOSE_LIMIT_S = 90.0  # a few seconds on an idle core: beyond this it is an endless loop
SUITE_LIMIT_S = 900.0
ENOUGH = 0.95
_BROKEN = re.compile(r"^(FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A small edit of one file of the package. `killer` is where to look first: "dose", or a path of tests."""

    name: str
    file: str
    bug: str
    old: str
    new: str
    killer: str = DOSE

    def apply(self, source: str) -> str:
        count = source.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: its old text is {count} times in {self.file}; it must be there once.")
        return source.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    return [
        Mutant(**entry)
        for path in sorted(FOLDER.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    ]


class Bench:
    """A copy of the package and its tests, so that concurrent edits do not matter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._broken: set[str] = set()  # fails without a mutant: not used

    def fill(self) -> None:
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "pyproject.toml", self.folder)

    def find_broken(self, killers: Iterable[str], pool: ThreadPoolExecutor) -> list[str]:
        """Run the tests on the unchanged package; those that fail are not used."""
        self._broken = {name for found in pool.map(self._failures_unchanged, killers) for name in found}
        return sorted(self._broken)

    def _failures_unchanged(self, killer: str) -> list[str]:
        if killer != DOSE:
            return self._failures(self.folder, killer, stop=False)
        return [DOSE] if self._dose(self.folder) is not None else []

    def kill(self, mutant: Mutant, killers: Sequence[str]) -> str | None:
        """The test that detected the mutant, if any."""
        with tempfile.TemporaryDirectory(prefix="mutant-") as name:
            copy = Path(name)
            for part in ("src", "tests"):
                shutil.copytree(self.folder / part, copy / part)
            shutil.copy2(self.folder / "pyproject.toml", copy)
            path = copy / "src" / "quire" / mutant.file
            path.write_text(mutant.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                compiled.unlink()  # Python compares size and age of the source only, which may be equal
            for killer in killers:
                seen = self._dose(copy) if killer == DOSE else self._suite(copy, killer)
                if seen is not None:
                    return seen
        return None

    def _dose(self, copy: Path) -> str | None:
        if DOSE in self._broken:
            return None
        command = [str(copy / "tests" / "mutants" / "dose.py"), str(copy / "src"), str(DOSE_STEPS)]
        done = _run(copy, command, DOSE_LIMIT_S)
        if done is None:
            return "dose: did not end"
        return None if done.returncode == 0 else f"dose: {_last_line(done.stdout + done.stderr)}"

    def _suite(self, copy: Path, path: str) -> str | None:
        if any(name.startswith((f"{path}: ", f"{path} did not end")) for name in self._broken):
            return None  # it ends like that without a mutant, too
        return next(iter(self._failures(copy, path, stop=True)), None)

    def _failures(self, copy: Path, path: str, *, stop: bool) -> list[str]:
        if not any((copy / path).rglob("test_*.py")) and not (copy / path).is_file():
            return []
        skipped = [f"--deselect={name}" for name in sorted(self._broken) if "::" in name]
        skipped += [f"--ignore={name}" for name in sorted(self._broken) if "::" not in name and name != DOSE]
        command = ["-m", "pytest", "-q", "-rfE", "--tb=no", *(["-x"] if stop else []), *skipped, path]
        done = _run(copy, command, SUITE_LIMIT_S)
        if done is None:
            return [f"{path} did not end"]
        found = [match[2] for match in _BROKEN.finditer(done.stdout)]
        return found if found or done.returncode in (0, 5) else [f"{path}: pytest stopped with {done.returncode}"]


def _run(copy: Path, arguments: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str] | None:
    """Python on a copy. Its package precedes an editable install on the path."""
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    try:
        return children.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:100] if lines else "nothing said"


def killers_of(mutant: Mutant, *, quick: bool) -> list[str]:
    """The tests to run, cheapest first; quick: only the mutant's own killer."""
    everywhere = [mutant.killer, DOSE, "tests/kv", "tests/sched", "tests/core", "tests/sim"]
    return [mutant.killer] if quick else list(dict.fromkeys(everywhere))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="the name of a mutant, or how it begins")
    parser.add_argument("--rotate", type=int, default=1, help="only every Nth mutant")
    parser.add_argument("--turn", type=int, default=0, help="offset of the first one")
    parser.add_argument("--quick", action="store_true", help="only the killer that each mutant names")
    return parser.parse_args()


def main() -> int:
    options = _options()
    mutants = [m for m in read_mutants() if not options.only or m.name.startswith(tuple(options.only))]
    mutants = mutants[options.turn % options.rotate :: options.rotate]
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, ThreadPoolExecutor(options.jobs) as pool:
        bench = Bench(Path(name))
        bench.fill()
        killers = {killer for mutant in mutants for killer in killers_of(mutant, quick=options.quick)}
        for each in bench.find_broken(sorted(killers), pool):
            print(f"no killer, it fails without a mutant: {each}", flush=True)

        def kill(mutant: Mutant) -> str | None:
            try:
                seen = bench.kill(mutant, killers_of(mutant, quick=options.quick))
            except ValueError as stale:
                return f"NOT PLANTED: {stale}"
            print(f"{'killed  ' if seen else 'SURVIVED'}  {mutant.name:<40} {seen or mutant.bug}", flush=True)
            return seen

        outcomes = dict(zip(mutants, pool.map(kill, mutants), strict=True))
    return report(outcomes)


def report(outcomes: dict[Mutant, str | None]) -> int:
    """A table by file, and one JSON line."""
    killed = {mutant for mutant, seen in outcomes.items() if seen is not None and not seen.startswith("NOT PLANTED")}
    print(f"\n{'file':<24}{'mutants':>8}{'killed':>8}")
    for file in sorted({mutant.file for mutant in outcomes}):
        here = [mutant for mutant in outcomes if mutant.file == file]
        print(f"{file:<24}{len(here):>8}{sum(mutant in killed for mutant in here):>8}")
    survivors = [mutant for mutant in outcomes if mutant not in killed]
    for mutant in survivors:
        print(f"survived: {mutant.name}: {outcomes[mutant] or mutant.bug}")
    share = len(killed) / len(outcomes) if outcomes else 0.0
    print(
        json.dumps(
            {
                "mutants": len(outcomes),
                "killed": len(killed),
                "survivors": [mutant.name for mutant in survivors],
                "share": round(share, 4),
            }
        )
    )
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
