"""Do the odd runs notice? Defects in Python are planted one at a time, in a copy of the tree.

Environment:
    MINATO_TEST_MUTANTS: set it for that (some minutes); else only the places are looked at.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from contract.support import search_path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("csrc", "minato", "tests", "pyproject.toml")


class Mutant(NamedTuple):
    """A change of minato, and the test that it must not pass."""

    file: str
    old: str
    new: str
    test: str
    seconds: str = "1"  # MINATO_STRESS_SECONDS


ODD, LIMITS = "test_odd_runs.py::test_", "test_limits.py::test_"
MUTANTS = {
    "deadlines go by a clock that can be set": Mutant(
        "time_limits.py", "        self._looked = time.monotonic()\n\n    def part(self) ->",
        "        self._looked = time.time()\n\n    def part(self) ->",
        ODD + "settable_clocks_are_not_read"),
    "time in which the program stands still counts": Mutant(
        "time_limits.py", "self._left -= min(now - self._looked, 2 * self._part)",
        "self._left -= (now - self._looked)",
        ODD + "a_program_that_stands_still[static]", "30"),
    "a descriptor of the zygote's is left open": Mutant(
        "workers/process_pool.py", "last_first.callback(os.close, fd)",
        "last_first.callback(int, fd)", ODD + "sixty_four_descriptors_are_enough"),
    "workers have as many threads as the program": Mutant(
        "workers/library_threads.py", "    torch.set_num_threads(1)\n    if _limited",
        "    if _limited", ODD + "a_program_with_threads_and_openmp_forks"),
    "a batch has to find room in /dev/shm": Mutant(
        "iterators/receiver.py", 'if "</torch_" not in str(error):', "if error:",
        ODD + "dev_shm_of_64_megabytes"),
    "the error does not say which limit to raise": Mutant(
        "_system.py", "        if not helps:", "        if helps:",
        LIMITS + "refused_resource_is_named"),
    "a refused system call is taken for granted": Mutant(
        "_system.py", "                return why", "                return None",
        LIMITS + "torch_serves_if_system_calls_are_refused"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_of_the_sources_as_they_are(name: str) -> None:
    mutant = MUTANTS[name]
    text = (ROOT / "minato" / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has changed: update the mutant"
    file, test = mutant.test.split("::")
    assert f"def {test.split('[')[0]}(" in (ROOT / "tests/attack" / file).read_text()


if os.environ.get("MINATO_TEST_MUTANTS"):

    @pytest.fixture(scope="module")
    def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
        root = tmp_path_factory.mktemp("planted") / "tree"
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            (root / name).parent.mkdir(exist_ok=True)
            copy(ROOT / name, root / name)
        return root

    def run(root: Path, mutant: Mutant) -> subprocess.CompletedProcess:
        told = {"PYTHONPATH": search_path().replace(str(ROOT), str(root)), "PYTEST_ADDOPTS": "",
                "PYTHONDONTWRITEBYTECODE": "1", "MINATO_STRESS_SECONDS": mutant.seconds}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
             f"--basetemp={root.parent / 'temporary'}", f"tests/attack/{mutant.test}"],
            cwd=root, env={**os.environ, **told}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 1) and " skipped" not in done.stdout, done.stdout[-6000:]
        return done

    @pytest.mark.limit(600)
    @pytest.mark.parametrize("name", MUTANTS)
    def test_a_broken_package_is_noticed(tree: Path, name: str) -> None:
        """By a test that passes as long as nothing is broken."""
        mutant = MUTANTS[name]
        whole = run(tree, mutant)
        assert whole.returncode == 0, whole.stdout[-6000:]
        path = tree / "minato" / mutant.file
        text = path.read_text()
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            assert run(tree, mutant).returncode == 1
        finally:
            path.write_text(text)
