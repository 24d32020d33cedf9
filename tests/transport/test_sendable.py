"""Batches with a collate_fn of the program's, fetched by several workers and collated by one."""

from __future__ import annotations

import os
import random
import threading
import time

import numpy as np
import pytest
import torch
from contract.support import error_text

import minato
from minato.iterators.loader_memo import memo_of
from minato.transport import messages
from minato.transport.messages import sendable, sending_ns

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Rich(torch.utils.data.Dataset):
    """Samples of ragged tensors, arrays in both orders, text; randomness from everywhere."""

    def __init__(self, n=60):
        self.n = n
        self.own = np.random.default_rng(5)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {
            "ragged": torch.randn(1 + index % 5, 3),
            "array": np.asfortranarray(np.random.rand(3, 2).astype(np.float32)),
            "own": self.own.random(),
            "text": f"sample {index}",
            "number": random.random(),
            "index": index,
            "none": None,
            "large": torch.full((70000,), index, dtype=torch.uint8),
        }


def messy(samples):
    """A collate_fn that draws, and writes into the samples it is given."""
    shift = torch.rand(())
    for sample in samples:
        sample["ragged"] += shift
        sample["array"] *= 2
    return {
        "ragged": torch.nn.utils.rnn.pad_sequence([s["ragged"] for s in samples]),
        "array": np.stack([s["array"] for s in samples]),
        "sums": [float(s["ragged"].sum()) for s in samples],
        "rest": [(s["own"], s["text"], s["number"], s["index"], s["none"]) for s in samples],
        "large": torch.stack([s["large"] for s in samples]),
        "drawn": (random.random(), float(np.random.rand()), torch.randn(3)),
    }


def make(dataset, split=True, **options):
    """A loader that knows uneven costs: with ``split`` None it is left to find out."""
    generator = torch.Generator().manual_seed(options.pop("seed", 1))
    options = {"batch_size": 8, "num_workers": 3, "shuffle": True} | options
    torch.manual_seed(7)
    loader = minato.DataLoader(dataset, generator=generator, **options)
    costs = memo_of(loader).costs
    for k in range(64):
        costs.observe(-1, 10**9 if k % 4 == 0 else 10**6)
    costs.sends(0 if split else -1)
    return loader


def same(a, b):
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.flags.forc == b.flags.forc and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_batches_are_those_of_one_worker(workers):
    whole = make(Rich(), split=False, collate_fn=messy, persistent_workers=True)
    parts = make(Rich(), collate_fn=messy, persistent_workers=True, num_workers=workers)
    for _ in range(2):
        expected, got = list(whole), list(parts)
        assert len(expected) == len(got) == 8
        assert all(map(same, expected, got))
    assert parts.stats()["cost"]["split"] and not whole.stats()["cost"]["split"]
    assert sum(parts.stats()["started"].values()) > 60  # tasks: more than two a batch


def test_out_of_order():
    key = lambda batch: min(r[3] for r in batch["rest"])  # noqa: E731
    whole = sorted(make(Rich(), split=False, collate_fn=messy), key=key)
    parts = sorted(make(Rich(), collate_fn=messy, in_order=False), key=key)
    assert all(map(same, whole, parts))


class Bad(Rich):
    def __getitem__(self, index):
        if index in (11, 12, 30):
            raise KeyError(f"corrupt {index}")
        return super().__getitem__(index)


def refusing(samples):
    if any(sample["index"] == 41 for sample in samples):
        raise ValueError("a batch of no use")
    return messy(samples)


def outcomes(loader):
    out, it = [], iter(loader)
    while True:
        try:
            out.append(next(it))
        except StopIteration:
            return out
        except Exception as error:
            out.append(error)


def test_errors_come_at_their_place_in_torchs_words():
    options = dict(shuffle=False, collate_fn=refusing)
    torchs = torch.utils.data.DataLoader(Bad(), 8, num_workers=1, collate_fn=refusing)
    whole, parts = outcomes(make(Bad(), split=False, **options)), outcomes(make(Bad(), **options))
    kinds = [type(x) for x in outcomes(torchs)]
    assert [type(x) for x in whole] == [type(x) for x in parts] == kinds
    first, second = parts[1], parts[5]
    assert isinstance(first, KeyError) and "corrupt 11" in str(first)  # the first in order
    assert "Caught KeyError in DataLoader worker process" in str(first)
    assert isinstance(second, ValueError) and "a batch of no use" in str(second)
    assert "refusing" in str(second) and type(second.__cause__) is ValueError
    assert "sample index 11, position 3 of batch 1" in error_text(first)
    assert all(same(a, b) for a, b in zip(whole, parts) if isinstance(a, dict))


