"""The DALI loader against the real package: exactly once, and by distribution as specified."""
from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from unet3d import dali, data, loaders, nifti, sampling, spec, train, transforms

PATCH = (16, 16, 16)
CPU = torch.device("cpu")
DRAWS = 3000

#: where a resident pipeline crops: the same code, with volumes in the host's memory or on a GPU
PLACES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device"))]

real = pytest.mark.skipif(loaders.unavailable("dali") is not None,
                          reason="NVIDIA DALI is not installed (pip install nvidia-dali-cuda120)")


@pytest.fixture(autouse=True)
def generated_files(tmp_path, monkeypatch):
    """DALI writes the code of its conditionals to files that stay until the interpreter ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def dataset_of(folder, repeat=3, chain=None):
    return data.VolumeDataset(data.list_cases(folder),
                              chain or transforms.train_transforms(PATCH), 7, repeat)


def loader_of(dataset, sampler=None, name="dali", **options):
    sampler = sampler or sampling.epoch_sampler(dataset, 0)
    return sampler, loaders.build(name, dataset, sampler=sampler,
                                  **({"batch_size": 4, "workers": 2} | options))


@real
@pytest.mark.parametrize("name, at_once", [
    ("dali", 1), ("dali-cached", 1), ("dali-cached", 3), ("dali-resident", 1),
    ("dali-resident", 3)])
def test_epochs_follow_the_sampler_in_one_pipeline(data_folder, monkeypatch, name, at_once):
    """15 samples in batches of 4; a new pipeline is made only where its list ends. A pipeline that
    makes three batches at once continues past the end of an epoch."""
    made = []
    make = dali._training_pipeline
    monkeypatch.setattr(dali, "_training_pipeline", lambda *a, **k: made.append(1) or make(*a, **k))
    monkeypatch.setattr(dali, "HORIZON", 45)
    dataset = dataset_of(data_folder)
    sampler, loader = loader_of(dataset, name=name, dali_batches=at_once, dali_depth=3)
    contents = []
    for epoch in range(1, 6):
        sampler.set_epoch(epoch)
        batches = list(loader)
        assert [len(b[2]) for b in batches] == [4, 4, 4, 3]
        assert [i for b in batches for i in b[2].tolist()] == list(sampler)
        for image, label, index in batches:
            assert image.shape == label.shape == (len(index), 1, *PATCH)
            assert (image.dtype, label.dtype) == (torch.float32, torch.uint8)
        contents.append(torch.cat([b[0] for b in batches]).sum().item())
    assert len(made) == 2 and len(set(contents)) == 5


@real
@pytest.mark.parametrize("name", ["dali", "dali-resident"])
def test_abandoned_epoch_does_not_affect_the_next(data_folder, name):
    dataset = dataset_of(data_folder)
    sampler, loader = loader_of(dataset, name=name, drop_last=True)
    sampler.set_epoch(1)
    first = next(iter(loader))[2].tolist()
    assert first == list(sampler)[:4]
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        assert [i for b in loader for i in b[2].tolist()] == list(sampler)[:12]
    rest = sampling.RestSampler([9, 2, 14])
    _, loader = loader_of(dataset, sampler=rest, name=name, batch_size=2)
    for _ in range(2):
        assert [b[2].tolist() for b in loader] == [[9, 2], [14]]


@real
def test_two_ranks_share_the_epoch(data_folder):
    dataset = dataset_of(data_folder)
    seen = []
    for rank in range(2):
        sampler = sampling.epoch_sampler(dataset, 0, rank, 2)
        sampler.set_epoch(3)
        _, loader = loader_of(dataset, sampler=sampler)
        seen += [i for b in loader for i in b[2].tolist()]
    assert len(seen) == 16 and set(seen) == set(range(15))  # one fills up the last round


@real
@pytest.mark.parametrize("name", ["dali", "dali-resident"])
def test_unreadable_file_raises_with_dali(data_folder, tmp_path, name):
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(data_folder, folder)
    (folder / "case_00002_x.npy").write_bytes(b"nonsense")
    dataset = dataset_of(folder, repeat=1)
    _, loader = loader_of(dataset, name=name, batch_size=1)
    with pytest.raises(nifti.DataError, match="case_00002_x.npy"):
        list(loader)


@real
def test_a_wrong_file_is_noticed(data_folder):
    dataset = dataset_of(data_folder, repeat=1)
    sampler, loader = loader_of(dataset)
    cases = iter(dataset.cases)
    dataset.case = lambda index: next(cases, dataset.cases[index])
    with pytest.raises(nifti.DataError, match="DALI read .*, not "):
        list(loader)


@real
@pytest.mark.parametrize("name", ["dali", "dali-resident"])
def test_cost_of_a_sample_on_one_thread(data_folder, name):
    _, loader = loader_of(dataset_of(data_folder), name=name)
    assert 0 < loader.sample_cost([0, 3, 7]) < 60


def test_missing_package_error_says_how_to_install(data_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali.plugin.pytorch", None)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    for name in ("dali", "dali-cached", "dali-resident"):
        assert "pip install nvidia-dali-cuda120" in loaders.unavailable(name)
        with pytest.raises(loaders.LoaderUnavailable, match="pip install nvidia-dali-cuda120"):
            loader_of(dataset_of(data_folder), name=name)


@real
def test_choices_that_dali_lacks_are_refused(data_folder):
    chain = transforms.train_transforms(PATCH, reference_starts=True)
    with pytest.raises(ValueError, match="last position"):
        loader_of(dataset_of(data_folder, chain=chain))


def run(folder, out, *more, loader="dali"):
    return train.main([
        "--data", str(folder), "--out", str(out), "--loader", loader, "--epochs", "2", "--patch",
        "16", "16", "16", "--filters", "2", "4", "--repeat", "4", "--workers", "1", "--threads",
        "1", "--hash-content", "--device", "cpu", "--no-eval", *more])


@real
def test_training_counts_bounds_and_resumes(data_folder, tmp_path, capsys):
    assert run(data_folder, tmp_path / "torch", "--no-bounds", loader="pytorch") == 0
    out = tmp_path / "dali"
    assert run(data_folder, out, "--dali-cache-objects", "--dali-no-mmap", "--stop-after",
               "11") == train.STOPPED
    assert run(data_folder, out, "--dali-cache-objects", "--dali-no-mmap", "--resume") == 0
    results = [json.loads((tmp_path / name / "result.json").read_text())
               for name in ("torch", "dali")]
    assert results[1]["config"]["loader"] == "dali-cached"
    assert results[1]["costs"]["sample_s"] > 0
    ends = [result["epochs"][-1] for result in results]
    assert ends[0]["index_hash"] == ends[1]["index_hash"]
    assert ends[0]["content_hash"] != ends[1]["content_hash"]


def test_training_without_the_package_and_wrong_options(data_folder, tmp_path, monkeypatch,
                                                        capsys):
    monkeypatch.setitem(sys.modules, "nvidia.dali.plugin.pytorch", None)
    assert run(data_folder, tmp_path, "--no-bounds") == 1
    assert "pip install nvidia-dali-cuda120" in capsys.readouterr().err
    for wrong, loader in (("--dali-no-mmap", "pytorch"), ("--dali-cache-objects", "pytorch"),
                          ("--reference-starts", "dali")):
        with pytest.raises(SystemExit):
            run(data_folder, tmp_path, wrong, loader=loader)


# -- volumes that stay on the device, whether or not DALI is installed ---------------------


class MadeUp:
    """In place of DALI's iterator: the volumes' numbers, of which "voxels" are made."""

    def __init__(self, pipeline, outputs, prepare_first_batch):
        assert outputs == ["image", "label", "number"] and not prepare_first_batch
        self.batches = pipeline

    def __iter__(self):
        for numbers, in self.batches:
            number = torch.from_numpy(np.stack(numbers))
            voxels = number.reshape(-1, 1, 1, 1, 1).expand(-1, 1, *PATCH)
            yield [{"image": voxels.float(), "label": voxels.to(torch.uint8), "number": number}]


@pytest.fixture
def without_dali(monkeypatch):
    """Pipelines are iterators over the order that they were given; the orders are returned."""
    orders = []

    def make(volumes, order, transform, *, batch_size, **_options):
        orders.append(list(order))
        return dali._batches([volumes.numbers], order, batch_size)

    plugin = type(sys)("nvidia.dali.plugin.pytorch")
    plugin.DALIGenericIterator = MadeUp
    for name in ("nvidia", "nvidia.dali", "nvidia.dali.plugin"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    monkeypatch.setattr(dali, "make_resident_pipeline", make)
    return orders


@pytest.mark.parametrize("at_once", [1, 3])
def test_resident_samples_have_the_samplers_cases(data_folder, monkeypatch, without_dali, at_once):
    """Volumes are read once, also for a second pipeline."""
    monkeypatch.setattr(dali, "HORIZON", 45)
    dataset = dataset_of(data_folder)
    sampler, loader = loader_of(dataset, name="dali-resident", dali_batches=at_once)
    load, read = data.Case.load, []
    monkeypatch.setattr(data.Case, "load", lambda case: read.append(case.name) or load(case))
    for epoch in range(1, 5):
        sampler.set_epoch(epoch)
        batches = list(loader)
        assert [len(b[2]) for b in batches] == [4, 4, 4, 3]
        assert [i for b in batches for i in b[2].tolist()] == list(sampler)
        for image, _, index in batches:
            assert image.shape == (len(index), 1, *PATCH)
            assert (image[:, 0, 0, 0, 0] == index % len(dataset.cases)).all()
    assert read == [case.name for case in dataset.cases] and len(without_dali) == 2
    assert len(without_dali[0]) == 3 * 16  # three epochs, each with its last sample twice


def test_resident_sample_of_another_case_is_noticed(data_folder, without_dali):
    dataset = dataset_of(data_folder)
    _, loader = loader_of(dataset, name="dali-resident")
    case = dataset.case
    first = iter(loader)
    next(first)
    dataset.case = lambda index: case(index + 1)
    with pytest.raises(nifti.DataError, match="DALI cropped .*_x.npy, not .*_x.npy"):
        next(first)


def test_resident_volumes_larger_than_half_the_memory_are_refused(data_folder, monkeypatch):
    cases = data.list_cases(data_folder)
    nbytes = sum(case.nbytes for case in cases)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * nbytes - 1, 4 * nbytes))
    with pytest.raises(nifti.DataError, match="more than half of .* cuda:0; choose dali-cached"):
        dali.Volumes(cases, torch.device("cuda:0"))


def test_resident_loader_on_a_cpu_says_so():
    told = loaders.without_device("dali-resident", CPU)
    assert "volumes stay in the host's memory" in told
    assert loaders.without_device("dali-resident", torch.device("cuda")) is None
    assert loaders.without_device("dali-cached", CPU) is None


# -- distributions ------------------------------------------------------------------------


def volumes(folder, label):
    """Files of an image whose values are coordinates, counted up in C order, and `label`."""
    image = np.arange(label.size, dtype=np.float32).reshape(label.shape)
    paths = str(folder / "x.npy"), str(folder / "y.npy")
    np.save(paths[0], image)
    np.save(paths[1], label)
    return paths


def draw(folder, label, patch, draws=DRAWS, around_one=False, cache_objects=False,
         oversampling=spec.FOREGROUND_PROBABILITY, resident=None):
    """`draws` samples of one case: images [draws, *patch], float64, and labels. `resident`: the
    device on which the case stays; None: files are read."""
    x, y = (Path(path) for path in volumes(folder, label))
    transform = transforms.train_transforms(patch, around_one, oversampling=oversampling)
    options = {"batch_size": 500, "threads": 2, "seed": 11}
    if resident is None:
        pipeline = dali.make_pipeline([str(x)], [str(y)], transform, device=CPU,
                                      cache_objects=cache_objects, **options)
    else:
        device = torch.device(resident)
        case = data.Case("case", x, y, x.stat().st_size + y.stat().st_size)
        kept = dali.Volumes([case], device)
        pipeline = dali.make_resident_pipeline(kept, [0], transform, device=device, **options)
    batches = [pipeline.run() for _ in range(draws // 500)]
    return [np.concatenate([np.asarray((b[i] if resident != "cuda" else b[i].as_cpu()).as_array())
                            [:, 0] for b in batches]) for i in range(2)]


@real
@pytest.mark.parametrize("place", PLACES)
def test_resident_crops_come_from_the_right_case(data_folder, monkeypatch, place):
    """Without brightness and noise all voxels of a crop occur in its case, and not all of them in
    another case."""
    monkeypatch.setattr(spec, "BRIGHTNESS_PROBABILITY", 0.0)
    monkeypatch.setattr(spec, "NOISE_PROBABILITY", 0.0)
    dataset = dataset_of(data_folder)
    _, loader = loader_of(dataset, name="dali-resident", device=torch.device(place))
    for image, label, index in loader:
        assert image.device.type == label.device.type == place
        for one, number in zip(image.cpu().numpy(), index.tolist()):
            assert np.isin(one, dataset.case(number).load()[0]).all()
            assert not np.isin(one, dataset.case(number + 1).load()[0]).all()


def undo(images, shape):
    """(factor, flipped axes [n, 3], starts [n, 3], noise [n, voxels]) of coordinate images.

    Along the first axis a step is `stride` coordinates: its mean slope gives the factor
    (of brightness) to a ten-thousandth even under noise, signs of slopes give the flips.
    """
    axes = (1, 2, 3)
    flipped = np.stack([np.diff(images, axis=a).mean(axes) < 0 for a in axes], 1)
    upright = np.stack([np.flip(im, np.flatnonzero(f)) for im, f in zip(images, flipped)])
    stride = shape[2] * shape[3] * (images.shape[1] - 1)
    factor = (upright[:, -1] - upright[:, 0]).mean((1, 2)) / stride
    corner = np.rint((upright / factor[:, None, None, None]).min(axes)).astype(int)
    starts = np.stack(np.unravel_index(corner, shape[1:]), 1)
    grid = np.indices(images.shape[1:]).reshape(3, -1)
    clean = np.stack([np.ravel_multi_index(grid + s[:, None], shape[1:]) for s in starts])
    return factor, flipped, starts, upright.reshape(len(images), -1) - factor[:, None] * clean


def uniform(counts):
    return stats.chisquare(counts).pvalue


@real
@pytest.mark.parametrize("around_one", [False, True])
def test_augmentations_are_distributed_as_specified(tmp_path, around_one):
    """Without foreground: uniform starts, flips of a third each, brightness, noise."""
    shape = (1, 12, 11, 10)
    label = np.zeros(shape, np.uint8)
    images, labels = draw(tmp_path, label, (8, 8, 8), 9000, around_one)
    assert not labels.any()
    factor, flipped, starts, noise = undo(images.astype(np.float64), shape)
    for axis, count in enumerate((5, 4, 3)):
        counts = np.bincount(starts[:, axis], minlength=count)
        assert len(counts) == count and uniform(counts) > 0.001
    share = np.array([2 / 3, 1 / 3])
    expected = np.einsum("i,j,k->ijk", share, share, share).ravel() * len(images)
    counts = np.bincount(flipped @ [4, 2, 1], minlength=8)
    assert stats.chisquare(counts, expected).pvalue > 0.001
    low, high = (0.7, 1.3) if around_one else (1.7, 2.3)
    changed = np.abs(factor - 1) > 0.002  # a factor around one may come that close
    assert changed.mean() == pytest.approx(0.1, abs=0.012)
    assert stats.kstest(factor[changed], stats.uniform(low, high - low).cdf).pvalue > 0.001
    deviation = noise.std(1)
    noisy = deviation > 0.001
    assert noisy.mean() == pytest.approx(0.1, abs=0.012)
    assert stats.kstest(deviation[noisy], stats.uniform(0, 0.1).cdf).pvalue > 0.001
    values = (noise[noisy] / deviation[noisy, None]).ravel()[:5000]
    assert stats.kstest(values, "norm").pvalue > 0.001


@real
@pytest.mark.parametrize("resident", [None, *PLACES])
def test_image_and_label_are_the_same_place(tmp_path, resident):
    """The label's parity pattern must fit the coordinates of its image."""
    shape = (1, 20, 12, 10)
    label = (np.arange(np.prod(shape)) % 3).astype(np.uint8).reshape(shape)
    images, labels = draw(tmp_path, label, (8, 8, 8), 500, resident=resident)
    factor, flipped, starts, noise = undo(images.astype(np.float64), shape)
    for row in range(len(images)):
        window = tuple(slice(s, s + 8) for s in starts[row])
        np.testing.assert_array_equal(
            np.flip(labels[row], np.flatnonzero(flipped[row])), label[(0, *window)])


