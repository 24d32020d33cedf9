"""Generators that the program has seeded itself: two runs, and each epoch, draw the same numbers."""

from __future__ import annotations

import random
import sys
import types

import numpy as np
import pytest
import torch

import minato
from minato.seeding.generator_states import own_seed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SAMPLES = 24

SEEDED = {
    "numpy": lambda: np.random.default_rng(42),
    "numpy, spawned": lambda: np.random.default_rng(np.random.SeedSequence(42).spawn(1)[0]),
    "bit generator": lambda: np.random.Generator(np.random.Philox(42)),
    "legacy": lambda: np.random.RandomState(42),
    "python": lambda: random.Random(42),
    "python, text": lambda: random.Random("42"),
    "torch": lambda: torch.Generator().manual_seed(42),
}
UNSEEDED = {
    "numpy": np.random.default_rng,
    "legacy": np.random.RandomState,
    "python": random.Random,
    "torch": lambda: (made := torch.Generator()).seed() and made,
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator, dtype=torch.float64).item()
    return generator.random()


class Holding(torch.utils.data.Dataset):
    def __init__(self, *makes):
        self.rngs = [make() for make in makes]

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([draw(rng) for rng in self.rngs], dtype=torch.float64)


class OfEpoch(Holding):
    def set_epoch(self, epoch):
        self.rngs = [np.random.default_rng(epoch)]


def epochs(data, workers=2, seed=None, count=2, **options):
    """seed: None: the program sets none."""
    torch.seed() if seed is None else torch.manual_seed(seed)
    options = {"seed_per_sample": True, **options}
    loader = minato.DataLoader(data, 4, num_workers=workers, **options)
    return [torch.cat(list(loader)) for _ in range(count)]


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("kind", SEEDED)
def test_seeded_generator_draws_alike_in_each_run_and_epoch(kind, seed):
    first, second = epochs(Holding(SEEDED[kind]), seed=seed)
    (other,) = epochs(Holding(SEEDED[kind]), 1, seed=None, count=1)
    (here,) = epochs(Holding(SEEDED[kind]), 0, seed=seed, count=1)
    assert torch.equal(first, second) and torch.equal(first, other) and torch.equal(first, here)
    assert len(first.unique()) == SAMPLES


class Spawning(Holding):
    def __getitem__(self, index):
        (child,) = self.rngs[0].spawn(1)
        return np.random.default_rng(child).random()


SPAWNING = {"sequence": lambda: np.random.SeedSequence(42), "generator": SEEDED["numpy"]}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SPAWNING)
def test_spawned_children_draw_alike_in_each_run(kind, workers):
    first, second = epochs(Spawning(SPAWNING[kind]), workers)
    (other,) = epochs(Spawning(SPAWNING[kind]), 1, count=1)
    assert torch.equal(first, second) and torch.equal(first, other)
    assert len(first.unique()) == SAMPLES


