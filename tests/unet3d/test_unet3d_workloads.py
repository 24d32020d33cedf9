"""The detection and speech workloads: their samples, batches, runs, and the comparison."""
from __future__ import annotations

import csv
import json
import sys
import types

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from unet3d import loaders, sampling  # noqa: E402
from unet3d.bench import compare, plot, slow  # noqa: E402
from unet3d.bench.workloads import base, detection, run, speech  # noqa: E402
from unet3d.nifti import DataError  # noqa: E402

COUNT = 13  # of samples: the last batch of 4 is short


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{workload: folder with a few small items}."""
    found = {name: tmp_path_factory.mktemp(name) for name in base.NAMES}
    detection.generate(found["detection"], COUNT, seed=1, scale=0.1)
    speech.generate(found["speech"], COUNT, seed=1, scale=0.05)
    return found


def job_of(name, folder, *more):
    arguments = ["--workload", name, "--data", str(folder), "--out", "unused", *more]
    return base.module(name).open_job(run.parse(arguments))


@pytest.mark.parametrize("name", base.NAMES)
def test_samples_depend_on_seed_epoch_and_index_alone(folders, name):
    def bytes_of(job, index):
        batch = job.collate([job.dataset[index]])
        return [t.numpy().tobytes() for t in job.parts(batch, 0)]

    one, other = (job_of(name, folders[name]) for _ in range(2))
    reseeded = job_of(name, folders[name], "--seed", "5")
    changed = 0
    for index in range(COUNT):
        first = bytes_of(one, index)
        torch.rand(3), np.random.rand(3)
        assert bytes_of(other, index) == first
        one.dataset.set_epoch(7)
        changed += bytes_of(one, index) != first
        changed += bytes_of(reseeded, index) != first
        one.dataset.set_epoch(0)
    assert changed > COUNT // 2


@pytest.mark.parametrize("name", base.NAMES)
def test_row_content_does_not_depend_on_batch(folders, name):
    job = job_of(name, folders[name])
    samples = [job.dataset[index] for index in range(COUNT)]
    batch = job.collate(samples)
    assert batch["index"].tolist() == list(range(COUNT))
    sizes = set()
    for row, sample in enumerate(samples):
        alone = job.parts(job.collate([sample]), 0)
        sizes.add(tuple(alone[0].shape))
        for mine, its, made in zip(job.parts(batch, row), alone, sample, strict=False):
            assert torch.equal(mine, its) and torch.equal(mine, made)
    assert len(sizes) > COUNT // 2


def test_images_are_resized_flipped_and_normalised(folders):
    job = job_of("detection", folders["detection"], "--short-side", "40", "--long-side", "56")
    flips = 0
    for index in range(COUNT):
        image, boxes, labels, _ = job.dataset[index]
        height, width = image.shape[1:]
        assert min(height, width) == 40 or max(height, width) == 56
        assert image.dtype == torch.float32 and -2.2 < image.min() < image.max() < 2.7
        assert len(boxes) == len(labels) == len(job.dataset.items[index]["labels"])
        if len(boxes):
            assert (boxes[:, :2] < boxes[:, 2:]).all() and (boxes >= -0.6).all()
            assert (boxes[:, 2] <= width + 0.6).all() and (boxes[:, 3] <= height + 0.6).all()
        plain = torch.from_numpy(_unflipped(job.dataset, index, (width, height)))
        pixels = image * torch.tensor(detection.STD)[:, None, None] \
            + torch.tensor(detection.MEAN)[:, None, None]
        straight, flipped = ((pixels - p).abs().max() < 1e-5 for p in (plain, plain.flip(2)))
        assert straight or flipped
        flips += int(flipped and not straight)
    assert 0 < flips < COUNT


def _unflipped(dataset, index, size):
    from PIL import Image
    with Image.open(dataset.file(index)) as stored:
        small = stored.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    return np.asarray(small).transpose(2, 0, 1) / np.float32(255)


def test_an_object_s_box_follows_its_pixels(tmp_path):
    """A white rectangle on black: the box is where the white is, flipped or not."""
    from PIL import Image
    pixels = np.zeros((60, 80, 3), np.uint8)
    pixels[10:30, 5:25] = 255
    Image.fromarray(pixels).save(tmp_path / "a.jpg", quality=95)
    item = {"name": "a.jpg", "boxes": [[5, 10, 25, 30]], "labels": [0]}
    base.write_index(tmp_path, {"kind": "detection"}, [item] * 8)
    dataset = detection.ImageDataset(tmp_path, 0, 60, 100)
    starts = set()
    for index in range(8):
        image, boxes, _, _ = dataset[index]
        x0, y0, x1, y1 = boxes[0].round().int().tolist()
        white = image[0] > 1
        assert white[y0 + 2:y1 - 2, x0 + 2:x1 - 2].all()
        assert white.sum() < 1.1 * 400
        starts.add(x0)
    assert starts == {5, 55}


def test_features_show_a_tone_and_masks_and_splices(folders):
    t = np.arange(speech.RATE) / speech.RATE
    features = speech.log_mel(np.sin(2 * np.pi * 1000 * t).astype(np.float32)
                              + np.where(t < 0.5, 0, 1e-3 * np.sin(2 * np.pi * 3000 * t)
                                         ).astype(np.float32))
    assert features.shape == (100, speech.BANDS) and features.dtype == np.float32
    centres = np.argmax(speech.mel_bank(), axis=0) * speech.RATE / speech.FFT
    band = int(np.argmin(np.abs(centres - 3000)))
    assert features[60:, band].min() > features[:40, band].max()  # the tone that came later
    assert np.allclose(features.mean(0), 0, atol=1e-3)
    masked = features + np.float32(100)
    speech.mask(masked, np.random.default_rng(3))
    gone = masked == 0
    whole_bands, whole_frames = gone.all(0), gone.all(1)
    assert 0 < whole_bands.sum() <= speech.BAND_MASKS * speech.BAND_WIDTH
    assert whole_frames.sum() <= speech.TIME_MASKS * speech.TIME_SHARE * 100
    assert (gone == (whole_bands[None] | whole_frames[:, None])).all()
    spliced = speech.splice(features)
    assert spliced.shape == (34, 240)
    assert np.array_equal(spliced.reshape(-1, speech.BANDS)[:100], features)
    assert not spliced[-1, speech.BANDS:].any()


def test_every_fifth_sample_is_heavy(folders):
    options = ["--light", "0.5", "--heavy", "3", "--time-scale", "0.01"]
    dataset = job_of("speech", folders["speech"], *options).dataset
    assert [round(1000 * dataset.simulated_s(i)) for i in range(10)] == [5, 5, 5, 5, 35] * 2
    drawn = job_of("speech", folders["speech"], *options, "--heavy-drawn").dataset
    heavy = []
    for epoch in (1, 2):
        drawn.set_epoch(epoch)
        heavy.append([drawn.simulated_s(i) > 0.02 for i in range(1000)])
    assert heavy[0] != heavy[1]
    assert all(140 < sum(epoch) < 260 for epoch in heavy)
    slept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech.time, "sleep", slept.append)
        dataset[3], dataset[4]
    assert slept == pytest.approx([0.005, 0.035])


@pytest.mark.parametrize("name", base.NAMES)
def test_the_network_learns(folders, name):
    job = job_of(name, folders[name])
    batch, step = job.collate([job.dataset[i] for i in range(4)]), job.step(torch.device("cpu"))
    losses = [step(batch) for _ in range(12)]
    assert losses[-1] < losses[0]


def test_folders_are_made_once_and_never_mixed(folders, tmp_path, capsys):
    folder = folders["speech"]
    before = (folder / base.INDEX_NAME).stat().st_mtime_ns
    speech.generate(folder, COUNT, seed=1, scale=0.05)
    assert (folder / base.INDEX_NAME).stat().st_mtime_ns == before
    with pytest.raises(DataError, match="use another folder"):
        speech.generate(folder, COUNT, seed=2, scale=0.05)
    with pytest.raises(DataError, match="holds data for speech; run"):
        base.read_index(folder, "detection", "COCO")
    with pytest.raises(DataError, match="holds no data; run"):
        base.read_index(tmp_path, "speech", "LibriSpeech")
    assert run.main(["--workload", "speech", "--data", str(tmp_path), "--out",
                     str(tmp_path / "out")]) == 1
    assert "python -m unet3d.bench.workloads.speech" in capsys.readouterr().err
    (tmp_path / "a.wav").write_bytes(b"nonsense")
    base.write_index(tmp_path, {"kind": "speech"}, [{"name": "a.wav", "tokens": [1]}])
    with pytest.raises(DataError, match="a.wav: cannot be read"):
        speech.SpeechDataset(tmp_path, 0)[0]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "unet3d.bench.workloads.detection", None)
    with pytest.raises(DataError, match="needs .*detection: pip install"):
        base.module("detection")


ONE_RUN = ["--batch-size", "4", "--epochs", "1", "--device", "cpu", "--threads", "1"]


PYTORCH = loaders.LOADERS["pytorch"]


def test_a_wrong_count_fails_the_run(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(loaders.LOADERS, "pytorch",
                        lambda dataset, options: list(PYTORCH(dataset, options))[:-1])
    assert run.main(["--workload", "speech", "--data", str(folders["speech"]), "--out",
                     str(tmp_path), "--loader", "pytorch", "--workers", "0", *ONE_RUN]) == 1
    assert "12 samples delivered, 13 expected" in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("name, names, options", [
    ("detection", "minato,synthetic", ["--short-side", "32"]),
    ("speech", "minato-ready,pytorch-ooo",
     ["--light", "0.5", "--heavy", "3", "--time-scale", "0.01", "--step-ms", "5"])])
def test_compare_runs_the_workload(folders, tmp_path, capsys, monkeypatch, name, names,
                                   options):
    if name == "speech":  # the cost of samples on this machine does not matter here
        monkeypatch.setattr(slow, "profile", lambda dataset, epoch: slow.Profile(
            epoch, [dataset.simulated_s(index) for index in range(len(dataset))]))
    status = compare.main(["--workload", name, "--data", str(folders[name]), "--out",
                           str(tmp_path), "--loaders", names, "--repeats", "1", "--epochs", "1",
                           "--page-cache", "cold", "--", "--workers", "1", *ONE_RUN[:2],
                           *ONE_RUN[4:], *options])
    found = capsys.readouterr()
    assert status == 0, found.err
    assert "posix_fadvise" in found.err
    assert "bounds of an epoch, cold run, reference samples: work" in found.out
    facts = json.loads((tmp_path / plot.JSON_NAME).read_text())
    assert [row["loader"] for row in facts["rows"]] == names.split(",")
    runs = [runs[0]["epochs"][0] for runs in facts["runs"]["cold"].values()]
    assert [row["samples"] for row in runs] == [COUNT] * 2
    assert runs[0]["steps"] == 4
    if "synthetic" not in names:
        checked = [json.loads((tmp_path / f"check-{loader}" / "result.json").read_text())
                   ["epochs"][0]["content_hash"] for loader in names.split(",")]
        assert checked[0] == checked[1] is not None
        assert [run["content_hash"] for run in runs] == [None, None]
        row = facts["rows"][0]
        assert facts["profile"]["slow"] == [4, 9] and row["slow_share"] == 2 / COUNT
        assert len(row["slow_shares"]) == 4 and row["slow_batch_max"] > 0
        assert row["work_bound_s"] == pytest.approx(11 * 0.005 + 2 * 0.035)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / plot.CSV_NAME, newline="") as stream:
        assert all(float(row["work_bound_s"]) > 0 for row in csv.DictReader(stream))


def test_compare_refuses_options_of_another_workload(folders, tmp_path, capsys):
    for wrong in (["--preset", "quick"], ["--loaders", "dali"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            compare.main(["--workload", "speech", "--data", str(folders["speech"]), "--out",
                          str(tmp_path), *wrong])


def _result(content):
    return {"config": {"seeding": "sample"},
            "epochs": [{"epoch": 1, "index_hash": "aa", "content_hash": content}]}


def test_bytes_are_compared_within_a_family():
    compare.check_same_work({"pytorch": [_result("1")], "minato-native": [_result("2")],
                             "pytorch-native": [_result("2")], "dali": [_result("3")]})
    with pytest.raises(compare.ComparisonError, match="native content_hashes differ"):
        compare.check_same_work({"minato-native": [_result("1")],
                                 "pytorch-native": [_result("2")]})


def test_slow_samples_are_those_over_twice_the_median():
    profile = slow.Profile(2, [1.0, 1.1, 0.9, 2.5, 1.0, 9.0])
    assert profile.slow == {3, 5} and profile.work_s([0, 3]) == 3.5
    assert profile.shares([[3, 5], [0, 1], [5, 2]]) == [1.0, 0.0, 0.5]
    assert slow.Profile(1, [1.0] * 5).slow == set()


def test_work_of_all_samples_replaces_the_estimate():
    result = {"config": {"workers": 2}, "epochs": [
        {"work_bound_s": 3.0, "core_bound_s": 5.0, "copy_bound_s": 0.1, "bound_s": 5.0}]}
    profile = slow.Profile(1, [1.0] * 8)
    cores = compare.available_cores()
    assert compare.bounds_of(result, None) == {
        "work_bound_s": 3.0, "core_bound_s": 5.0, "copy_bound_s": 0.1}
    assert compare.bounds_of(result, profile) == {
        "work_bound_s": 4.0, "core_bound_s": 5.0 + 2 / cores, "copy_bound_s": 0.1}
    assert compare.bounds_of(result, profile, 2) == {
        "work_bound_s": 2.0, "core_bound_s": 5.0 - 2 * 2 / cores, "copy_bound_s": 0.1}


def test_ceiling_is_at_least_the_measured_rate():
    bounds = {"work_bound_s": 4.0, "core_bound_s": 5.0, "synthetic_bound_s": 3.0}
    runs = [{"config": {"threads": 1}, "epochs": [{"epoch_s": s}]} for s in (3.5, 2.0)]
    assert compare.lower_ceiling(bounds, runs[:1]) == bounds
    assert compare.lower_ceiling(bounds, runs) == {
        "work_bound_s": 4.0, "synthetic_bound_s": 2.0,
        "core_bound_s": 5.0 - 1.0 / compare.available_cores()}


def test_order_of_the_sampler_is_torch_s_own():
    """Look-ahead and ready-first batches need a sampler of torch's own type."""
    dataset = torch.utils.data.TensorDataset(torch.zeros(4))
    assert type(sampling.epoch_sampler(dataset, 0)) is torch.utils.data.DistributedSampler


