"""States and the generators of orders: whether the state or the program sets them last."""

from __future__ import annotations

import itertools
import random
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from resuming import check_rest, lists, through_json
from test_resume_orders import Draws
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
)

import minato
from minato.seeding.order_generators import Sources

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# ---- iterable datasets in this process ------------------------------------------------------


class Shuffles(IterableDataset):
    """Shuffles with its own generator, or that of a dataset that it holds."""

    def __init__(self, rng: Any = None, inner: Any = None) -> None:
        self.rng, self.inner = rng or random.Random(0), inner

    def set_epoch(self, epoch: int) -> None:
        self.rng.seed(epoch)

    def __iter__(self) -> Any:
        order = list(range(16)) if self.inner is None else list(self.inner)
        self.rng.shuffle(order)
        yield from order


def tell(loader: Any, epoch: int, how: str) -> None:
    if how == "loader":
        loader.set_epoch(epoch)
    elif how == "dataset":
        loader.dataset.set_epoch(epoch)
    elif how == "exchanged":
        loader.dataset.rng = random.Random(epoch)


@pytest.mark.parametrize("how", ["loader", "dataset", "exchanged", "nothing"])
def test_dataset_changes_after_load_take_effect(how: str) -> None:
    first, again = (minato.DataLoader(Shuffles(), batch_size=4) for _ in range(2))
    tell(first, 1, how)
    lists(first)
    state = through_json(first.state_dict())
    again.load_state_dict(state)
    for epoch in (2, 3):
        tell(first, epoch, how)
        tell(again, epoch, how)
        assert lists(first) == lists(again)


