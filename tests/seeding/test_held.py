"""How often samples are made that draw from a generator of their dataset."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch

import minato
from minato.seeding.find_generators import make_seeder
from minato.seeding.held import Held

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SAMPLES, WORKERS = 24, 2

MAKE = {
    "numpy": lambda: np.random.default_rng(0),
    "mapped": lambda: np.random.Generator(np.random.MT19937(0)),
    "legacy": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0),
    "torch": lambda: torch.Generator().manual_seed(0),
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return generator.random() if hasattr(generator, "random") else generator.rand()


class Drawing(torch.utils.data.Dataset):
    """Draws for each sample, keeps what it drew last, as transforms do, and counts its samples."""

    def __init__(self, *held):
        self.rngs = [MAKE[name]() for name in held or ("numpy",)]
        self.flip = False
        self.asked = torch.zeros(SAMPLES, dtype=torch.int32).share_memory_()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.asked[index] += 1
        self.flip = draw(self.rngs[0]) < 0.5
        return self.sample(index, self.flip, *[draw(rng) for rng in self.rngs])

    @staticmethod
    def sample(*numbers):
        return torch.tensor(numbers, dtype=torch.float64)

    def runs(self):
        """Since this was asked last."""
        count = int(self.asked.sum())
        self.asked.zero_()
        return count


class InAttribute(Drawing):
    """Builds a table in the first sample, of one number."""

    table = None

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if self.table is None:
            self.table = [draw(self.rngs[0])]
        return self.sample(*sample, *self.table)


class InCache(Drawing):
    """The same, where no attribute shows it."""

    def __init__(self, *held):
        super().__init__(*held)
        self.built = functools.lru_cache(None)(functools.partial(draw, self.rngs[0]))

    def __getitem__(self, index):
        return self.sample(*super().__getitem__(index), self.built())


def loader_of(data, workers=WORKERS, **options):
    return minato.DataLoader(
        data, 4, shuffle=True, num_workers=workers, seed_per_sample=True, **options
    )


def epochs(loader, count=3):
    torch.manual_seed(5)
    return [torch.cat(list(loader)) for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 1, WORKERS])
@pytest.mark.parametrize("held", MAKE)
def test_later_epochs_make_no_sample_twice(held, workers):
    data = Drawing(held)
    loader = loader_of(data, workers)
    torch.manual_seed(5)
    runs = []
    for _ in range(3):
        list(loader)
        runs.append(data.runs() - SAMPLES)
    # once more in each worker that got one, and in the first of them for the trial
    assert 2 <= runs[0] <= max(workers, 1) + 1
    assert runs[1:] == [0, 0]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_findings_of_trial_change_no_sample(workers):
    """The same as with loaders that know nothing yet."""
    torch.manual_seed(5)
    held = "numpy", "torch"
    expected = [torch.cat(list(loader_of(Drawing(*held), 1))) for _ in range(3)]
    got = epochs(loader_of(Drawing(*held), workers))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind", [InAttribute, InCache])
def test_table_in_later_epochs_is_the_programs(kind):
    numbers = np.random.default_rng(0).random(3)  # two of the sample come first
    data = kind()
    for epoch in epochs(loader_of(data)):
        assert (epoch[:, -1] == numbers[2]).all()
        assert len(set(epoch[:, -2].tolist())) == SAMPLES


def test_only_generators_without_tables_are_seeded_early():
    """Of two, one builds a table."""
    data = InAttribute("numpy", "torch")
    loader = loader_of(data, 1)
    list(loader)
    held = minato.iterators.across_iterators.memo_of(loader).held
    assert held == Held(("Generator", "Generator"), {0: True, 1: False})
    assert data.runs() == SAMPLES + 2
    list(loader)
    assert data.runs() == SAMPLES + 1


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_trial_works_with_other_start_methods(method):
    data = Drawing()
    loader = loader_of(data, 1, multiprocessing_context=method)
    list(loader)
    assert data.runs() == SAMPLES + 2
    list(loader)
    assert data.runs() == SAMPLES


def test_persistent_workers_make_no_trial():
    data = Drawing()
    list(loader_of(data, 1, persistent_workers=True))
    assert data.runs() == SAMPLES + 1


def test_abandoned_epoch_also_makes_trial():
    data = Drawing()
    loader = loader_of(data, 1, prefetch_factor=1)
    iterator = iter(loader)
    next(iterator)
    del iterator
    data.runs()
    list(loader)
    assert data.runs() == SAMPLES


def test_unknown_generators_are_left():
    data = Drawing("numpy")
    known = Held(("Generator",), {0: False})
    assert make_seeder(data, known=known).left() == [False]
    data.rngs.append(random.Random(0))
    assert make_seeder(data, known=known).left() == [True, True]


class Failing(Drawing):
    """Fails after it has drawn, if its first draw is that of the program's generator."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if sample[-1] == 0.2697867137638703:
            raise ValueError("by the program's generator")
        return sample


def test_sample_failing_in_trial_uses_its_seeds():
    data = Failing()
    loader = loader_of(data, 1)
    list(loader)
    assert data.runs() == SAMPLES + 2
    list(loader)
    assert data.runs() == SAMPLES
