"""State of a loader, wherever its order comes from: samplers and generators of all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resuming import (
    N,
    PRIVATE,
    SIZE,
    Noisy,
    Shuffles,
    Within,
    indices,
    lists,
    make,
    pull,
    seed,
    shuffled,
    take,
    through_json,
)
from test_resume import MODES, check_resumed
from torch.utils.data import BatchSampler, RandomSampler, Sampler

import minato
from minato.seeding.order_generators import Sources

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# ---- orders that go on in another loader ---------------------------------------------------


class Draws(Sampler):
    """Draws an order with what ``dice()`` gives."""

    def __init__(self) -> None:
        self.kept: Any = random.Random(5)

    def dice(self) -> Any:
        return self.kept

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        dice, order = self.dice(), list(range(24))
        if isinstance(dice, torch.Generator):
            order = torch.randperm(24, generator=dice).tolist()
        else:
            dice.shuffle(order)
        yield from order


class InSlots(Draws):
    __slots__ = ("__mine",)

    def __init__(self) -> None:
        self.__mine = random.Random(1)

    def dice(self) -> Any:
        return self.__mine


class OnlySlots:
    """Not a Sampler, which has a dictionary."""

    __slots__ = ("empty", "rng")

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        yield from torch.randperm(24, generator=self.rng).tolist()


class IsOne(Draws, random.Random):
    """A generator itself, which holds another."""

    def __init__(self) -> None:
        random.Random.__init__(self, 1)
        Draws.__init__(self)


class Around(Draws):
    """Its other attributes come before its sampler."""

    def __init__(self, inner: Any, *besides: Any) -> None:
        self.besides, self.inner = list(besides), inner

    def __iter__(self) -> Any:
        yield from self.inner


class DrawsFromTorchs(Draws):
    """From what torch's loader draws its base seeds from, held as its own."""

    def __init__(self) -> None:
        self.generator = torch.default_generator

    def dice(self) -> Any:
        return self.generator


class KeepsItsDice(Sampler):
    """A stateful sampler whose state includes its generator."""

    def __init__(self) -> None:
        self.rng, self.order, self.at = random.Random(0), [], 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        if not self.order:
            self.order, self.at = list(range(24)), 0
            self.rng.shuffle(self.order)
        while self.at < 24:
            self.at += 1
            yield self.order[self.at - 1]
        self.order = []

    def state_dict(self) -> Any:
        return {"order": self.order, "at": self.at, "rng": self.rng.getstate()}

    def load_state_dict(self, state: Any) -> None:
        self.order, self.at = list(state["order"]), state["at"]
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))


def with_another_generator() -> BatchSampler:
    """Its own generator is never drawn from."""
    sampler = RandomSampler(range(24), generator=torch.Generator().manual_seed(1))
    batches: Any = BatchSampler(sampler, 4, False)
    batches.generator = torch.Generator()
    return batches


#: samplers whose generators are in unusual places
HELD: dict[str, Callable[[], Any]] = {
    "in a slot": InSlots,
    "in a slot, no dictionary": OnlySlots,
    "one that is a generator": lambda: Around(IsOne()),
    "behind many sets": lambda: Around(Draws(), *({n} for n in range(63))),
    "torch's own": lambda: RandomSampler(range(24), generator=torch.default_generator),
    "torch's own, of another class": DrawsFromTorchs,
    "in a state of the sampler's": KeepsItsDice,
    "below an unused one": with_another_generator,
}
#: of resuming.make()
NAMED = [
    *(f"batches at once of {rng}" for rng in PRIVATE),
    *(f"indices of {rng}" for rng in ("random.Random", "Philox", "SFC64", "torch.Generator", "random", "torch")),
    "indices with the loader of torch.Generator", "batches at once with the loader of torch.Generator",
    "batches within others of torch.Generator", "indices within others of Philox",
    "indices among many within others of random.Random", "alone at once of RandomState",
]  # fmt: skip


