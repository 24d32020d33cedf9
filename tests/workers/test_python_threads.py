"""Python threads as workers: the batches of worker processes, one shared dataset, orderly ends."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from contract.support import programs
from attack import support
from attack.support import same
from torch.utils.data import Dataset, Subset, get_worker_info

import minato
from minato.iterators.receiver import CollatesHere
from minato.transport.layouts import SampleTransport
from minato.workers.threads import ThreadPool

#: where a wait that should end at once is given up
PATIENCE = 60.0
wait_for = functools.partial(support.wait_for, seconds=PATIENCE)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:worker_type='thread'. threads share"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


def worker_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("minato-thread")]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    code = get_worker_info.__code__
    yield
    gc.collect()
    wait_for(lambda: not worker_threads())
    wait_for(lambda: get_worker_info.__code__ is code)


def threaded(dataset: Any, *args: Any, **options: Any) -> minato.DataLoader:
    options = {"num_workers": 2, "worker_type": "thread", **options}
    return minato.DataLoader(dataset, *args, **options)


class Numbered(Dataset):
    """Sample i is of i alone, and has a field of every kind."""

    def __init__(self, length: int = 50) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {
            "image": torch.full((3, 160, 160), index, dtype=torch.float32),
            "array": np.arange(index, index + 5),
            "number": index,
            "share": index / 3,
            "name": f"sample {index}",
        }


class Does(Dataset):
    """Sample i is the result of a function."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Fetching(Numbered):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i]["array"] for i in indices]


def listed(samples: list[Any]) -> Any:
    return [s["number"] for s in samples], torch.stack([s["image"] for s in samples])


# ---- the same samples ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset, options",
    [
        pytest.param(Numbered(), {"batch_size": 4}, id="rows"),
        pytest.param(Numbered(), {"batch_size": 7, "shuffle": True, "num_workers": 3}, id="shuffled"),
        pytest.param(Numbered(), {"batch_size": 4, "collate_fn": listed}, id="collate_fn"),
        pytest.param(Numbered(9), {"batch_size": None}, id="no batches"),
        pytest.param(Fetching(), {"batch_size": 4}, id="getitems"),
        pytest.param(Subset(Numbered(), [3, 1, 4, 1, 5]), {"batch_size": 2}, id="subset"),
        pytest.param(Numbered(), {"batch_size": 4, "drop_last": True, "num_workers": 1}, id="drop_last"),
        pytest.param(Does(12, lambda i: torch.zeros(i % 3, 2)), {"batch_size": 1}, id="uneven"),
        pytest.param(Numbered(), {"batch_size": 4, "autoscale": (1, 4)}, id="autoscale"),
        pytest.param(Numbered(), {"batch_size": 4, "memory_limit": "3MB"}, id="memory"),
    ],
)
def test_the_same_batches_as_from_processes(dataset, options) -> None:
    def batches(kind: str) -> list[Any]:
        torch.manual_seed(5)
        made = threaded(dataset, **{**options, "worker_type": kind})
        return list(made)

    assert same(batches("thread"), batches("process"))


def test_unordered_batches_hold_each_sample_once() -> None:
    for options in ({}, {"batching": "ready"}):
        made = threaded(Numbered(40), batch_size=4, num_workers=3, in_order=False, **options)
        numbers = [n for batch in made for n in batch["number"].tolist()]
        assert sorted(numbers) == list(range(40))


def test_the_dataset_is_shared_and_nothing_is_pickled() -> None:
    class Unpicklable(Dataset):
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.made: set[int] = set()

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            with self.lock:
                self.made.add(index)
            return index, os.getpid()

        def __reduce__(self) -> Any:
            raise AssertionError("pickled")

    dataset, seen = Unpicklable(), []
    made = threaded(
        dataset,
        batch_size=5,
        collate_fn=lambda samples: samples,
        worker_init_fn=lambda number: seen.append((number, get_worker_info().dataset is dataset)),
    )
    samples = [sample for batch in made for sample in batch]
    assert samples == [(i, os.getpid()) for i in range(20)]
    assert dataset.made == set(range(20))
    assert sorted(seen) == [(0, True), (1, True)]
    assert made.stats()["worker_type"] == "thread" and made.stats()["verdict"]


