"""The extension itself under AddressSanitizer and UndefinedBehaviorSanitizer, with fault points;
and its use by several threads under ThreadSanitizer.

It is built in a copy of the tree, so that no build output gets into this one. These
tests of this folder run with it: workers and the zygote killed at each labelled point; tests that
load rows, envelopes and collated batches; and in the long run all of tests/contract. Reports go to
files, because a worker that a sanitizer ends otherwise looks like any dead worker, and is replaced.
gcc's UndefinedBehaviorSanitizer writes no file together with AddressSanitizer: it sets the other's
file in place of its own. So undefined behaviour is an illegal instruction, whose place
AddressSanitizer reports. ThreadSanitizer sees all of the extension, and of Python and torch only
their waits (the GIL is a lock to it) and allocations.

Environment:
    MINATO_TEST_SANITIZED: set it for the long runs, too (some minutes).
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("csrc", "minato", "tests", "minato_command.py", "setup.py", "pyproject.toml", "README.md")
SHORT = [
    "tests/attack/test_faults.py", "tests/attack/test_trainer_faults.py",
    "tests/contract/test_transport.py",
]  # fmt: skip
LONG = [
    "tests/attack/test_faults.py", "tests/attack/test_kills.py", "tests/attack/test_damage.py",
    "tests/test_loader.py", "tests/iterators/test_prefetching.py",
    "tests/transport/test_sendable.py", "tests/seeding/test_seeding.py",
    "tests/ops/test_images.py", "tests/ops/test_jpeg.py",
    *sorted(f"tests/contract/{path.name}" for path in (ROOT / "tests/contract").glob("test_*.py")
             if path.name != "test_threads.py"),  # it forks next to threads: see ALONE
]  # fmt: skip
#: Worker threads, the engine's thread, and batches that other threads drop. (Tests that fork next
#: to other threads do not work under ThreadSanitizer.)
SHARED = [
    "tests/workers/test_python_threads.py", "tests/workers/test_thread_pool.py",
    "tests/workers/test_shared_by_threads.py",
    "tests/transport/test_sendable.py", "tests/transport/test_forks_while_held.py",
    "tests/ops/test_images.py",
]  # fmt: skip
#: That these runs end is seen to by the deadlines of the tests in them; this is for what hangs
#: outside of those. A machine that has much else to do may need long for all of them.
HANGS_S = 3600
#: GCC's AddressSanitizer does not prepare for forks. If another thread of the process starts or
#: ends during the fork, the child may inherit a held lock of the sanitizer's, which is never
#: released, and spin forever (1 in 300 such forks, gcc 12). Without these variables BLAS
#: starts a thread in each zygote, just before it forks its workers.
ALONE = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Kind(NamedTuple):
    """How the extension is built, what is loaded before Python, and the sanitizer's options, in
    which LOGS is the place for its reports."""

    sanitizers: str
    runtime: str
    options: dict[str, str]
    flags: str = ""
    with_torch: bool = True


ADDRESS = Kind(
    "address,undefined", "libasan.so",
    {"ASAN_OPTIONS": "detect_leaks=0:handle_sigill=2:log_path=LOGS/address",
     "PYTHONMALLOC": "malloc"},  # what Python allocates is watched, too
    flags="-fsanitize-undefined-trap-on-error",
)  # fmt: skip
#: Without minato._torch, so on the ways that do without it.
NO_TORCH = ADDRESS._replace(with_torch=False)
THREAD = Kind(
    "thread", "libtsan.so",
    {"TSAN_OPTIONS": "die_after_fork=0:exitcode=0:allocator_may_return_null=1:history_size=4:"
                     "report_signal_unsafe=0:suppressions=LOGS/../suppressions:log_path=LOGS/thread"},
)  # fmt: skip
#: glibc frees a thread's variables after its end, an order that ThreadSanitizer does not see.
SUPPRESSIONS = "race:_dl_deallocate_tls\n"


def runtimes(kind: Kind = ADDRESS) -> str | None:
    """The libraries to load before Python, or None if this compiler has no sanitizers. C++'s is
    included because AddressSanitizer looks once, and early, for how torch throws."""
    compiler = shutil.which("gcc")
    found = []
    for name in (kind.runtime, "libstdc++.so.6") if compiler else ():
        done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True,
                              text=True, check=True)  # fmt: skip
        found.append(done.stdout.strip())
    return " ".join(found) if found and all(map(os.path.isabs, found)) else None


class Tree:
    """A copy of this tree with a sanitized extension."""

    def __init__(self, root: Path, kind: Kind) -> None:
        self.root, self.kind = root, kind
        root.mkdir()
        (root / "suppressions").write_text(SUPPRESSIONS)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, symlinks=True,
                                ignore=shutil.ignore_patterns("*.so", "__pycache__"))  # fmt: skip
            else:
                shutil.copy(source, root / name)
        if not kind.with_torch:  # else that of an editable installation is found
            (root / "minato" / "_torch.py").write_text('raise ImportError("left out")\n')
        self.build()

    def build(self) -> None:
        environment = {"MINATO_SANITIZE": self.kind.sanitizers, "MINATO_FAULTS": "1",
                       "CFLAGS": self.kind.flags, "MINATO_OPTIMIZE": "-O1",
                       "MINATO_TORCH": str(int(self.kind.with_torch))}
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=self.root,
            env={**os.environ, **environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        """pytest's exit status and output, and the sanitizers' reports."""
        logs = self.root / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        (self.root / "left").mkdir(exist_ok=True)  # by a process that a sanitizer ends
        told = {
            "LD_PRELOAD": runtimes(self.kind) or "",
            **{name: text.replace("LOGS", str(logs)) for name, text in self.kind.options.items()},
            "PYTHONPATH": str(self.root),
            "TMPDIR": str(self.root / "left"),
            "MINATO_TEST_LOADERS": "minato,minato-static",
            "MINATO_TEST_FAULTS": "1",
            # of pytest's plugins and options for the run outside, none
            "PYTEST_ADDOPTS": "",
            **ALONE,
            **environment,
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
             f"--basetemp={self.root / 'temporary'}", *arguments],
            cwd=self.root, env={**os.environ, **told}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        reports = [path.read_text(errors="replace") for path in sorted(logs.iterdir())]
        return done.returncode, done.stdout[-6000:] + done.stderr[-3000:], reports


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory):
    """Makes a tree, or gives the one that was made."""
    if runtimes() is None:
        pytest.skip("gcc has no sanitizers here")
    made: dict[str, Tree] = {}

    def get(kind: Kind) -> Tree:
        key = repr(kind)
        if key not in made:
            made[key] = Tree(tmp_path_factory.mktemp("sanitized") / "tree", kind)
        return made[key]

    yield get
    for tree in made.values():
        shutil.rmtree(tree.root)


def test_sanitized_test_files_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of fault points are collected in these runs alone, and can be imported in any."""
    monkeypatch.setenv("MINATO_TEST_FAULTS", "1")
    faults = importlib.import_module("attack.test_faults")
    assert Path(faults.__file__) == ROOT / SHORT[0]
    assert [file for file in [*LONG, *SHARED] if not (ROOT / file).exists()] == []


def must_pass(status: int, output: str, reports: list[str]) -> None:
    assert reports == [], reports[0][:6000]
    assert status == 0, output


if os.environ.get("MINATO_TEST_SANITIZED"):

    @pytest.mark.limit(HANGS_S)
    @pytest.mark.parametrize("file", SHORT)
    def test_short(trees, file: str) -> None:
        must_pass(*trees(NO_TORCH).run(file, MINATO_STRESS_SECONDS="0.3"))

    @pytest.mark.limit(HANGS_S)
    @pytest.mark.parametrize("file", LONG)
    def test_long(trees, file: str) -> None:
        must_pass(*trees(ADDRESS).run(file, MINATO_TEST_FAULTS="2"))

    @pytest.mark.limit(HANGS_S)
    @pytest.mark.parametrize("file", SHARED)
    def test_shared_files_under_thread_sanitizer_pass(trees, file: str) -> None:
        must_pass(*trees(THREAD).run(file))


def test_normal_build_has_no_sanitizer() -> None:
    for library in (ROOT / "minato").glob("*.so"):
        assert b"__asan_init" not in library.read_bytes(), f"{library.name} is sanitized"