# -- real folders ----------------------------------------------------------------------


def coco_folder(folder, part="val2017", images="val2017", count=6):
    """A folder as COCO's, with a grey image, an image without objects, and gaps in the numbers."""
    from PIL import Image
    (folder / images).mkdir(parents=True)
    (folder / "annotations").mkdir(exist_ok=True)
    known = {"images": [], "annotations": [], "categories": [
        {"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}]}
    for number in range(count):
        name = f"{900 - number:012d}.jpg"
        mode, size = ("L" if number == 1 else "RGB"), (60 + number, 40)
        Image.new(mode, size, 128).save(folder / images / name)
        known["images"].append({"id": 70 + number, "file_name": name, "width": size[0],
                                "height": size[1]})
        box = {"image_id": 70 + number, "bbox": [5, 10, 20, 8], "iscrowd": 0}
        known["annotations"] += [] if number == 2 else [
            box | {"category_id": 90}, box | {"category_id": 1, "iscrowd": 1},
            box | {"category_id": 1, "bbox": [1, 1, 0, 5]}]
    (folder / f"annotations/instances_{part}.json").write_text(json.dumps(known))
    return folder


@pytest.mark.parametrize("images", ["val2017", "images/val2017", "images"])
def test_coco_folder_is_taken_as_it_is(tmp_path, images):
    job = job_of("detection", coco_folder(tmp_path, images=images), "--short-side", "40")
    assert len(job.dataset) == 6 and job.dataset.classes == 2
    assert [item["name"] for item in job.dataset.items] == sorted(
        path.name for path in (tmp_path / images).iterdir())
    batch = job.collate([job.dataset[index] for index in range(6)])
    assert [labels.tolist() for labels in batch["labels"]] == [[1], [1], [1], [], [1], [1]]
    x0, y0, x1, y1 = batch["boxes"][0][0].tolist()  # 65 pixels wide, flipped or not
    assert (y0, y1) == (10, 18) and (x0, x1) in {(5, 25), (40, 60)}
    loss = job.step(torch.device("cpu"))(batch)
    assert np.isfinite(loss)


def test_coco_parts_are_chosen(tmp_path):
    """The training part of several; else the one that is named."""
    coco_folder(tmp_path, "val2017", "val2017", 2)
    (tmp_path / "annotations/captions_val2017.json").write_text("{}")
    assert len(job_of("detection", tmp_path).dataset) == 2
    coco_folder(tmp_path, "train2017", "train2017", 4)
    assert len(job_of("detection", tmp_path).dataset) == 4
    given = ["--annotations", str(tmp_path / "annotations/instances_val2017.json")]
    assert len(job_of("detection", tmp_path, *given).dataset) == 2
    (tmp_path / "annotations/instances_train2017.json").rename(
        tmp_path / "annotations/instances_test.json")
    with pytest.raises(DataError, match="choose with --annotations"):
        job_of("detection", tmp_path)


def test_broken_coco_folders_are_explained(tmp_path):
    folder = coco_folder(tmp_path)
    for image in (folder / "val2017").iterdir():
        image.unlink()
    with pytest.raises(DataError, match="lists 6 images, of which the first is in none of"):
        job_of("detection", folder)
    (folder / "annotations/instances_val2017.json").write_text('{"images": []}')
    with pytest.raises(DataError, match="cannot be read as annotations of COCO: KeyError"):
        job_of("detection", folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="or name a folder of COCO"):
        job_of("detection", tmp_path / "empty")


def librispeech_folder(folder, write):
    """Two chapters as LibriSpeech's; `write` makes a file of a waveform."""
    texts = {"84/121123/84-121123-0000": "GO DO YOU HEAR", "84/121123/84-121123-0001": "IT'S ME",
             "174/50561/174-50561-0000": "FORGOTTEN TOO"}
    for number, (name, text) in enumerate(texts.items()):
        path = folder / "dev-clean" / f"{name}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        sound, _ = speech.speak(np.random.default_rng(number), 0.05 + 0.02 * number)
        write(path, sound)
        with open(path.parent / f"{'-'.join(name.split('/')[:2])}.trans.txt", "a") as stream:
            stream.write(f"{path.stem} {text}\n")
    return folder


def check_librispeech(folder):
    for root, count in ((folder, 3), (folder / "dev-clean" / "84", 2)):
        job = job_of("speech", root)
        batch = job.collate([job.dataset[index] for index in range(len(job.dataset))])
        assert len(job.dataset) == count and batch["features"].shape[2] == 240
    said = {item["name"].rpartition("/")[2]: item["tokens"] for item in job.dataset.items}
    assert said["84-121123-0001.flac"] == [9, 20, 27, 19, 28, 13, 5]
    assert np.isfinite(job.step(torch.device("cpu"))(batch))


def test_librispeech_folder_is_taken_as_it_is(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    check_librispeech(librispeech_folder(
        tmp_path, lambda path, sound: soundfile.write(path, sound, speech.RATE)))


def test_librispeech_needs_a_decoder_of_flac(tmp_path, monkeypatch):
    """Its structure is tested with a decoder that is made up."""
    folder = librispeech_folder(tmp_path, lambda path, sound: path.write_bytes(sound.tobytes()))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match=r"needs soundfile: pip install .*\[unet3d,speech\]"):
        job_of("speech", folder)
    rate = [speech.RATE]
    monkeypatch.setitem(sys.modules, "soundfile", types.SimpleNamespace(
        read=lambda path, dtype: (np.fromfile(path, dtype), rate[0])))
    check_librispeech(folder)
    rate[0] = 8000
    with pytest.raises(DataError, match="8000 Hz"):
        job_of("speech", folder)
    next(folder.rglob("174-*.flac")).unlink()
    with pytest.raises(DataError, match="174-50561-0000.flac: missing, and a transcript lists it"):
        job_of("speech", folder)


def test_some_samples_are_drawn_by_seed(folders):
    def names(*options):
        return [item["name"] for item in job_of("speech", folders["speech"],
                                                *options).dataset.items]

    few = names("--samples", "5")
    assert few == sorted(few) == names("--samples", "5") and len(set(few)) == 5
    assert set(few) < set(names()) and few != names("--samples", "5", "--seed", "8")
    assert names("--samples", "99") == names()


def test_compare_runs_a_real_folder(tmp_path, capsys):
    status = compare.main([
        "--workload", "detection", "--data", str(coco_folder(tmp_path / "coco")), "--out",
        str(tmp_path / "out"), "--loaders", "pytorch", "--repeats", "1", "--epochs", "1", "--",
        "--workers", "0", "--step-ms", "1", "--samples", "4", "--threads", "1", "--device",
        "cpu"])
    found = capsys.readouterr()
    assert status == 0, found.err
    facts = json.loads((tmp_path / "out" / plot.JSON_NAME).read_text())
    assert facts["rows"][0]["samples"] == 4


def test_long_profiles_are_announced(capsys, monkeypatch):
    class Slow(list):
        def set_epoch(self, epoch):
            pass

    clock = iter(range(1000))
    monkeypatch.setattr(slow.time, "perf_counter", lambda: next(clock))
    assert slow.profile(Slow(range(100)), 1).costs == [1] * 100
    assert "making all 100 samples once, to know their cost: about 1 minutes" in (
        capsys.readouterr().err)
