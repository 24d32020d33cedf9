"""States and the generators that orders come from: who sets them last, the state or the program."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SubsetRandomSampler

import minato

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


# ---- iterable datasets in this process ------------------------------------------------------


class Shuffles(IterableDataset):
    """Shuffles with a generator of its own, or of a dataset that it holds."""

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
def test_what_a_dataset_is_told_after_the_state_counts(how: str) -> None:
    first, again = (minato.DataLoader(Shuffles(), batch_size=4) for _ in range(2))
    tell(first, 1, how)
    lists(first)
    state = through_json(first.state_dict())
    again.load_state_dict(state)
    for epoch in (2, 3):
        tell(first, epoch, how)
        tell(again, epoch, how)
        assert lists(first) == lists(again)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_an_iterable_within_another_goes_on(taken: int) -> None:
    def make() -> Any:
        return minato.DataLoader(Shuffles(inner=Shuffles(random.Random(5))), batch_size=4)

    first, again = make(), make()
    lists(first)
    iterator = iter(first)
    for _ in range(taken):
        next(iterator)
    again.load_state_dict(through_json(first.state_dict()))
    assert lists(again) == lists(iterator)
    assert lists(again) == lists(first)


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
def test_a_generator_that_the_program_puts_back_is_left_alone(before: bool) -> None:
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
def test_a_datasets_generator_without_a_state_is_its_programs(kind: Any) -> None:
    loader = minato.DataLoader(Shuffles(kind(3)), batch_size=4)
    assert sorted(sum(lists(loader), [])) == list(range(16))
    assert not any(role.startswith("dataset") for role in loader.state_dict()["generators"])


def test_a_large_dataset_is_not_gone_through() -> None:
    dataset = Shuffles()
    dataset.table = [{"path": str(n), "rng": random.Random(n)} for n in range(1000)]
    state = minato.DataLoader(dataset, batch_size=4).state_dict()
    assert [role for role in state["generators"] if role.startswith("dataset")] == ["dataset.rng"]


def test_a_batch_that_an_interrupt_took_comes_once_where_iteration_goes_on() -> None:
    fired = []

    def collate(batch: list[int]) -> list[int]:
        if 8 in batch and not fired:
            fired.append(True)
            raise KeyboardInterrupt
        return batch

    class Counts(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(24))

    def make() -> Any:
        return minato.DataLoader(Counts(), batch_size=4, collate_fn=collate)

    loader = make()
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    stopped, again = through_json(loader.state_dict()), make()
    again.load_state_dict(stopped)
    assert next(iter(again)) == [8, 9, 10, 11]  # nobody has gone on behind it
    assert next(iterator) == [12, 13, 14, 15]
    again = make()
    again.load_state_dict(through_json(loader.state_dict()))
    assert list(again) == [[16, 17, 18, 19], [20, 21, 22, 23]]


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
    """Also where the epoch has begun and no batch was taken: its base seed has been drawn."""
    first, again = seeded(**options), seeded(**options)
    first.generator.manual_seed(3)
    iterator = iter(first)
    for _ in range(taken):
        next(iterator)
    again.load_state_dict(through_json(first.state_dict()))
    again.generator.manual_seed(3)
    assert lists(again) == lists(iterator)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_state_between_epochs_serves_any_number_of_workers(workers: int) -> None:
    first = seeded(num_workers=2, persistent_workers=True)
    first.generator.manual_seed(1)
    lists(first)
    again = seeded(num_workers=workers)
    again.load_state_dict(through_json(first.state_dict()))
    for loader in (first, again):
        loader.generator.manual_seed(2)
    assert lists(again) == lists(first)


@pytest.mark.parametrize("early", [False, True])
def test_a_state_of_an_epoch_ahead_is_not_taken_for_what_was_drawn_early(early: bool) -> None:
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


class KeepsItsDice(Sampler):
    """A stateful sampler whose state holds its generator."""

    def __init__(self) -> None:
        self.rng, self.order, self.at = random.Random(0), [], 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        if not self.order:
            self.order, self.at = list(range(8)), 0
            self.rng.shuffle(self.order)
        while self.at < 8:
            self.at += 1
            yield self.order[self.at - 1]
        self.order = []

    def state_dict(self) -> Any:
        return {"order": self.order, "at": self.at, "rng": self.rng.getstate()}

    def load_state_dict(self, state: Any) -> None:
        self.order, self.at = list(state["order"]), state["at"]
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_in_a_samplers_own_state_goes_on_from_there(workers: int) -> None:
    first, again = (
        minato.DataLoader(range(8), batch_size=4, sampler=KeepsItsDice(), num_workers=workers)
        for _ in range(2)
    )
    iterator = iter(first)
    next(iterator)
    again.load_state_dict(through_json(first.state_dict()))
    assert lists(again) == lists(iterator)
    assert lists(again) == lists(first)
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


def test_a_batch_sampler_of_the_programs_own_is_read_no_further_than_torch_does() -> None:
    def after_a_break(kind: Any) -> list[Any]:
        sampler = RandomSampler(range(40), generator=torch.Generator().manual_seed(9))
        loader = kind(range(40), batch_sampler=Threes(sampler), num_workers=2)
        lists(loader), lists(loader)  # costs are known from here on
        next(iter(loader))
        return lists(loader)

    assert after_a_break(minato.DataLoader) == after_a_break(torch.utils.data.DataLoader)


def test_a_damaged_word_on_whether_the_epoch_has_begun() -> None:
    loader = minato.DataLoader(range(8), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="damaged: begun is 'yes'"):
        loader.load_state_dict({**state, "begun": "yes"})
    del state["begun"]  # as older states have it
    loader.load_state_dict(state)
    assert lists(loader) == [[4, 5, 6, 7]]
