"""Preprocessing against the written specification; checksums; bad input."""
from __future__ import annotations

import gzip
import hashlib
import json
import shutil

import numpy as np
import pytest
from scipy import ndimage

from unet3d import nifti, preprocess, spec

SMALL = preprocess.Settings(min_shape=(16, 16, 16))  # of the fixtures


def test_resample_size_and_aligned_corners():
    rng = np.random.default_rng(0)
    image = rng.normal(size=(7, 10, 9)).astype(np.float32)
    label = rng.integers(0, 3, image.shape, dtype=np.uint8)
    spacing = (3.0, 0.8, 1.5)
    new_image, new_label = preprocess.resample(image, label, spacing, spec.TARGET_SPACING)
    size = tuple(int(s / t * n) for s, t, n in zip(spacing, spec.TARGET_SPACING, image.shape))
    assert new_image.shape == new_label.shape == size
    # SciPy as the second opinion: aligned corners put the ends onto the ends.
    grid = np.meshgrid(*[np.linspace(0, n - 1, m) for n, m in zip(image.shape, size)],
                       indexing="ij")
    expected = ndimage.map_coordinates(image, grid, order=1)
    np.testing.assert_allclose(new_image, expected, atol=1e-4)
    places = [np.floor(np.arange(m) * n / m).astype(int) for n, m in zip(image.shape, size)]
    np.testing.assert_array_equal(new_label, label[np.ix_(*places)])


def test_target_spacing_is_left_alone():
    image = np.zeros((3, 3, 3), np.float32)
    same, _ = preprocess.resample(image, image, spec.TARGET_SPACING, spec.TARGET_SPACING)
    assert same is image


def test_normalise():
    values = np.array([-1000, -79, 0, 101, 304, 2000], np.float32)
    expected = (np.clip(values, -79, 304) - 101.0) / 76.9
    np.testing.assert_allclose(preprocess.normalise(values), expected, rtol=1e-6)


def test_pad_floor_half_first_with_edges():
    volume = np.arange(3, dtype=np.float32)[:, None, None] * np.ones((3, 4, 9), np.float32)
    padded = preprocess.pad(volume, (8, 4, 8))
    assert padded.shape == (8, 4, 9)
    np.testing.assert_array_equal(padded[:, 0, 0], [0, 0, 0, 1, 2, 2, 2, 2])


def test_round_trip(nifti_folder, data_folder):
    for case in nifti.find_cases(nifti_folder, nifti.IMAGE_NAME):
        image, spacing = nifti.read_image(case / nifti.IMAGE_NAME)
        label, _ = nifti.read_label(case / nifti.LABEL_NAME)
        expected = preprocess.prepare(image, label, spacing, SMALL)
        for letter, array, dtype in zip("xy", expected, (np.float32, np.uint8)):
            saved = np.load(data_folder / f"{case.name}_{letter}.npy")
            assert saved.dtype == dtype and saved.ndim == 4 and saved.shape[0] == 1
            np.testing.assert_array_equal(saved, array)
        assert min(expected[0].shape[1:]) >= 16
    assert preprocess.verify(data_folder) == []


