"""Statistical quality of per-sample seeds; keys are fixed, so a bound is always met or never.

Bounds are five standard deviations of what independent fair bits would show.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from minato._core import Seeder

from . import seeder_of


@pytest.fixture(autouse=True)
def _globals_restored() -> Iterator[None]:
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.set_rng_state(saved[2])


def words_array(positions: range, stream: int = 1, n: int = 16) -> np.ndarray:
    raw = b"".join(Seeder._words(1, 0, p, 0, stream, n)[0] for p in positions)
    return np.frombuffer(raw, dtype=np.uint32).reshape(len(positions), n)


def bits_of(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1)


@pytest.mark.parametrize("part", range(5))
def test_every_input_bit_flips_half_of_the_words(part: int) -> None:
    rng, width = random.Random(part), (64, 64, 64, 32, 64)[part]
    flips = []
    for bit in range(width):
        for _ in range(16):
            args = [rng.getrandbits(w) for w in (64, 64, 64, 32, 64)]
            other = list(args)
            other[part] ^= 1 << bit
            a, b = (np.frombuffer(Seeder._words(*x, 16)[0], np.uint32) for x in (args, other))
            flips.append(bits_of(a ^ b))
    share = np.array(flips).reshape(width, 16, -1)
    assert abs(share.mean() - 0.5) < 5 * 0.5 / share.size**0.5
    per_input = share.mean(axis=(1, 2))  # 16 x 512 bits each
    assert np.abs(per_input - 0.5).max() < 5 * 0.5 / (16 * 512) ** 0.5
    per_output = share.mean(axis=(0, 1))
    assert np.abs(per_output - 0.5).max() < 5 * 0.5 / (width * 16) ** 0.5


def test_bits_are_balanced_and_neighbours_are_independent() -> None:
    n = 4096
    ours, next_stream = words_array(range(n)), words_array(range(n), stream=2)
    bound = 5 * 0.5 / n**0.5
    assert np.abs(bits_of(ours).mean(axis=0) - 0.5).max() < bound
    for pair in (ours[1:] ^ ours[:-1],            # neighbouring positions
                 ours ^ next_stream,              # streams
                 ours[:, 1:] ^ ours[:, :-1],      # words
                 ours[1:, 1:] ^ ours[:-1, :-1]):  # word i + 1 of position p + 1
        assert np.abs(bits_of(pair).mean(axis=0) - 0.5).max() < bound
    assert len(np.unique(ours)) > ours.size - 5  # 0.5 equal pairs expected


@functools.cache
def first_draws() -> dict[str, np.ndarray]:
    rows: dict[str, list[list[float]]] = {}
    pcg = np.random.Generator(np.random.PCG64())
    philox, sfc = (np.random.Generator(c()) for c in (np.random.Philox, np.random.SFC64))
    seeder = seeder_of([pcg, philox, sfc])
    for position in range(4000):
        seeder.seed(9, 0, position)
        for name, drawn in (("random", [random.random() for _ in range(4)]),
                            ("numpy", np.random.random_sample(4).tolist()),
                            ("torch", torch.rand(4, dtype=torch.float64).tolist()),
                            ("pcg", pcg.random(4).tolist()),
                            ("philox", philox.random(4).tolist()),
                            ("sfc", sfc.random(4).tolist())):
            rows.setdefault(name, []).append(drawn)
    return {name: np.array(r) for name, r in rows.items()}


@pytest.mark.parametrize("name", ["random", "numpy", "torch", "pcg", "philox", "sfc"])
def test_first_draws_are_uniform_over_positions(name: str) -> None:
    draws = first_draws()[name]
    for column in draws.T:
        counts = np.bincount((column * 64).astype(int), minlength=64)
        chi2 = float(((counts - len(column) / 64) ** 2 / (len(column) / 64)).sum())
        assert 63 - 5 * 126**0.5 < chi2 < 63 + 5 * 126**0.5
        assert abs(np.corrcoef(column[1:], column[:-1])[0, 1]) < 5 / len(column) ** 0.5


def test_first_draws_of_different_generators_are_uncorrelated() -> None:
    columns = np.concatenate([d.T for d in first_draws().values()])
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlation).max() < 5 / columns.shape[1] ** 0.5
