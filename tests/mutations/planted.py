"""The planted mutations: mistakes that a rewrite could make, one a patch, and how each is tried.

A patch begins with a sentence that says what breaks for a user, and with a line ``found by:`` for
each test that must notice. It is applied to a copy of the tree, with little context, so that it
survives code that moves; what no longer applies must be made anew against the new code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.test_tree import row_of

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "tests" / "mutations"
APPLY = ("git", "apply", "--recount", "-C1")
TIMEOUT_S = 900


class Mutation(NamedTuple):
    """One patch."""

    path: Path
    breaks: str
    """What a user would suffer, in a sentence."""
    tests: tuple[str, ...]
    """The tests that must notice, as pytest names them."""
    files: tuple[str, ...]
    """What the patch changes, relative to the top of the tree."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def room(self) -> str:
        """The row of the budget in docs/design/house.md that the first changed file counts for."""
        return row_of(ROOT / self.files[0])


class Trial(NamedTuple):
    """What came of one mutation; ``reason`` says why it was not found, and is empty if it was."""

    mutation: Mutation
    reason: str


def read(path: Path) -> Mutation:
    """Raises ``ValueError`` for a patch whose head lacks its sentence or its tests."""
    head, _, diff = path.read_text().partition("\ndiff --git ")
    lines = head.splitlines()
    tests = [line.removeprefix("found by: ") for line in lines if line.startswith("found by: ")]
    breaks = [line for line in lines if line and not line.startswith("found by:")]
    files = [line.removeprefix("+++ b/") for line in diff.splitlines() if line.startswith("+++ b/")]
    if not (tests and breaks and files):
        raise ValueError(f"{path} must be a sentence, lines 'found by: tests/...::test_...', and a diff of git")
    return Mutation(path, " ".join(breaks), tuple(tests), tuple(files))


def planted(names: Sequence[str] = ()) -> list[Mutation]:
    """Return the mutations of these names, or all."""
    found = {mutation.name: mutation for mutation in map(read, sorted(FOLDER.glob("*.patch")))}
    if unknown := sorted(set(names) - found.keys()):
        raise ValueError(f"no mutation {unknown[0]}; there are {', '.join(found)}")
    return [found[name] for name in names or found]


def why_not_applied(mutation: Mutation, tree: Path, *, check: bool = False) -> str:
    """Apply a patch to a tree, or only see whether it could be; return why it cannot, or ''."""
    command = [*APPLY, *(["--check"] if check else []), str(mutation.path)]
    # A tree inside another repository must not be taken for a part of it.
    around = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=around, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return f"does not apply: {done.stderr.strip()}. Make the same mistake in the new code, and the patch anew"


def copy_tree(into: Path) -> Path:
    """Copy what git knows or would add; links stay links."""
    listed = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        source, target = ROOT / name, into / name
        if os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return into


def run_tests(tests: Iterable[str], tree: Path) -> tuple[int, dict[str, str], str]:
    """Run tests in a tree; return pytest's exit status, how each test failed that did, and what was
    printed.
    """
    around = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    around |= {"PYTHONPATH": str(tree)}
    command = (sys.executable, "-m", "tests.mutations.witness", *tests)
    try:
        done = subprocess.run(
            command, cwd=tree, env=around, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return -1, {}, f"the tests ran longer than {TIMEOUT_S} s"
    failed = [line.split("\t", 2)[1:] for line in done.stdout.splitlines() if line.startswith("witness\t")]
    return done.returncode, dict(failed), done.stdout + done.stderr


def try_one(mutation: Mutation, tree: Path) -> Trial:
    """Break a tree, run the tests that must notice, and mend it."""
    if why := why_not_applied(mutation, tree):
        return Trial(mutation, why)
    try:
        status, failed, said = run_tests(mutation.tests, tree)
    finally:
        for name in mutation.files:
            shutil.copy2(ROOT / name, tree / name)
    if status != 1:
        return Trial(mutation, "not noticed" if status == 0 else f"the tests did not run: {said[-2000:]}")
    for test in mutation.tests:
        how = failed.get(test, "passed")
        if how not in ("assertion", "declared"):
            return Trial(mutation, f"{test}: {how}")
    return Trial(mutation, "")


def try_all(mutations: Sequence[Mutation]) -> Iterator[Trial]:
    """Yield what came of each mutation, in order. What fails without one finds none.

    Raises ``ValueError`` if the tests cannot be run.
    """
    workers = min(os.cpu_count() or 1, len(mutations))
    with TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(workers) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            trees.put(copy_tree(Path(folder, str(number))))
        tree = trees.get()
        status, failing, said = run_tests(sorted({test for mutation in mutations for test in mutation.tests}), tree)
        trees.put(tree)
        if status not in (0, 1):
            raise ValueError(f"the tests cannot be run on the tree as it is: {said}")

        def in_a_tree(mutation: Mutation) -> Trial:
            for test in mutation.tests:
                if test in failing:
                    return Trial(mutation, f"{test} fails without it, by: {failing[test]}")
            tree = trees.get()
            try:
                return try_one(mutation, tree)
            finally:
                trees.put(tree)

        yield from pool.map(in_a_tree, mutations)
