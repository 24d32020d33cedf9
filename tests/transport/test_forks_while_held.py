"""A batch that a forked child inherited does not change under it."""

import ctypes
import gc
import os
import signal
import sys
import threading

import pytest
import torch
from attack.support import in_child
from housekeeping import next_to_fork

import minato
from minato import _core
from minato.iterators.loader_memo import memo_of


class Big(torch.utils.data.Dataset):
    """Samples that are other ones in each epoch."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((50_000,), torch.rand(()).item())


def loader():
    return minato.DataLoader(Big(), batch_size=2, num_workers=1, persistent_workers=True)


def fds():
    return len(os.listdir("/proc/self/fd"))


def fork(child, begin=lambda: None, end=lambda: None):
    """Process number of a fork. begin() and end() run next to it in the parent, inside minato's
    hooks; the child's exit code is the result of child()."""
    ended = []  # a hook's exception does not end a fork
    next_to_fork.before = lambda: ended.append(begin())
    next_to_fork.after = lambda: ended.append(end())
    try:
        pid = os.fork()
    finally:
        vars(next_to_fork).clear()
    if pid == 0:
        code = 99
        try:
            code = child()
        finally:
            os._exit(code)
    assert ended == [None, None]
    return pid


def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Pair:
    """A pipe: a child waits until the other side writes."""

    def __enter__(self):
        self.ends = os.pipe()
        return self

    def __exit__(self, *_):
        for fd in self.ends:
            os.close(fd)

    def wait(self):
        return os.read(self.ends[0], 1)

    def write(self, what=b"!"):
        os.write(self.ends[1], what)


def begun():
    """A loader, and an iterator of its second epoch: from there on batches are views of the arena."""
    source = loader()
    list(source)
    return source, iter(source)


def goes_on(source):
    for _ in range(3):
        list(source)


def array_of(batch):
    """What a child looks at, since torch's threads do not survive a fork; and a copy."""
    return batch.numpy(), batch.numpy().copy()


@pytest.mark.parametrize("then", ["kept", "share_memory_", "queue"])
def test_child_keeps_batch_after_parent_continues(then):
    """share_memory_() and queues give a storage new memory, and an existing NumPy array
    still shows the old one: also to a child that is forked afterwards."""
    source, it = begun()
    batch = next(it)
    seen, expected = array_of(batch)
    if then == "queue":
        queue = torch.multiprocessing.get_context("fork").SimpleQueue()
        queue.put(batch)
    elif then == "share_memory_":
        batch.share_memory_()
    assert (batch.data_ptr() != seen.ctypes.data) == (then != "kept")
    with Pair() as go:
        pid = fork(lambda: 0 if go.wait() and (seen == expected).all() else 2)
        del batch, seen
        goes_on(source)
        go.write()
        assert end_of(pid) == 0


@pytest.mark.parametrize("dropped", ["before its end", "after it"])
@pytest.mark.parametrize("out", [0, 1])
def test_batch_received_by_thread_during_fork(out, dropped):
    """Between minato's hook and the fork: others run there, and may wait."""
    source, it = begun()
    kept = [next(it) for _ in range(out)]
    box = []

    def begin():
        thread = threading.Thread(target=lambda: box.append(next(it).numpy()))
        thread.start()
        thread.join()

    def child():
        expected = box[0].copy()
        return 0 if go.wait() and (box[0] == expected).all() else 2

    def end():
        if dropped == "before its end":
            box.clear()
            source.stats()

    with Pair() as go:
        pid = fork(child, begin, end)
        box.clear()
        kept.clear()
        goes_on(source)
        go.write()
        assert end_of(pid) == 0


def test_child_without_descriptors_keeps_its_batch():
    """As daemons do, in a child of the child."""
    source, it = begun()
    batch = next(it)
    seen, expected = array_of(batch)

    def child():
        if os.fork() == 0:
            os.dup2(go.ends[0], 0)
            os.dup2(answer.ends[1], 1)
            os.closerange(2, 4096)
            os.write(1, b"!")
            os.read(0, 1)
            os.write(1, b"=" if (seen == expected).all() else b"x")
            os._exit(0)
        return 0

    with Pair() as go, Pair() as answer:
        assert end_of(fork(child)) == 0
        assert answer.wait() == b"!"
        del batch, seen
        goes_on(source)
        go.write()
        assert answer.wait() == b"="


