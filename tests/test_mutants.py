"""Do the tests notice faults? Each ``MN_BUG_NAME`` of csrc is one, off in normal builds.

A run must pass without its fault and fail with it.

Environment:
    MINATO_TEST_MUTANTS: set it for these runs (`make mutants`, some minutes).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from test_c_primitives import Builder, builder_for, must_pass
from test_sanitized import NO_TORCH, ROOT, Tree, runtimes


class Run(NamedTuple):
    """Cases of a C program."""

    program: str
    kinds: tuple[str, ...]
    build: str = "gcc"
    seconds: float = 0.3  # of stress: more where two processors have to meet within nanoseconds


#: faults in the protocols between processes
PROGRAMS = {
    "EVENT_ORDER": Run("mn_event", ("thread",), "tsan"),  # a sleep may end before what it waits for
    "CLAIM": Run("mn_runqueue", ("thread",), seconds=8),  # without a compare-and-swap
    "GENERATION": Run("mn_runqueue", ("plain",)),  # of an entry is not compared
    "DONE_ORDER": Run("mn_engine", ("thread",), "tsan"),  # rows may be seen after DONE
    "SWEEP": Run("mn_worker", ("fork",)),  # tasks stay with the dead worker
    "CACHE_LOG": Run("mn_cache", ("fork",)),  # a segment in use is emptied
    "CACHE_READ": Run("mn_cache", ("plain",)),  # a recycled entry is delivered
}  # fmt: skip
#: faults in the extension, which is built with AddressSanitizer
EXTENSION = {
    "TENSOR": "tests/contract/test_transport.py",  # freed before its hold
    "SEED": "tests/seeding/test_seeding.py",  # does not depend on the epoch
}


def test_every_planted_fault_has_a_run() -> None:
    text = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.[ch]"))
    assert set(re.findall(r"#ifn?def MN_BUG_(\w+)", text)) == {*PROGRAMS, *EXTENSION}


if os.environ.get("MINATO_TEST_MUTANTS"):

    @pytest.fixture(scope="module")
    def builders() -> dict[str, Builder]:
        return {}

    @pytest.mark.limit(1200)
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_program_with_planted_fault_fails(
        name: str, builders: dict[str, Builder], tmp_path: Path,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:  # fmt: skip
        program, kinds, build, seconds = PROGRAMS[name]
        environment = {"MINATO_STRESS_SECONDS": str(seconds),
                       "MINATO_TEST_DEADLINE": str(60 + 5 * seconds)}  # fmt: skip
        whole = builder_for(build, builders, tmp_path_factory)
        must_pass(whole.run(program, *kinds, **environment))
        broken = Builder(tmp_path, build, whole, "MN_BUG_" + name)
        assert broken.run(program, *kinds, **environment).returncode != 0

    @pytest.fixture(scope="module")
    def whole(tmp_path_factory: pytest.TempPathFactory) -> Tree:
        if runtimes() is None:
            pytest.skip("gcc has no sanitizers here")
        return Tree(tmp_path_factory.mktemp("whole") / "tree", NO_TORCH)

    @pytest.mark.limit(1200)
    @pytest.mark.parametrize("name", EXTENSION)
    def test_extension_with_planted_fault_fails(name: str, whole: Tree, tmp_path: Path) -> None:
        status, output, reports = whole.run(EXTENSION[name])
        assert status == 0 and reports == [], output
        flags = f"{NO_TORCH.flags} -DMN_BUG_{name}"
        status, output, reports = Tree(tmp_path / "tree", NO_TORCH._replace(flags=flags)).run(
            "-x", EXTENSION[name]
        )
        failed = status == 1 and "DeadlineExceeded" not in output  # not for want of time
        assert reports or failed, output
