"""VolumeDataset: the same bytes from every loader and from C threads."""
from __future__ import annotations

import copy
import errno
import gc
import multiprocessing
import pickle
import threading
import types

import numpy as np
import pytest
from attack.support import in_child

import minato
from minato import ops

from . import reference
from .conftest import make_pair
from .native import Host, Native

torch = pytest.importorskip("torch")

PATCH = (9, 9, 9)
MASK = (1 << 64) - 1


def strong(patch=9) -> ops.Pipeline:
    """The training chain with each of its steps likely."""
    return ops.Pipeline([ops.ReadNpy(), ops.RandBalancedCrop(patch, 0.7), ops.RandFlip(),
                         ops.Cast(), ops.RandScaleIntensity(0.5), ops.RandGaussianNoise(0.5)])


@pytest.fixture
def dataset(files):
    return ops.VolumeDataset(files, strong(), seed=11, repeat=4)


def by_index(samples) -> dict[int, tuple[bytes, bytes]]:
    return {index: (image.numpy().tobytes(), label.numpy().tobytes())
            for image, label, index in samples}


def all_samples(dataset) -> dict[int, tuple[bytes, bytes]]:
    return by_index((*dataset[i][:2], i) for i in range(len(dataset)))


def through_torch(dataset, **kwargs) -> dict[int, tuple[bytes, bytes]]:
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, shuffle=True, **kwargs)
    return by_index(loader)


def test_a_sample(dataset, files):
    assert len(dataset) == 12
    image, label = dataset[5]
    assert isinstance(image, torch.Tensor) and image.dtype == torch.float32
    assert label.dtype == torch.uint8 and image.shape == label.shape == (1, *PATCH)
    want = reference.rand_balanced_crop(*map(np.load, files[2]),
                                        reference.Draws((11, 5), 1), PATCH, 0.7)
    want = reference.rand_flip(*want, reference.Draws((11, 5), 2))
    np.testing.assert_array_equal(label.numpy(), want[1])
    for one, other in zip(dataset[-1], dataset[11]):
        assert torch.equal(one, other)
    for index in (12, -13):
        with pytest.raises(IndexError):
            dataset[index]


def test_output_option_sets_types_and_shapes(files):
    case = [types.SimpleNamespace(image=x, label=y) for x, y in files]
    image, label, index = ops.VolumeDataset(case, strong(), output="numpy", with_index=True)[2]
    assert type(image) is type(label) is np.ndarray and index == 2 and type(index) is int
    alone = ops.Pipeline([ops.ReadNpy(), ops.RandCrop(4)])
    (only,) = ops.VolumeDataset([x for x, _ in files], alone)[1]
    assert only.shape == (1, 4, 4, 4)
    sized = ops.Pipeline([ops.ReadNpy(), ops.Resample(6), ops.Cast("uint8")])
    image, label = ops.VolumeDataset(files, sized)[0]
    assert image.dtype == label.dtype == torch.uint8 and image.shape == (1, 6, 6, 6)


def test_samples_share_memory_with_nothing(dataset):
    first, second = dataset[0], dataset[0]
    first[0].fill_(9)
    assert not torch.equal(first[0], second[0])


def test_epoch_and_seed_and_index_make_the_bytes(dataset, files):
    first = all_samples(dataset)
    assert first == all_samples(dataset)
    dataset.set_epoch(1)
    second = all_samples(dataset)
    assert dataset.epoch == 1 and all(first[i] != second[i] for i in first)
    dataset.set_epoch(0)
    assert all_samples(dataset) == first
    other = ops.VolumeDataset(files, strong(), seed=12, repeat=4)
    assert all(first[i] != sample for i, sample in all_samples(other).items())
    assert len(set(first.values())) == len(first)


def test_torch_loader_gives_the_same_bytes(files):
    dataset = ops.VolumeDataset(files, strong(), seed=11, repeat=4, with_index=True)
    first = by_index(dataset[i] for i in range(len(dataset)))
    dataset.set_epoch(1)
    second = by_index(dataset[i] for i in range(len(dataset)))
    for workers in (0, 1, 2):
        for number, want in ((0, first), (1, second)):
            dataset.set_epoch(number)
            assert through_torch(dataset, num_workers=workers) == want


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_set_epoch_reaches_workers_that_stay(files, context):
    dataset = ops.VolumeDataset(files, strong(), seed=11, with_index=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1,
                                         persistent_workers=True,
                                         multiprocessing_context=context)
    for number in (0, 1):
        dataset.set_epoch(number)
        assert by_index(loader) == by_index(dataset[i] for i in range(len(dataset)))
    del loader
    gc.collect()


