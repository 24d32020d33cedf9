"""Batches and samples: who makes them, and how errors name them."""

import multiprocessing
import os

import numpy as np
import pytest
import torch
from contract.support import error_text
from torch.utils.data._utils.collate import default_collate_fn_map

import minato


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "y": index}


class Meeting(torch.utils.data.Dataset):
    """Samples that end when as many workers make one."""

    def __init__(self, workers: int) -> None:
        self.barrier = multiprocessing.Barrier(workers)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.barrier.wait(60)
        return index


@pytest.mark.parametrize("nested", [False, True])
def test_workers_share_a_batch_of_a_subset(nested) -> None:
    """torch's Subset asks its dataset for one sample after another, and so do workers."""
    subset = torch.utils.data.Subset(Meeting(4), [6, 5, 4, 3])
    if nested:
        subset = torch.utils.data.Subset(subset, range(4))
    loader = minato.DataLoader(
        subset, batch_size=4, num_workers=4, multiprocessing_context="fork"
    )
    assert [batch.tolist() for batch in loader] == [[6, 5, 4, 3]]


class Drawing(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_samples_of_subset_have_their_own_seeds() -> None:
    data = torch.utils.data.Subset(Drawing(), range(12))
    batches = {size: minato.DataLoader(data, batch_size=size, num_workers=2) for size in (2, 4)}
    made = {}
    for size, loader in batches.items():
        torch.manual_seed(3)
        made[size] = torch.cat(list(loader)).tolist()
    assert made[2] == made[4] and len(set(made[2])) == 12


class Foreign:
    """A class that some library has taught default_collate."""


class MyInt(int):
    """One that rows would hold as a plain number."""


@pytest.mark.parametrize("batching", ["sampler", "ready"])
@pytest.mark.parametrize("kind", [Foreign, MyInt, object])
def test_rows_depend_on_registered_collate_classes(kind, batching, monkeypatch) -> None:
    """Decided by a batch that a worker made, if none of its samples could be of those classes."""
    monkeypatch.setitem(default_collate_fn_map, kind, lambda batch, *, collate_fn_map: batch[0])
    options = {"batching": batching, "in_order": batching == "sampler"}
    loader = minato.DataLoader(Squares(), batch_size=2, num_workers=2, **options)
    iterator = iter(loader)
    got = list(iterator)
    assert (iterator._receiver.shape.layout is not None) == (kind is Foreign)
    assert iterator._receiver.shape.whole == (kind is not Foreign)
    if kind is Foreign:
        assert sorted(int(y) for batch in got for y in batch["y"]) == list(range(50))
        assert iter(loader)._receiver.shape.layout is not None  # the next epochs start with it


def test_index_of_single_sample_batch_made_whole() -> None:
    class Ends(Squares):
        def __getitem__(self, index):
            if index == 1:
                os._exit(7)
            return index

    loader = minato.DataLoader(Ends(), num_workers=1, collate_fn=lambda batch: batch)
    with pytest.raises(minato.WorkerLost, match="sample index 1 of batch 1") as caught:
        list(loader)
    assert caught.value.index == 1


class Fails(Squares):
    def __getitem__(self, index):
        return 1 // (int(index) - 5)


class Once(list):
    """A batch sampler of these batches."""


@pytest.mark.parametrize("collate", [None, list])
@pytest.mark.parametrize("batch", [
    [4, 5], (4, 5), range(4, 6), torch.tensor([4, 5]), np.array([4, 5]), {4: 1, 5: 2}, {4, 5},
    iter([4, 5]), {5: 1},
], ids=lambda value: repr(value).split(" at 0x")[0])  # fmt: skip
def test_an_error_names_the_sample(batch, collate) -> None:
    """Wherever it is collated, and in whatever container the sampler yields the indices."""
    batches = Once([[1], batch])
    loader = minato.DataLoader(Fails(), batch_sampler=batches, num_workers=1, collate_fn=collate)
    with pytest.raises(ZeroDivisionError) as caught:
        list(loader)
    if isinstance(batch, (list, tuple, range, torch.Tensor, np.ndarray)):
        want = f"minato: sample index {batch[1]!r}, position 1 of batch 1"
    else:
        want = f"minato: batch 1, sample indices {batch!r}"
    assert want in error_text(caught.value)
