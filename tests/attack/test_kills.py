"""Workers, zygote and trainer killed at random instants; nothing is lost or changed."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import struct
import subprocess
import threading
import time
import warnings
from multiprocessing import forkserver

import numpy as np
import psutil
import pytest
import torch

import minato
from minato.iterators.loader_memo import memo_of
from minato.workers import process_pool, zygote
from minato.workers.zygote import Zygote

from .datasets import Counting, Images, Noisy, Ragged, Slow, Wordy, keep_list
from .support import (
    PATIENCE,
    SECONDS,
    Killer,
    Stopper,
    alive,
    copied,
    epochs,
    kill,
    kill_zygote,
    run_script,
    same,
    start_script,
    wait_for,
    worker_entries,
    workers_of,
    zygote_of,
)  # fmt: skip

#: enum mn_worker_state
EMPTY, WANTED, READY = 0, 1, 3


def make(dataset, split=False, **options):
    """split: batches of a collate_fn are made in parts from the first one on."""
    torch.manual_seed(1234)
    options = {"batch_size": 8, "num_workers": 3, "shuffle": True, **options}
    if "scheduling" not in options and not isinstance(dataset, torch.utils.data.IterableDataset):
        options.setdefault("max_retries", 100)
    loader = minato.DataLoader(dataset, **options)
    for cost in [10**6, 10**6, 10**6, 10**9] * 16 if split else []:
        memo_of(loader).costs.observe(-1, cost)
        memo_of(loader).costs.sends(0)
    return loader


KINDS = {
    "rows": (Noisy, {}),
    "rows and envelopes": (Wordy, {}),
    "batches": (Ragged, {"collate_fn": keep_list}),
    "batches in parts": (Ragged, {"collate_fn": keep_list, "split": True}),
    "large": (lambda: Noisy(60, 30000), {}),
    "small memory": (lambda: Wordy(80, 30000), {"memory_limit": "3MiB"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_kills_change_nothing(kind, seed):
    """kill -9 of random workers; every batch as in an undisturbed run, bit for bit."""
    dataset, options = KINDS[kind]
    rng = random.Random(f"{seed}/{kind}")
    calm = make(dataset(), persistent_workers=True, **options)
    hunted = make(dataset(), persistent_workers=True, **options)
    kills = 0
    for epoch in epochs(SECONDS, enough=lambda: kills > 3):
        torch.manual_seed(epoch)
        expected = [copied(batch) for batch in calm]
        torch.manual_seed(epoch)
        iterator = iter(hunted)
        with Killer(iterator, rng) as killer:
            got = [batch for batch in iterator]
        kills += killer.kills
        assert len(got) == len(expected)
        assert all(map(same, got, expected)), f"epoch {epoch}, {killer.kills} kills"


class Fatal(torch.utils.data.Dataset):
    """Sample 5 ends its worker, each time it is made, as soon as the test allows it."""

    def __init__(self):
        self.times, self.goes_on = multiprocessing.Value("i", 0), multiprocessing.Event()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 5:
            with self.times.get_lock():
                self.times.value += 1
            self.goes_on.wait(PATIENCE)
            os._exit(3)
        return index


def test_abandoned_deadly_sample_kills_one_worker():
    """Its epoch was left while the sample was made: no other worker gets it."""
    dataset, batches = Fatal(), [[0], [5]]
    loader = minato.DataLoader(
        dataset, batch_sampler=batches, num_workers=2, persistent_workers=True, max_retries=3
    )
    next(iter(loader))
    wait_for(lambda: dataset.times.value == 1, "sample 5")
    batches[:] = [[n] for n in range(10, 40)]
    assert [int(batch) for batch in loader] == list(range(10, 40))
    dataset.goes_on.set()
    wait_for(lambda: loader.stats()["deaths"] == 1, "its worker's death")
    # the retried sample comes first
    assert [int(batch) for batch in loader] == list(range(10, 40))
    assert dataset.times.value == 1


def test_kills_in_the_first_instants(seed):
    """Workers die while they start, before anything is known about them."""
    rng = random.Random(seed)
    expected = [copied(batch) for batch in make(Noisy(40))]
    for _ in epochs(SECONDS):
        iterator = iter(make(Noisy(40)))
        for worker in rng.sample(range(3), 2):
            time.sleep(rng.random() * 0.02)
            kill(worker_entries(iterator)[worker]["pid"])
        assert same(list(iterator), expected)


class OfStreams(torch.utils.data.Dataset):
    """Numbers from a worker's random streams, and its reported seed."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        numbers = random.getrandbits(60), np.random.randint(1 << 60), torch.randint(1 << 60, ()).item()
        return info.id, info.seed, *numbers


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_replacement_worker_has_its_own_streams(method):
    def epoch(loader):
        rows = [tuple(map(int, row)) for batch in loader for row in zip(*batch, strict=True)]
        return {number: seed for number, seed, *_ in rows}, {n for _, _, *ns in rows for n in ns}

    loader = minato.DataLoader(
        OfStreams(), 4, num_workers=1, persistent_workers=True, seed_per_sample=False,
        multiprocessing_context=method, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    seeds, drawn = epoch(loader)
    assert len(drawn) == 120 and seeds == {0: loader._iterator._pool.base_seed}
    for times in (1, 2):
        iterator = loader._iterator
        kill(worker_entries(iterator)[0]["pid"])
        wait_for(lambda: iterator._engine.segment.starts(0) == times + 1, "another")
        again, numbers = epoch(loader)
        assert again[0] != seeds[0] and not numbers & drawn
        seeds, drawn = again, numbers | drawn
    assert len(drawn) == 360


def test_every_worker_at_once(seed):
    loader = make(Noisy(200), persistent_workers=True)
    expected = [copied(batch) for batch in make(Noisy(200))]
    torch.manual_seed(1234)
    iterator = iter(loader)
    got, killed = [], set()
    for number, batch in enumerate(iterator):
        got.append(batch)
        if number in (3, 11):
            wait_for(lambda: len({*workers_of(iterator)} - killed) >= 2, "workers to be there")
            new = {*workers_of(iterator)} - killed
            for pid in new:
                kill(pid)
            killed |= new
    assert same(got, expected)
    wait_for(lambda: iterator._engine.health()["deaths"] >= 4, "deaths to be seen")


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_too_many_killed_zygotes_raise(scheduling, monkeypatch):
    monkeypatch.setattr(process_pool, "RESTARTS_MOST", 0)
    # a number of samples whose end cannot come first
    iterator = iter(make(Slow(10**6, 0.02), batch_size=2, scheduling=scheduling))
    next(iterator)
    workers = [psutil.Process(pid) for pid in workers_of(iterator)]  # with when they were started
    kill_zygote(iterator)
    with pytest.raises(RuntimeError, match="died unexpectedly"):
        for _ in iterator:
            pass
    del iterator
    wait_for(lambda: not any(w.is_running() and alive(w.pid) for w in workers), f"{workers} to end")


KILLED_WITH = {
    "zygote": lambda i: [zygote_of(i)],
    "worker and zygote": lambda i: [i._workers[0].pid, zygote_of(i)],
    "zygote and worker": lambda i: [zygote_of(i), i._workers[0].pid],
}


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("killed", KILLED_WITH)
def test_a_killed_zygote_takes_no_sample_along(killed, method):
    """Each one, as soon as it has begun, up to four an epoch."""
    options = {"persistent_workers": True, "multiprocessing_context": method}
    loader, undisturbed = make(Noisy(300), **options), make(Noisy(300), **options)
    torch.manual_seed(1234)
    expected = [[copied(batch) for batch in undisturbed] for _ in range(2)]
    torch.manual_seed(1234)
    zygotes = set()
    for epoch in range(2):
        iterator, got = iter(loader), []
        for number, batch in enumerate(iterator):
            got.append(copied(batch))
            if number >= 5 and zygote_of(iterator) not in {0, *zygotes} and len(zygotes) < 4 + 4 * epoch:
                zygotes.add(zygote_of(iterator))
                for pid in KILLED_WITH[killed](iterator):
                    kill(pid)
        assert same(got, expected[epoch])
    assert zygotes and iterator._pool.restarts >= len(zygotes) - 1
    dead = iterator._engine.health()["deaths"] > 0  # the next zygote tells, if it begins in time
    assert dead == ("worker" in killed) or len(zygotes) == 1


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("scheduling", ["balanced", "static", "iterable"])
def test_workers_of_a_killed_zygote_go_on(scheduling, method):
    """Twice. The program starts others."""
    dataset = Counting(64, 0.02) if scheduling == "iterable" else Slow(64, 0.02)
    options = {} if scheduling == "iterable" else {"scheduling": scheduling}
    if scheduling == "balanced":
        options["shuffle"] = True
    iterator = iter(make(
        dataset, batch_size=2, num_workers=2, multiprocessing_context=method,
        persistent_workers=True, **{"shuffle": False, **options},
    ))  # fmt: skip
    got, workers, zygotes = [next(iterator)], workers_of(iterator), set()
    for batch in iterator:
        got.append(batch)
        if iterator._pool.restarts == len(zygotes) < 2:
            wait_for(lambda: zygote_of(iterator) not in {0, *zygotes}, "another zygote")
            zygotes.add(kill_zygote(iterator))
    assert iterator._pool.restarts == 2 and workers_of(iterator) == workers
    assert sorted(torch.cat(got).tolist()) == list(range(64))
    wait_for(lambda: zygote_of(iterator) not in {0, *zygotes}, "the third zygote")
    iterator._shutdown_workers()
    assert not any(map(alive, workers))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_all_processes_killed_at_once_lose_no_sample(method):
    expected = [copied(batch) for batch in make(Noisy(200))]
    torch.manual_seed(1234)
    iterator = iter(make(Noisy(200), persistent_workers=True, multiprocessing_context=method))
    got, zygotes = [], set()
    for number, batch in enumerate(iterator):
        got.append(copied(batch))
        times = len(zygotes)
        if times < 2 and number >= 3 + 8 * times and iterator._pool.restarts == times:
            wait_for(lambda: zygote_of(iterator) not in {0, *zygotes}, "a zygote")
            workers = wait_for(lambda: [w["pid"] for w in worker_entries(iterator) if w["pid"]], "workers")
            if method == "forkserver":
                kill(forkserver._forkserver._forkserver_pid)
            zygotes.add(kill_zygote(iterator))
            for pid in workers:
                kill(pid)
    assert same(got, expected) and iterator._pool.restarts == 2


def test_all_static_processes_killed_raise_an_error():
    iterator = iter(make(Slow(10**6, 0.02), batch_size=2, scheduling="static"))
    next(iterator)
    workers = workers_of(iterator)
    kill_zygote(iterator)
    for pid in workers:
        kill(pid)
    with pytest.raises(minato.WorkerLost, match="its exit code is unknown"):
        for _ in iterator:
            pass


def test_an_adopted_worker_is_replaced_when_it_dies():
    """By the zygote that came after its own."""
    iterator = iter(make(Slow(200, 0.05), batch_size=2, shuffle=False, num_workers=2))
    got, before = [next(iterator)], workers_of(iterator)
    kill_zygote(iterator)
    while not iterator._pool.restarts:
        got.append(next(iterator))
    kill(before[0])
    wait_for(lambda: iterator._engine.health()["deaths"], "the death to be seen")
    wait_for(lambda: all(w["state"] == READY for w in worker_entries(iterator)), "another worker")
    now = workers_of(iterator)
    assert now[0] != before[0] and now[1] == before[1]
    got += iterator
    assert torch.cat(got).tolist() == list(range(200))
    assert not any(map(psutil.pid_exists, now[:1]))  # it has reaped its own


@pytest.mark.parametrize("which", ["first", "next"])
def test_a_zygotes_exception_is_in_the_error(which, monkeypatch):
    """It is no death that another zygote would make up for."""
    watch = Zygote._watch

    def fails(self):
        if which == "next" and not self.children:
            return watch(self)
        raise ValueError("of the zygote")

    monkeypatch.setattr(Zygote, "_watch", fails)
    with pytest.raises(RuntimeError, match="died unexpectedly, .* Cause: ValueError: of the zygote"):
        for _ in (iterator := iter(make(Slow(10**6, 0.01)))):
            if not iterator._pool.restarts:
                kill_zygote(iterator)


def test_zygotes_that_die_at_once_are_an_error(monkeypatch):
    monkeypatch.setattr(Zygote, "_watch", lambda self: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(process_pool, "SOON_SECONDS", PATIENCE)
    monkeypatch.setattr(process_pool, "RESTARTS_MOST", 3)
    iterator = None
    with pytest.raises(RuntimeError, match="died unexpectedly"):
        iterator = iter(make(Slow(10**6, 0.01)))
        pool = iterator._pool
        list(iterator)
    assert pool.restarts == 3


@pytest.mark.parametrize(
    "options", [{}, {"in_order": False, "batching": "ready"}, {"scheduling": "static"}]
)
def test_a_persistent_loader_makes_another_zygote(options, monkeypatch):
    monkeypatch.setattr(process_pool, "RESTARTS_MOST", 0)
    loader = make(Slow(64, 0.02), batch_size=2, persistent_workers=True, **options)
    iterator = iter(loader)
    next(iterator)
    kill_zygote(iterator)
    with pytest.raises(RuntimeError, match="died unexpectedly"):
        for _ in iterator:
            pass
    with pytest.raises((RuntimeError, AssertionError)):  # that epoch does not continue
        next(iterator)
    for _ in range(2):
        got = [int(index) for batch in loader for index in batch]
        assert sorted(got) == list(range(64))


@contextlib.contextmanager
def program_of(script, *arguments):
    """A program that prints the ids of its processes, and the ids. None of them is left at the end."""
    process = start_script(script, *arguments)
    family = [int(pid) for pid in process.stdout.readline().split()]
    try:
        yield process, family
        wait_for(lambda: not any(map(alive, family)), "workers and zygote to end")
    finally:
        for pid in (process.pid, *family):
            kill(pid)
        process.communicate()


@pytest.mark.parametrize("dataset, method", [
    ("Slow(64, 0.05)", "fork"), ("Slow(64, 30.0)", "fork"), ("Noisy(10000)", "fork"),
    ("Slow(64, 30.0)", "spawn"), ("StartsThread(64)", "spawn"),
])  # fmt: skip
def test_killed_trainer_ends_all_processes(dataset, method):
    script = (
        "import minato\nfrom attack.datasets import *\nfrom attack.support import descendants\n"
        "if __name__ == '__main__':\n"
        f"    it = iter(minato.DataLoader({dataset}, batch_size=4, num_workers=2,\n"
        f"        multiprocessing_context={method!r}))\n"
        "    pids = [w.pid for w in it._workers]\n"
        "    print(*(p.pid for p in descendants()), flush=True)\n"
        "    for batch in it: pass\n"
    )
    with program_of(script) as (process, family):
        assert len(family) >= 3
        kill(process.pid)


#: goes on when it has input
IDLE = """
import sys, minato
from attack.datasets import *
if __name__ == "__main__":
    it = iter(minato.DataLoader(Slow(4, 0.0), num_workers=2, persistent_workers=True,
                                multiprocessing_context=sys.argv[1]))
    list(it)
    print(it._pool.zygote.pid, *(w.pid for w in it._workers), flush=True)
    input()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_killed_trainer_with_stopped_zygote(method):
    """Workers see for themselves that the trainer is gone, and continue the zygote."""
    with program_of(IDLE, method) as (process, family):
        assert len(family) == 3
        kill(family[0], signal.SIGSTOP)
        kill(process.pid)


def test_program_exits_with_stopped_zygote():
    with program_of(IDLE, "fork") as (process, family):
        kill(family[0], signal.SIGSTOP)
        process.communicate("go on", timeout=3 * PATIENCE)
        assert process.returncode == 0


def test_killed_trainer_beside_a_hung_zygote_leaves_none():
    """One that hangs in a hook of fork."""
    script = (
        "import os, time\nimport minato\n"
        "hung, hangs = os.pipe()\n"
        "def hang():\n"
        "    if open('/proc/self/comm').read() == 'minato_zygote\\n':\n"
        "        os.write(hangs, b'.')\n"
        "        time.sleep(1000)\n"
        "os.register_at_fork(before=hang)\n"
        "it = iter(minato.DataLoader([0, 1], num_workers=1))\n"
        "os.read(hung, 1)\n"
        "print(it._pool.zygote.pid, flush=True)\n"
        "input()\n"
    )
    with program_of(script) as (process, _):
        kill(process.pid)


def test_exit_during_worker_start_leaves_no_process():
    """multiprocessing asks the zygote to end then, here while it is in a fork whose worker has
    begun already."""
    script = (
        "import os, signal, sys, time\nimport minato\n"
        "(begun, begins), (asked, asks), (born, bears) = os.pipe(), os.pipe(), os.pipe()\n"
        "class Begins:\n"
        "    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, index):\n"
        "        os.write(begins, b'.')\n"
        "        time.sleep(60)\n"
        "def end():\n"
        "    if open('/proc/self/comm').read() == 'minato_zygote\\n':\n"
        "        os.read(begun, 1)\n"
        "        os.write(asks, b'.')\n"
        "        while signal.SIGTERM not in signal.sigpending():\n"
        "            time.sleep(0.001)\n"
        "os.register_at_fork(after_in_parent=end, after_in_child=lambda: os.write(bears, b'%d ' % os.getpid()))\n"
        "it = iter(minato.DataLoader(Begins(), num_workers=3))\n"
        "os.read(asked, 1)\n"
        "it._pool.zygote.terminate()\n"
        "it._pool.zygote.join()\n"
        "print(os.read(born, 999).decode(), flush=True)\n"
        "os._exit(0)\n"
    )
    with program_of(script) as (process, family):
        process.wait(3 * PATIENCE)
        assert len(family) == 2  # the zygote and its first worker


def test_killed_zygote_with_default_sigpipe_is_an_error():
    """Programs whose output is piped often restore the default action of SIGPIPE."""
    script = (
        "import os, signal\nimport minato\nfrom attack.datasets import *\n"
        "minato.workers.process_pool.RESTARTS_MOST = 0\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "it = iter(minato.DataLoader(Slow(4000, 0.01), num_workers=2))\n"
        "next(it)\n"
        "os.kill(it._pool.zygote.pid, signal.SIGKILL)\n"
        "try:\n    list(it)\n"
        "except RuntimeError as error:\n    print(error)\n"
        "assert signal.SIGPIPE not in signal.sigpending()\n"
        "assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
    )
    done = run_script(script)
    assert "died unexpectedly" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_exit_waits_for_zygote_closed_by_thread():
    """As multiprocessing does, which has listed its children a moment before."""
    iterator = iter(make(Slow(4, 0.01), num_workers=2))
    pool = iterator._pool
    zygote = pool.zygote
    iterator._shutdown_workers()
    with pytest.raises(ValueError, match="closed"):
        zygote.is_alive()
    zygote.join()
    pool.join_zygote()


def test_workers_are_killed_if_zygote_hangs(monkeypatch):
    """A zygote that the system does not release uses up its own waiting time only."""
    iterator = iter(make(Slow(4, 60.0), num_workers=2))
    wait_for(lambda: all(w["running"] for w in worker_entries(iterator)), "workers at work")
    pool, workers = iterator._pool, workers_of(iterator)
    clock = [0.0]
    monkeypatch.setattr(process_pool.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(pool, "signal_zygote", lambda number: None)
    monkeypatch.setattr(pool, "_await_zygote", lambda seconds: clock.append(clock.pop() + seconds))
    pool._kill_all()
    monkeypatch.undo()
    wait_for(lambda: not any(map(alive, workers)), "workers to end")


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_refused_replacement_is_retried(number, monkeypatch):
    """It does not count as another death: a process may start a moment later."""
    fork, tries, refusal = Zygote._fork, [], number

    def refused(self, number):
        tries.append(number)  # in the zygote
        if 2 < len(tries) < 8:
            raise OSError(refusal, "no")
        return fork(self, number)

    monkeypatch.setattr(Zygote, "_fork", refused)
    loader = make(Slow(400, 0.001), shuffle=False, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    got = next(iterator).tolist()
    kill(workers_of(iterator)[0])
    wait_for(lambda: iterator._engine.health()["deaths"] == 1, "its death")
    wait_for(lambda: all(w["state"] == 3 for w in worker_entries(iterator)), "a replacement")
    assert got + torch.cat(list(iterator)).tolist() == list(range(400))
    assert iterator._engine.health()["deaths"] == 1


@pytest.mark.parametrize("workers, number, remedy", [
    (1, errno.EAGAIN, "ulimit -u"), (1, errno.ENOMEM, "lower num_workers"), (1, errno.EMFILE, "ulimit -n"),
    (2, errno.EAGAIN, "ulimit -u"),
])  # fmt: skip
def test_permanently_refused_replacement_is_an_error(workers, number, remedy, monkeypatch):
    """The other workers take over with a warning; without any it is an error. Both say what
    helps, and no sample is missing before that."""
    fork, tries = Zygote._fork, []

    def refused(self, worker):
        tries.append(worker)  # in the zygote
        if len(tries) > workers:
            raise OSError(number, "no")
        return fork(self, worker)

    monkeypatch.setattr(Zygote, "_fork", refused)
    monkeypatch.setattr(zygote, "REFUSED_SECONDS", 0.05)
    iterator = iter(make(Slow(120, 0.01), batch_size=2, shuffle=False, num_workers=workers))
    got = next(iterator).tolist()
    kill(workers_of(iterator)[0])
    if workers == 1:
        with pytest.raises(minato.WorkerLost, match=f"could not be started: .*{remedy}"):
            for batch in iterator:
                got += batch.tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # there are no others to take over its samples
            iterator._shutdown_workers()
        assert got == list(range(len(got))) and len(got) < 120
    else:
        with pytest.warns(UserWarning, match=f"could not be started: .*{remedy}.*take over its samples"):
            got += torch.cat(list(iterator)).tolist()
        assert got == list(range(120))


class Everybody(threading.Thread):
    """Kills the only worker of an iterator every 30 to 200 ms, in any state. After three in a
    row that did not become READY, the fourth is spared until it is."""

    def __init__(self, iterator, rng):
        super().__init__(daemon=True)
        self.iterator, self.rng, self.kills, self.end = iterator, rng, 0, threading.Event()

    def run(self):
        unready = 0
        while not self.end.wait(self.rng.uniform(0.03, 0.2)):
            try:
                [entry] = worker_entries(self.iterator)
            except RuntimeError:
                return  # the iterator has ended
            unready = unready + 1 if entry["state"] != 3 else 0
            if entry["pid"] and unready < 4:
                kill(entry["pid"])
                self.kills += 1


@pytest.mark.filterwarnings("ignore:DataLoader worker .* deaths in a row:UserWarning")
def test_the_only_worker_is_killed_again_and_again(seed):
    """max_retries=1000: random kills end no run."""
    loader = make(Noisy(80), num_workers=1, persistent_workers=True, max_retries=1000)
    calm = make(Noisy(80), persistent_workers=True)
    rng, kills = random.Random(seed), 0
    for epoch in epochs(SECONDS if SECONDS >= 30 else 0, enough=lambda: kills > 3):
        torch.manual_seed(epoch)
        expected = [copied(batch) for batch in calm]
        torch.manual_seed(epoch)
        hunter = Everybody(iterator := iter(loader), rng)
        hunter.start()
        try:
            assert same([copied(batch) for batch in iterator], expected)
        finally:
            hunter.end.set()
            hunter.join()
        kills += hunter.kills


def test_a_stopped_zygote_hides_no_death():
    """The loader sees by itself that a worker has died, waits for ten seconds to be told, and ends
    the zygote. The program starts another."""
    iterator = iter(make(Slow(4, 0.5), batch_size=4, num_workers=1))
    wait_for(lambda: worker_entries(iterator)[0]["running"], "a worker at work")
    zygote = zygote_of(iterator)
    kill(zygote, signal.SIGSTOP)
    try:
        kill(workers_of(iterator)[0])
        assert sorted(next(iterator).tolist()) == list(range(4))
        assert zygote_of(iterator) != zygote and iterator._pool.restarts == 1
    finally:
        kill(zygote, signal.SIGCONT)


def test_an_entry_without_a_worker_names_no_process():
    """The entry of a reaped worker keeps its id, which another process may have by now."""
    engine = minato._core.Engine(1, 0, False)
    other = subprocess.Popen(["sleep", "100"])
    try:
        engine.segment.starting(0)
        assert engine.segment.claim(0, engine.segment.starts(0), other.pid)
        assert engine.kill_worker(0, signal.SIGCONT)
        (entry,) = struct.unpack("Q", os.pread(engine.fd, 8, 24))  # mn_ctl.workers_off
        state = entry + 4  # mn_worker.state
        for nobody in (EMPTY, WANTED):
            os.pwrite(engine.fd, struct.pack("I", nobody), state)
            assert not engine.kill_worker(0, signal.SIGKILL)
        assert other.poll() is None
        os.pwrite(engine.fd, struct.pack("I", READY), state)
        assert engine.kill_worker(0, signal.SIGKILL)
        assert other.wait() == -signal.SIGKILL
        assert not engine.kill_worker(0, signal.SIGKILL)
    finally:
        other.kill()
        other.wait()


def test_stopped_workers_go_on(seed):
    """SIGSTOP and SIGCONT at random: a stopped worker's task waits for it."""
    rng = random.Random(seed)
    expected = [copied(batch) for batch in make(Noisy())]
    stops = 0
    for _ in epochs(SECONDS, enough=lambda: stops > 0):
        iterator = iter(make(Noisy()))
        with Stopper(iterator, rng) as stopper:
            got = list(iterator)
        assert same(got, expected)
        stops += stopper.stops


def test_stopped_worker_is_waited_for():
    """timeout= reports it, and no other worker takes over; it continues where it was."""
    iterator = iter(make(Slow(40, 0.01), batch_size=2, shuffle=False, num_workers=2, timeout=1))
    got = next(iterator).tolist()
    wait_for(lambda: worker_entries(iterator)[0]["running"], "work")
    stopped = workers_of(iterator)[0]
    kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(RuntimeError, match="timed out"):
            for batch in iterator:
                got += batch.tolist()
    finally:
        kill(stopped, signal.SIGCONT)
    while len(got) < 40:
        try:
            got += next(iterator).tolist()
        except RuntimeError as error:  # a second is short on a busy machine
            assert "timed out" in str(error)
    assert got == list(range(40))
    assert iterator._engine.health()["deaths"] == 0


def test_a_trainer_that_is_stopped_goes_on():
    """Its workers check for it meanwhile, and one of them is killed."""
    tell, told = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        code = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            iterator = iter(make(Slow(120, 0.01), batch_size=2, shuffle=False, num_workers=2))
            got = next(iterator).tolist()
            os.write(told, " ".join(map(str, workers_of(iterator))).encode())
            got += torch.cat(list(iterator)).tolist()
            code = 0 if got == list(range(120)) else 2
        finally:
            os._exit(code)
    try:
        pids = [int(pid) for pid in os.read(tell, 99).split()]
        kill(trainer, signal.SIGSTOP)
        kill(pids[0])
        wait_for(lambda: psutil.Process(trainer).status() == psutil.STATUS_STOPPED, "it to stop")
        time.sleep(2.5)  # longer than one check of idle workers
        assert alive(pids[1])
    finally:
        kill(trainer, signal.SIGCONT)
        os.close(tell)
        os.close(told)
        code = os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1])
    assert code == 0
    wait_for(lambda: not alive(pids[1]), "its workers to end")