def test_two_threads_fork_at_once():
    """The child that ends first is not taken for both."""
    source, it = begun()
    batch = next(it)
    seen, expected = array_of(batch)
    forking, forked, pids = threading.Event(), threading.Event(), []

    def begin():
        forking.set()
        assert forked.wait(60)

    def child():
        return 0 if go.wait() and (seen == expected).all() else 2

    with Pair() as go:
        thread = threading.Thread(target=lambda: pids.append(fork(child, begin)))
        thread.start()
        assert forking.wait(60)
        assert in_child(lambda: 0) == 0
        forked.set()
        thread.join(60)
        del batch, seen
        goes_on(source)
        go.write()
        assert end_of(pids[0]) == 0


def test_memory_is_reused_after_child_exits():
    source, it = begun()
    batch = next(it)
    kept = source.stats()["memory"]["kept"]
    assert kept > 0
    assert in_child(lambda: 0) == 0
    del batch
    assert source.stats()["memory"]["kept"] < kept


def test_exited_children_leave_no_descriptors():
    source = loader()
    list(source)
    before = fds()
    for _ in range(10):
        batch = next(iter(source))
        assert in_child(lambda: 0) == 0
        del batch
        source.stats()
    assert fds() <= before + 1


def test_fork_checks_run_no_program_code():
    """A signal handler could run: its exception would be lost, and it may shut the loader down."""
    source, it = begun()
    batch = next(it)
    with Pair() as go:
        pid = fork(lambda: len(go.wait()))
        del batch
        engine, calls = it._engine, []
        sys.setprofile(lambda frame, event, _: calls.append((event, frame.f_code.co_name)))
        engine.memory()
        sys.setprofile(None)
        go.write()
        assert end_of(pid) == 1
    assert [name for event, name in calls if event == "call"] == []


def test_child_inherits_no_fork_records():
    """Nor with a lock of its parent's: a thread that is not in the child may have held it."""
    it = iter(loader())
    batch = next(it)

    def left_of_a_fork():
        before = fds()
        _core.fork_begins()
        _core.fork_ends()
        return fds() - before

    assert left_of_a_fork() == 1  # a batch is out; the child has not been checked yet
    assert in_child(left_of_a_fork) == 0
    del batch, it


def test_child_without_batches_costs_no_descriptor():
    """Nothing is out in the process that forks it: a child itself, since others may have kept some
    in this one."""

    def left_of_forks():
        with Pair() as go:
            before = fds()
            pids = [fork(lambda: len(go.wait())) for _ in range(3)]
            left = fds() - before
            go.write(b"!!!")
            return left if [end_of(pid) for pid in pids] == [1, 1, 1] else -1

    it = iter(loader())
    batch = next(it)
    assert in_child(left_of_forks) == 0
    del batch, it


def lock_of_held_memory():
    """Address of the lock in the last field of the core's state: what mn_delivered_memory.c calls
    pending."""
    api = ctypes.pythonapi
    api.PyModule_GetState.restype = api.PyModule_GetDef.restype = ctypes.c_void_p
    core = ctypes.py_object(_core)
    size = ctypes.c_ssize_t.from_address(api.PyModule_GetDef(core) + 7 * 8).value  # m_size
    return ctypes.c_void_p.from_address(api.PyModule_GetState(core) + size - 8).value


@pytest.mark.skipif(sys.maxsize < 2**32, reason="the layouts are those of 64 bits")
@pytest.mark.parametrize("which", ["held memory", "costs"])
def test_child_does_not_wait_for_parents_locks(which):
    """A thread without the GIL has it at the moment of the fork: here as good as."""
    source = loader()
    list(source)
    costs = memo_of(source).costs
    lock = id(costs) + object.__basicsize__ if which == "costs" else lock_of_held_memory()
    libc = ctypes.CDLL(None)

    def work():
        costs.summary()
        if which != "costs":
            _core.fork_begins()
            _core.fork_ends()
        return 0

    def begin():
        assert libc.pthread_mutex_trylock(ctypes.c_void_p(lock)) == 0

    def end():
        assert libc.pthread_mutex_unlock(ctypes.c_void_p(lock)) == 0

    assert end_of(fork(lambda: signal.alarm(60) or work(), begin, end)) == 0
