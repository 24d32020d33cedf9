"""All loaders that need no additional package, on the same epochs."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest
import torch

from unet3d import data, loaders, sampling, transforms
from unet3d.bench import meters

PATCH = (16, 16, 16)
NAMES = [name for name in loaders.LOADERS if not name.startswith("dali")]
ANY_ORDER = ("pytorch-ooo", "minato-ready")


def dataset_of(folder, name="pytorch", seed=7, repeat=3):
    cases = data.list_cases(folder)
    reference = data.VolumeDataset(cases, transforms.train_transforms(PATCH), seed, repeat)
    return loaders.dataset_for(name, reference)


def need(name):
    if reason := loaders.unavailable(name):
        pytest.skip(reason)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_deliver_the_epoch(data_folder, name, workers):
    need(name)
    dataset = dataset_of(data_folder, name)
    sampler = sampling.epoch_sampler(dataset, 0)
    loader = loaders.build(name, dataset, batch_size=4, sampler=sampler, workers=workers)
    for epoch in (1, 2):  # the same loader, so workers outlive the epoch
        sampler.set_epoch(epoch)
        dataset.set_epoch(epoch)
        batches = list(loader)
        sizes = sorted(tuple(b[0].shape) for b in batches)
        assert sizes == [(3, 1, *PATCH)] + [(4, 1, *PATCH)] * 3
        indices = [i for b in batches for i in b[2].tolist()]
        assert sorted(indices) == list(range(15))
        if name not in ANY_ORDER:
            assert indices == list(sampler)
        assert all(b[0].dtype == torch.float32 and b[1].dtype == torch.uint8 and
                   b[2].dtype == torch.int64 for b in batches)
        if loaders.samples_of(name) is not None:
            for image, label, index in batches:
                expected = dataset[int(index[0])]
                np.testing.assert_array_equal(image[0], expected[0])
                np.testing.assert_array_equal(label[0], expected[1])


@pytest.mark.parametrize("kind", ["reference", "native"])
def test_loaders_of_a_kind_deliver_the_same_bytes(data_folder, kind):
    """The hash of an epoch is the same under every loader of the kind, another epoch's and
    the other kind's are not."""
    hashes = {}
    for name in NAMES:
        if loaders.samples_of(name) != kind:
            continue
        need(name)
        dataset = dataset_of(data_folder, name)
        sampler = sampling.epoch_sampler(dataset, 0)
        loader = loaders.build(name, dataset, batch_size=4, sampler=sampler, workers=2)
        for epoch in (1, 2):
            sampler.set_epoch(epoch)
            dataset.set_epoch(epoch)
            made = meters.DeliveryHash(True)
            for image, label, index in loader:
                made.add(image, label, index.tolist())
            hashes.setdefault(epoch, {})[name] = made.state()["content"]
    assert len(hashes[1]) == {"reference": 7, "native": 8}[kind]
    for found in hashes.values():
        assert len(set(found.values())) == 1, found
    assert not set(hashes[1].values()) & set(hashes[2].values())


def test_native_loader_has_same_cases_and_options(data_folder):
    need("minato-native")
    reference = dataset_of(data_folder)
    twin = loaders.dataset_for("pytorch-native", reference)
    assert loaders.dataset_for("minato-native", twin) is twin
    assert loaders.dataset_for("pytorch", reference) is reference
    assert len(twin) == len(reference) == 15
    assert [twin.case(i).name for i in range(15)] == [reference.case(i).name for i in range(15)]
    chain = transforms.train_transforms(PATCH, True, True)
    other = loaders.dataset_for("minato-native",
                                data.VolumeDataset(reference.cases, chain, None))
    crop, scale = other.pipeline.operators[1], other.pipeline.operators[4]
    assert not crop.include_last and scale.around_one and other.keyed_by == "sample"


def test_the_timeout_reaches_the_workers_loader(data_folder):
    dataset = dataset_of(data_folder)
    for workers, expected in ((0, 0.0), (1, 30.0)):
        loader = loaders.build("pytorch", dataset, batch_size=1, workers=workers,
                               sampler=sampling.epoch_sampler(dataset, 0), timeout_s=30.0)
        assert loader.timeout == expected


@pytest.mark.parametrize("name", ["minato", "minato-native", "pytorch-native"])
def test_minato_is_imported_only_when_used(data_folder, monkeypatch, name,
                                                               capsys):
    dataset = dataset_of(data_folder)
    monkeypatch.setitem(sys.modules, "minato", None)
    monkeypatch.delitem(sys.modules, "unet3d.native", raising=False)
    with pytest.raises(loaders.LoaderUnavailable, match="pip install"):
        loaders.build(name, dataset, batch_size=1, workers=0,
                      sampler=sampling.epoch_sampler(dataset, 0))
    assert "pip install" in loaders.unavailable(name)
    assert loaders.available([name, "pytorch"]) == ["pytorch"]
    assert f"left out: {name}: " in capsys.readouterr().err
    assert loaders.unavailable("pytorch") is None


def test_unbuilt_sources_are_reported(tmp_path):
    """As from the repository's root where minato was installed elsewhere."""
    import minato

    package = Path(minato.__file__).parent
    shutil.copytree(package, tmp_path / "minato", ignore=shutil.ignore_patterns("*.so"))
    # An editable install would find the extensions where they were built.
    code = ("import os, sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in repr(f)]; "
            "ours = '', os.environ.get('PYTHONPATH'); "
            "sys.path[:] = [p for p in sys.path if p in ours or not os.path.isdir(p + '/minato')]; "
            "import minato")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                          capture_output=True, timeout=120, check=False,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert done.returncode == 1
    assert "is not built for this Python" in done.stderr and "pip install -e ." in done.stderr

    installed = tmp_path / "site" / "minato"
    installed.mkdir(parents=True)
    (installed / f"_core{EXTENSION_SUFFIXES[0]}").touch()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                          capture_output=True, timeout=120, check=False,
                          env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert done.returncode == 1
    assert f"instead of the installed minato in {installed}. Run Python from a directory" in done.stderr


def test_an_unknown_loader_is_named(data_folder):
    dataset = dataset_of(data_folder)
    with pytest.raises(ValueError, match="unknown loader"):
        loaders.build("fast", dataset, batch_size=1, workers=0,
                      sampler=sampling.epoch_sampler(dataset, 0))
