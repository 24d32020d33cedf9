"""spawn and forkserver: the same data, and datasets with files, threads or locks."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socketserver
import sqlite3
import threading
import time

import numpy as np
import pytest
import torch
import torch.utils.data

import minato
from minato.workers.job import Pickled

from .datasets import (
    Decodes,
    DefaultMethod,
    Images,
    Noisy,
    Opens,
    Plain,
    Ragged,
    SharesHandle,
    SharesTensors,
    StartsThread,
    WithTools,
    Wordy,
    keep_list,
)  # fmt: skip
from .support import (
    A_THREAD,
    SECONDS,
    alive,
    copied,
    expect_returned,
    held,
    kill,
    kill_ready,
    run_file,
    run_script,
    same,
    wait_for,
    worker_entries,
    workers_of,
)  # fmt: skip

METHODS = ["spawn", "forkserver"]


def make(dataset, method, **options):
    torch.manual_seed(77)
    options = {"batch_size": 8, "num_workers": 2, "shuffle": True, **options}
    return minato.DataLoader(dataset, multiprocessing_context=method, **options)


@pytest.mark.parametrize("method", METHODS)
def test_workers_start_processes_by_the_same_method(method):
    loader = make(DefaultMethod(), method, batch_size=None)
    assert list(loader) == [method] * 4


@pytest.mark.parametrize("method", METHODS)
def test_start_methods_give_the_same_data(method):
    for dataset, options in [
        (Wordy(40), {}),  # rows and envelopes
        (Ragged(40), {"collate_fn": keep_list, "scheduling": "static"}),
    ]:
        expected = [copied(b) for b in make(dataset, "fork", **options)]
        assert same([copied(b) for b in make(dataset, method, **options)], expected)


@pytest.mark.parametrize("method", METHODS)
def test_workers_are_replaced(method):
    expected = [copied(b) for b in make(Noisy(200), "fork")]
    iterator = iter(make(Noisy(200), method, max_retries=50))
    got = []
    for number, batch in enumerate(iterator):
        got.append(batch)
        if number in (2, 5, 8):  # most samples are not made yet
            deaths = iterator._engine.health()["deaths"]
            wait_for(lambda: kill_ready(iterator, random), "a worker that can be killed")
            wait_for(lambda: iterator._engine.health()["deaths"] > deaths, "its death")
    assert same(got, expected)


@pytest.mark.parametrize("method", ["fork", *METHODS])
def test_datasets_with_multiprocessing_objects(method):
    context = multiprocessing.get_context(method)
    dataset = WithTools(context)
    loader = minato.DataLoader(
        dataset, batch_size=8, num_workers=2, multiprocessing_context=context
    )
    got = torch.cat([b["index"] for b in loader]).tolist()
    assert got == list(range(48))
    assert dataset.value.value == 48
    assert sorted(dataset.queue.get(timeout=120) for _ in range(48)) == list(range(48))
    dataset.queue.close()
    dataset.queue.join_thread()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_dataset_threads_run_in_workers(method, scheduling):
    expected = [copied(b) for b in make(Noisy(24), "fork", scheduling=scheduling)]
    loader = make(StartsThread(24), method, scheduling=scheduling)
    assert same([copied(b) for b in loader], expected)
    assert loader.stats()["worker_start"] == "forked"


# ---- packages that start threads with the interpreter --------------------------------------


@pytest.mark.parametrize("starts", [
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "import _thread, time; _thread.start_new_thread(time.sleep, (600,))",
])  # fmt: skip
def test_a_packages_thread_makes_each_worker_start_itself(starts, started_with):
    expected = [copied(b) for b in make(Noisy(24), "fork")]
    started_with(starts)
    loader = make(Noisy(24), "spawn")
    assert same([copied(b) for b in loader], expected)
    assert "threads" in loader.stats()["worker_start"]


def test_a_directly_started_worker_is_replaced(started_with):
    started_with(A_THREAD)
    iterator = iter(make(Noisy(400), "spawn", persistent_workers=True))
    next(iterator)
    os.kill(worker_entries(iterator)[0]["pid"], signal.SIGKILL)
    assert len(list(iterator)) == 49
    assert len(list(iterator._pool.handles)) == 2


# ---- what loading a dataset opens ---------------------------------------------------------


class Squares(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while number := self.rfile.read(8):
            square = int.from_bytes(number, "little") ** 2
            self.wfile.write(square.to_bytes(8, "little"))


@pytest.fixture
def place(request, tmp_path):
    """A source of squares of numbers, of the kind that a dataset asks for."""
    what, path = request.param, tmp_path / "squares"
    if what == "socket":
        with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Squares) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            yield what, "{}:{}".format(*server.server_address)
            server.shutdown()
            thread.join()
        return
    if what == "sqlite":
        with sqlite3.connect(path) as base:
            base.execute("CREATE TABLE t (i INTEGER PRIMARY KEY, v INTEGER)")
            base.executemany("INSERT INTO t VALUES (?, ?)", [(i, i * i) for i in range(4096)])
        base.close()
    else:
        path.write_bytes(b"".join((i * i).to_bytes(8, "little") for i in range(4096)))
    yield what, str(path)


def wrong(loader) -> int:
    """How many samples are not the expected squares."""
    return sum(int((square != index * index).sum()) for index, square in loader)


@pytest.mark.parametrize("place, method", [
    ("file", "forkserver"), ("sqlite", "spawn"), ("socket", "spawn"),
], indirect=["place"])  # fmt: skip
def test_files_opened_while_loading_are_per_worker(place, method):
    """All forks of the opening process share a file's offset and a connection's stream."""
    what, path = place
    loader = make(Opens(path, what), method)
    assert wrong(loader) == 0
    assert loader.stats()["worker_start"] == "forked"


@pytest.mark.parametrize("method", METHODS)
def test_tensors_sharing_memory_still_share_in_workers(method):
    assert wrong(make(SharesTensors(), method)) == 0


def test_accelerator_handles_are_loaded_by_workers_only(tmp_path, monkeypatch):
    """Once in each worker, as with torch; the memory lives as long as the workers."""
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: (), raising=True)
    log = tmp_path / "log"
    iterator = iter(minato.DataLoader(
        SharesHandle(str(log)), 4, num_workers=2, multiprocessing_context="forkserver",
    ))  # fmt: skip
    wait_for(lambda: all(w["state"] == 3 for w in worker_entries(iterator)), "both workers")
    loaded = [int(pid) for pid in log.read_text().split()]
    assert sorted(loaded) == sorted(workers_of(iterator))
    assert [storage.nbytes() for storage in iterator._pool._shared] == [12]
    assert set(torch.cat(list(iterator)).tolist()) <= set(loaded)
    iterator._shutdown_workers()
    assert iterator._pool._shared == []


@pytest.mark.parametrize("method", METHODS)
def test_folder_made_while_loading_is_per_worker(method, tmp_path, monkeypatch):
    """A folder that is removed with its process is removed with the worker."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    loader = make(Decodes(200), method, num_workers=4)
    assert sum(int((number != index).sum()) for index, number in loader) == 0
    assert list(tmp_path.iterdir()) == []