def test_preprocess_resumes_missing_and_stale_cases(nifti_folder, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(nifti_folder, source)
    out = tmp_path / "out"
    assert preprocess.preprocess(source, out, SMALL) == (5, 0)
    assert preprocess.preprocess(source, out, SMALL) == (0, 5)
    (out / "case_00002_y.npy").unlink()
    (out / ".tmp-1-case_00009_x.npy").write_bytes(b"of a killed run")
    shutil.copyfile(source / "case_00001" / nifti.IMAGE_NAME,
                    source / "case_00003" / nifti.IMAGE_NAME)
    shutil.copyfile(source / "case_00001" / nifti.LABEL_NAME,
                    source / "case_00003" / nifti.LABEL_NAME)
    assert preprocess.preprocess(source, out, SMALL, workers=2) == (2, 3)
    assert preprocess.verify(out) == []
    assert not list(out.glob(".tmp-*"))
    np.testing.assert_array_equal(np.load(out / "case_00003_x.npy"),
                                  np.load(out / "case_00001_x.npy"))
    with pytest.raises(nifti.DataError, match="another folder"):
        preprocess.preprocess(source, out, preprocess.Settings())


def test_verify_detects_damage(data_folder, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(data_folder, out)
    assert preprocess.main(["--out", str(out), "--verify", "--workers", "1"]) == 0
    flipped = out / "case_00000_x.npy"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    (out / "case_00001_y.npy").write_bytes(b"short")
    (out / "case_00002_y.npy").unlink()
    shutil.copyfile(out / "case_00003_y.npy", out / "case_00077_y.npy")
    wrong = "\n".join(preprocess.verify(out))
    assert "case_00000_x.npy: content differs" in wrong
    assert "case_00001_y.npy: 5 bytes" in wrong
    assert "case_00002_y.npy: missing" in wrong
    assert "case_00077_y.npy: not in" in wrong
    assert len(wrong.splitlines()) == 4
    assert preprocess.main(["--out", str(out), "--verify", "--workers", "1"]) == 1
    assert "content differs" in capsys.readouterr().out


def _broken_cases(folder):
    """(damage, words of the message) for one case folder each."""
    image, label = folder / nifti.IMAGE_NAME, folder / nifti.LABEL_NAME
    volume = np.zeros((4, 4, 4), np.int16)

    def truncated():
        image.write_bytes(image.read_bytes()[:-200])

    def not_nifti():
        image.write_bytes(gzip.compress(b"hello" * 100))

    def not_gzip():
        image.write_bytes(b"hello" * 100)

    def other_shape():
        nifti.write(image, volume, (1.0, 1.0, 1.0))

    def bad_class():
        nifti.write(label, volume + 257, (1.0, 1.0, 1.0))

    def fraction():
        nifti.write(label, np.full((4, 4, 4), 1.5, np.float32), (1.0, 1.0, 1.0))

    def nan():
        nifti.write(image, np.full((4, 4, 4), np.nan, np.float32), (1.0, 1.0, 1.0))

    def label_missing():
        label.unlink()

    def vanishing():
        nifti.write(image, volume, (0.1, 1.0, 1.0))
        nifti.write(label, volume.astype(np.uint8), (0.1, 1.0, 1.0))

    return {"truncated": (truncated, "imaging.nii.gz: cannot be read"),
            "not_nifti": (not_nifti, "imaging.nii.gz: cannot be read"),
            "not_gzip": (not_gzip, "imaging.nii.gz: cannot be read"),
            "other_shape": (other_shape, "case_00004: image shape"),
            "bad_class": (bad_class, "segmentation.nii.gz: labels must be"),
            "fraction": (fraction, "segmentation.nii.gz: labels must be"),
            "nan": (nan, "imaging.nii.gz: holds values that are not finite"),
            "label_missing": (label_missing, "segmentation.nii.gz: No such file"),
            "vanishing": (vanishing, "case_00004: shape")}


@pytest.mark.parametrize("kind", ["truncated", "not_nifti", "not_gzip", "other_shape",
                                  "bad_class", "fraction", "nan", "label_missing",
                                  "vanishing"])
def test_bad_input_is_named(nifti_folder, tmp_path, kind, capsys):
    source = tmp_path / "source"
    shutil.copytree(nifti_folder / "case_00004", source / "case_00004")
    damage, words = _broken_cases(source / "case_00004")[kind]
    damage()
    arguments = ["--source", str(source), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert preprocess.main(arguments) == 1
    assert words in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.npy"))


def test_labels_without_images_point_to_the_phantom(tmp_path):
    (tmp_path / "case_00000").mkdir()
    (tmp_path / "case_00000" / nifti.LABEL_NAME).write_bytes(b"")
    with pytest.raises(nifti.DataError, match="phantom --labels"):
        preprocess.preprocess(tmp_path, tmp_path / "out")


def test_manifest_of_another_program(tmp_path):
    (tmp_path / preprocess.MANIFEST).write_text(json.dumps({"a": 1}))
    with pytest.raises(nifti.DataError, match="not a manifest"):
        preprocess.verify(tmp_path)


def test_cases_without_labels_are_skipped_and_reported(nifti_folder, tmp_path, capsys):
    """KiTS19's download has 90 more cases, of which only the images are public."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "case_00001").symlink_to(nifti_folder / "case_00001")
    for number in (210, 299):
        case = source / f"case_{number:05d}"
        case.mkdir()
        (case / "imaging.nii.gz").symlink_to(nifti_folder / "case_00001/imaging.nii.gz")
    arguments = ["--source", str(source), "--out", str(out), "--min-shape", "16", "16", "16",
                 "--workers", "1"]
    assert preprocess.main(arguments) == 0
    said = capsys.readouterr()
    assert "2 cases without labels are skipped (case_00210 to case_00299)" in said.err
    assert "1 cases made" in said.out and len(list(out.glob("*.npy"))) == 2
    lacking = source / "case_00002"
    lacking.mkdir()
    (lacking / "imaging.nii.gz").symlink_to(nifti_folder / "case_00001/imaging.nii.gz")
    assert preprocess.main(arguments) == 1, "one of the labelled cases lacks its label"
    assert "case_00002/segmentation.nii.gz" in capsys.readouterr().err


def test_the_references_checksums(data_folder, tmp_path, capsys):
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest()
            for path in data_folder.glob("*.npy")}
    listed = tmp_path / "checksum.json"
    check = ["--out", str(data_folder), "--verify", "--reference-checksums", str(listed),
             "--workers", "1"]
    listed.write_text(json.dumps(sums))
    assert preprocess.main(check) == 0
    first, second, *_ = sorted(sums)
    listed.write_text(json.dumps({**{n: s for n, s in sums.items() if n != second},
                                  first: "0" * 32, "case_00777_x.npy": "0" * 32}))
    capsys.readouterr()
    assert preprocess.main(check) == 1
    said = capsys.readouterr().out
    assert f"{first}: differs from the reference's" in said
    assert "case_00777_x.npy: missing" in said and f"{second}: not in" in said
    for wrong in ("[]", '{"a": 1}', "nonsense"):
        listed.write_text(wrong)
        assert preprocess.main(check) == 1
        assert str(listed) in capsys.readouterr().err
    with pytest.raises(SystemExit):
        preprocess.main(["--source", "a", "--out", "b", "--reference-checksums", str(listed)])


def test_statistics_are_those_of_the_reference(data_folder, tmp_path):
    """Medians of the cases' means, deviations and shapes; also of folders without statistics."""
    folder = tmp_path / "copy"
    shutil.copytree(data_folder, folder)
    manifest = preprocess.read_manifest(folder)
    rows = []
    for name in manifest["cases"]:
        image, label = (np.load(folder / f"{name}_{kind}.npy") for kind in "xy")
        numbers = [np.round(of(image, (1, 2, 3)), 2)[0] for of in (np.mean, np.std)]
        rows.append([*numbers, *image.shape[1:], (label == 1).sum(), (label == 2).sum(),
                     label.size, image.nbytes + label.nbytes + 256])
    rows = np.array(rows, np.float64)
    mean, std, depth, height, width, *_ = np.median(rows, axis=0)
    said = preprocess.describe(folder)
    assert (f"median of 5 cases: mean value {mean:.2f}, std {std:.2f}, d {depth:g}, h {height:g}, "
            f"w {width:g}\n") in said
    kidney, tumour, total, nbytes = rows[:, 5], rows[:, 6], rows[:, 7].sum(), rows[:, 8]
    assert f"smallest {nbytes.min() / 1e6:.1f}, median" in said
    assert (f"kidney: in 5 of 5 cases, {kidney.min():g} to {kidney.max():g} voxels there, "
            f"{kidney.sum() / total:.3%} of all voxels") in said
    assert f"tumour: in {(tumour > 0).sum()} of 5 cases" in said
    for entry in manifest["cases"].values():
        del entry["statistics"]
    preprocess.write_manifest(folder, manifest)
    assert preprocess.describe(folder) == said


def test_preprocess_prints_statistics_when_all_done(nifti_folder, data_folder, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(data_folder, folder)
    assert preprocess.main(["--source", str(nifti_folder), "--out", str(folder), "--min-shape",
                            "16", "16", "16", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "0 cases made, 5 already there" in said and "median of 5 cases" in said