@real
@pytest.mark.parametrize("resident", [None, *PLACES])
def test_foreground_share(tmp_path, resident):
    label = np.zeros((1, 40, 8, 8), np.uint8)
    label[0, 30, 2, 2] = 1
    images, labels = draw(tmp_path, label, (8, 8, 8), resident=resident)
    hits = labels.any((1, 2, 3)).mean()
    assert hits == pytest.approx(0.4 + 0.6 * 8 / 33, abs=0.03)


@real
@pytest.mark.parametrize("cache_objects, resident", [(False, None), (True, None), (True, "cpu")])
def test_foreground_class_and_component(tmp_path, cache_objects, resident):
    """A class uniformly, then one of its two components with the largest boxes."""
    label = np.zeros((1, 60, 8, 8), np.uint8)
    label[0, 2:6, 1:5, 1:5] = 1      # box 64
    label[0, 20, 1, 1] = 1           # box 1: the third, never chosen
    label[0, 30:33, 0:4, 0:4] = 1    # box 48
    label[0, 50:52, 2:4, 2:4] = 2
    label[0, 52:54, 4:6, 4:6] = 2    # touches only at a corner: a separate component
    images, labels = draw(tmp_path, label, (8, 8, 8), cache_objects=cache_objects,
                          oversampling=1.0, resident=resident)
    z = undo(images.astype(np.float64), label.shape)[2][:, 0]
    groups = [(z < 13).sum(), ((22 < z) & (z <= 30)).sum(), (z > 40).sum()]
    assert sum(groups) == DRAWS  # none around the small one, which would need 13 to 20
    expected = np.array([0.25, 0.25, 0.5]) * DRAWS
    assert stats.chisquare(groups, expected).pvalue > 0.001
    # Two boxes of 2 among slices 50 to 53: starts 44 to 50 and 46 to 52, half each.
    counts = np.bincount(z[z > 40] - 44, minlength=9)
    expected = np.convolve(np.ones(7), [0.5, 0, 0.5]) / 7 * counts.sum()
    assert len(counts) == 9 and stats.chisquare(counts, expected).pvalue > 0.001


