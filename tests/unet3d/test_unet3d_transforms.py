"""Every training transform against the specification, by distribution, seeds fixed."""
from __future__ import annotations

import random

import numpy as np
import pytest
from scipy import stats

from unet3d import transforms

DRAWS = 3000


@pytest.fixture(autouse=True)
def seeds():
    random.seed(11)
    np.random.seed(11)


def coordinates(shape):
    """An image whose values show where a voxel came from."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(1, *shape)


def start_of(patch_image, shape):
    return np.unravel_index(int(patch_image[0, 0, 0, 0]), shape)


def uniform(counts):
    """p-value of the hypothesis that all outcomes are equally likely."""
    return stats.chisquare(counts).pvalue


def crop_starts(crop, label, draws=DRAWS):
    shape = label.shape[1:]
    image = coordinates(shape)
    starts = []
    for _ in range(draws):
        x, y = crop(image, label)
        start = start_of(x, shape)
        assert x.shape == y.shape == (1, *crop.patch)
        window = tuple(slice(s, s + p) for s, p in zip(start, crop.patch))
        assert (y == label[(slice(None), *window)]).all()
        starts.append(start)
    return np.array(starts)


def test_random_crop_takes_every_valid_start_equally():
    label = np.zeros((1, 8, 6, 5), np.uint8)
    starts = crop_starts(transforms.RandBalancedCrop((4, 4, 4), 0.0), label)
    for axis, count in enumerate((5, 3, 2)):
        counts = np.bincount(starts[:, axis], minlength=count)
        assert len(counts) == count and uniform(counts) > 0.001


def test_reference_starts_leave_out_the_last():
    label = np.zeros((1, 8, 6, 4), np.uint8)
    starts = crop_starts(transforms.RandBalancedCrop((4, 4, 4), 0.0, True), label, 500)
    assert starts.max(0).tolist() == [3, 1, 0]


def test_foreground_probability_and_no_foreground():
    label = np.zeros((1, 40, 4, 4), np.uint8)
    label[0, 30, 2, 2] = 1
    starts = crop_starts(transforms.RandBalancedCrop((4, 4, 4)), label)
    hits = ((starts[:, 0] <= 30) & (starts[:, 0] > 26)).mean()
    assert hits == pytest.approx(0.4 + 0.6 * 4 / 37, abs=0.03)
    empty = np.zeros((1, 8, 4, 4), np.uint8)
    starts = crop_starts(transforms.RandBalancedCrop((4, 4, 4), 1.0), empty, 1000)
    assert uniform(np.bincount(starts[:, 0], minlength=5)) > 0.001


def test_foreground_class_and_component():
    """A class uniformly, then one of its two components with the largest boxes."""
    label = np.zeros((1, 60, 6, 6), np.uint8)
    label[0, 2:6, 1:5, 1:5] = 1      # box 64
    label[0, 20, 1, 1] = 1           # box 1: the third, never chosen
    label[0, 30:33, 0:4, 0:4] = 1    # box 48
    label[0, 50:52, 2:4, 2:4] = 2
    starts = crop_starts(transforms.RandBalancedCrop((6, 6, 6), 1.0), label)[:, 0]
    groups = [(starts < 14).sum(), ((14 < starts) & (starts <= 20)).sum(),
              ((24 < starts) & (starts <= 33)).sum(), (starts > 40).sum()]
    assert sum(groups) == DRAWS and groups[1] == 0
    expected = np.array([0.25, 0.25, 0.5]) * DRAWS
    assert stats.chisquare([groups[0], groups[2], groups[3]], expected).pvalue > 0.001


def test_diagonal_neighbours_are_two_components():
    label = np.zeros((1, 6, 6, 6), np.uint8)
    label[0, 0:2, 0:2, 0:2] = label[0, 2:5, 2:5, 2:5] = 1
    boxes = transforms.largest_boxes(label, 1)
    assert [b[0] for b in boxes] == [slice(0, 2), slice(2, 5)]


def test_slack_is_split_uniformly_and_box_is_covered():
    label = np.zeros((1, 40, 40, 40), np.uint8)
    label[0, 20:23, 15:25, 20] = 1  # 3, 10 and 1 voxels; patch 8
    starts = crop_starts(transforms.RandBalancedCrop((8, 8, 8), 1.0), label)
    z, y, x = starts.T
    assert uniform(np.bincount(z - 15, minlength=6)) > 0.001 and set(z) == set(range(15, 21))
    # Longer than the patch: the window lies inside the box.
    assert uniform(np.bincount(y - 15, minlength=3)) > 0.001 and set(y) == {15, 16, 17}
    assert uniform(np.bincount(x - 13, minlength=8)) > 0.001 and set(x) == set(range(13, 21))


def test_window_is_pushed_back_inside():
    label = np.zeros((1, 12, 12, 12), np.uint8)
    label[0, 0, 11, 5] = 1
    starts = crop_starts(transforms.RandBalancedCrop((8, 8, 8), 1.0), label, 500)
    assert set(starts[:, 0]) == {0} and set(starts[:, 1]) == {4}


def test_crop_of_a_small_volume_is_an_error():
    volume = np.zeros((1, 4, 8, 8), np.uint8)
    with pytest.raises(ValueError, match="smaller than the patch"):
        transforms.RandBalancedCrop((8, 8, 8))(volume, volume)


def test_flips_are_independent_with_a_third_each():
    image = coordinates((2, 2, 2))
    counts = np.zeros((2, 2, 2))
    for _ in range(DRAWS):
        x, y = transforms.RandFlip()(image, image)
        np.testing.assert_array_equal(x, y)
        flipped = start_of(x, (2, 2, 2))
        axes = [a + 1 for a in range(3) if flipped[a]]
        np.testing.assert_array_equal(x, np.flip(image, axes) if axes else image)
        counts[flipped] += 1
    share = np.array([2 / 3, 1 / 3])
    expected = np.einsum("i,j,k->ijk", share, share, share) * DRAWS
    assert stats.chisquare(counts.ravel(), expected.ravel()).pvalue > 0.001


def test_cast_copies_and_frees_the_volume():
    whole = np.zeros((1, 8, 8, 8), np.float64)
    x, y = transforms.Cast()(whole[:, 2:4], whole[:, 2:4])
    assert (x.dtype, y.dtype) == (np.float32, np.uint8)
    assert x.base is None and y.base is None and x.flags.c_contiguous
    same = np.zeros((1, 8, 8, 8), np.float32)
    assert transforms.Cast()(same[:, 2:4], same)[0].base is None


@pytest.mark.parametrize("around_one, low, high", [(False, 1.7, 2.3), (True, 0.7, 1.3)])
def test_brightness(around_one, low, high):
    transform = transforms.RandBrightness(around_one)
    image, label = np.ones((1, 1, 1, 2), np.float32), np.ones((1, 1, 1, 2), np.uint8)
    factors = []
    for _ in range(4 * DRAWS):
        x, y = transform(image, label)
        assert x.dtype == np.float32 and y is label and x[0, 0, 0, 0] == x[0, 0, 0, 1]
        if x is not image:
            factors.append(float(x[0, 0, 0, 0]))
    assert len(factors) / (4 * DRAWS) == pytest.approx(0.1, abs=0.01)
    assert stats.kstest(factors, stats.uniform(low, high - low).cdf).pvalue > 0.001


def test_gaussian_noise():
    image, label = np.full((1, 8, 8, 8), 3, np.float32), np.zeros((1, 8, 8, 8), np.uint8)
    deviations, values = [], []
    for _ in range(4 * DRAWS):
        x, y = transforms.GaussianNoise()(image, label)
        assert x.dtype == np.float32 and y is label
        if x is not image:
            deviations.append(float((x - image).std()))
            values.append(((x - image) / deviations[-1]).ravel())
    assert len(deviations) / (4 * DRAWS) == pytest.approx(0.1, abs=0.01)
    assert stats.kstest(deviations, stats.uniform(0, 0.1).cdf).pvalue > 0.001
    assert stats.kstest(np.concatenate(values)[:5000], "norm").pvalue > 0.001


def test_chain_order_and_generators():
    """The chain uses both global generators, and nothing else."""
    chain = transforms.train_transforms((4, 4, 4))
    names = [type(step).__name__ for step in chain.steps]
    assert names == ["RandBalancedCrop", "RandFlip", "Cast", "RandBrightness",
                     "GaussianNoise"]
    image = coordinates((12, 12, 12))
    label = (np.random.default_rng(0).random(image.shape) > 0.9).astype(np.uint8)

    def run():
        random.seed(2)
        np.random.seed(2)
        return np.stack([chain(image, label)[0] for _ in range(60)])

    first = run()
    np.testing.assert_array_equal(first, run())
    random.seed(3)
    np.random.seed(2)
    other = np.stack([chain(image, label)[0] for _ in range(60)])
    assert (first != other).any()


@pytest.mark.parametrize("reference_starts", [False, True])
def test_no_choice_draws_nothing(reference_starts):
    """As in the reference; otherwise later draws would differ."""
    label = np.zeros((1, 4, 4, 4), np.uint8)
    crop = transforms.RandBalancedCrop((4, 4, 4), 0.0, reference_starts)
    random.seed(5)
    random.random()  # foreground or not
    expected = random.random()
    random.seed(5)
    crop(label, label)
    assert random.random() == expected


def test_brightness_is_rounded_once():
    """The reference multiplies in float64."""
    image = np.random.default_rng(0).normal(size=(1, 8, 8, 8)).astype(np.float32)
    for seed in range(200):
        random.seed(seed)
        if random.random() < 0.1:
            break
    random.seed(seed)
    np.random.seed(seed)
    made, _ = transforms.RandBrightness()(image, image)
    np.random.seed(seed)
    factor = np.random.uniform(0.7, 1.3, size=1)
    np.testing.assert_array_equal(made, (image * (1 + factor)).astype(np.float32))
    assert made.dtype == np.float32