def test_stopped_workers_do_not_stop_the_end():
    iterator = iter(make(Slow(64, 0.02)))
    next(iterator)
    pids = workers_of(iterator)
    for pid in pids:
        kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    del iterator
    assert time.monotonic() - begin < PATIENCE
    assert not any(map(alive, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_signals_to_a_worker(number):
    loader = make(Noisy(), shuffle=False)
    expected = [copied(batch) for batch in make(Noisy(), shuffle=False)]
    torch.manual_seed(1234)
    iterator = iter(loader)
    got = [next(iterator)]
    kill(workers_of(iterator)[1], number)
    got += list(iterator)
    assert same(got, expected)


def test_without_retries_only_the_batch_is_lost():
    """max_retries=0: the sample's batch is an error, others arrive; no thread spins."""
    iterator = iter(make(Slow(24, 0.2), batch_size=1, shuffle=False, max_retries=0))
    got, lost = [int(next(iterator))], []
    wait_for(lambda: worker_entries(iterator)[2]["running"], "work")
    kill(workers_of(iterator)[2])
    begin = time.process_time()
    while True:
        try:
            got.append(int(next(iterator)))
        except minato.WorkerLost as error:
            lost.append(error.index)
        except StopIteration:
            break
    assert len(lost) <= 1
    assert sorted(got + lost) == list(range(24))
    assert time.process_time() - begin < 0.6


@pytest.mark.parametrize("scheduling", ["static", "iterable"])
def test_static_workers_are_missed_at_once(scheduling):
    dataset = Counting(1000, 0.01) if scheduling == "iterable" else Slow(200, 0.02)
    options = {} if scheduling == "iterable" else {"scheduling": "static"}
    iterator = iter(make(dataset, shuffle=False, batch_size=2, **options))
    next(iterator)
    kill(workers_of(iterator)[0])
    with pytest.raises(RuntimeError, match="killed by signal"):
        for _ in range(1000):
            next(iterator)


def test_large_batches_survive_their_workers(seed):
    rng = random.Random(seed)
    loader = make(Images(48), batch_size=4, shuffle=False)
    iterator = iter(loader)
    kept = []
    with Killer(iterator, rng, 0.05):
        for images, index in iterator:
            kept.append((images, index))
    for number, (images, index) in enumerate(kept):
        assert index.tolist() == list(range(4 * number, 4 * number + 4))
        assert torch.equal(images, index[:, None, None].float().expand_as(images))
