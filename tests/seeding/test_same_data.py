"""The same job twice gives one hash, whatever the workers, their number and their order."""

from __future__ import annotations

import hashlib
import random
import re
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
    """A collate_fn with its own randomness."""
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
def test_data_is_the_same_with_any_workers(collate_fn):
    runs = []
    for workers in (1, 2, 7, 2):
        loader = make(workers, collate_fn, persistent_workers=True)
        runs.append([digest(loader) for _ in range(3)])
    assert runs[0] == runs[1] == runs[2] == runs[3]
    assert len({row for epoch in runs[0] for row in epoch}) == 24  # epochs draw new numbers


@hypothesis.settings(deadline=None, max_examples=8)
@hypothesis.given(
    st.integers(1, 5), st.integers(0, 9), st.sampled_from([None, drawing]), st.booleans(),
    st.sampled_from([None, (1, 6)]), st.integers(1, 3),
)  # fmt: skip
def test_data_does_not_depend_on_machinery(workers, slow, collate, in_order, most, prefetch):
    """Random numbers of workers, costs, windows, with and without a scheduler."""
    plain = digest(make(2, collate), in_order)
    threshold = 0.005 if most is not None else "auto"
    options = dict(in_order=in_order, autoscale=most, prefetch_factor=prefetch)
    other = make(workers, collate, dataset=Augmented(slow=slow), straggler_threshold=threshold,
                 **options)  # fmt: skip
    assert digest(other, in_order) == plain


@hypothesis.settings(deadline=None, max_examples=8)
@hypothesis.given(
    st.integers(1, 4), st.integers(0, 9), st.integers(1, 60), st.integers(1, 9),
    st.sampled_from([None, (1, 6)]),
)  # fmt: skip
def test_ready_batches_deliver_each_sample_once(workers, slow, count, size, most):
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


# ---- without workers, and the program's generators -----------------------------------------


class Fetching(Augmented):
    """A dataset that fetches whole batches."""

    def __getitems__(self, indices):
        noise = float(torch.rand(())) + self.numpy.random()
        return [self[i] + noise for i in indices]


def generators(dataset):
    """States of the program's generators, the dataset's included."""
    return repr([
        random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist(),
        dataset.numpy.bit_generator.state, dataset.legacy.get_state(legacy=False),
        dataset.python.getstate(), dataset.torch.get_state().tolist(),
    ])  # fmt: skip


KINDS = {
    "rows": dict(batch_size=5), "collate": dict(batch_size=5, collate_fn=drawing),
    "samples": dict(batch_size=None), "samples, collate": dict(
        batch_size=None, collate_fn=lambda sample: sample + random.random()),
    "uneven": dict(batch_size=7, drop_last=True),
}  # fmt: skip


