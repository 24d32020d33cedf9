"""spawn and forkserver: the same data, and datasets that bring things along."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
import torch.utils.data

import minato

from .datasets import Images, Noisy, Ragged, StartsThread, WithTools, Wordy, keep_list
from .support import SECONDS, copied, kill_ready, resources, same, wait_for, worker_entries

METHODS = ["spawn", "forkserver"]


def make(dataset, method, **options):
    torch.manual_seed(77)
    options = {"batch_size": 8, "num_workers": 2, "shuffle": True, **options}
    return minato.DataLoader(dataset, multiprocessing_context=method, **options)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_data(method):
    for dataset, options in [
        (Noisy(40), {}),
        (Wordy(40), {}),
        (Ragged(40), {"collate_fn": keep_list}),
        (Noisy(40), {"scheduling": "static"}),
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
def test_datasets_with_tools_of_multiprocessing(method):
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
def test_a_dataset_that_starts_a_thread(method, scheduling):
    """Threads do not survive a fork: workers are then started one by one."""
    expected = [copied(b) for b in make(Noisy(24), "fork", scheduling=scheduling)]
    got = [copied(b) for b in make(StartsThread(24), method, scheduling=scheduling)]
    assert same(got, expected)


def test_a_directly_started_worker_is_replaced():
    iterator = iter(make(StartsThread(400), "spawn", persistent_workers=True))
    next(iterator)
    os.kill(worker_entries(iterator)[0]["pid"], signal.SIGKILL)
    assert len(list(iterator)) == 49
    assert len(list(iterator._pool.handles)) == 2


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_left(method):
    list(make(Images(8), method))
    before = resources()
    for _ in range(2):
        iterator = iter(make(Images(40), method))
        next(iterator)
        del iterator
    assert resources() == before


def test_first_batch(capsys):
    """Its indices are judged; the time it takes is only told."""
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
