"""A batch that a forked child inherited does not change under it."""

import ctypes
import errno
import os
import sys
import types

import pytest
import torch

import minato
from attack.support import in_child
from minato import _core
from minato.transport import forks_while_held as _fork
from minato.iterators.loader_memo import memo_of


class Big(torch.utils.data.Dataset):
    """Samples that are other ones in each epoch."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((50_000,), torch.rand(()).item())


def loader():
    return minato.DataLoader(Big(), batch_size=2, num_workers=1, persistent_workers=True)



@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("untold", [None, "fork_begins", "living_forks"])
def test_child_sees_its_batch_after_the_parent_has_gone_on(untold, monkeypatch):
    """untold: what there is no memory for when it forks."""
    source = loader()
    list(source)  # from the second epoch on batches are views of the arena
    it = iter(source)
    batch = next(it)
    # NumPy: torch's threads do not survive a fork
    seen, expected = batch.numpy(), batch.numpy().copy()
    go, told = os.pipe(), os.pipe()
    forgetful = Forgetful(untold)
    with monkeypatch.context() as patch:
        if untold is not None:
            patch.setattr(_fork, "_core", forgetful)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.read(go[0], 1)
            code = 0 if (seen == expected).all() else 2
        finally:
            os._exit(code)
    del batch, seen
    for _ in range(3):
        list(source)
    os.write(go[1], b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for fd in (*go, *told):
        os.close(fd)
    if untold == "fork_begins":  # nobody knows of it, so its memory is kept for good
        _core.living_forks([], [forgetful.count])


class Forgetful:
    """The core, in which one function does all that it does, but has no room for its result."""

    def __init__(self, name):
        self.name = name
        self.count = None  # the fork that nobody was told of

    def __getattr__(self, name):
        if name == self.name == "living_forks":
            raise MemoryError
        if name == self.name:
            self.count = _core.fork_begins()
            raise MemoryError
        return getattr(_core, name)


def test_memory_is_used_again_once_the_child_is_gone():
    source = loader()
    list(source)
    it = iter(source)
    batch = next(it)
    kept = source.stats()["memory"]["kept"]
    assert kept > 0
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    del batch
    assert source.stats()["memory"]["kept"] < kept


def test_no_descriptor_is_kept_for_children_that_are_gone():
    source = loader()
    list(source)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        batch = next(iter(source))
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        del batch
        source.stats()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_child_begins_with_nothing_of_its_parents():
    """Nor with a lock of its parent's: a thread that is not in the child may have held it."""
    it = iter(loader())
    batch = next(it)
    count = _core.fork_begins()
    assert count > 0  # something is out
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if _core.fork_begins() == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    _core.living_forks([], [count])
    del batch


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
def test_a_child_does_not_wait_for_a_lock_of_its_parents_threads(which, monkeypatch):
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
            _core.living_forks([], [])

    def begins():
        assert libc.pthread_mutex_trylock(ctypes.c_void_p(lock)) == 0
        return 0

    hooks = types.SimpleNamespace(fork_begins=begins, forked=_core.forked)
    with monkeypatch.context() as patch:
        patch.setattr(_fork, "_core", hooks)
        code = in_child(work)
    held = libc.pthread_mutex_trylock(ctypes.c_void_p(lock))
    assert libc.pthread_mutex_unlock(ctypes.c_void_p(lock)) == 0
    assert held == errno.EBUSY and code == 0


def two_that_are_gone():
    """Forks as transport/forks_while_held.py counts them, whose children have ended."""
    living = {}
    for count in (1, 2):
        living[count], write = os.pipe()
        os.close(write)
    return living


def test_a_descriptor_is_closed_once_even_if_forgetting_is_entered_again(monkeypatch):
    """By a finalizer, say: a number closed twice may be somebody else's by then."""
    closed, told, living = [], [], two_that_are_gone()

    def close(fd):
        closed.append(fd)
        _fork.poll()
        os.close(fd)

    def tell(going_on, ended):
        told.append(going_on)

    monkeypatch.setattr(_fork, "_living", living)
    monkeypatch.setattr(_fork, "os", types.SimpleNamespace(close=close))
    monkeypatch.setattr(_fork, "_core", types.SimpleNamespace(living_forks=tell))
    ends = sorted(living.values())
    _fork.poll()
    assert sorted(closed) == ends and living == {} and told[-1] == []


def test_forgetting_that_is_broken_off_leaves_no_closed_descriptor(monkeypatch):
    living = two_that_are_gone()

    def close(fd):
        os.close(fd)
        raise KeyboardInterrupt

    monkeypatch.setattr(_fork, "_living", living)
    monkeypatch.setattr(_fork, "os", types.SimpleNamespace(close=close))
    with pytest.raises(KeyboardInterrupt):
        _fork.poll()
    assert len(living) == 1
    for fd in living.values():
        os.close(fd)  # open still
