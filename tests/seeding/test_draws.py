"""minato.draws(seed): what a sample will draw, known from its seed."""

import copy
import pickle
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato._core import Seeder
from minato.seeding.find_generators import Growing
from minato.seeding.generator_states import SampleSeed, sample_seed


def seed_of(position: int, hook: int = 0, ranks: tuple[int, int, int] | None = None) -> SampleSeed:
    seeder = Seeder([])
    if ranks is not None:
        seeder.share(ranks)
    return sample_seed(*seeder.sample(11, 2, position, hook))


def first_of(draws: Any) -> list[Any]:
    """The first numbers of each library, of all kinds that cache some."""
    return [
        draws.random.random(), draws.random.gauss(0, 1), draws.random.randrange(1000),
        draws.numpy.rand(), draws.numpy.normal(), draws.numpy.randint(1000),
        torch.rand(3, generator=draws.torch).tolist(),
        torch.randn(3, generator=draws.torch).tolist(),
    ]  # fmt: skip


def first_of_globals() -> list[Any]:
    return [
        random.random(), random.gauss(0, 1), random.randrange(1000),
        np.random.rand(), np.random.normal(), np.random.randint(1000),
        torch.rand(3).tolist(), torch.randn(3).tolist(),
    ]  # fmt: skip


def states() -> tuple[Any, ...]:
    return (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


@pytest.mark.parametrize("ranks", [None, (2, 4, 8), (3, 0, 1)], ids=["alone", "position", "rank"])
def test_draws_are_those_of_the_seeded_sample(ranks: tuple[int, int, int] | None) -> None:
    seeder = Growing([]).seeder
    if ranks is not None:
        seeder.share(ranks)
    for position in (0, 1, 2**40):
        seeder.seed(11, 2, position)
        assert first_of(minato.draws(seed_of(position, 0, ranks))) == first_of_globals()


def test_draws_leave_the_programs_generators_alone() -> None:
    before = states()
    first_of(minato.draws(seed_of(5)))
    assert states() == before


def test_draws_of_other_samples_differ() -> None:
    found = [first_of(minato.draws(seed_of(k))) for k in range(3)]
    assert found[0] != found[1] != found[2]
    assert first_of(minato.draws(seed_of(1))) == found[1]


def test_threads_have_draws_of_their_own() -> None:
    mine = minato.draws(seed_of(1)).random
    theirs: list[float] = []
    thread = threading.Thread(
        target=lambda: theirs.append(minato.draws(seed_of(2)).random.random())
    )
    thread.start()
    thread.join()
    assert mine.random() == minato.draws(seed_of(1)).random.random()
    assert theirs == [minato.draws(seed_of(2)).random.random()]


class Seeded(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def seed_sample(self, seed: int) -> None:
        self.seeds.append(seed)


def test_seed_is_the_one_that_seed_sample_gets() -> None:
    parts = [Seeded(), Seeded()]
    seeder = Growing(torch.utils.data.ConcatDataset(parts)).seeder
    seeder.seed(11, 2, 9)
    assert [part.seeds for part in parts] == [[seed_of(9, hook)] for hook in (0, 1)]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
                         ids=["copy", "deepcopy", "pickle"])  # fmt: skip
def test_seed_keeps_its_key_when_copied(again: Any) -> None:
    seed = again(seed_of(3))
    assert seed == seed_of(3) and seed.key == seed_of(3).key


@pytest.mark.parametrize(("seed", "why"), [
    (None, "does not seed samples one by one"),
    (7, "7, which is a plain int"),
    (seed_of(3) + 1, "which is a plain int"),
], ids=["none", "number", "computed"])  # fmt: skip
def test_draws_of_another_number_are_refused(seed: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        minato.draws(seed)