DRAWS_FROM_A_MODULE = """
import sys, numpy, torch, minato
rng = numpy.random.default_rng()

class Draws(torch.utils.data.Dataset):
    drawn = 0.0
    def __len__(self):
        return 200
    def __getstate__(self):
        return "a state"
    def __setstate__(self, state):
        self.drawn = numpy.random.rand()
    def __getitem__(self, index):
        return rng.random(), self.drawn

if __name__ == "__main__":
    loader = minato.DataLoader(Draws(), 10, num_workers=2, multiprocessing_context=sys.argv[1],
                               scheduling=sys.argv[2])
    got = [row for batch in loader for row in zip(*(field.tolist() for field in batch))]
    print(len({number for number, _ in got}), len({drawn for _, drawn in got}))
"""


@pytest.mark.parametrize("method, scheduling", [
    ("spawn", "balanced"), ("spawn", "static"), ("forkserver", "static"),
])  # fmt: skip
def test_module_generator_is_per_worker(method, scheduling, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DRAWS_FROM_A_MODULE)
    done = run_file(script, method, scheduling)
    assert done.returncode == 0, done.stderr[-3000:]
    numbers, loadings = map(int, done.stdout.split())
    assert numbers == 200 and (scheduling == "balanced" or loadings == 2)


UNGUARDED = """
import sys, torch, minato
loader = minato.DataLoader(torch.arange(4), num_workers=1, multiprocessing_context=sys.argv[1])
print(list(loader))
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("text, told", [
    (UNGUARDED, "if __name__ == '__main__':"),
    ("import multiprocessing, sys\nif multiprocessing.parent_process(): sys.exit(3)\n" + UNGUARDED,
     "SystemExit: 3"),
])  # fmt: skip
def test_unimportable_program_is_an_error(text, told, method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text)
    done = run_file(script, method)
    assert done.returncode == 1
    [line] = {row for row in done.stderr.splitlines() if "could not load the dataset" in row}
    assert line.startswith("RuntimeError: DataLoader worker") and told in done.stderr


# ---- large plain data ----------------------------------------------------------------------


def size_of_pickle(obj) -> int:
    """With the memory of arrays and tensors behind it."""
    pickled = Pickled(obj)
    pickled.close()
    return pickled._begins


def test_large_plain_data_stays_out_of_the_pickle():
    paths = [f"/data/{i}" for i in range(100_000)]
    named = {name: (i, None, True) for i, name in enumerate(paths)}
    for one in (paths, tuple(paths), named, b"x" * 100_000, "y" * 100_000, bytearray(100_000)):
        assert size_of_pickle(one) < 100
    array, tensor = np.arange(100_000), torch.arange(100_000)
    for many in ([array] * 9, [tensor] * 9, [tensor[i:] for i in range(9)]):
        assert size_of_pickle(many) < array.nbytes + 3_000
    for one in ([object] * 2_000, [[i] for i in range(2_000)]):
        assert size_of_pickle(one) > 2_000


def test_large_plain_data_comes_back_the_same():
    paths = [f"/data/{i}" for i in range(2_000)]
    grid = np.arange(60_000.0).reshape(200, 300)
    tensor = torch.arange(60_000).reshape(200, 300)
    dates = np.arange(20_000).astype("datetime64[s]")
    pairs = np.zeros(10_000, [("a", "i4"), ("b", "f8")])
    given = (paths, paths, grid, grid.T, grid[::2], dates, pairs, tensor, tensor.T, tensor[3:])
    pickled = Pickled(given)
    for _ in range(2):
        first, again, *arrays, whole, turned, part = pickled.load()
        assert first == paths and again is first
        for array, expected in zip(arrays, given[2:7], strict=True):
            assert array.dtype == expected.dtype and np.array_equal(array, expected)
            array[-1] = array[0]  # of this loading alone
        assert torch.equal(turned, tensor.T) and torch.equal(part, tensor[3:])
        whole[3, 4] += 1  # of all that load it
        assert part[0, 4] == turned[4, 3] == whole[3, 4]
        tensor[3, 4] += 1
        assert torch.equal(whole, tensor)
    pickled.close()


def test_plain_values_of_each_type_come_back():
    odd = ["\ud800", "é" * 70_000, b"\0", -(2**70), 1.5, float("inf"), 2j, True, None, (1, "a")]
    given = {
        "list": odd * 200,
        "tuple": tuple(odd * 200),
        "dict": {f"{i}": odd[i % len(odd)] for i in range(2_000)} | {3: None},
        "text": "é" * 70_000,
        "bytes": b"a" * 70_000,
        "changes": bytearray(b"b" * 70_000),
    }
    pickled = Pickled(given)
    for _ in range(2):
        got = pickled.load()
        assert got == given and list(got["dict"]) == list(given["dict"])
        for name, one in got.items():
            assert type(one) is type(given[name])
        assert [type(one) for one in got["list"]] == [type(one) for one in given["list"]]
        assert len({id(one) for one in got["list"] if type(one) is str}) == 2  # as in the program
        got["changes"][0] = 0  # of this loading alone
    pickled.close()


@pytest.mark.parametrize("method", METHODS)
def test_workers_write_to_private_large_data(method):
    """Each worker has its own lists, dicts and arrays; workers share the memory of tensors."""
    data = Plain(64)
    view = data.tensor.numpy()
    for _ in range(2):
        got = list(make(data, method, batch_size=1))
        assert sum(int(others) for others, _ in got) == 0
        assert max(int(seen) for _, seen in got) >= 62
        assert data.paths[5] == "5" and data.named["5"] == 5 and data.array.sum() == 0
        assert view.ctypes.data == data.tensor.data_ptr() and not data.tensor.is_shared()
        assert view.sum() == 0


OPENED_BY_MAIN = """
import os, sys, torch, minato
numbers = os.open(sys.argv[1], os.O_RDONLY)