class DrawsTwice(Shuffles):
    """With generators for two kinds of draws, one of them in a list. It may get more when asked."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.parts = late, [np.random.default_rng(1)]

    def __iter__(self) -> Any:
        if self.late:
            self.parts.insert(0, np.random.default_rng(2))
        return ((i, self.parts[-1].random()) for i in super(DrawsTwice, self).__iter__())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("epochs, taken", [(0, 0), (0, 3), (1, 1), (2, 4)])
def test_generators_of_an_iterable_are_restored(epochs: int, taken: int, nested: bool) -> None:
    def make() -> Any:
        data = Shuffles(inner=Shuffles(random.Random(5))) if nested else DrawsTwice(late=False)
        return minato.DataLoader(data, batch_size=4, collate_fn=torch.tensor)

    lists(again := make())  # its generators are elsewhere by now
    check_rest(make(), again, taken, epochs, later=1)


def test_late_stream_generators_are_not_touched() -> None:
    loader, other = (minato.DataLoader(DrawsTwice(late=True), batch_size=4) for _ in range(2))
    list(loader)
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 3


class Remembers(IterableDataset):
    """Says where it is, and nothing of its generator."""

    def __init__(self) -> None:
        self.at, self.rng = 0, random.Random(0)

    def __iter__(self) -> Any:
        while self.at < 16:
            self.at += 1
            yield self.at, self.rng.random()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("before", [False, True])
def test_generator_restored_by_program_is_kept(before: bool) -> None:
    whole = list(minato.DataLoader(Remembers(), batch_size=4, collate_fn=list))
    first, again = (minato.DataLoader(Remembers(), batch_size=4, collate_fn=list) for _ in range(2))
    iterator = iter(first)
    begun = [next(iterator), next(iterator)]
    state, dice = through_json(first.state_dict()), first.dataset.rng.getstate()
    if before:
        again.dataset.rng.setstate(dice)
    again.load_state_dict(state)
    if not before:
        again.dataset.rng.setstate(dice)
    assert begun + list(again) == whole


class Stateless(random.Random):
    def getstate(self) -> Any:
        raise NotImplementedError("no state")


class Odd(random.Random):
    def getstate(self) -> Any:
        return object(), {b"not": "JSON"}


@pytest.mark.parametrize("kind", [Stateless, Odd])
def test_dataset_generator_without_state_is_untouched(kind: Any) -> None:
    loader = minato.DataLoader(Shuffles(kind(3)), batch_size=4)
    assert sorted(sum(lists(loader), [])) == list(range(16))
    assert not any(role.startswith("dataset") for role in loader.state_dict()["generators"])


def test_large_dataset_is_not_searched() -> None:
    dataset = Shuffles()
    dataset.table = [{"path": str(n), "rng": random.Random(n)} for n in range(1000)]
    state = minato.DataLoader(dataset, batch_size=4).state_dict()
    assert [role for role in state["generators"] if role.startswith("dataset")] == ["dataset.rng"]


# ---- the loader's generator and the samplers' ------------------------------------------------


def seeded(**options: Any) -> Any:
    generator = torch.Generator()
    return minato.DataLoader(range(8), batch_size=4, shuffle=True, generator=generator, **options)


@pytest.mark.parametrize("options", [
    {}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "scheduling": "static"},
])  # fmt: skip
@pytest.mark.parametrize("taken", [0, 1])
def test_a_program_seeds_the_generator_before_each_epoch(options: Any, taken: int) -> None:
    """Also if the epoch has started and no batch was taken: its base seed has been drawn."""
    first, again = seeded(**options), seeded(**options)
    first.generator.manual_seed(3)
    iterator = iter(first)
    for _ in range(taken):
        next(iterator)
    again.load_state_dict(through_json(first.state_dict()))
    again.generator.manual_seed(3)
    assert lists(again) == lists(iterator)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_state_between_epochs_fits_any_workers(workers: int) -> None:
    first = seeded(num_workers=2, persistent_workers=True)
    first.generator.manual_seed(1)
    lists(first)
    again = seeded(num_workers=workers)
    again.load_state_dict(through_json(first.state_dict()))
    for loader in (first, again):
        loader.generator.manual_seed(2)
    assert lists(again) == lists(first)


@pytest.mark.parametrize("early", [False, True])
def test_loaded_state_replaces_early_epoch(early: bool) -> None:
    """The process that loads it has just drawn that very epoch's order."""

    def make() -> Any:
        sampler = SubsetRandomSampler(range(40), generator=torch.Generator().manual_seed(0))
        return minato.DataLoader(range(40), batch_size=5, sampler=sampler, num_workers=2,
                                 persistent_workers=True, prefetch_next_epoch=early)  # fmt: skip

    first, again = make(), make()
    lists(first), lists(first)
    state = through_json(first.state_dict())
    lists(again)
    again.load_state_dict(state)
    assert lists(again) == lists(first)


