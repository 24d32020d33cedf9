"""Operators written in C by a user, built outside the tree."""
from __future__ import annotations

import importlib
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minato
from minato import ops

from . import reference
from .conftest import make_pair
from .native import Host

SOURCE = Path(__file__).with_name("user_operator")
KEY = (5, 6)


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("user_operator")
    for name in ("mirror_operator.c", "setup.py"):
        shutil.copy(SOURCE / name, folder)
    packages = str(Path(minato.__file__).parents[1])
    built = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
                           cwd=folder, env={**os.environ, "PYTHONPATH": packages},
                           capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("mirror_operator")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("mirror_operator", None)


@pytest.fixture
def pair():
    return make_pair(8, (6, 7, 9))


def test_in_place(mine, pair):
    pipeline = ops.Pipeline([ops.RandFlip(1), ops.UserOperator(mine.invert, 0.5), ops.RandCrop(4)])
    inverted = 0
    before = pair[0].copy()
    for key in range(40):
        image, label = reference.rand_flip(*pair, reference.Draws((key, 1), 0), (1, 1, 1))
        negate = reference.Draws((key, 1), 1).u(0) < 0.5
        want = reference.rand_crop(-image if negate else image, label,
                                   reference.Draws((key, 1), 2), (4, 4, 4))
        for got, expected in zip(pipeline(*pair, key=(key, 1)), want):
            np.testing.assert_array_equal(got, expected)
        inverted += negate
    assert 5 < inverted < 35
    np.testing.assert_array_equal(pair[0], before)


def test_alone_never_writes_to_the_input(mine, pair):
    before = pair[0].copy()
    image, label = ops.UserOperator(mine.invert, 1.0)(*pair, key=KEY)
    np.testing.assert_array_equal(image, -before)
    np.testing.assert_array_equal(pair[0], before)
    np.testing.assert_array_equal(label, pair[1])


def test_new_shape(mine, pair):
    pipeline = ops.Pipeline([ops.UserOperator(mine.halve), ops.Normalize()])
    image, label = pipeline(*pair, key=KEY)
    assert image.shape == label.shape == (1, 6, 7, 5)
    np.testing.assert_array_equal(label, pair[1][..., ::2])
    assert pipeline(pair[0], key=KEY)[1] is None


def test_in_a_dataset(mine, files):
    steps = [ops.ReadNpy(), ops.RandCrop((5, 6, 8)), ops.UserOperator(mine.halve),
             ops.UserOperator(mine.invert, 1.0)]
    dataset = ops.VolumeDataset(files, ops.Pipeline(steps), output="numpy", seed=3)
    twin = pickle.loads(pickle.dumps(dataset))
    host = Host(dataset.native_pipeline())
    assert host.fields[0] == (np.dtype("f4"), (1, 5, 6, 4))
    for index in range(3):
        rc, arrays = host.run(index, (3, index))
        assert rc == 0
        for a, b, c in zip(arrays, dataset[index], twin[index]):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)


def test_operator_errors_name_the_operator(mine, pair):
    with pytest.raises(ValueError, match="operator invert: the image must be float32"):
        ops.UserOperator(mine.invert, 1.0)(pair[1], key=KEY)
    with pytest.raises(ValueError, match="operator broken: no plan for 6 planes"):
        ops.UserOperator(mine.broken, 0.0)(*pair, key=KEY)
    with pytest.raises(OSError, match="operator broken: failed without a message"):
        ops.UserOperator(mine.broken, 1.0)(*pair, key=KEY)
    with pytest.raises(ValueError, match="impossible dtype or shape"):
        ops.UserOperator(mine.broken, 2.0)(*pair, key=KEY)
    with pytest.raises(ValueError, match="ABI 2 .* this minato has ABI 1"):
        ops.UserOperator(mine.foreign, 1.0)(*pair, key=KEY)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        ops.UserOperator(dict)(*pair, key=KEY)