def test_batches_collate(dataset):
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    images, labels = next(iter(loader))
    assert images.shape == labels.shape == (4, 1, *PATCH)


def test_keyed_by_sample(files):
    dataset = ops.VolumeDataset(files, strong(), seed=11, keyed_by="sample")

    def sample(index):
        return [part.numpy().tobytes() for part in dataset[index]]

    dataset.seed_sample(77)
    first = sample(1)
    dataset.seed_sample(77)
    dataset.set_epoch(3)
    assert sample(1) == first
    torch.manual_seed(5)
    drawn = sample(1)  # the seed counts for one sample only
    assert drawn != first
    assert sample(1) != drawn
    torch.manual_seed(5)
    assert sample(1) == drawn
    want = ops.Pipeline(strong().operators)(*files[1], key=(77, MASK))
    assert first == [part.tobytes() for part in want]


def test_a_loader_leaves_no_seed_behind(files):
    """The seed for collate_fn would become that of the program's next sample."""
    dataset = ops.VolumeDataset(files, strong(), keyed_by="sample")
    torch.manual_seed(5)
    first = [part.numpy().tobytes() for part in dataset[0]]
    next(iter(minato.DataLoader(dataset, batch_size=1, seed_per_sample=True)))
    torch.manual_seed(5)
    assert [part.numpy().tobytes() for part in dataset[0]] == first


def test_seeds_of_threads_do_not_mix(files):
    dataset = ops.VolumeDataset(files, strong(), keyed_by="sample", output="numpy")
    dataset.seed_sample(1)
    seen = []

    def other():
        dataset.seed_sample(2)
        seen.append(dataset[0][0].tobytes())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    dataset.seed_sample(1)
    assert dataset[0][0].tobytes() != seen[0]
    dataset.seed_sample(2)
    assert dataset[0][0].tobytes() == seen[0]


def test_seeds_of_the_loader_do_not_touch_epochs(dataset):
    first = all_samples(dataset)
    dataset.seed_sample(5)
    assert all_samples(dataset) == first


def test_pickles_and_copies(dataset):
    want = all_samples(dataset)
    dataset.set_epoch(2)
    later = all_samples(dataset)
    scans = dataset.pipeline.stats()["scans"]
    assert scans == 3
    for twin in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert twin.epoch == 2 and all_samples(twin) == later
        assert twin.pipeline.stats()["scans"] == 0  # the boxes came along
        twin.set_epoch(0)
        assert all_samples(twin) == want and dataset.epoch == 2


def test_pickled_boxes_are_checked(dataset):
    dataset[0]
    native = dataset.pipeline._get()
    dataset.warm()
    (path, identity, boxes), *_ = native.export_boxes()
    for bad in (b"", boxes[:-1], boxes + b"x", b"\xff" * len(boxes),
                boxes[:9] + b"\x03" + boxes[10:], b"\x05" + boxes[1:]):
        with pytest.raises(ValueError, match="not a list of boxes"):
            native.import_boxes([(path, identity, bad)])


def test_warm_scans_each_label_once(dataset):
    dataset.warm()
    assert dataset.pipeline.stats()["scans"] == 3
    all_samples(dataset)
    assert dataset.pipeline.stats()["scans"] == 3


def test_native_pipeline_gives_the_same_bytes(files):
    dataset = ops.VolumeDataset(files, strong(), seed=11, repeat=4, with_index=True)
    dataset.set_epoch(3)
    host = Host(dataset.native_pipeline())
    native = host.native
    assert native.abi == 1 and native.size == __import__("ctypes").sizeof(Native)
    assert (native.length, native.keying, native.seed) == (12, 0, 11)
    assert host.fields == [(np.dtype("f4"), (1, *PATCH)), (np.dtype("u1"), (1, *PATCH)),
                           (np.dtype("i8"), ())]
    for index in range(12):
        rc, (image, label, number) = host.run(index, (11, 3 << 32 | index))
        assert rc == 0 and number == index
        want = dataset[index]
        np.testing.assert_array_equal(image, want[0].numpy())
        np.testing.assert_array_equal(label, want[1].numpy())


def test_native_errors(files):
    host = Host(ops.VolumeDataset(files, strong()).native_pipeline())
    for index in (-1, 3):
        assert host.run(index, (0, 0)) == (-errno.ERANGE, f"sample {index} is not among the 3 of the dataset")
    files[1][1].unlink()
    rc, text = host.run(1, (0, 0))
    assert rc == -errno.ENOENT and text.startswith(str(files[1][1]))


