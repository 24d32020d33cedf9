"""The counter-based generator: known answers, equal paths, distributions."""
from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from minato import _ops

from . import reference
from .native import draws, instruction_sets

KEYS = [(0, 0), (1, 2**64 - 1), (0x0123456789ABCDEF, 0xFEDCBA9876543210)]


def normals(count, key=(3, 4), number=5, first=0, level=-1) -> np.ndarray:
    out = np.empty(count, np.float32)
    draws().normals(out.ctypes.data, count, first, *key, number, level)
    return out


@pytest.mark.parametrize(("counter", "key", "expected"), [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_reference_gives_known_answers_of_philox(counter, key, expected):
    """The vectors published with the generator (Random123, kat_vectors). The tests below compare
    the extension with the reference."""
    block, word1, word2, word3 = counter
    hi, lo = word3 << 32 | word2, key[1] << 32 | key[0]
    assert tuple(reference.philox(hi, lo, word1 & 0xFFFF, word1 >> 16, block)) == expected


@pytest.mark.parametrize("key", KEYS)
def test_draws_agree_with_the_reference(key):
    wanted = reference.Draws(key, 7)
    for draw in range(50):
        assert _ops.uniform(*key, 7, draw) == draws().uniform(*key, 7, draw) == wanted.u(draw)
        for bound in (1, 2, 3, 1000, 2**31, 2**32):
            assert draws().below(*key, 7, draw, bound) == wanted.below(draw, bound)


def test_draws_are_uniform():
    counts = np.bincount([draws().below(9, i, 0, 0, 7) for i in range(7000)], minlength=7)
    assert stats.chisquare(counts).pvalue > 1e-4
    sample = [draws().uniform(9, i, 1, 0) for i in range(7000)]
    assert stats.kstest(sample, "uniform").pvalue > 1e-4


def test_draws_of_neighbours_are_unrelated():
    """Keys, operators and draws that differ by one have nothing in common."""
    base = np.array([draws().uniform(1, i, 1, 1) for i in range(4000)])
    for other in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        moved = np.array([draws().uniform(other[0], i, other[1], other[2]) for i in range(4000)])
        assert abs(np.corrcoef(base, moved)[0, 1]) < 0.08
    following = np.array([draws().uniform(1, i + 1, 1, 1) for i in range(4000)])
    assert abs(np.corrcoef(base, following)[0, 1]) < 0.08


@pytest.mark.parametrize("key", KEYS)
def test_normals_have_the_bytes_of_the_reference(key, level):
    got = normals(64 * 50 + 13, key, 11, level=level)
    want = reference.Draws(key, 11).normals(got.size)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_normals_do_not_depend_on_the_instruction_set(level):
    np.testing.assert_array_equal(normals(1 << 17, level=level).view(np.uint32),
                                  normals(1 << 17, level=0).view(np.uint32))


def test_normals_do_not_depend_on_chunking(level):
    whole = normals(1000, level=level)
    for first, count in [(0, 1), (1, 63), (63, 2), (64, 64), (100, 500), (999, 1), (5, 0)]:
        part = normals(count, first=first, level=level)
        np.testing.assert_array_equal(part, whole[first:first + count])


def test_normals_are_normal():
    sample = normals(1 << 20)
    assert stats.kstest(sample, "norm").pvalue > 1e-4
    z = sample.astype(np.float64)
    n = z.size
    for power, moment, deviation in [(1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5),
                                     (4, 3, 96**0.5)]:
        assert abs((z**power).mean() - moment) < 5 * deviation / n**0.5
    assert 4.3 < np.abs(z).max() < 6.7
    outputs = z.reshape(-1, 4, 16).transpose(1, 0, 2).reshape(4, -1)
    for a in range(4):
        for b in range(a):
            assert abs(np.corrcoef(outputs[a], outputs[b])[0, 1]) < 0.01
            assert abs(np.corrcoef(outputs[a]**2, outputs[b]**2)[0, 1]) < 0.01


def test_instruction_sets_are_named_and_checked():
    names = instruction_sets()
    assert names[0] == "plain" and len(set(names)) == len(names)
    with pytest.raises(ValueError, match="instruction set"):
        _ops.Pipeline((), len(names))