def seeded(workers, kind, data, **options):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    return minato.DataLoader(
        data, shuffle=True, num_workers=workers, seed_per_sample=True, **KINDS[kind], **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind, dataset", [
    *((kind, Augmented) for kind in KINDS), ("rows", Fetching), ("collate", Fetching),
])  # fmt: skip
def test_data_is_the_same_without_workers(kind, dataset):
    runs, states = [], []
    for workers in (0, 1, 3):
        data = dataset(23)
        loader = seeded(workers, kind, data)
        runs.append([digest(loader), digest(loader)])
        states.append(generators(data))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0] != runs[0][1]
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("first, then", [(0, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["rows", "samples, collate"])
def test_resumed_epoch_without_workers_is_the_same(kind, first, then):
    whole = digest(seeded(1, kind, Augmented(23)))
    it = iter(loader := seeded(first, kind, Augmented(23)))
    begin = digest([next(it) for _ in range(3)])
    state = loader.state_dict()
    del it
    other = seeded(then, kind, Augmented(23))
    torch.manual_seed(99)  # another process knows nothing of the first one's generators
    other.load_state_dict(state)
    assert begin + digest(other) == whole


class Failing(Augmented):
    def __getitem__(self, index):
        if index == 3:
            raise KeyError("three")
        return super().__getitem__(index)


def test_failure_without_workers_restores_global_generators():
    data = Failing(8)
    loader = minato.DataLoader(data, batch_size=2, seed_per_sample=True)
    it = iter(loader)
    next(it)
    before = generators(data)
    with pytest.raises(KeyError, match="three"):
        next(it)
    assert generators(data) == before
    assert len(list(it)) == 2


def test_no_workers_default_uses_global_generators():
    torch.manual_seed(1)
    mine = list(minato.DataLoader(Augmented(6)))
    torch.manual_seed(1)
    assert not all(torch.equal(a, b) for a, b in zip(mine, minato.DataLoader(
        Augmented(6), seed_per_sample=True)))  # fmt: skip


# ---- a collate_fn that runs in the program's process ---------------------------------------


def marked(samples):
    draws = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
    return draws.tolist(), sorted(int(s[0]) for s in samples)


def test_ready_batches_are_collated_as_in_order():
    """A worker collates each of the sampler's batches with its own draws; the program's generators
    do not change. Only the order differs."""

    def collated(workers, **options):
        data = Augmented(23)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        it = iter(minato.DataLoader(data, 5, num_workers=workers, collate_fn=marked, **options))
        before = generators(data)
        got = sorted(it, key=lambda batch: batch[1])
        assert generators(data) == before
        return got

    ready = dict(in_order=False, batching="ready")
    ordered = collated(1)
    assert collated(1, **ready) == collated(3, **ready) == ordered
    assert len({str(draws) for draws, _ in ordered}) == 5


def test_resumed_ready_batches_are_collated_the_same():
    def loader():
        torch.manual_seed(3)
        return minato.DataLoader(Augmented(23), 5, num_workers=2, in_order=False,
                                 batching="ready", collate_fn=marked)  # fmt: skip

    def in_order(batches):
        return sorted(batches, key=lambda batch: batch[1])

    whole = in_order(loader())
    it = iter(first := loader())
    begin = [next(it) for _ in range(2)]
    other = loader()
    other.load_state_dict(first.state_dict())
    assert in_order(begin + list(other)) == whole
    del it


class Unsized(torch.utils.data.Sampler):
    """A sampler that does not know its length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [0, 3, 20, 23])
def test_ready_batches_of_a_sampler_without_a_length(count, drop_last):
    loader = minato.DataLoader(
        Augmented(30), 5, sampler=Unsized(count), num_workers=2, in_order=False,
        batching="ready", drop_last=drop_last,
    )  # fmt: skip
    for _ in range(2):
        got = sorted(int(i) for batch in loader for i in batch[:, 0])
        assert got == list(range(count // 5 * 5 if drop_last else count))


def test_programs_own_worker_info_is_kept():
    """A program may set its own worker info."""
    worker = torch.utils.data._utils.worker
    mine = worker.WorkerInfo(id=7, num_workers=9, seed=1, dataset=None)
    worker._worker_info = mine
    try:
        for options in ({}, dict(batching="ready", in_order=False, collate_fn=marked)):
            list(minato.DataLoader(Augmented(6), 2, num_workers=1, **options))
            assert torch.utils.data.get_worker_info() is mine
    finally:
        worker._worker_info = None


# ---- generators that are made in the first sample ------------------------------------------


class Lazy(torch.utils.data.Dataset):
    """Makes its generator when it needs one, as programs do because of forks."""

    def __init__(self, place="attribute"):
        self.place, self.rng, self.parts = place, None, []
        self.by_process = {}
        self.transform = Transform() if place == "transform" else None

    def __len__(self):
        return 24

    def generator(self):
        if self.place == "transform":
            return self.transform.generator()
        if self.place == "dict":
            return self.by_process.setdefault("mine", np.random.default_rng())
        if self.place == "new attribute":
            if not hasattr(self, "late"):
                self.late = np.random.default_rng()
            return self.late
        if self.rng is None:
            self.rng = np.random.default_rng()
        return self.rng

    def __getitem__(self, index):
        rng = self.generator()
        return torch.tensor([index, rng.random(), float(torch.rand(()))])


class Transform:
    def __init__(self):
        self.rng = None

    def generator(self):
        if self.rng is None:
            self.rng = random.Random()
        return self.rng


class BesideAnother(Lazy):
    def __init__(self, lazy):
        super().__init__()
        self.other, self.lazy = np.random.default_rng(), lazy

    def __getitem__(self, index):
        if self.lazy:
            self.generator()
        return torch.tensor([index, self.other.random()])


@pytest.mark.parametrize("workers, persistent", [(0, False), (1, False), (1, True)])
def test_lazy_generator_does_not_change_draws_of_others(workers, persistent):
    """Else they would depend on which samples a worker has made before."""
    with_it, without = (
        torch.cat(lazily(workers, BesideAnother(lazy), persistent_workers=persistent))
        for lazy in (True, False)
    )
    assert torch.equal(with_it, without)


class LazyWithSeed(Lazy):
    def generator(self):
        if self.rng is None:
            self.rng = np.random.default_rng(42)
        return self.rng


def test_lazy_generator_never_has_a_seed_of_its_own():
    """Without workers it is there when the next epoch begins. In the first sample it gives what it
    was made to give."""
    here, worker = lazily(0, LazyWithSeed()), lazily(1, LazyWithSeed())
    assert int((here[1] != worker[1]).any(1).sum()) <= 1


class LazyPair(Lazy):
    def __init__(self):
        super().__init__()
        self.even = self.odd = None

    def __getitem__(self, index):
        name = "odd" if index % 2 else "even"
        if getattr(self, name) is None:
            setattr(self, name, np.random.default_rng())
        return getattr(self, name).random()


def drawn_after_both(order):
    from minato.seeding import find_generators

    data = LazyPair()
    growing = find_generators.Growing(data)
    drawn = {}
    for index in (*order, 2, 3):
        growing.seeder.seed(1, 0, index)
        drawn[index] = data[index]
        growing.seeder.renew()
    return drawn[2], drawn[3]


def test_order_in_which_samples_make_generators_does_not_matter():
    assert drawn_after_both([0, 1]) == drawn_after_both([1, 0])


class LazyBatches(Lazy):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


def lazily(workers, dataset, **options):
    torch.manual_seed(5)
    loader = minato.DataLoader(
        dataset, 4, shuffle=True, num_workers=workers, seed_per_sample=True, **options
    )
    return [torch.cat(list(loader)) for _ in range(2)]


def differing(run, other):
    """In how many samples of their first epochs two runs differ."""
    return int((run[0] != other[0]).any(1).sum())


@pytest.mark.parametrize("place", ["attribute", "new attribute", "dict", "transform"])
def test_generator_made_in_first_sample_is_seeded(place):
    """From the second sample of each worker on; in the first it gives what it was made to give."""
    runs = [lazily(workers, Lazy(place)) for workers in (0, 1, 3)]
    assert differing(runs[0], runs[1]) <= 1 and differing(runs[0], runs[2]) <= 4
    assert differing(runs[0], runs[0][1:]) == 24


@pytest.mark.parametrize(
    "make, first",
    [(lambda: LazyBatches(), 4), (lambda: torch.utils.data.Subset(Lazy(), range(24)[::-1]), 1)],
)
@pytest.mark.parametrize("options", [{}, {"collate_fn": torch.stack}])
def test_lazy_generator_is_seeded_with_other_options(make, first, options):
    """first: samples that a worker makes before the generator is found."""
    runs = [lazily(workers, make(), **options) for workers in (0, 1, 3)]
    assert differing(runs[0], runs[1]) <= first and differing(runs[0], runs[2]) <= 4 * first


def test_determinism_report_tells_of_lazy_generators():
    report = minato.check_determinism(LazyBatches(), samples=4)
    assert not report and "makes in its first" in str(report)


class Counting(torch.utils.data.Dataset):
    """Counts how often each sample was requested; the types of its attributes keep changing."""

    def __init__(self, makes):
        self.makes, self.more, self.odd = makes, [], None
        self.asked = torch.zeros(300, dtype=torch.int32).share_memory_()

    def __len__(self):
        return 300

    def __getitem__(self, index):
        self.asked[index] += 1
        self.odd = index if self.odd is None else None
        self.more.append(np.random.default_rng() if self.makes else 1)
        return index


@pytest.mark.parametrize("makes", [False, True])
def test_dataset_that_makes_generators_makes_samples_once(makes):
    data = Counting(makes)
    assert len(list(minato.DataLoader(data, 10, num_workers=1))) == 30
    assert data.asked.tolist() == [1] * 300


def test_fruitless_walks_become_rare(monkeypatch):
    from minato.seeding import find_generators as _seeding

    growing = _seeding.Growing(data := Counting(False))
    walks = []
    walk = growing._walk
    monkeypatch.setattr(growing, "_walk", lambda: walks.append(1) or walk())
    for index in range(300):
        data[index]
        assert not growing.seeder.renew()
    assert 1 < len(walks) < 12


# ---- generators that the dataset holds ------------------------------------------------------

HELD = {
    "numpy": (lambda: np.random.default_rng(0), lambda g: g.random()),
    "legacy": (lambda: np.random.RandomState(0), lambda g: g.rand()),
    "python": (lambda: random.Random(0), lambda g: g.random()),
    "torch": (lambda: torch.Generator().manual_seed(0), lambda g: torch.rand((), generator=g).item()),
    "mapped": (lambda: np.random.Generator(np.random.MT19937(0)), lambda g: g.random()),
}


class Holding(torch.utils.data.Dataset):
    """Draws from its own generator; records how often each sample was requested."""

    def __init__(self, held):
        make, self.draw = HELD[held]
        self.rng, self.table = make(), [0.0]
        self.asked = torch.zeros(40, dtype=torch.int32).share_memory_()

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.asked[index] += 1
        return torch.tensor([index, self.draw(self.rng), *self.table], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("held", HELD)
def test_dataset_with_generator_makes_each_sample_once(held, workers):
    """From the first epoch on, and also if its calls cannot be repeated."""
    data = Holding(held)
    loader = make(workers, dataset=data, seed_per_sample=True)
    for epoch in range(2):
        list(loader)
        assert data.asked.tolist() == [epoch + 1] * 40


class Picky(Holding):
    """Some values that it may draw cause an error."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if sample[1] > 0.6:
            raise ValueError(f"{float(sample[1])}")
        return sample


@pytest.mark.parametrize("collate", [None, torch.stack])
def test_a_sample_fails_by_its_own_seeds_alone(collate):
    """The first draw of its generator is one that fails: 0.63, with no seed of minato's."""
    runs = []
    for workers in (0, 1, 3):
        torch.manual_seed(5)
        loader = minato.DataLoader(
            Picky("numpy"), 1, num_workers=workers, seed_per_sample=True, collate_fn=collate
        )
        iterator, run = iter(loader), []
        for _ in range(40):
            try:
                run.append(next(iterator)[0].tolist())
            except ValueError as error:
                run.append(re.findall(r"0\.\d+", str(error))[-1])
        runs.append(run)
    assert runs[0] == runs[1] == runs[2] and 0 < sum(type(r) is str for r in runs[0]) < 40


class TableOfEpoch(Holding):
    """Builds another table in each epoch."""

    def set_epoch(self, epoch):
        self.table = [self.draw(self.rng) for _ in range(3)]

    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)


def test_table_per_epoch_is_equal_in_all_workers():
    runs = []
    for workers in (1, 3):
        loader = make(workers, dataset=TableOfEpoch("numpy"), persistent_workers=True)
        for epoch in range(3):
            loader.set_epoch(epoch)
            rows = torch.cat(list(loader))
            assert len(rows[:, 2:].unique(dim=0)) == 1
            runs.append(rows)
    assert all(map(torch.equal, runs[:3], runs[3:]))


# ---- generators in a collate_fn -------------------------------------------------------------


class Collates:
    """Has a generator."""

    def __init__(self):
        self.rng = torch.Generator().manual_seed(0)

    def __call__(self, samples):
        rows = [sample.pop("row") for sample in samples]  # another time there is none
        return torch.stack(rows) + torch.rand(len(rows), 1, generator=self.rng)


class Dicts(Augmented):
    def __getitem__(self, index):
        return {"row": super().__getitem__(index)}


@pytest.mark.parametrize("prefetch", [1, 4])
def test_generators_of_the_collate_fn_are_seeded(prefetch):
    runs = []
    for workers in (0, 1, 3, 3):
        more = dict(prefetch_factor=prefetch) if workers else {}
        loader = make(workers, Collates(), dataset=Dicts(), seed_per_sample=True, **more)
        runs.append([digest(loader), digest(loader)])
    assert runs[0] == runs[1] == runs[2] == runs[3] and runs[0][0] != runs[0][1]


def test_generators_of_collate_fn_in_trainer_are_seeded():
    collate = Collates()
    options = dict(dataset=Dicts(), batching="ready", in_order=False, straggler_threshold=None)
    # with one worker, whose order is the sampler's
    runs = [digest(make(1, collate, **options)) for _ in range(2)]
    assert runs[0] == runs[1]


# ---- generators that replace others ---------------------------------------------------------


class AnewEachEpoch(torch.utils.data.Dataset):
    def __init__(self):
        self.rng = [np.random.default_rng(0)]

    def set_epoch(self, epoch):
        self.rng = [np.random.default_rng(epoch)]

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index, self.rng[0].random()])


