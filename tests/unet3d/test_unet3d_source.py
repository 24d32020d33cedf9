"""Training from NIfTI: the samples of preprocessed data, with and without a cache."""
from __future__ import annotations

import csv
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from unet3d import data, evaluate, nifti, preprocess, source, train, transforms

PATCH = (16, 16, 16)
SMALL = preprocess.Settings(min_shape=PATCH)  # of the fixtures
TINY = ["--patch", "16", "16", "16", "--filters", "2", "4", "--repeat", "2", "--threads", "1",
        "--hash-content", "--no-bounds", "--no-eval", "--device", "cpu", "--epochs", "2",
        "--step-ms", "0"]


def hashes(out):
    with open(out / "epochs.csv", newline="") as stream:
        return [(row["index_hash"], row["content_hash"], row["read_mb_s"] != "0")
                for row in csv.DictReader(stream)]


@pytest.fixture(scope="module")
def wanted(data_folder, tmp_path_factory):
    """The hashes of a run on preprocessed data."""
    out = tmp_path_factory.mktemp("wanted")
    assert train.main(["--data", str(data_folder), "--out", str(out), "--loader", "pytorch",
                       "--workers", "1", *TINY]) == 0
    return hashes(out)


def forget():
    """As in another program: this one opens its cache anew."""
    source.memoized.cache_clear()
    source.cache_of.cache_clear()


@pytest.fixture
def cached(monkeypatch):
    """The size of a cache, whose file is in a folder of this test."""
    from minato.cache import cache

    folder = Path(tempfile.mkdtemp(prefix="minato-test-", dir=cache.MEMORY))
    monkeypatch.setattr(cache, "folder", lambda _directory: str(folder))
    forget()
    yield 64 << 20
    forget()
    shutil.rmtree(folder)


def test_source_volumes_equal_preprocessed_ones(nifti_folder, data_folder):
    made = data.list_cases(data_folder)
    found = source.list_sources(nifti_folder, SMALL)
    assert [case.name for case in found] == [case.name for case in made]
    for before, after in zip(found, made):
        assert before.nbytes == after.nbytes
        for one, other in zip(before.load(), after.load()):
            assert one.dtype == other.dtype and one.shape[1:] == before.shape
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("loader", ["pytorch", "minato"])
def test_training_from_source_delivers_the_same_bytes(nifti_folder, wanted, tmp_path, loader):
    assert train.main(["--source", str(nifti_folder), "--out", str(tmp_path), "--loader", loader,
                       "--workers", "1", *TINY]) == 0
    assert hashes(tmp_path) == wanted


def test_cached_source_is_prepared_once(nifti_folder, wanted, tmp_path, monkeypatch, cached):
    """Two epochs of four cases twice, by two workers: each case is prepared by one of them."""
    made, prepare = tmp_path / "made", preprocess.load_case

    def count(case: Path, how: preprocess.Settings):
        with open(made, "a") as stream:
            stream.write(f"{case.name}\n")
        return prepare(case, how)

    monkeypatch.setattr(preprocess, "load_case", count)
    monkeypatch.setattr(source, "SLAB_BYTES", 100_000)  # several slabs a case
    out = tmp_path / "out"
    assert train.main(["--source", str(nifti_folder), "--out", str(out), "--loader", "minato",
                       "--workers", "2", "--cache", str(cached), *TINY]) == 0
    assert hashes(out) == wanted
    prepared = made.read_text().split()
    assert sorted(prepared) == sorted(set(prepared)) and len(prepared) == 4
    stats = source.cache_of(cached).stats()
    assert stats["stored"] > 4 and stats["refused"] == 0


def test_small_cache_leaves_samples_right(nifti_folder, data_folder, monkeypatch, cached):
    """Values that the cache refuses are prepared once for each load."""
    calls, prepare = [], preprocess.load_case
    monkeypatch.setattr(preprocess, "load_case",
                        lambda *given: calls.append(given) or prepare(*given))
    small = 1 << 20
    monkeypatch.setattr(source, "SLAB_BYTES", 100_000)
    case = source.list_sources(nifti_folder, SMALL, small)[0]
    assert len(case.slabs()) > 1
    for _ in range(2):
        for one, other in zip(case.load(), data.list_cases(data_folder)[0].load()):
            np.testing.assert_array_equal(one, other)
    assert len(calls) <= 2


def test_changed_source_is_prepared_again(nifti_folder, tmp_path, cached):
    folder = tmp_path / "copy"
    shutil.copytree(nifti_folder, folder)
    case = source.list_sources(folder, SMALL, cached)[0]
    before, _ = case.load()
    image, spacing = nifti.read_image(case.image)
    nifti.write(case.image, (image + 50).astype(np.int16), spacing)
    forget()  # files are looked at once an epoch
    after, _ = case.load()
    assert (after > before).any()


def test_source_of_real_labels_equals_preprocessed(real_labels, tmp_path):
    """An image painted over the smallest real label, at its own spacing."""
    from unet3d import phantom

    smallest = min(real_labels.glob("case_*/segmentation.nii.gz"),
                   key=lambda path: path.stat().st_size).parent
    (tmp_path / "labels").mkdir()
    shutil.copytree(smallest, tmp_path / "labels" / smallest.name)
    phantom.paint_labels(tmp_path / "labels", tmp_path / "nifti")
    preprocess.preprocess(tmp_path / "nifti", tmp_path / "npy")
    (before,) = source.list_sources(tmp_path / "nifti", preprocess.Settings())
    (after,) = data.list_cases(tmp_path / "npy")
    assert before.nbytes == after.nbytes
    chain = transforms.train_transforms((128, 128, 128))
    samples = [data.VolumeDataset([case], chain, seed=5, repeat=2)[1] for case in (before, after)]
    for one, other in zip(*samples):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("loader", ["minato-native", "pytorch-native", "dali"])
def test_loader_of_prepared_files_refuses_source(nifti_folder, tmp_path, capsys, loader):
    with pytest.raises(SystemExit):
        train.main(["--source", str(nifti_folder), "--out", str(tmp_path), "--loader", loader])
    said = capsys.readouterr().err
    assert f"--source: {loader} reads prepared files" in said and "unet3d.preprocess" in said


def test_missing_source_and_label_are_named(nifti_folder, tmp_path, capsys):
    assert train.main(["--source", str(tmp_path / "none"), "--out", str(tmp_path / "out"),
                       "--loader", "pytorch", *TINY]) == 1
    assert f"{tmp_path / 'none'}: no such folder" in capsys.readouterr().err
    folder = tmp_path / "copy"
    shutil.copytree(nifti_folder, folder)
    (folder / "case_00002" / nifti.LABEL_NAME).unlink()
    with pytest.raises(nifti.DataError, match="case_00002.*segmentation.*missing"):
        source.list_sources(folder, SMALL)


def test_evaluation_runs_from_source(nifti_folder, data_folder, tmp_path, capsys):
    assert train.main(["--source", str(nifti_folder), "--out", str(tmp_path), "--loader",
                       "pytorch", "--workers", "0", *TINY]) == 0
    scores = []
    for where in (["--source", str(nifti_folder)], ["--data", str(data_folder)]):
        capsys.readouterr()
        assert evaluate.main([*where, "--checkpoint", str(tmp_path / "checkpoint.pt"),
                              "--device", "cpu"]) == 0
        scores.append(capsys.readouterr().out)
    assert scores[0] == scores[1]
