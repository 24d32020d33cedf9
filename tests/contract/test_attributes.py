"""Attributes, the guard against late changes, private names in use, ``len``."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from .datasets import Numbers, Replicated, Sharded, as_is
from .support import Kind, flat

GUARDED = [
    "batch_size", "batch_sampler", "sampler", "drop_last", "dataset",
    "persistent_workers",
]


def _public(made: Any) -> set[str]:
    return {name for name in vars(made) if not name.startswith("_")}


def test_every_argument_is_an_attribute(loader: Kind) -> None:
    parameters = set(inspect.signature(loader.cls.__init__).parameters)
    made = loader(Numbers(4), num_workers=1)
    # shuffle is consumed by the choice of a sampler; the context is a property.
    stored = parameters - {"self", "shuffle", "multiprocessing_context"}
    assert _public(made) == stored
    assert hasattr(made, "multiprocessing_context")


def test_torchs_names_hold_the_given_values(loader: Kind) -> None:
    dataset, generator = Numbers(4), torch.Generator()
    made = loader(dataset, batch_size=3, num_workers=1, collate_fn=as_is,
                  drop_last=True, timeout=7, worker_init_fn=print, generator=generator,
                  prefetch_factor=5, persistent_workers=True, pin_memory=True,
                  pin_memory_device="x", in_order=False)
    assert vars(made)["dataset"] is dataset
    got = [vars(made)[name] for name in (
        "batch_size", "num_workers", "collate_fn", "drop_last", "timeout",
        "worker_init_fn", "generator", "prefetch_factor", "persistent_workers",
        "pin_memory", "pin_memory_device", "in_order")]
    assert got == [3, 1, as_is, True, 7, print, generator, 5, True, True, "x", False]


def test_private_attributes_used_by_libraries_exist(loader: Kind) -> None:
    made = loader(Numbers(4), num_workers=1)
    assert made._DataLoader__initialized is True
    assert made._DataLoader__multiprocessing_context is None
    assert made._dataset_kind == 0 and made._iterator is None
    assert made._auto_collation is True
    assert made._index_sampler is made.batch_sampler
    assert made._IterableDataset_len_called is None
    single = loader(Numbers(4), batch_size=None)
    assert single._auto_collation is False
    assert single._index_sampler is single.sampler
    assert loader(Sharded(4))._dataset_kind == 1


@pytest.mark.parametrize("name", GUARDED)
def test_guarded_attributes(loader: Kind, name: str) -> None:
    made = loader(Numbers(4))
    with pytest.raises(ValueError) as caught:
        setattr(made, name, 1)
    assert str(caught.value) == (
        f"{name} attribute should not be set after DataLoader is initialized"
    )


def test_guard_names_the_subclass(loader: Kind) -> None:
    class Mine(loader.cls):
        pass

    with pytest.raises(ValueError, match="after Mine is initialized"):
        Mine(Numbers(4), **loader.options).dataset = 1


def test_object_setattr_passes_the_guard(loader: Kind) -> None:
    for workers in (0, 1):
        made = loader(Numbers(6), num_workers=workers)
        sampler = BatchSampler(SequentialSampler(range(6)), 4, False)
        object.__setattr__(made, "batch_sampler", sampler)
        assert [batch.tolist() for batch in made] == [[0, 1, 2, 3], [4, 5]]
        assert len(made) == 2


def test_flag_lifts_the_guard(loader: Kind) -> None:
    made = loader(Numbers(6), batch_size=2, num_workers=1)
    made._DataLoader__initialized = False
    made.batch_sampler = [[5], [3, 4]]
    made.dataset = Numbers(7)
    made._DataLoader__initialized = True
    assert [batch.tolist() for batch in made] == [[5], [3, 4]]
    with pytest.raises(ValueError):
        made.dataset = 1


def _doubled(samples: list[int]) -> list[int]:
    return [2 * sample for sample in samples]


def _fail_init(_: int) -> None:
    raise LookupError("init ran")


def test_other_attributes_act_at_the_next_iterator(loader: Kind) -> None:
    made = loader(Numbers(4), batch_size=2, num_workers=1)
    first = iter(made)
    made.collate_fn = _doubled
    assert flat(first) == [0, 1, 2, 3]
    assert list(made) == [[0, 2], [4, 6]]
    made.num_workers = 2
    second = iter(made)
    assert len(second._workers) == 2
    assert list(second) == [[0, 2], [4, 6]]
    made.worker_init_fn = _fail_init
    with pytest.raises(LookupError, match="init ran"):
        list(made)
    made.worker_init_fn = None
    made.num_workers, made.prefetch_factor = 0, None
    assert list(made) == [[0, 2], [4, 6]]
    made.timeout = 3
    with pytest.raises(AssertionError):
        iter(made)


def test_generator_may_be_replaced(loader: Kind) -> None:
    made = loader(Numbers(4), num_workers=1)
    made.generator = torch.Generator().manual_seed(11)
    reference = torch.Generator().manual_seed(11)
    want = torch.empty((), dtype=torch.int64).random_(generator=reference).item()
    iterator = iter(made)
    assert iterator._base_seed == want
    list(iterator)


def test_context_is_checked_on_assignment(loader: Kind) -> None:
    made = loader(Numbers(4), num_workers=1)
    with pytest.raises(ValueError, match="should specify a valid start method"):
        made.multiprocessing_context = "bad"
    with pytest.raises(TypeError, match="should be a valid context object"):
        made.multiprocessing_context = 3
    made.multiprocessing_context = "fork"
    assert made.multiprocessing_context.get_start_method() == "fork"
    assert flat(made) == [0, 1, 2, 3]
    made.multiprocessing_context = None
    single = loader(Numbers(4))
    with pytest.raises(ValueError, match="can only be used with multi-process"):
        single.multiprocessing_context = "fork"


# ----------------------------------------------------------------------- len


def test_len_of_map_dataset(loader: Kind) -> None:
    assert len(loader(Numbers(7), batch_size=3)) == 3
    assert len(loader(Numbers(7), batch_size=3, drop_last=True)) == 2
    assert len(loader(Numbers(7), batch_size=None)) == 7
    assert len(loader(Numbers(7), batch_sampler=[[1], [2, 3]])) == 2
    assert len(loader(Numbers(7), sampler=[4, 5, 6], batch_size=2)) == 2


def test_len_follows_a_growing_dataset(loader: Kind) -> None:
    dataset = Numbers(4)
    made = loader(dataset, batch_size=2, num_workers=1)
    assert len(made) == 2
    dataset.length = 9
    assert len(made) == 5
    assert flat(made) == list(range(9))


def test_len_without_length(loader: Kind) -> None:
    with pytest.raises(TypeError):
        len(loader(Numbers(4), batch_sampler=iter([[1]])))
    with pytest.raises(TypeError):
        len(loader(Sharded(4)))


def test_len_of_iterable_dataset(loader: Kind) -> None:
    made = loader(Replicated(7), batch_size=3)
    assert len(made) == 3 and made._IterableDataset_len_called == 7
    assert len(loader(Replicated(7), batch_size=3, drop_last=True)) == 2
    assert len(loader(Replicated(7), batch_size=None)) == 7
