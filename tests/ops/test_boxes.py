"""Foreground boxes against scipy.ndimage.label and find_objects."""
from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from minato import ops

from . import reference
from .conftest import STRESS, make_label


def expected(label: np.ndarray):
    return [(int(value), ndimage.label(label == value)[1],
             tuple(reference.boxes(label, value)))
            for value in np.unique(label[label > 0])]


def check(label: np.ndarray) -> None:
    assert ops.label_boxes(label) == expected(label)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.tuples(*[st.integers(1, 9)] * 3), st.floats(0, 1),
       st.integers(1, 4))
def test_boxes_of_noise_equal_reference(seed, shape, density, classes):
    rng = np.random.default_rng(seed)
    label = rng.integers(1, classes + 1, (1, *shape)) * (rng.random((1, *shape)) < density)
    check(label.astype(np.uint8))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 12))
def test_boxes_of_blobs_equal_reference(seed, blobs):
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 40, 3)
    check(make_label(rng, shape, blobs, (1, 2, 255)))


def test_shapes_that_join_late():
    """Combs, rings and spirals: parts that join only rows or planes later."""
    comb = np.zeros((1, 9, 9, 9), np.uint8)
    comb[0, :8, ::2, ::2] = 1
    comb[0, 8] = 1
    check(comb)
    check(np.ascontiguousarray(comb[:, ::-1]))
    ring = np.zeros((1, 3, 12, 12), np.uint8)
    ring[0, 1, 1:11, 1:11] = 3
    ring[0, 1, 3:9, 3:9] = 0
    ring[0, 1, 5:7, 5:7] = 3
    check(ring)
    spiral = np.zeros((1, 1, 7, 7), np.uint8)
    spiral[0, 0] = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0, 1],
                    [1, 0, 0, 0, 1, 0, 1], [1, 0, 1, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0, 1],
                    [1, 1, 1, 1, 1, 1, 1]]
    check(spiral)


def test_corners_and_edges_do_not_connect():
    label = np.zeros((1, 2, 2, 2), np.uint8)
    label[0, 0, 0, 0] = label[0, 1, 1, 1] = label[0, 0, 1, 1] = 1
    assert ops.label_boxes(label)[0][1] == 2
    check(label)


def test_neighbouring_classes_do_not_connect():
    label = np.arange(1, 256, dtype=np.uint8).reshape(1, 1, 1, 255)
    boxes = ops.label_boxes(label)
    assert [b[0] for b in boxes] == list(range(1, 256)) and all(b[1] == 1 for b in boxes)


def test_equal_boxes_are_ranked_by_place():
    """Of equal boxes the later ones count as larger: a stable ascending sort."""
    label = np.zeros((1, 1, 1, 9), np.uint8)
    label[0, 0, 0, [0, 2, 4, 6]] = 1
    assert ops.label_boxes(label)[0][2] == (((0, 0, 4), (1, 1, 5)), ((0, 0, 6), (1, 1, 7)))
    label[0, 0, 0, 1] = 1
    check(label)


def test_nothing_and_everything():
    assert ops.label_boxes(np.zeros((1, 4, 5, 6), np.uint8)) == []
    check(np.full((1, 4, 5, 6), 9, np.uint8))


def test_strided_memory():
    label = make_label(np.random.default_rng(5), (12, 14, 16))
    for view in (label[:, ::-1], label[:, :, ::-2], label[..., ::-1], label[..., 1::3],
                 np.asfortranarray(label), label.transpose(0, 3, 1, 2)):
        assert ops.label_boxes(view) == expected(np.ascontiguousarray(view))


def test_a_file_in_pieces(tmp_path):
    """Larger than one read, with planes cut into pieces."""
    label = make_label(np.random.default_rng(6), (40, 130, 171), 12)
    np.save(tmp_path / "label.npy", label)
    assert ops.label_boxes(tmp_path / "label.npy") == expected(label)


def test_long_rows_and_many_components():
    label = np.zeros((1, 2, 3, 70001), np.uint8)
    label[..., ::2] = 1
    check(label)


@pytest.mark.parametrize("bad", [np.zeros((1, 2, 2, 2), np.float32),
                                 np.zeros((2, 2, 2, 2), np.uint8)])
def test_boxes_of_invalid_labels_raise(bad):
    with pytest.raises(ValueError, match="balanced crop needs"):
        ops.label_boxes(bad)


def test_real_labels(kits19):
    """Every real file, each second voxel of each axis."""
    import nibabel

    for path in kits19:
        volume = np.asarray(nibabel.load(path).dataobj)
        label = np.ascontiguousarray(volume[None, ::2, ::2, ::2], np.uint8)
        check(label)


def test_one_real_label_at_full_size(kits19):
    import nibabel

    smallest = min(kits19, key=lambda path: nibabel.load(path).shape[0])
    check(np.ascontiguousarray(np.asarray(nibabel.load(smallest).dataobj)[None], np.uint8))


def test_boxes_of_random_labels_equal_reference():
    rng = np.random.default_rng()
    seed = rng.bit_generator.seed_seq.entropy
    end = time.monotonic() + STRESS
    while time.monotonic() < end:
        shape = rng.integers(1, 24, 3)
        density = rng.random()
        label = rng.integers(1, 4, (1, *shape)) * (rng.random((1, *shape)) < density)
        smooth = ndimage.grey_closing(label[0].astype(np.uint8), size=2)[None]
        for volume in (label.astype(np.uint8), smooth):
            assert ops.label_boxes(volume) == expected(volume), f"entropy {seed}"