class Odd(Rich):
    """Plain samples until one that cannot travel."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == 37:
            sample["odd"] = self.odd()
        return sample


class NoPickle:
    def __reduce__(self):
        raise TypeError("this stays where it is")


@pytest.mark.parametrize(
    "odd", [lambda: iter([1]), NoPickle, lambda: torch.eye(3).T[:, 1:], lambda: np.eye(3)[::2, 1]]
)
def test_unsendable_batch_ends_splitting(odd):
    options = dict(collate_fn=messy, shuffle=False)
    parts = make(Odd(odd), **options)
    assert all(map(same, make(Rich(), split=False, **options), parts))
    assert not parts.stats()["cost"]["split"]


def test_splitting_is_learned_from_costs():
    """Without hints: the first batches show the cost of sending, the costs the rest."""

    class Sleepy(Rich):
        def __getitem__(self, index):
            time.sleep(0.05 if index % 5 == 0 else 0.002)
            return super().__getitem__(index)

    def plain(**options):
        return minato.DataLoader(
            Sleepy(200), batch_size=8, num_workers=3, shuffle=False, collate_fn=messy, **options
        )

    torch.manual_seed(3)
    loader = plain(persistent_workers=True)
    found = list(loader)
    assert memo_of(loader).costs.summary()["send_ns"] > 0
    cost = loader.stats()["cost"]
    assert cost["split"] and cost["collate"] > 0
    torch.manual_seed(3)
    whole = plain(worker_init_fn=no_sending)
    assert all(map(same, found, whole)) and not whole.stats()["cost"]["split"]


def no_sending(_number):
    from minato.workers import runner as _worker

    _worker.sending_ns = lambda samples: -1


def test_slow_sample_leaves_batch_to_other_workers():
    """One worker is at a sample that blocks until all others of its batch were fetched."""
    context = torch.multiprocessing.get_context("fork")
    gate, fetched = context.Event(), context.Semaphore(0)

    class Gate(Rich):
        def __getitem__(self, index):
            if index == 0:
                assert gate.wait(60)
            else:
                fetched.release()
            return super().__getitem__(index)

    loader = make(
        Gate(8), num_workers=2, shuffle=False, collate_fn=messy, multiprocessing_context=context
    )
    opener = threading.Thread(
        target=lambda: all(fetched.acquire(timeout=60) for _ in range(7)) and gate.set()
    )
    opener.start()
    assert len(list(loader)) == 1
    opener.join()


def test_a_worker_that_dies_collating_is_replaced(tmp_path):
    once = tmp_path / "died"

    def dies(samples):
        if any(sample["index"] == 20 for sample in samples) and not once.exists():
            once.touch()
            os._exit(3)
        return messy(samples)

    options = dict(shuffle=False, multiprocessing_context="fork")
    whole = make(Rich(), split=False, collate_fn=messy, **options)
    assert all(map(same, whole, make(Rich(), collate_fn=dies, **options)))
    assert once.exists()


def test_early_break_and_another_epoch():
    loader = make(Rich(), collate_fn=messy, persistent_workers=True)
    for count in range(5):
        it = iter(loader)
        for _ in range(count):
            next(it)
    assert len(list(loader)) == 8


def test_sendable_types():
    class Sub(np.ndarray):
        pass

    good = [
        1, 2.5, None, True, "text", b"bytes", torch.zeros(2, 3), np.zeros((2, 3), order="F"),
        np.float32(2), {"a": [1, (torch.ones(1),)]}, torch.zeros(0),
    ]  # fmt: skip
    bad = [
        object(), torch.zeros(2, requires_grad=True), torch.zeros(4, 4).T, np.zeros((4, 4))[:, 1],
        np.array([None]), np.zeros(3, ">f8"), np.zeros(3).view(Sub), torch.eye(3).to_sparse(),
        {("a", 1): 2}, {1, 2}, torch.nn.Parameter(torch.zeros(1)),
    ]  # fmt: skip
    assert all(sendable(x) and sending_ns([x, x]) >= 0 for x in good)
    assert not any(sendable(x) or sending_ns([1, [x]]) >= 0 for x in bad)
    nested = []
    nested.append(nested)
    assert not sendable(nested)


def test_samples_keep_their_byte_order() -> None:
    """default_collate refuses another than the machine's, also of an array that is not contiguous,
    which NumPy's own pickle would turn."""
    for array in (np.ones(3, ">f4"), np.broadcast_to(np.ones(3, ">f4"), (2, 3))):
        pickled, buffers = messages.dumps([array], samples=True)
        [there] = messages.loads(pickled, buffers)
        assert there.dtype.str == ">f4" and there.tolist() == array.tolist()


@pytest.mark.parametrize("make", [
    lambda x: x.unfold(0, 100, 1),
    lambda x: [x[k : k + 100] for k in range(0, 901, 10)],
    lambda x: [x[:10], x, x.view(10, 100).T],
    lambda x: (x.view(10, 100)[:, 20:], x.view(10, 100)),
    lambda x: [torch.nn.Parameter(x), x[5:].expand(3, 995)],
], ids=["unfold", "windows", "whole in the middle", "columns", "parameter"])
def test_tensors_that_overlap_take_their_buffer_once(make):
    sent = make(torch.arange(1000.0))
    data, buffers = messages.dumps(sent)
    assert sum(map(len, buffers)) == 4000
    got = messages.loads(data, [bytearray(buffer) for buffer in buffers])
    flat = [sent] if isinstance(sent, torch.Tensor) else sent
    for one, other in zip(flat, [got] if isinstance(got, torch.Tensor) else got, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
        assert type(one) is type(other) and one.requires_grad == other.requires_grad


def test_small_parts_of_large_buffer_are_sent_alone():
    x = torch.zeros(1000, 1000)
    data, buffers = messages.dumps([x[:, :1], x[:, 1:2]])
    assert sum(map(len, buffers)) == 8000
