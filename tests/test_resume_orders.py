"""State of a loader, wherever its order comes from: samplers of all kinds, states of all moments."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resuming import Noisy, seed, through_json
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

import minato
from minato.seeding.order_generators import Sources

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N, SIZE = 22, 4

PRIVATE: dict[str, Any] = {
    "random.Random": lambda: random.Random(4),
    "RandomState": lambda: np.random.RandomState(4),
    "PCG64": lambda: np.random.default_rng(4),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(4)),
    "Philox": lambda: np.random.Generator(np.random.Philox(4)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(4)),
    "torch.Generator": lambda: torch.Generator().manual_seed(4),
    "random": lambda: random,
    "numpy.random": lambda: np.random,
    "torch": lambda: None,
}


def shuffled(items: list[Any], rng: Any) -> list[Any]:
    if rng is None or isinstance(rng, torch.Generator):
        return [items[i] for i in torch.randperm(len(items), generator=rng).tolist()]
    order = list(range(len(items)))
    rng.shuffle(order)
    return [items[i] for i in order]


class Shuffles(Sampler):
    """Of indices, or of batches of them; draws at the first next(), or at once in iter()."""

    def __init__(self, rng: Any, batches: bool, at_once: bool) -> None:
        self.dice, self.at_once = rng, at_once
        self.items: list[Any] = list(range(N))
        if batches:
            self.items = [list(range(i, min(N, i + SIZE))) for i in range(0, N, SIZE)]

    def __len__(self) -> int:
        return len(self.items)

    def lazily(self) -> Iterator[Any]:
        yield from shuffled(self.items, self.dice)

    def __iter__(self) -> Iterator[Any]:
        return iter(shuffled(self.items, self.dice)) if self.at_once else self.lazily()


class Within:
    """Gives what samplers give that it holds, as accelerate's BatchSamplerShard does."""

    def __init__(self, base: Any, many: bool) -> None:
        self.me = self
        self.base = [[], base] if many else base

    def bases(self) -> list[Any]:
        return self.base if isinstance(self.base, list) else [self.base]

    def __len__(self) -> int:
        return sum(map(len, self.bases()))

    def __iter__(self) -> Iterator[Any]:
        for base in self.bases():
            yield from base