@pytest.mark.parametrize("seed", [0, 3])
def test_opencv_is_seeded_for_each_sample(seed, monkeypatch):
    """With a stand-in for OpenCV: one generator, whose state only its draws show."""
    rng = random.Random(seed)
    fake = types.ModuleType("cv2")
    fake.setRNGSeed = lambda seed: rng.seed(seed) if abs(seed) < 1 << 31 else 1 / 0
    fake.randu = lambda out, low, high: np.array([rng.randrange(low, high) for _ in out.flat], out.dtype)
    monkeypatch.setitem(sys.modules, "cv2", fake)

    class Drawing(Holding):
        def __getitem__(self, index):
            return int(fake.randu(np.empty(1, np.int64), 0, 1 << 40)[0])

    first, second = epochs(Drawing())
    (other,) = epochs(Drawing(), 1, count=1)
    assert torch.equal(first, second) and torch.equal(first, other)
    assert len(first.unique()) == SAMPLES
    rng.seed(seed + 1)
    assert not torch.equal(first, epochs(Drawing(), count=1)[0])
    drawn = [epochs(Drawing(), seed=n, count=1, worker_init_fn=fake.setRNGSeed)[0] for n in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("kind", ["numpy", "python", "torch"])
def test_persistent_workers_draw_new_numbers_in_each_epoch(kind):
    """As torch's, whose streams go on."""
    run = epochs(Holding(SEEDED[kind]), persistent_workers=True)
    other = epochs(Holding(SEEDED[kind]), 1, persistent_workers=True)
    assert all(map(torch.equal, run, other)) and not torch.equal(*run)


@pytest.mark.parametrize("kind", UNSEEDED)
def test_unseeded_generator_draws_from_loaders_seed(kind):
    run = epochs(Holding(UNSEEDED[kind]), seed=7)
    other = epochs(Holding(UNSEEDED[kind]), 1, seed=7)
    assert all(map(torch.equal, run, other)) and not torch.equal(*run)
    assert not torch.equal(run[0], epochs(Holding(UNSEEDED[kind]))[0])


def test_other_seed_gives_other_numbers():
    runs = [epochs(Holding(lambda: np.random.default_rng(seed)), seed=7)[0] for seed in (1, 2)]
    assert not torch.equal(*runs)


@pytest.mark.parametrize("kind", ["numpy", "python", "legacy", "torch"])
def test_generators_in_the_same_state_draw_alike(kind):
    """A transform of images and one of their masks, for example."""
    for epoch in epochs(Holding(SEEDED[kind], SEEDED[kind])):
        assert torch.equal(epoch[:, 0], epoch[:, 1])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_own_seeds_survive_other_start_methods(method):
    kinds = SEEDED["numpy"], SEEDED["legacy"], SEEDED["python"], SEEDED["torch"]
    (forked,) = epochs(Holding(*kinds), count=1)
    (other,) = epochs(Holding(*kinds), count=1, multiprocessing_context=method)
    assert torch.equal(forked, other)


def seed_by_number(number):
    for rng in torch.utils.data.get_worker_info().dataset.rngs:
        rng.seed(number)


def test_seed_from_worker_init_fn_gives_way_to_loaders():
    """It may be another one in each worker."""
    runs = [
        epochs(Holding(SEEDED["python"]), workers, seed=7, worker_init_fn=seed_by_number)
        for workers in (1, 3)
    ]
    assert all(map(torch.equal, *runs)) and not torch.equal(*runs[0])


def test_generator_of_set_epoch_keeps_its_seed():
    runs = []
    for workers in (1, 3):
        torch.seed()
        loader = minato.DataLoader(OfEpoch(), 4, num_workers=workers, persistent_workers=True)
        for epoch in range(3):
            loader.set_epoch(epoch)
            runs.append(torch.cat(list(loader)))
    assert all(map(torch.equal, runs[:3], runs[3:])) and not torch.equal(*runs[:2])


def test_system_seed_of_python_is_recognized():
    assert [own_seed(random.Random()) for _ in range(50)] == [0] * 50
    seeds = (0, 1, -5, 2**32, 2**200 + 1, 0.5, "text", b"bytes")
    assert all(own_seed(random.Random(seed)) for seed in seeds)


class Shares(Holding):
    """Draws from the loader's own generator."""

    def __init__(self, generator):
        super().__init__(lambda: generator)


def sharing(**options):
    torch.seed()
    generator = torch.Generator().manual_seed(42)
    options |= {"generator": generator, "shuffle": True, "seed_per_sample": True}
    return minato.DataLoader(Shares(generator), 4, **options)


@pytest.mark.parametrize("method", ["fork", "spawn", None])
def test_generator_shared_with_loader_draws_alike_after_a_resume(method):
    """The workers start at another state of it then."""
    options = dict(num_workers=2, persistent_workers=True, multiprocessing_context=method)
    options = options if method else {}
    through, before, after = (sharing(**options) for _ in range(3))
    first, *rest = [torch.cat(list(through)) for _ in range(3)]
    assert torch.equal(torch.cat(list(before)), first)
    after.load_state_dict(before.state_dict())
    assert all(torch.equal(torch.cat(list(after)), epoch) for epoch in rest)
    assert not torch.equal(first, rest[0])