def of_order(order: str, workers: int) -> Any:
    if order not in HELD:
        return make(order, data=torch.arange(N), num_workers=workers)
    sampler = HELD[order]()
    if isinstance(sampler, BatchSampler):
        return minato.DataLoader(range(24), batch_sampler=sampler, num_workers=workers)
    return minato.DataLoader(range(24), batch_size=4, sampler=sampler, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("order", [*HELD, *NAMED])
def test_order_continues_in_another_loader(order: str, workers: int) -> None:
    """Also in the second epoch, where a new generator would be in another state. Later epochs are
    those of a generator of the sampler's alone; the program restores others itself."""
    shared = (" of random", " of numpy.random", " of torch", "with the loader of torch.Generator", "of another class")
    seed(77)
    first = of_order(order, workers)
    states, epochs = [], []
    for taken in (2, 3):
        iterator = iter(first)
        epochs.append(take(iterator, taken))
        states.append(through_json(first.state_dict()))
        epochs[-1] += lists(iterator)
        assert sorted(np.ravel(epochs[-1]).tolist()) == list(range(len(first.dataset)))
    epochs.append(lists(first))
    for epoch, taken in enumerate((2, 3)):
        again = of_order(order, workers)
        again.load_state_dict(states[epoch])
        assert lists(again) == epochs[epoch][taken:]
        assert order.endswith(shared) or lists(again) == epochs[epoch + 1]


def test_older_states_with_generator_of_loader_load() -> None:
    """As those had it that were written before samplers were asked for it first."""
    loader = make("indices with the loader of torch.Generator", num_workers=2)
    pull(iter(loader))
    state = loader.state_dict()
    state["generators"]["loader"] = state["generators"].pop("sampler.dice")
    expected = indices(pull(iter(loader)))
    other = make("indices with the loader of torch.Generator", num_workers=1)
    other.load_state_dict(state)
    assert indices(pull(iter(other))) == expected


def test_generator_roles_are_shortest_paths() -> None:
    """Those that states have always had stay, and data is not gone into."""
    data = Noisy(N)
    rng = np.random.default_rng(4)
    sampler = Shuffles(rng, batches=False, at_once=False)
    batches = torch.utils.data.BatchSampler(sampler, SIZE, False)
    batches.data, batches.again = data, {"rng": rng}  # type: ignore[attr-defined]
    loader: Any = minato.DataLoader(data, batch_sampler=batches)
    assert [*Sources(loader).own] == ["batch_sampler.again.0"]
    del batches.again  # type: ignore[attr-defined]
    assert [*Sources(loader).own] == ["sampler.dice"]
    loader = minato.DataLoader(data, batch_sampler=Within(batches, True))
    assert [*Sources(loader).own] == ["batch_sampler.base.1.sampler.dice"]


def test_long_list_is_not_searched() -> None:
    class Counted(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("it is long")

    sampler = Shuffles(random.Random(4), batches=False, at_once=False)
    sampler.items = Counted([0] * 10_000)
    loader = minato.DataLoader(Noisy(N), sampler=sampler)
    assert [*Sources(loader).own] == ["sampler.dice"]


@pytest.mark.parametrize("then", ["SFC64", "torch.Generator", "RandomState", "random.Random"])
def test_a_generator_of_another_kind_is_refused(then: str) -> None:
    loader = make("indices of PCG64", num_workers=0)
    pull(iter(loader), 2)
    other = make(f"indices of {then}", num_workers=0)
    with pytest.raises(ValueError, match="'sampler.dice' is of another kind"):
        other.load_state_dict(loader.state_dict())


class Stateless(random.Random):
    """Reads a device, as ``random.SystemRandom`` does."""

    def getstate(self) -> Any:
        raise NotImplementedError("no state")


class Short(random.Random):
    """Has a state of another form than the Mersenne Twister's."""

    def getstate(self) -> Any:
        return b"\0\1\2\3"


class Numbered(random.Random):
    def getstate(self) -> Any:
        return 7


@pytest.mark.parametrize("kind", [Stateless, Short, Numbered, random.SystemRandom])
@pytest.mark.parametrize("workers", [0, 1])
def test_generator_without_settable_state_is_untouched(
    workers: int, kind: Any
) -> None:
    class Orders(Sampler):
        def __init__(self) -> None:
            self.rng = kind()

        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[int]:
            return iter(self.rng.sample(range(6), 6))

    loader = minato.DataLoader(list(range(6)), 2, sampler=Orders(), num_workers=workers)  # type: ignore
    for _epoch in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(6))
    assert not any("rng" in role for role in loader.state_dict()["generators"] or ())


def test_eager_sampler_restores_global_generators() -> None:
    loader = make("batches at once of random", num_workers=2)
    it = iter(loader)
    pull(it, 2)
    other = make("batches at once of random", num_workers=2)
    other.load_state_dict(loader.state_dict())
    before = random.getstate()
    pull(iter(other), 1)
    assert random.getstate() == before


@pytest.mark.parametrize("kind", ["sequence", "batches at once of torch.Generator"])
def test_early_epoch_draws_from_sampler_once(kind: str) -> None:
    """One draw per epoch, whether it was started early or not."""
    orders = []
    for early in (False, True):
        loader = make(kind, num_workers=1, persistent_workers=True, prefetch_next_epoch=early)
        orders.append([indices(pull(iter(loader))) for _ in range(3)])
    assert orders[0] == orders[1]


def test_set_epoch_after_early_start_counts() -> None:
    kw: dict[str, Any] = dict(persistent_workers=True, prefetch_next_epoch=True)
    loader = make("distributed", num_workers=2, **kw)
    loader.set_epoch(0)
    pull(iter(loader))
    loader.set_epoch(5)
    state = loader.state_dict()
    assert state["user_epoch"] == 5
    expected = pull(iter(loader))
    other = make("distributed", num_workers=1, **kw)
    other.load_state_dict(state)
    assert pull(iter(other)) == expected and {row[1] for b in expected for row in b} == {5}


def test_epochs_after_a_resumed_one_do_not_repeat() -> None:
    """The epoch started early draws from the program's generator, not from the restored one."""
    loader = make("shuffle", num_workers=1, persistent_workers=True, prefetch_next_epoch=True)
    it = iter(loader)
    state = loader.state_dict()
    del it
    other = make("shuffle", num_workers=4, persistent_workers=True, prefetch_next_epoch=True)
    other.load_state_dict(state)
    seed(77)
    orders = [tuple(indices(pull(iter(other)))) for _ in range(4)]
    assert len(set(orders)) == 4


class Told(Shuffles):
    """set_epoch() seeds its generator."""

    fails = False

    def __init__(self) -> None:
        super().__init__(np.random.default_rng(4), batches=False, at_once=True)

    def set_epoch(self, epoch: int) -> None:
        self.dice.bit_generator.state = np.random.PCG64(epoch).state

    def __iter__(self) -> Iterator[Any]:
        indices = shuffled(self.items, self.dice)
        if self.fails:
            raise OSError("not now")
        return iter(indices)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("workers, kw", [
    (0, {}), (2, {}), (2, {"persistent_workers": True}),
    (2, {"persistent_workers": True, "prefetch_next_epoch": True}),
])  # fmt: skip
def test_sampler_changes_after_load_take_effect(workers, kw, told) -> None:
    """An epoch that failed to start counts as if it had drawn nothing."""

    def orders(loader: Any, epochs: range) -> Iterator[list[int]]:
        for epoch in epochs:
            if told:
                loader.sampler.set_epoch(epoch)
            yield torch.cat(list(loader)).tolist()

    made = [minato.DataLoader(range(N), SIZE, sampler=Told(), num_workers=workers, **kw)
            for _ in range(3)]  # fmt: skip
    whole = list(orders(made[0], range(4)))
    begun = list(orders(made[1], range(2)))
    made[2].load_state_dict(through_json(made[1].state_dict()))
    if workers > 0:  # without workers, an epoch has started when its sampler is asked
        made[2].sampler.fails = True
        with pytest.raises(OSError, match="not now"):
            iter(made[2])
        made[2].sampler.fails = False
    assert begun + list(orders(made[2], range(2, 4))) == whole


@pytest.mark.parametrize("held", ["generator", "sampler"])
@pytest.mark.parametrize("early", [False, True])
def test_a_program_that_exchanges_generators_between_epochs(early: bool, held: str) -> None:
    """The generator of the batch sampler's sampler, or the whole batch sampler."""

    def exchange(loader: Any, epoch: int) -> None:
        generator = torch.Generator().manual_seed(epoch)
        if held == "generator":
            loader.sampler.generator = generator
        else:
            loader.batch_sampler.sampler = RandomSampler(range(N), generator=generator)

    kw: dict[str, Any] = dict(persistent_workers=True, prefetch_next_epoch=early)
    loader = make("shuffle of its own", num_workers=2, **kw)
    for epoch in range(3):
        exchange(loader, epoch)
        it = iter(loader)
        pull(it, 3)
        state = through_json(loader.state_dict())
        expected = indices(pull(it))
        other = make("shuffle of its own", num_workers=1, **kw)
        exchange(other, epoch)
        other.load_state_dict(state)
        assert indices(pull(iter(other))) == expected


# ---- any of them -----------------------------------------------------------------------

orders = st.one_of(
    st.sampled_from(["sequence", "shuffle", "shuffle of its own", "replacement", "distributed"]),
    st.builds("{} of {}".format,
              st.sampled_from(["indices", "batches", "batches at once", "indices at once",
                               "batches within others", "indices among many within others"]),
              st.sampled_from(sorted(PRIVATE))),
    st.sampled_from(["indices with the loader of torch.Generator",
                     "batches at once with the loader of torch.Generator"]),
)  # fmt: skip


@settings(deadline=None, max_examples=24, suppress_health_check=[HealthCheck.too_slow])
@given(orders, st.sampled_from([*MODES]), st.integers(0, 2), st.none() | st.integers(0, 10),
       st.integers(1, 4))  # fmt: skip
def test_any_order_resumes_in_any_mode(order, mode, epochs, done, workers) -> None:
    """The table's check, drawn; fuzzing tries others."""
    if "batch_size" in MODES[mode][0]:
        order = order.replace("batches", "indices")
    if mode == "begun early" and done is None:
        done = 0  # else it has begun, whatever the program's generators are set to
    kw = MODES[mode][0]
    workers = kw.get("num_workers", 2 if "scheduling" in kw else workers)
    check_resumed(mode, order, [(epochs, done)], [workers])