class Threes:
    """A batch sampler of the program's own around one of torch's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return -(-len(self.sampler) // 3)

    def __iter__(self) -> Any:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == 3:
                yield batch
                batch = []
        if batch:
            yield batch


def test_custom_batch_sampler_is_read_as_in_torch() -> None:
    def after_a_break(kind: Any) -> list[Any]:
        sampler = RandomSampler(range(40), generator=torch.Generator().manual_seed(9))
        loader = kind(range(40), batch_sampler=Threes(sampler), num_workers=2)
        lists(loader), lists(loader)  # costs are known from here on
        next(iter(loader))
        return lists(loader)

    assert after_a_break(minato.DataLoader) == after_a_break(torch.utils.data.DataLoader)


# ---- where samplers have their generators ----------------------------------------------------


class MakesItLate(Draws):
    def __init__(self) -> None:
        self.made: Any = None

    def dice(self) -> Any:
        self.made = self.made or random.Random(1)
        return self.made


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_generator_warns(workers: int) -> None:
    first, again = (
        minato.DataLoader(range(24), batch_size=4, sampler=MakesItLate(), num_workers=workers)
        for _ in range(2)
    )
    lists(first)
    next(iter(first))
    again.load_state_dict(through_json(first.state_dict()))
    with pytest.warns(UserWarning, match=r"'sampler\.made', but this loader's sampler does not have"):
        lists(again)


class SeedsByEpoch(MakesItLate):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def dice(self) -> Any:
        dice = super().dice()
        dice.seed(self.epoch)
        return dice


class EverySecond(BatchSampler):
    """One rank's share of another sampler's batches."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Any:
        return itertools.islice(self.batch_sampler, 0, None, 2)

    def __len__(self) -> int:
        return len(self.batch_sampler) // 2


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_of_nested_sampler_is_restored(workers: int) -> None:
    def make() -> tuple[Any, Any]:
        sampler = SeedsByEpoch()
        batches = EverySecond(BatchSampler(sampler, 4, drop_last=False))
        return sampler, minato.DataLoader(range(24), batch_sampler=batches, num_workers=workers)

    (sampler, first), (_, again) = make(), make()
    sampler.set_epoch(7)
    iterator = iter(first)
    next(iterator)
    state = through_json(first.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(state)
        assert lists(again) == lists(iterator)


class Gone:
    pass


class HoldsWhatIsGone(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.owner = weakref.proxy(Gone())
        self.owners = [self.owner]


class Refuses(Draws):
    @property
    def generator(self) -> Any:
        raise RuntimeError("not set yet")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [HoldsWhatIsGone, Refuses])
def test_unsearchable_sampler_is_iterated(kind: Any, workers: int) -> None:
    loader = minato.DataLoader(range(24), batch_size=4, sampler=kind(), num_workers=workers)
    assert sorted(sum(lists(loader), [])) == list(range(24))


class SlotOfEpoch(Draws):
    """Notes its epoch in a slot."""

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def dice(self) -> Any:
        return random.Random(self.epoch)


def test_sampler_with_slots_gets_its_epoch() -> None:
    def epochs(kind: Any, **options: Any) -> list[Any]:
        sampler = SlotOfEpoch()
        loader = kind(range(24), batch_size=4, sampler=sampler, num_workers=2,
                      persistent_workers=True, **options)  # fmt: skip
        made = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            made.append(lists(loader))
        return made

    assert epochs(minato.DataLoader, prefetch_next_epoch=True) == epochs(
        torch.utils.data.DataLoader
    )


class Buffers(Sampler):
    """Shuffles as it goes, through a buffer."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Any:
        buffer: list[int] = []
        for index in range(60):
            buffer.append(index)
            if len(buffer) == 6:
                yield buffer.pop(self.draw(6))
        yield from buffer


OF_ITS_OWN = random.Random(1)
GLOBAL = {
    "torch": lambda n: int(torch.randint(n, ())), "numpy": lambda n: int(np.random.randint(n)),
    "random": random.randrange,
}  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", GLOBAL)
def test_sampler_with_late_global_draws_warns(
    name: str, workers: int
) -> None:
    sampler = Buffers(GLOBAL[name])
    loader = minato.DataLoader(range(60), batch_size=4, sampler=sampler, num_workers=workers)
    loader.state_dict()
    iterator = iter(loader)
    for _ in range(14):
        next(iterator)
    with pytest.warns(UserWarning, match="draws from a global generator"):
        loader.state_dict()
    list(iterator)
    loader.state_dict()  # the next epoch starts with the generators as they are then


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", [
    Buffers(OF_ITS_OWN.randrange), Draws(), RandomSampler(range(60)), range(60),
], ids=["its own", "at once", "torch's", "none"])  # fmt: skip
def test_other_samplers_do_not_warn(sampler: Any, workers: int, recwarn: Any) -> None:
    loader = minato.DataLoader(range(60), batch_size=4, sampler=sampler, num_workers=workers)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
        torch.rand(1), random.random(), np.random.rand()
        loader.state_dict()
    assert not [w for w in recwarn if "global generator" in str(w.message)]


def test_the_programs_default_device_is_not_the_generators() -> None:
    """A base seed that torch draws on another device moves none of these."""
    loader = minato.DataLoader(range(8), 4, generator=torch.Generator())
    sources = Sources(loader)
    before = sources.capture()
    with torch.device("meta"):
        assert Sources(minato.DataLoader(range(8), 4)).drew({}) in (True, False)
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator)
        assert not sources.drew(before)
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator)
        assert sources.drew(before)
