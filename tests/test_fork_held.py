"""A batch that a forked child inherited does not change under it."""

import os
import types

import pytest
import torch

import minato
from minato import _core, _fork


class Big(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((50_000,), float(index))


def loader():
    return minato.DataLoader(Big(), batch_size=2, num_workers=1, persistent_workers=True)



def test_child_sees_its_batch_after_the_parent_has_gone_on():
    source = loader()
    list(source)  # from the second epoch on batches are views of the arena
    it = iter(source)
    batch = next(it)
    # NumPy: torch's threads do not survive a fork
    seen, expected = batch.numpy(), batch.numpy().copy()
    go, told = os.pipe(), os.pipe()
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
    assert _core.fork_begins() > 0  # something is out
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if _core.fork_begins() == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    del batch


def two_that_are_gone():
    """Forks as _fork.py counts them, whose children have ended."""
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

    monkeypatch.setattr(_fork, "_living", living)
    monkeypatch.setattr(_fork, "os", types.SimpleNamespace(close=close))
    monkeypatch.setattr(_fork, "_core", types.SimpleNamespace(living_forks=told.append))
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
