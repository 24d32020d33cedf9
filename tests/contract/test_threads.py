"""Threads of libraries in workers: one each, unless the program says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .support import Kind, search_path

#: sizes of a worker's thread pools, as the libraries report them
SCRIPT = """
import ctypes, os, re, sys
import numpy, torch
from torch.utils.data import Dataset, get_worker_info

def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}

def pools(do, *arguments):
    found = []
    for path in sorted(libraries()):
        if re.search("openblas|gomp", os.path.basename(path)):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            for name in ("scipy_openblas_%s_num_threads64_", "openblas_%s_num_threads"):
                if hasattr(library, name % do):
                    found.append(getattr(library, name % do)(*arguments))
    return found

def variable(name):  # as a library reads it
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return (getenv(name.encode()) or b"").decode()

class Asks(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        assert get_worker_info() is not None
        values = numpy.ones((300, 300))
        assert (values @ values).max() == 300
        return pools("get"), torch.get_num_threads(), variable("OPENBLAS_NUM_THREADS")

def two(worker):
    pools("set", 2)
    torch.set_num_threads(2)

def ask(**options):
    if sys.argv[1:]:
        options["multiprocessing_context"] = sys.argv[1]
    [answer] = {str(a) for a in make(Asks(), batch_size=None, num_workers=2, **options)}
    print(answer)

if __name__ == "__main__":
    pools("set", 2)
    ask()
    ask(worker_init_fn=two)
    print((pools("get"), torch.get_num_threads()))
"""


def answers(kind: Kind, *arguments: str, **variables: str) -> list:
    env = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", kind.script_head + SCRIPT, *arguments],
        env={**env, "PYTHONPATH": search_path(), **variables},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [eval(line) for line in done.stdout.splitlines()]


def test_one_thread_each(loader: Kind) -> None:
    plain, told, here = answers(loader)
    if not here[0]:
        pytest.skip("this NumPy has no OpenBLAS of its own")
    one = 1 if loader.balanced else 2  # sums over two threads are rounded otherwise
    assert plain == [[one], 1, "1" if loader.balanced else ""]
    assert told == [[2], 2, plain[2]]
    assert here[0] == [2]  # the program's own are left alone


def test_environment_sets_threads_of_workers(own: Kind) -> None:
    plain, _, here = answers(own, OPENBLAS_NUM_THREADS="3", OMP_NUM_THREADS="3")
    if not here[0]:
        pytest.skip("this NumPy has no OpenBLAS of its own")
    assert plain == [[2], 1, "3"]  # as the script set them