def with_draws(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate_fn that is random, too."""
    batch = torch.stack(samples)
    return batch + random.random() * torch.tensor([0, 0, 1, 1, 1, 1]) + torch.rand(1) * (
        torch.arange(6) > 1
    )


def make(order: str, workers: int, bad: frozenset[int] = frozenset(), **kw: Any) -> Any:
    """A loader by the name of its order; none of its generators has been used."""
    data = Noisy(N, bad)
    kw = {"num_workers": workers, "batch_size": SIZE, **kw}
    what, _, rng = order.partition(" of ")
    if what == "shuffle":
        kw.update(shuffle=True, generator=torch.Generator() if rng else None)
    elif what == "replacement":
        kw.update(sampler=RandomSampler(data, replacement=True, num_samples=N + 3))
    elif what == "distributed":
        kw.update(sampler=DistributedSampler(data, 2, 1))
    elif what != "sequence":
        batches = "batches" in what
        generator = PRIVATE[rng]()
        if "with the loader" in what:
            kw["generator"] = generator
        sampler: Any = Shuffles(generator, batches, "at once" in what)
        if "within" in what:
            sampler = Within(Within(sampler, "many" in what), False)
        if batches:
            del kw["batch_size"]
        elif "alone" in what:
            kw["batch_size"] = None
        kw["batch_sampler" if batches else "sampler"] = sampler
    return minato.DataLoader(data, **kw)


def pull(it: Any, count: int | None = None) -> list[Any]:
    """This many batches, or all; failed ones as the name of their error's type."""
    out: list[Any] = []
    while count is None or len(out) < count:
        try:
            out.append(next(it).tolist())
        except StopIteration:
            break
        except LookupError:
            out.append("LookupError")
    return out


def indices(batches: list[Any]) -> list[int]:
    made = [b for b in batches if isinstance(b, list)]
    return [int(row[0]) for b in made for row in (b if isinstance(b[0], list) else [b])]


@pytest.mark.parametrize("workers, what, rng", [
    *((0, "batches at once", rng) for rng in PRIVATE),
    *((0, "indices", rng) for rng in ("random.Random", "Philox", "random", "torch")),
    *((2, "indices", rng) for rng in ("SFC64", "torch.Generator")),
    *((workers, f"{what} with the loader", "torch.Generator")
      for workers in (0, 2) for what in ("indices", "batches at once")),
    *((workers, what, rng) for workers in (0, 2) for what, rng in [
        ("batches within others", "torch.Generator"), ("indices within others", "Philox"),
        ("indices among many within others", "random.Random"),
    ]),
    *((2, "batches at once", rng) for rng in ("MT19937", "random", "numpy.random", "torch")),
    (2, "alone at once", "RandomState"),
])
def test_samplers_with_any_generator(workers: int, what: str, rng: str) -> None:
    """In the second epoch, so that a new generator would be in another state."""
    seed(5)
    loader = make(f"{what} of {rng}", workers)
    pull(iter(loader))
    it = iter(loader)
    first = indices(pull(it, 3))
    state = through_json(loader.state_dict())
    expected = indices(pull(it))
    seed(6)
    other = make(f"{what} of {rng}", workers)
    other.load_state_dict(state)
    assert indices(pull(iter(other))) == expected
    assert sorted(first + expected) == list(range(N))


def test_older_states_with_generator_of_loader_load() -> None:
    """As those had it that were written before samplers were asked for it first."""
    loader = make("indices with the loader of torch.Generator", 2)
    pull(iter(loader))
    state = loader.state_dict()
    state["generators"]["loader"] = state["generators"].pop("sampler.dice")
    expected = indices(pull(iter(loader)))
    other = make("indices with the loader of torch.Generator", 1)
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
    loader = make("indices of PCG64", 0)
    pull(iter(loader), 2)
    other = make(f"indices of {then}", 0)
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
    loader = make("batches at once of random", 2)
    it = iter(loader)
    pull(it, 2)
    other = make("batches at once of random", 2)
    other.load_state_dict(loader.state_dict())
    before = random.getstate()
    pull(iter(other), 1)
    assert random.getstate() == before


@pytest.mark.parametrize("kind", ["sequence", "batches at once of torch.Generator"])
def test_early_epoch_draws_from_sampler_once(kind: str) -> None:
    """One draw per epoch, whether it was started early or not."""
    orders = []
    for early in (False, True):
        loader = make(kind, 1, persistent_workers=True, prefetch_next_epoch=early)
        orders.append([indices(pull(iter(loader))) for _ in range(3)])
    assert orders[0] == orders[1]


def test_set_epoch_after_early_start_counts() -> None:
    kw: dict[str, Any] = dict(persistent_workers=True, prefetch_next_epoch=True)
    loader = make("distributed", 2, **kw)
    loader.set_epoch(0)
    pull(iter(loader))
    loader.set_epoch(5)
    state = loader.state_dict()
    assert state["user_epoch"] == 5
    expected = pull(iter(loader))
    other = make("distributed", 1, **kw)
    other.load_state_dict(state)
    assert pull(iter(other)) == expected and {row[1] for b in expected for row in b} == {5}


def test_epochs_after_a_resumed_one_do_not_repeat() -> None:
    """The epoch started early draws from the program's generator, not from the restored one."""
    loader = make("shuffle", 1, persistent_workers=True, prefetch_next_epoch=True)
    it = iter(loader)
    state = loader.state_dict()
    del it
    other = make("shuffle", 4, persistent_workers=True, prefetch_next_epoch=True)
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
    loader = make("shuffle of its own", 2, **kw)
    for epoch in range(3):
        exchange(loader, epoch)
        it = iter(loader)
        pull(it, 3)
        state = through_json(loader.state_dict())
        expected = indices(pull(it))
        other = make("shuffle of its own", 1, **kw)
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
options = st.fixed_dictionaries({
    "persistent_workers": st.booleans(),
    "prefetch_factor": st.integers(1, 3),
    "collate_fn": st.sampled_from([None, with_draws]),
})  # fmt: skip
moments = st.sampled_from(["before it begins", "at its begin", "in the middle", "in the middle",
                           "after the last batch", "after its end"])  # fmt: skip


class Interrupted:
    """A loader, its state at some moment, and what came of it after."""

    def __init__(self, order: str, workers: int, moment: str, warm: int, done: int,
                 **kw: Any) -> None:  # fmt: skip
        seed(warm + 10 * done)
        loader = make(order, workers, **kw)
        for epoch in range(warm):
            loader.set_epoch(epoch)
            pull(iter(loader))
        self.first, it = [], None
        if moment != "before it begins":
            it = iter(loader)
            counts = {"at its begin": 0, "in the middle": min(done, len(loader)),
                      "after the last batch": len(loader)}  # fmt: skip
            self.first = pull(it, counts.get(moment))
        self.state = loader.state_dict()
        program = torch.get_rng_state(), random.getstate(), np.random.get_state()
        if it is None or moment == "after its end":
            it = iter(loader)
        self.rest = pull(it)
        self.program = program

    def resumed(self, order: str, workers: int, **kw: Any) -> list[Any]:
        file = io.BytesIO()
        torch.save(self.state, file)
        file.seek(0)
        seed(99)
        other = make(order, workers, **kw)
        other.load_state_dict(torch.load(file, weights_only=True))
        torch.set_rng_state(self.program[0])
        random.setstate(self.program[1])
        np.random.set_state(self.program[2])
        return pull(iter(other))


def fuzzed(examples: int) -> Any:
    return settings(deadline=None, max_examples=examples,
                    suppress_health_check=[HealthCheck.too_slow])  # fmt: skip


@fuzzed(16)
@given(orders, moments, st.integers(1, 3), st.integers(1, 4), st.integers(0, 2),
       st.integers(0, 6), st.sampled_from([frozenset(), frozenset([3, 17])]), options)
def test_in_order_the_rest_is_the_same(order, moment, workers, others, warm, done, bad, kw) -> None:
    was = Interrupted(order, workers, moment, warm, done, bad=bad, **kw)
    assert was.resumed(order, others, bad=bad, **kw) == was.rest


@fuzzed(12)
@given(orders, moments, st.integers(1, 3), st.integers(1, 4), st.integers(0, 2),
       st.integers(0, 6), st.sampled_from(["sampler", "ready"]), options)
def test_out_of_order_resume_delivers_the_rest(order, moment, workers, others, warm, done,
                                                   batching, kw) -> None:  # fmt: skip
    """Whatever batch it is in, a sample is the same one; a random collate_fn is of the batch."""
    kw = {**kw, "in_order": False, "batching": batching}
    if batching == "ready":
        kw["collate_fn"] = None
        order = order.replace("batches", "indices")
    was = Interrupted(order, workers, moment, warm, done, **kw)
    rest = was.resumed(order, others, **kw)
    assert sorted(row for b in rest for row in b) == sorted(row for b in was.rest for row in b)


@fuzzed(5)
@given(orders, st.sampled_from(["at its begin", "in the middle", "after the last batch"]),
       st.integers(1, 3), st.integers(0, 6), options)
def test_static_resume_repeats_delivered_batches(order, moment, workers, done, kw) -> None:
    kw = {**kw, "scheduling": "static"}
    was = Interrupted(order, workers, moment, 0, done, **kw)
    assert was.resumed(order, workers, **kw) == was.rest


