"""Threads that OpenMP has started in the program, which forks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract.support import wait_for

import minato
from minato.workers import library_threads

LARGE = torch.full((1_000_000,), 0.5)


def in_parallel() -> float:
    return float(LARGE.sin().max())


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    in_parallel()
    yield
    torch.set_num_threads(before)


class Parallel:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        torch.set_num_threads(2)  # minato and torch have said 1
        return in_parallel()


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_torch_threads_work_before_and_after_a_fork(two_threads: Any, scheduling: str) -> None:
    right = in_parallel()
    loader = minato.DataLoader(Parallel(), batch_size=2, num_workers=2, scheduling=scheduling,
                               multiprocessing_context="fork", timeout=60)  # fmt: skip
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == [right] * 4
        assert in_parallel() == right


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_openmp_threads_end_and_begin_again(two_threads: Any) -> None:
    if not library_threads._libraries.gnu_openmp():
        pytest.skip("torch has no GNU OpenMP here")
    before = threads()
    library_threads.end_openmp_threads()
    assert wait_for(lambda: before - threads())  # it may be listed for a moment after it has ended
    after = threads()
    in_parallel()
    assert threads() - after


@pytest.mark.parametrize("program, fork", [("import minato", ""), ("", "import minato")])
def test_a_fork_of_a_parallel_program_can_load(program: str, fork: str) -> None:
    """Its copy of the pool has no threads that could be ended, whichever process imports minato."""
    text = f"""
import os, signal, sys, threading, torch
{program}
torch.set_num_threads(4)
torch.rand(1 << 22).sin()
pid = os.fork()
if pid == 0:
    {fork}
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.alarm(60)
    loader = minato.DataLoader(range(8), 2, num_workers=1, multiprocessing_context="fork")
    os._exit(len(list(loader)))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100)
    assert done.stdout == "4\n", done.stderr


def test_openmp_libraries_are_looked_for_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    found = library_threads._Libraries()

    def library(path: str) -> Any:
        looked.append(path)
        return ctypes.CDLL(path)

    monkeypatch.setattr(library_threads, "_library", library)
    first, times = found.gnu_openmp(), len(looked)
    assert times and found.gnu_openmp() is first and len(looked) == times
    found._added -= 1  # as if another had come since
    assert len(found.gnu_openmp()) == len(first)
    assert len(looked) == 2 * times