def test_state_and_resume() -> None:
    def make(workers: int) -> minato.DataLoader:
        generator = torch.Generator().manual_seed(workers)
        return threaded(
            Numbered(), batch_size=4, shuffle=True, generator=generator, num_workers=workers
        )

    made = make(2)
    iterator = iter(made)
    first = [next(iterator) for _ in range(5)]
    state = made.state_dict()
    rest = list(iterator)
    other = make(3)
    other.load_state_dict(state)
    assert len(first) == 5 and same(list(other), rest)


# ---- each thread is a worker ----------------------------------------------------------------


def test_worker_info_is_of_the_thread() -> None:
    def make(index: int) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is get_worker_info() and info.dataset is dataset
        return info.id, info.num_workers, info.seed - info.id, threading.get_ident()

    dataset = Does(60, make)
    made = threaded(dataset, batch_size=1, num_workers=3, collate_fn=lambda samples: samples[0])
    answers = set()
    for answer in made:
        assert get_worker_info() is None
        answers.add(answer)
    numbers, workers, seeds, threads = map(set, zip(*answers))
    assert numbers <= {0, 1, 2} and workers == {3} and len(seeds) == 1
    assert len(threads) == len(numbers) == len(answers)


def test_worker_info_during_collation_is_per_thread() -> None:
    """In the collating thread, and in no other at that time."""
    inside, seen, done = threading.Event(), threading.Event(), threading.Event()

    def collate(samples: list[Any]) -> Any:
        answers.append(get_worker_info())
        inside.set()
        assert seen.wait(PATIENCE)
        return samples

    answers: list[Any] = []
    here = CollatesHere.__new__(CollatesHere)
    here.collate_fn, here.dataset, here._num_workers = collate, None, 5
    here.shape, here.position = SampleTransport(), SimpleNamespace(base_seed=70)  # type: ignore[assignment]
    here.shape.whole = True
    thread = threading.Thread(target=lambda: (here.collated([1], 3), done.set()))
    thread.start()
    assert inside.wait(PATIENCE)
    assert get_worker_info() is None
    seen.set()
    thread.join()
    assert done.is_set() and (answers[0].id, answers[0].num_workers, answers[0].seed) == (3, 5, 73)


def test_process_workers_have_their_own_info() -> None:
    iterator = iter(threaded(Numbered()))
    next(iterator)
    beside = torch.utils.data.DataLoader(
        Does(4, lambda i: (get_worker_info().id, get_worker_info().num_workers)),
        num_workers=1, multiprocessing_context="fork",
    )  # fmt: skip
    assert [[int(n) for n in pair] for pair in beside] == [[0, 1]] * 4