class Reads(torch.utils.data.Dataset):
    def __len__(self):
        return 1024
    def __getitem__(self, index):
        os.lseek(numbers, 8 * index, os.SEEK_SET)
        os.sched_yield()
        return index, int.from_bytes(os.read(numbers, 8), "little")

if __name__ == "__main__":
    loader = minato.DataLoader(Reads(), 8, num_workers=2, multiprocessing_context='spawn')
    print(sum(int((v != i * i).sum()) for i, v in loader), loader.stats()["worker_start"])
"""


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_files_opened_by_main_module_are_per_worker(place, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OPENED_BY_MAIN)
    done = run_file(script, place[1])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "0 forked\n"


SHARED_BY_NAME = """
import torch
from minato.workers.job import Pickled
from torch.multiprocessing.reductions import shared_cache
torch.multiprocessing.set_sharing_strategy("file_system")
numbers = torch.arange(9).share_memory_()
pickled = Pickled(numbers)
for _ in range(4):
    shared_cache.clear()  # as in a process of its own
    assert torch.equal(pickled.load(), numbers)
"""


def test_named_shared_memory_outlives_its_loaders():
    """It counts its users, and each unpickling subtracts one."""
    done = run_script(SHARED_BY_NAME)
    assert done.returncode == 0, done.stderr[-3000:]


def test_directly_started_workers_may_die_together(started_with):
    """The starter must not reap one death in its own bookkeeping while it handles another."""
    started_with(A_THREAD)
    iterator = iter(make(Noisy(64), "spawn", persistent_workers=True))

    def both_ready() -> list[int]:
        entries = worker_entries(iterator)
        return [w["pid"] for w in entries] if all(w["state"] == 3 for w in entries) else []

    pids = wait_for(both_ready, "both workers")
    starter = iterator._pool.zygote.pid
    kill(starter, signal.SIGSTOP)
    try:
        for pid in pids:
            kill(pid)
        wait_for(lambda: not any(map(alive, pids)), "both deaths")
    finally:
        kill(starter, signal.SIGCONT)
    wait_for(lambda: iterator._engine.health()["deaths"] == 2, "the loader to hear of them")
    assert not set(wait_for(both_ready, "others in their place")) & set(pids)
    assert sum(len(batch["index"]) for batch in iterator) == 64


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_left(method):
    list(make(Images(8), method))
    before = held()
    for _ in range(2):
        iterator = iter(make(Images(40), method))
        next(iterator)
        del iterator
    expect_returned(before)


def test_first_batch(capsys):
    """Its indices are checked; the time it takes is only printed."""
    with capsys.disabled():
        for method in ["fork", *METHODS] if SECONDS >= 30 else ["fork"]:
            took = {}
            for name, module in (("torch", torch.utils.data), ("minato", minato)):
                loader = module.DataLoader(
                    Noisy(400), batch_size=8, num_workers=4, multiprocessing_context=method
                )
                begin = time.monotonic()
                iterator = iter(loader)
                batch = next(iterator)
                took[name] = time.monotonic() - begin
                assert batch["index"].tolist() == list(range(8)), (method, name)
                del iterator
            print(f"  first batch, {method}: " + str({k: round(v, 2) for k, v in took.items()}))