def test_capsule_keeps_its_pipeline_alive(files):
    host = Host(ops.VolumeDataset(files, strong(), seed=1).native_pipeline())
    gc.collect()
    want = ops.VolumeDataset(files, strong(), seed=1)[2]
    rc, (image, _) = host.run(2, (1, 2))
    assert rc == 0 and np.array_equal(image, want[0].numpy())


@pytest.mark.parametrize("kind", ["native", "python"])
def test_many_threads(files, kind):
    """Threads share one pipeline, its caches and its pool."""
    pipeline = strong()
    dataset = ops.VolumeDataset(files, pipeline, seed=2, repeat=30, output="numpy")
    quiet = ops.VolumeDataset(files, strong(), seed=2, repeat=30, output="numpy")
    host = Host(dataset.native_pipeline()) if kind == "native" else None
    wrong, barrier = [], threading.Barrier(8)

    def work(offset):
        barrier.wait(60)
        for i in range(offset, offset + len(dataset)):
            index = i % len(dataset)
            got = host.run(index, (2, index))[1] if host else dataset[index]
            if any(a.tobytes() != b.tobytes() for a, b in zip(got, want[index])):
                wrong.append(index)

    want = [quiet[i] for i in range(len(quiet))]
    threads = [threading.Thread(target=work, args=(11 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 3 <= pipeline.stats()["scans"] <= 24 and pipeline.stats()["samples"] == 8 * 90


def _child(connection, dataset):
    connection.send([part.numpy().tobytes() for part in dataset[1]])
    connection.close()


class Halts(ops.Cast):
    """Describes itself only when released, except in the main thread."""

    there, go = threading.Event(), threading.Event()

    def _describe(self):
        if threading.current_thread() is not threading.main_thread():
            self.there.set()
            assert self.go.wait(60)
        return super()._describe()


def test_a_fork_while_another_thread_makes_the_pipeline(files):
    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandCrop(PATCH), Halts()])
    dataset = ops.VolumeDataset(files, pipeline, seed=11)
    got = []
    thread = threading.Thread(target=lambda: got.append(dataset[0]))
    thread.start()
    assert Halts.there.wait(60)
    assert in_child(lambda: int(len(dataset[0]) != 2)) == 0
    assert len(dataset[0]) == 2 and not got
    Halts.go.set()
    thread.join(60)
    assert all(map(torch.equal, got[0], dataset[0]))


def test_a_fork_in_the_middle_of_work(dataset):
    """Caches and pool have no locks that a fork could copy in a held state."""
    want = [part.numpy().tobytes() for part in dataset[1]]
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            dataset[0]

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        context = multiprocessing.get_context("fork")
        for _ in range(5):
            here, there = context.Pipe()
            child = context.Process(target=_child, args=(there, dataset))
            child.start()
            there.close()
            assert here.poll(60) and here.recv() == want
            child.join(60)
            assert child.exitcode == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("first", ["a label", "no label"])
def test_cases_with_and_without_label_raise(files, first):
    """Its label is not dropped, and the other's is not made up."""
    cases = [files[0], (files[1][0], None)][:: 1 if first == "a label" else -1]
    dataset = ops.VolumeDataset(cases, ops.Pipeline([ops.ReadNpy(), ops.RandCrop(5)]), resident=True)
    for parts in (dataset, dataset._windows().dataset):
        assert len(parts[0])
        told = "no label" if first == "a label" else "a label"
        with pytest.raises(ValueError, match=f"_x.npy: the sample has {told}, unlike the first"):
            parts[1]


def test_labels_of_files_that_are_cast(files, tmp_path):
    image, label = files[0]
    np.save(tmp_path / "y.npy", np.load(label).astype(np.int16))
    crop = [ops.Cast(None, "uint8"), ops.RandBalancedCrop(5, 1.0)]
    for key in range(5):
        got = ops.Pipeline([ops.ReadNpy(label="int16"), *crop])(image, tmp_path / "y.npy", key=key)
        want = ops.Pipeline([ops.ReadNpy(), *crop])(image, label, key=key)
        assert got[0].tobytes() == want[0].tobytes() and got[1].tobytes() == want[1].tobytes()


def test_errors_name_the_file(files, tmp_path):
    dataset = ops.VolumeDataset(files, strong(17))
    with pytest.raises(ValueError, match="case_2_x.npy: axis 2 has 16 voxels"):
        dataset[2]
    image, label = make_pair(0, (20, 20, 20))
    np.save(tmp_path / "wide_x.npy", np.concatenate([image, image]))
    np.save(tmp_path / "wide_y.npy", label)
    mixed = ops.VolumeDataset([*files, (tmp_path / "wide_x.npy", tmp_path / "wide_y.npy")], strong())
    with pytest.raises(ValueError, match="wide_x.npy: the sample's shape 2 x 9"):
        mixed[3]


@pytest.mark.parametrize(("make", "words"), [
    (lambda files: ops.VolumeDataset([], strong()), "at least one case"),
    (lambda files: ops.VolumeDataset(files, strong(), repeat=0), "at least 1"),
    (lambda files: ops.VolumeDataset(files, strong(), keyed_by="worker"), "keyed_by"),
    (lambda files: ops.VolumeDataset(files, strong(), output="list"), "output"),
    (lambda files: ops.VolumeDataset(files, ops.Pipeline([ops.Cast()])), "begin with ReadNpy"),
    (lambda files: ops.VolumeDataset(files, ops.Pipeline([ops.ReadNpy()]))[0], "depends on the case"),
    (lambda files: ops.VolumeDataset(files, ops.Pipeline(
        [ops.ReadNpy(), ops.Resample(factors=(1, 1, 2))])).native_pipeline(), "depends on the case"),
])
def test_arguments_are_checked(files, make, words):
    with pytest.raises(ValueError, match=words):
        make(files)


def test_shapes_that_padding_and_factors_leave_known(files):
    fixed = ops.Pipeline([ops.ReadNpy(), ops.RandCrop(10), ops.Pad(12),
                          ops.Resample(factors=(0.5, 1, 2))])
    image, label = ops.VolumeDataset(files, fixed)[0]
    assert image.shape == label.shape == (1, 6, 12, 24)


@pytest.mark.parametrize("copied", [copy.copy, lambda d: pickle.loads(pickle.dumps(d))])
def test_attributes_may_be_changed(files, copied):
    dataset = ops.VolumeDataset(files, strong(), seed=11)
    before = dataset[1]
    dataset.pipeline, dataset.seed = strong(7), 12
    dataset.repeat = 2
    image, label = dataset[5]
    assert image.shape == label.shape == (1, 7, 7, 7) and len(dataset) == 6
    for made in (dataset, copied(dataset)):
        for loader in (minato.DataLoader(made, num_workers=1), minato.DataLoader(made)):
            rows = list(loader)
            assert torch.equal(rows[5][0][0], image) and torch.equal(rows[5][1][0], label)
    dataset.pipeline, dataset.seed = strong(), 11
    for one, other in zip(dataset[1], before):
        assert torch.equal(one, other)


@pytest.fixture
def lesions(tmp_path):
    """A case whose only foreground is one voxel in a corner, which random crops miss."""
    label = np.zeros((1, 40, 40, 40), np.uint8)
    label[0, 0, 0, 0] = 1
    paths = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(paths[0], np.ones(label.shape, np.float32))
    np.save(paths[1], label)
    return [paths]


@pytest.mark.parametrize("keyed_by", ["epoch", "sample"])
def test_hint_knows_which_samples_crop_around_foreground(lesions, keyed_by):
    seeder = minato._core.Seeder([])
    crop = ops.RandBalancedCrop(4, 0.5, keep_boxes=False)
    dataset = ops.VolumeDataset(lesions, ops.Pipeline([ops.ReadNpy(), crop]), keyed_by=keyed_by,
                                repeat=40)
    dataset.set_epoch(3)
    least, found = dataset.cost_hint(0, epoch=3), []
    for index in range(40):
        seed, *_key = seeder.sample(1, 2, index, 0)
        dataset.seed_sample(seed)
        _image, label = dataset[index]
        hint = dataset.cost_hint(index, seed=seed, epoch=3)
        least = min(least, hint)
        found.append((bool(label.any()), hint))
    assert {foreground for foreground, _ in found} == {True, False}
    assert all((hint > least) == foreground for foreground, hint in found)


def test_hint_counts_kept_boxes_once(lesions):
    crop = ops.RandBalancedCrop(4, 1.0)
    dataset = ops.VolumeDataset(lesions, ops.Pipeline([ops.ReadNpy(), crop]), repeat=3)
    first, *later = [dataset.cost_hint(index) for index in range(3)]
    assert first > later[0] == later[1] > 0
    assert pickle.loads(pickle.dumps(dataset)).cost_hint(0) == first


def test_hint_without_draw_is_the_patch_size(files):
    alone = ops.Pipeline([ops.ReadNpy(), ops.RandCrop(4)])
    dataset = ops.VolumeDataset([image for image, _ in files], alone, keyed_by="sample")
    assert {dataset.cost_hint(index) for index in range(len(dataset))} == {4**3 * 4.0}
