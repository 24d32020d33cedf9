"""The same job twice: one hash, whatever the workers, their number and their order do."""

from __future__ import annotations

import hashlib
import random
import time

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import minato

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Augmented(torch.utils.data.Dataset):
    """Draws from every generator there is, its own included; some samples take longer."""

    def __init__(self, count=40, slow=0, seconds=0.004):
        self.count, self.slow, self.seconds = count, slow, seconds
        self.numpy = np.random.default_rng(1)
        self.legacy = np.random.RandomState(2)
        self.python = random.Random(3)
        self.torch = torch.Generator().manual_seed(4)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.slow and index % self.slow == 0:
            time.sleep(self.seconds)
        return torch.tensor([
            index, random.random(), np.random.rand(), torch.rand(()).item(),
            self.numpy.random(), self.legacy.rand(), self.python.random(),
            torch.rand((), generator=self.torch).item(),
        ], dtype=torch.float64)  # fmt: skip


def drawing(samples):
    """A collate_fn with randomness of its own."""
    mixed = torch.stack(samples) * random.random() + torch.rand(len(samples), 1)
    return mixed + np.random.rand()


def digest(loader, in_order=True):
    rows = [hashlib.sha256(batch.numpy().tobytes()).hexdigest() for batch in loader]
    return rows if in_order else sorted(rows)


def make(workers, collate_fn=None, seed=11, dataset=None, **options):
    torch.manual_seed(seed)
    return minato.DataLoader(
        dataset or Augmented(), batch_size=5, shuffle=True, num_workers=workers,
        collate_fn=collate_fn, **options,
    )  # fmt: skip


@pytest.mark.parametrize("collate_fn", [None, drawing])
def test_the_same_with_one_two_and_seven_workers(collate_fn):
    runs = []
    for workers in (1, 2, 7, 2):
        loader = make(workers, collate_fn, persistent_workers=True)
        runs.append([digest(loader) for _ in range(3)])
    assert runs[0] == runs[1] == runs[2] == runs[3]
    assert len({row for epoch in runs[0] for row in epoch}) == 24  # epochs draw anew


@hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
@hypothesis.given(
    st.integers(1, 5), st.integers(0, 9), st.sampled_from([None, drawing]), st.booleans(),
    st.sampled_from([None, (1, 6)]), st.integers(1, 3),
)  # fmt: skip
def test_the_same_whatever_the_machinery_does(workers, slow, collate, in_order, most, prefetch):
    """Random numbers of workers, costs, windows, with and without a scheduler."""
    plain = digest(make(2, collate), in_order)
    threshold = 0.005 if most is not None else "auto"
    options = dict(in_order=in_order, autoscale=most, prefetch_factor=prefetch)
    other = make(workers, collate, dataset=Augmented(slow=slow), straggler_threshold=threshold,
                 **options)  # fmt: skip
    assert digest(other, in_order) == plain


@hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
@hypothesis.given(
    st.integers(1, 4), st.integers(0, 9), st.integers(1, 60), st.integers(1, 9),
    st.sampled_from([None, (1, 6)]),
)  # fmt: skip
def test_ready_first_delivers_each_sample_once(workers, slow, count, size, most):
    """Samples and their randomness are those of strict order, in whichever batch."""
    def rows(**options):
        torch.manual_seed(5)
        loader = minato.DataLoader(
            Augmented(count, slow, 0.01), batch_size=size, shuffle=True, num_workers=workers,
            autoscale=most, **options,
        )  # fmt: skip
        batches = list(loader)
        assert [len(b) for b in batches[:-1]] == [size] * (len(batches) - 1)
        return {int(row[0]): row.tolist() for batch in batches for row in batch}, batches

    strict, _ = rows()
    ready, batches = rows(in_order=False, batching="ready")
    assert sum(map(len, batches)) == count and ready == strict


@hypothesis.settings(deadline=None, max_examples=5, derandomize=True)
@hypothesis.given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 8), st.booleans())
def test_the_rest_of_an_epoch_elsewhere(before, after, taken, split):
    """Left in the middle with so many workers, gone on with others."""
    collate = drawing if split else None
    whole = digest(make(before, collate))
    loader = make(before, collate)
    it = iter(loader)
    first = [hashlib.sha256(next(it).numpy().tobytes()).hexdigest() for _ in range(min(taken, 7))]
    state = loader.state_dict()
    del it
    other = make(after, collate, seed=99)
    other.load_state_dict(state)
    assert first + digest(other) == whole
