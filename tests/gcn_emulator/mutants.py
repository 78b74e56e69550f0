"""Mutation of the emulator itself: one planted bug at a time must be noticed by its own tests.

    python tests/gcn_emulator/mutants.py            every mutant, Markdown table
    python tests/gcn_emulator/mutants.py exec       those whose description contains "exec"

Every mutant is a textual change of a copy of the package; the tests named beside it run against the
copy.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent / "gcn_emulator"


@dataclass(frozen=True)
class Mutant:
    """A planted bug: `old` becomes `new` once in `file`; the files `tests` must then fail."""

    kind: str
    what: str
    file: str
    old: str
    new: str
    tests: str


def load_mutants() -> list[Mutant]:
    """The planted bugs of mutants.toml."""
    table = tomllib.loads((HERE / "mutants.toml").read_text())
    return [Mutant(**entry) for entry in table["mutant"]]


def _copy(folder: Path) -> Path:
    copy = folder / "gcn_emulator"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def _pytest(folder: Path, tests: str) -> subprocess.CompletedProcess:
    env = dict(os.environ, PYTHONPATH=str(folder), XDG_CACHE_HOME=str(folder / "cache"))
    # confcutdir: the conftest.py above would put the original package in front of the copy
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--confcutdir={HERE}"]
    options += [str(path) for name in tests.split() for path in sorted(HERE.glob(name))]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env=env, capture_output=True, text=True, cwd=folder, check=False,
    )  # fmt: skip


def check_that_the_copy_runs(folder: Path) -> None:
    """The tests must pass on an unchanged copy, and must not run the original.

    Raises: RuntimeError: one of the two does not hold.
    """
    copy = _copy(folder)
    clean = _pytest(folder, "test_waves.py")
    (copy / "__init__.py").write_text("raise RuntimeError('the copy')\n")
    if clean.returncode or "the copy" not in _pytest(folder, "test_waves.py").stdout:
        raise RuntimeError(f"the tests do not run on the copy:\n{clean.stdout[-2000:]}")


def run(mutant: Mutant, folder: Path) -> bool:
    """Whether the tests notice the mutant."""
    path = _copy(folder) / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.what}: {mutant.old!r} is not once in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new))
    done = _pytest(folder, mutant.tests)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.what}: pytest ended with {done.returncode}:\n{done.stdout}")
    return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wanted", nargs="?", default="", help="part of a kind or description")
    args = parser.parse_args()
    chosen = [m for m in load_mutants() if args.wanted in f"{m.kind} {m.what}"]
    with tempfile.TemporaryDirectory() as folder:
        check_that_the_copy_runs(Path(folder))
        caught = {m: run(m, Path(folder)) for m in chosen}
    print("| kind | planted | caught |\n| --- | --- | --- |")
    for kind in dict.fromkeys(m.kind for m in chosen):
        mine = [c for m, c in caught.items() if m.kind == kind]
        print(f"| {kind} | {len(mine)} | {sum(mine)} |")
    print(f"| all | {len(caught)} | {sum(caught.values())} |")
    for m, noticed in caught.items():
        if not noticed:
            print(f"not noticed: {m.what} ({m.file})")
    return 0 if all(caught.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