@real
def test_slack_is_uniform_and_window_stays_inside(tmp_path):
    label = np.zeros((1, 40, 40, 12), np.uint8)
    label[0, 20:23, 15:25, 11] = 1  # 3, 10 and 1 voxels; the last at the volume's edge
    images, labels = draw(tmp_path, label, (8, 8, 8), oversampling=1.0)
    z, y, x = undo(images.astype(np.float64), label.shape)[2].T
    assert uniform(np.bincount(z - 15, minlength=6)) > 0.001 and set(z) == set(range(15, 21))
    # Longer than the patch: the window lies inside the box.
    assert uniform(np.bincount(y - 15, minlength=3)) > 0.001 and set(y) == {15, 16, 17}
    assert set(x) == {4}
    label = np.zeros((1, 16, 16, 16), np.uint8)
    label[0, 1, 13, 8] = 1  # starts -6..1, 6..13, 1..8 before they are pushed back
    images, labels = draw(tmp_path, label, (8, 8, 8), oversampling=1.0)
    z, y, x = undo(images.astype(np.float64), label.shape)[2].T
    for found, expected in ((z, [7, 1]), (y, [1, 1, 6])):
        counts = np.bincount(found - found.min())
        share = np.array(expected) / 8 * DRAWS
        assert len(counts) == len(share) and stats.chisquare(counts, share).pvalue > 0.001
    assert (z.min(), y.min()) == (0, 6) and uniform(np.bincount(x - 1, minlength=8)) > 0.001
