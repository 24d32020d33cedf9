"""Phantoms: sizes, contents, seeds, real label files."""
from __future__ import annotations

import hashlib

import numpy as np
import pytest

from unet3d import anatomy, nifti, phantom, preprocess, spec


def test_sizes_follow_kits19():
    """Preprocessed sizes, from drawn headers alone: min 32, median 130, mean 147,
    90th percentile 247, max 392 MB in the real data."""
    sizes = []
    for number in range(2000):
        shape, spacing = anatomy.draw_field(phantom.case_generator(0, number), 1.0)
        new = [max(128, int(s / t * n))
               for s, t, n in zip(spacing, spec.TARGET_SPACING, shape)]
        sizes.append(np.prod(new) * 5 / 1e6)
    assert np.median(sizes) == pytest.approx(130, rel=0.1)
    assert np.mean(sizes) == pytest.approx(147, rel=0.1)
    assert np.percentile(sizes, 90) == pytest.approx(247, rel=0.1)
    assert 20 < min(sizes) and max(sizes) < 480


def test_tumour_counts():
    counts = {len(anatomy.draw_patient(phantom.case_generator(0, n)).tumours)
              for n in range(300)}
    assert counts == {0, 1, 2, 3}


def test_labels_are_two_kidneys_with_contrast(nifti_folder):
    for case in nifti.find_cases(nifti_folder, nifti.IMAGE_NAME):
        label, spacing = nifti.read_label(case / nifti.LABEL_NAME)
        image, image_spacing = nifti.read_image(case / nifti.IMAGE_NAME)
        assert label.shape == image.shape and spacing == image_spacing
        half = label.shape[2] // 2
        assert (label[:, :, :half] == 1).any() and (label[:, :, half:] == 1).any()
        assert 0.001 < (label > 0).mean() < 0.2
        assert 110 < np.median(image[label == 1]) < 240
        assert image.min() < -900 and image.max() > 200


def _digest(folder):
    return {p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.glob("case_*/*.nii.gz"))}


def test_seed_decides_every_byte_whatever_the_workers(tmp_path):
    for name, seed, workers in (("a", 5, 1), ("b", 5, 2), ("c", 6, 1)):
        phantom.generate(tmp_path / name, 2, seed, 0.1, workers)
    assert _digest(tmp_path / "a") == _digest(tmp_path / "b")
    assert not set(_digest(tmp_path / "a").values()) & set(_digest(tmp_path / "c").values())


def test_resumes_and_refuses_other_settings(tmp_path):
    phantom.generate(tmp_path, 2, 0, 0.1)
    before = _digest(tmp_path)
    (tmp_path / "case_00001" / nifti.IMAGE_NAME).unlink()
    phantom.generate(tmp_path, 2, 0, 0.1)
    assert _digest(tmp_path) == before
    with pytest.raises(nifti.DataError, match="another folder"):
        phantom.generate(tmp_path, 2, 1, 0.1)


def test_paints_over_a_real_label_file(real_labels, tmp_path):
    smallest = min(real_labels.glob("case_*/segmentation.nii.gz"),
                   key=lambda path: path.stat().st_size)
    source = tmp_path / "source"
    source.mkdir()
    (source / smallest.parent.name).symlink_to(smallest.parent)
    names = phantom.paint_labels(source, tmp_path / "painted")
    assert names == [smallest.parent.name]
    case = tmp_path / "painted" / names[0]
    assert (case / nifti.LABEL_NAME).read_bytes() == smallest.read_bytes()
    label, spacing = nifti.read_label(smallest)
    image, painted_spacing = nifti.read_image(case / nifti.IMAGE_NAME)
    assert image.shape == label.shape and painted_spacing == pytest.approx(spacing)
    assert np.median(image[label == 1]) > np.median(image[label == 2]) > 40
    image, label = preprocess.prepare(image, label, spacing)
    assert image.shape == label.shape and min(image.shape[1:]) >= 128
    assert set(np.unique(label)) == {0, 1, 2}


@pytest.mark.parametrize("fails", ["label", "image"])
def test_interrupted_painting_is_repeated(tmp_path, monkeypatch, fails):
    """No half-written file has a final name; every image has its label."""
    source = tmp_path / "source" / "case_00000"
    source.mkdir(parents=True)
    label = np.zeros((8, 16, 16), np.uint8)
    label[2:6, 4:8, 4:8], label[3, 5, 5] = 1, 2
    nifti.write(source / nifti.LABEL_NAME, label, (3.0, 1.0, 1.0))

    def half_copy(given, to):
        to.write_bytes(given.read_bytes()[:100])
        raise KeyboardInterrupt

    def no_write(*args):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        if fails == "label":
            patched.setattr(phantom.shutil, "copyfile", half_copy)
        else:
            patched.setattr(phantom.nifti, "write", no_write)
        with pytest.raises(KeyboardInterrupt):
            phantom.paint_case(source, out, 0)
    found = {path.name for path in (out / source.name).iterdir()}
    assert found == ({nifti.LABEL_NAME} if fails == "image" else set())
    assert phantom.paint_case(source, out, 0) == source.name
    assert {path.name for path in (out / source.name).iterdir()} == {
        nifti.LABEL_NAME, nifti.IMAGE_NAME}
    assert (out / source.name / nifti.LABEL_NAME).read_bytes() == (
        source / nifti.LABEL_NAME).read_bytes()
    assert nifti.read_image(out / source.name / nifti.IMAGE_NAME)[0].shape == label.shape


def test_command_line_explains_errors(tmp_path, capsys):
    (tmp_path / "case_00000").mkdir()
    status = phantom.main(["--labels", str(tmp_path), "--out", str(tmp_path / "out")])
    assert status == 1
    assert "case_00000/segmentation.nii.gz: missing" in capsys.readouterr().err