class Attribute(AnewEachEpoch):
    """In an attribute instead of a list, where the walk does not see it."""

    rng = property(lambda self: [self.own], lambda self, rng: vars(self).update(own=rng[0]))


@pytest.mark.parametrize("kind", [AnewEachEpoch, Attribute])
def test_a_generator_in_place_of_another_is_seeded(kind):
    runs = []
    for workers in (1, 2, 2):
        loader = make(workers, dataset=kind(), persistent_workers=True)
        runs.append([])
        for epoch in range(2):
            loader.set_epoch(epoch)
            runs[-1].append(digest(loader))
    assert runs[0] == runs[1] == runs[2]


class Caching(Lazy):
    """A cache that grows with every sample, and a generator after many of them."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def __getitem__(self, index):
        self.cache[index] = index
        return self.rng if index < 200 else super().__getitem__(index)


def test_a_growing_cache_hides_no_generator():
    from minato.seeding import find_generators as _seeding

    growing = _seeding.Growing(data := Caching())
    for index in range(200):
        data[index]
        assert not growing.seeder.renew()
    data[200]
    assert growing.seeder.renew() and growing.found.generators == [data.rng]


class Step:
    def __init__(self, number):
        self.name, self.low, self.high, self.p, self.number = f"{number}", 0, 1, 0.5, number


class Noise:
    rng = None


@pytest.mark.parametrize("steps", [3, 15, 200, 1000])
def test_late_nested_generator_is_found(steps):
    """Up to some of these also one in place of an attribute that was there before."""
    from minato.seeding import find_generators as _seeding

    data = Step(0)
    data.steps = [*map(Step, range(steps)), Noise()]
    if steps < 40:
        data.steps[-1].rng = None
    growing = _seeding.Growing(data)
    assert not growing.seeder.renew()
    data.steps[-1].rng = np.random.default_rng(0)
    assert growing.seeder.renew() and growing.found.generators == [data.steps[-1].rng]
    assert not growing.seeder.renew()


class OfIndex(Lazy):
    """Makes its generator anew for each sample."""

    def generator(self):
        self.rng = np.random.default_rng(7)
        return self.rng


@pytest.mark.filterwarnings("error")
def test_generators_made_for_each_sample_are_left_alone():
    (first, _), (other, _) = lazily(1, OfIndex()), lazily(2, OfIndex())
    assert torch.equal(first, other) and len(first[:, 1].unique()) == 1