def test_default_collate_needs_no_shared_memory() -> None:
    """And treats samples that are not alike as in a worker process."""

    def collate(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        shared.append(batch[0].is_shared())
        return batch

    def batches(kind: str, make: Callable[[int], Any]) -> Any:
        made = threaded(Does(8, make), batch_size=4, collate_fn=collate, worker_type=kind)
        return list(made)

    shared: list[bool] = []
    for make in (
        lambda i: (torch.full((3, 2), i), {"n": np.full(2, i)}),
        lambda i: (torch.full((2,), i, dtype=[torch.float32, torch.float64][i % 2]), i),
        lambda i: (torch.full((3, 2), i).t(), torch.zeros(i // 4)),
    ):
        shared.clear()
        assert same(batches("thread", make), batches("process", make))
        if make(0)[0].is_contiguous() and make(1)[0].dtype == make(0)[0].dtype:
            assert shared == [False, False]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_process_of_sample_has_own_info() -> None:
    def make(index: int) -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if get_worker_info() is None else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert [int(status) for status in threaded(Does(2, make))] == [0, 0]


def test_process_wide_settings_are_left_alone() -> None:
    """Threads of torch's pool, generators, signals: a worker process may have its own."""

    def make(index: int) -> Any:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return torch.get_num_threads(), signal.SIGTERM in blocked, signal.SIGINT in blocked

    torch.set_num_threads(2)
    states = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    [answer] = {tuple(map(int, a)) for a in threaded(Does(8, make), batch_size=None)}
    if "OMP_NUM_THREADS" not in os.environ:
        assert answer == (1, 0, 0)
    assert torch.get_num_threads() == 2
    now = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    assert now[0] == states[0] and now[2] == states[2]


def test_worker_init_fn_that_fails() -> None:
    def init(number: int) -> None:
        raise LookupError("no such disk")

    with pytest.raises(LookupError, match="(?s)in DataLoader worker process .*no such disk"):
        next(iter(threaded(Numbered(), worker_init_fn=init)))


def test_persistent_threads_call_set_epoch_once() -> None:
    told = []

    class Epochs(Numbered):
        def set_epoch(self, epoch: int) -> None:
            told.append((epoch, threading.current_thread() is threading.main_thread()))

    made = threaded(Epochs(12), batch_size=4, persistent_workers=True, prefetch_next_epoch=True)
    before = None
    for epoch in range(3):
        made.set_epoch(epoch)
        assert [b["number"].tolist() for b in made] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        threads = {t.ident for t in worker_threads()}
        assert before in (None, threads) and len(threads) == 2
        before = threads
    assert told == [(0, True), (1, True), (2, True)]
    del made


# ---- seeds ----------------------------------------------------------------------------------


class Local(threading.local):
    def __init__(self) -> None:
        self.rng = np.random.default_rng()


class Hooked(Dataset):
    """Seeded by seed_sample."""

    def __init__(self) -> None:
        self.local = threading.local()

    def __len__(self) -> int:
        return 30

    def seed_sample(self, seed: int) -> None:
        self.local.mine = random.Random(seed)

    def __getitem__(self, index: int) -> float:
        return self.local.mine.random()


class Private(Dataset):
    """With a generator for each thread."""

    def __init__(self) -> None:
        self.local = Local()

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> float:
        return self.local.rng.random()


class Lazy(Private):
    """The same, made with the first sample."""

    def __init__(self) -> None:
        self.local = threading.local()

    def __getitem__(self, index: int) -> float:
        if not hasattr(self.local, "rng"):
            self.local.rng = np.random.default_rng()
        return self.local.rng.random()


@pytest.mark.parametrize("kind", [Hooked, Private, Lazy])
def test_seeds_of_samples(kind) -> None:
    def draws(worker_type: str, workers: int) -> list[list[float]]:
        generator = torch.Generator().manual_seed(9)
        made = threaded(
            kind(), batch_size=3, num_workers=workers, worker_type=worker_type, generator=generator
        )
        return [batch.tolist() for batch in made]

    want = draws("process", 2)
    assert len({x for batch in want for x in batch}) == 30
    for workers in (1, 3):
        rows = zip(want, draws("thread", workers), strict=True)
        differ = sum(x != y for batch, other in rows for x, y in zip(batch, other, strict=True))
        assert differ <= (2 + workers if kind is Lazy else 0)  # the first sample of each worker


def warned_of(dataset: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = threaded(dataset, batch_size=4, **options)
        for _ in range(2):
            list(made)
    return [str(w.message) for w in told if "threads share" in str(w.message)]


def test_unseedable_generators_warn_once() -> None:
    class Shares(Private):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng()

    [text] = warned_of(Numbered())
    assert "seed_sample" in text and "with each other" not in text
    [text] = warned_of(Shares())
    assert "those that the dataset holds (Generator)" in text
    assert warned_of(Numbered(), seed_per_sample=False) == []
    assert warned_of(Hooked()) == warned_of(Private()) == []
    assert warned_of(Hooked(), seed_per_sample=True) == []


def test_a_shared_generator_is_not_seeded() -> None:
    class Shares(Dataset):
        def __init__(self) -> None:
            self.rng = np.random.default_rng(1)
            self.local = Local()

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> float:
            return self.rng.random()

    made = threaded(Shares(), batch_size=1, num_workers=1)
    drawn = [batch.item() for batch in made]
    assert drawn == np.random.default_rng(1).random(8).tolist()


# ---- errors ---------------------------------------------------------------------------------


def fails_at(bad: int, error: BaseException) -> Callable[[int], int]:
    def make(index: int) -> int:
        if index == bad:
            raise error
        return index

    return make


@pytest.mark.parametrize("collate_fn", [None, lambda samples: torch.tensor(samples)])
def test_an_error_at_its_place(collate_fn) -> None:
    made = threaded(Does(16, fails_at(6, KeyError("six"))), batch_size=4, collate_fn=collate_fn)
    iterator = iter(made)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError) as raised:
        next(iterator)
    error = raised.value
    assert isinstance(error.__cause__, KeyError) and "in DataLoader worker" in str(error)
    if hasattr(error, "__notes__"):
        assert "6" in error.__notes__[0]
    assert [b.tolist() for b in iterator] == [[8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("mode", ["skip", "replace"])
@pytest.mark.parametrize("collate_fn", [None, lambda samples: torch.tensor(samples)])
def test_on_error_works_with_threads(mode, collate_fn) -> None:
    def batches(kind: str) -> list[Any]:
        dataset = Does(16, fails_at(6, KeyError("six")))
        made = threaded(
            dataset, batch_size=4, collate_fn=collate_fn, on_error=mode, max_errors=1,
            worker_type=kind,
        )  # fmt: skip
        found = [b.tolist() for b in made]
        counted = made.stats()["failed"]
        return [found, counted["left_out"], counted["replaced"]]

    assert batches("thread") == batches("process")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_exiting_in_sample_is_lost_worker(monkeypatch) -> None:
    """A BaseException ends any worker; the others continue."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    made = threaded(Does(16, fails_at(6, SystemExit(3))), batch_size=1)
    iterator, found, lost = iter(made), [], []
    while True:
        try:
            found.append(next(iterator).item())
        except StopIteration:
            break
        except minato.WorkerLost as error:
            lost.append(error)
    assert found == [i for i in range(16) if i != 6] and len(lost) == 1
    assert "exited unexpectedly with exit code 1" in str(lost[0])
    iterator = iter(threaded(Does(4, fails_at(0, KeyboardInterrupt())), num_workers=1))
    with pytest.raises(minato.WorkerLost):
        next(iterator)


def test_a_timeout_does_not_wait_for_the_sample() -> None:
    going, begun = threading.Event(), threading.Event()

    def make(index: int) -> int:
        begun.set()
        assert going.wait(PATIENCE)
        return index

    try:
        made = iter(threaded(Does(8, make), num_workers=1, timeout=0.05))
        assert begun.wait(PATIENCE)
        with pytest.raises(RuntimeError, match="DataLoader timed out after 0.05 seconds"):
            next(made)
        del made
        gc.collect()
        assert len(worker_threads()) == 2  # the worker, and the waiting thread
    finally:
        going.set()


def test_terminate_ends_worker_after_its_sample() -> None:
    made = threaded(Numbered(400), batch_size=4, num_workers=2)
    iterator = iter(made)
    next(iterator)
    handle = iterator._workers[0]
    handle.terminate()
    wait_for(lambda: not handle.is_alive())
    assert sum(len(b["number"]) for b in iterator) == 396
    assert handle.exitcode == -signal.SIGTERM


# ---- refused options -------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    "dataset, options, reason",
    [
        (Numbered(), {"num_workers": 0}, "num_workers is 0"),
        (Stream(), {}, "its dataset is iterable"),
        (Numbered(), {"scheduling": "static"}, "random streams of processes"),
        (Numbered(), {"multiprocessing_context": "fork"}, "asks for processes"),
        (Numbered(), {"max_retries": 2}, "max_retries=2 has no effect"),
        (Numbered(), {"seed_per_sample": True}, "needs a dataset with seed_sample"),
        (torch.utils.data.datapipes.iter.IterableWrapper([1]), {}, "."),
    ],
)
def test_unsupported_options_are_refused(dataset, options, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        threaded(dataset, **options)


# ---- ends -----------------------------------------------------------------------------------


def test_an_early_break_asks_for_no_more_samples() -> None:
    """Neither of the running task nor of the batch that a collate_fn waits for."""
    for collate_fn in (None, lambda samples: samples):
        going, made, begun = threading.Event(), [], threading.Event()

        def make(index: int) -> int:
            made.append(index)
            if index >= 8:
                begun.set()
                assert going.wait(PATIENCE)
            return index

        for _ in threaded(Does(64, make), batch_size=8, num_workers=1, collate_fn=collate_fn):
            assert begun.wait(PATIENCE)
            break
        gc.collect()
        wait_for(lambda: "minato-thread-close" in [t.name for t in worker_threads()])
        going.set()
        wait_for(lambda: not worker_threads())
        assert max(made) == 8


def test_loaders_inside_samples() -> None:
    """One with its own threads, and one without workers, which sees this worker's info."""

    def make(index: int) -> int:
        inner = threaded(Does(4, lambda i: i), batch_size=2, num_workers=1)
        found = sum(int(b.sum()) for b in inner)
        plain = minato.DataLoader(Does(2, lambda i: get_worker_info().id), batch_size=2)
        [ids] = list(plain)
        assert ids.tolist() == [get_worker_info().id] * 2
        return found + index

    assert [b.tolist() for b in threaded(Does(6, make), batch_size=2)] == [[6, 7], [8, 9], [10, 11]]


def test_iterator_collected_by_worker_thread(monkeypatch) -> None:
    """An iterator that is freed in its own worker's thread ends all the same."""
    closed = threading.Event()
    close = ThreadPool._close
    monkeypatch.setattr(ThreadPool, "_close", lambda self: (close(self), closed.set()))
    box: list[Any] = []
    given = threading.Event()

    def make(index: int) -> int:
        if index == 5:
            assert given.wait(PATIENCE)
            box.clear()
        return index

    box.append(iter(threaded(Does(8, make), num_workers=1, prefetch_factor=8)))
    given.set()
    # Without the GIL, objects of this thread end in it: it must not sleep meanwhile.
    wait_for(closed.is_set)


def counts() -> tuple[int, int, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        arenas = sum("memfd:" in line for line in maps)
    tasks = os.listdir("/proc/self/task")
    return len(os.listdir("/proc/self/fd")), len(tasks), arenas


def test_nothing_accumulates() -> None:
    def use(times: int) -> None:
        for number in range(times):
            iterator = iter(threaded(Numbered(24), batch_size=2, persistent_workers=number % 2 == 0))
            for _ in range(number % 4):
                next(iterator)
            del iterator
        wait_for(lambda: not worker_threads())

    use(4)
    before = counts()
    use(12)
    now = counts()
    # One of each use would be twelve; leftovers of earlier tests may come and go.
    assert all(n < b + 6 for n, b in zip(now, before)), (before, now)


def test_many_loaders_that_fail_and_break() -> None:
    """Exceptions, ends at any time, several consumers: every batch that comes is right."""
    seed = int(os.environ.get("MINATO_TEST_SEED", 0))
    wrong: list[Any] = []

    def make(index: int) -> Any:
        if index % 11 == 10:
            raise ValueError(index)
        if index % 5 == 0:
            time.sleep(0.0005)
        return index, torch.full((40,), index), np.full(index % 3 + 1, index).sum()

    def consume(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        try:
            for _ in range(6):
                made = threaded(
                    Does(66, make), batch_size=3, num_workers=rng.randint(1, 4),
                    collate_fn=rng.choice([None, list]), in_order=rng.random() < 0.7,
                )  # fmt: skip
                iterator, most = iter(made), rng.randint(0, 22)
                for _ in range(most):
                    try:
                        batch = next(iterator)
                    except ValueError:
                        continue
                    except StopIteration:
                        break
                    rows = batch if made.collate_fn is list else list(zip(*batch))
                    for i, tensor, total in rows:
                        i = int(i)
                        if tensor.tolist() != [i] * 40 or int(total) != i * (i % 3 + 1):
                            wrong.append((i, tensor, total))
        except BaseException as error:
            wrong.append(error)

    consumers = [threading.Thread(target=consume, args=(n,)) for n in range(3)]
    for thread in consumers:
        thread.start()
    for thread in consumers:
        thread.join()
    assert wrong == [], seed


HEAD = """
import sys, threading, time, torch, warnings, minato
warnings.simplefilter("ignore")
begun, never = threading.Event(), threading.Event()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if index >= 2:
            begun.set()
            {wait}
        return torch.full((50000,), index)
loader = minato.DataLoader(Data(), num_workers=2, worker_type="thread")
for batch in loader:
    assert begun.wait(50)
    {then}
print("end", flush=True)
"""


@pytest.mark.parametrize(
    "wait, then",
    [
        pytest.param("never.wait()", "break", id="hangs"),
        pytest.param("time.sleep(0.01); torch.ones(300000).cumsum(0)", "kept = iter(loader); break", id="computes"),
        pytest.param("never.wait()", "sys.exit(0)", id="sys.exit"),
    ],
)
def test_exit_in_the_middle_of_a_sample(wait: str, then: str) -> None:
    script = HEAD.format(wait=wait, then=then)
    done = programs().run(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("end" in done.stdout) == ("exit" not in then)


class Layers(Dataset):
    def __init__(self) -> None:
        self.net = torch.nn.Linear(2, 2)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        zero = np.zeros(())
        return self.net(torch.ones(2)), torch.is_inference_mode_enabled(), zero / zero


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_torch_modes_come_from_the_creating_thread(mode: Any) -> None:
    with mode(), np.errstate(all="ignore"):
        for made, inference, _ in threaded(Layers(), 4, seed_per_sample=False):
            assert not made.requires_grad
            assert inference.all().item() is (mode is torch.inference_mode)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with torch.no_grad(), np.errstate(all="raise"), pytest.raises(FloatingPointError):
            list(threaded(Layers(), 4, seed_per_sample=False))
    assert torch.is_grad_enabled()
