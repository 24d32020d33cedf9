"""Split, dataset, sampling, delivery check, hashes."""
from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from unet3d import data, nifti, sampling, spec, transforms
from unet3d.bench import meters, pagecache, usage

PATCH = (16, 16, 16)


def named_cases(count):
    return [data.Case(f"case_{i:05d}", Path("x"), Path("y"), 5) for i in range(count)]


def dataset_of(folder, seed=7, repeat=3):
    cases = data.list_cases(folder)
    return data.VolumeDataset(cases, transforms.train_transforms(PATCH), seed, repeat)


def test_kits19_split_is_the_fixed_one():
    train, evaluation = data.split(named_cases(210), seed=5)
    assert len(train) == 168 and len(evaluation) == 42
    assert [int(c.name[5:]) for c in evaluation] == list(spec.KITS19_EVALUATION)
    assert sum(spec.KITS19_EVALUATION) == 4316  # against a slip of the pen in spec.py


def test_seeded_split_has_the_same_proportion():
    train, evaluation = data.split(named_cases(50), seed=1)
    assert len(evaluation) == 10 and not set(train) & set(evaluation)
    assert data.split(named_cases(50), seed=1) == (train, evaluation)
    assert data.split(named_cases(50), seed=2)[1] != evaluation
    assert len(data.split(named_cases(210), 1, "seeded")[1]) == 42
    with pytest.raises(nifti.DataError, match="cannot be split"):
        data.split(named_cases(1))


def test_samples_depend_on_seed_epoch_and_index_alone(data_folder):
    dataset = dataset_of(data_folder)
    assert len(dataset) == 15 and dataset.case(7) is dataset.cases[2]
    image, label, index = dataset[7]
    assert (image.shape, label.shape) == ((1, *PATCH), (1, *PATCH))
    assert (image.dtype, label.dtype, index) == (np.float32, np.uint8, 7)
    random.random(), np.random.random()
    dataset[3]
    np.testing.assert_array_equal(dataset[7][0], image)
    assert any((dataset[i][0] != dataset[i + 5][0]).any() for i in range(5))
    before = [dataset[i][0] for i in range(15)]
    dataset.set_epoch(1)
    assert sum((dataset[i][0] != before[i]).any() for i in range(15)) > 10
    with pytest.raises(IndexError):
        dataset[15]


def test_unseeded_samples_follow_the_global_generators(data_folder):
    dataset = dataset_of(data_folder, seed=None)

    def run():
        random.seed(1)
        np.random.seed(1)
        return [dataset[i][0] for i in range(5)]

    first, second = run(), run()
    assert all((a == b).all() for a, b in zip(first, second))
    state = random.getstate()
    dataset[0]
    assert random.getstate() != state


def test_folder_of_nifti_is_not_named_as_output(tmp_path):
    (tmp_path / "case_00000").mkdir()
    (tmp_path / "case_00000" / nifti.IMAGE_NAME).touch()
    with pytest.raises(nifti.DataError, match=f"preprocess --source {tmp_path} --out OTHER"):
        data.list_cases(tmp_path)


def test_unreadable_volumes_are_named(data_folder, tmp_path):
    with pytest.raises(nifti.DataError, match=f"holds no preprocessed cases.*--out {tmp_path}"):
        data.list_cases(tmp_path)
    out = tmp_path / "out"
    shutil.copytree(data_folder, out)
    (out / "case_00001_x.npy").write_bytes(b"nonsense")
    with pytest.raises(nifti.DataError, match="case_00001_x.npy: cannot be read"):
        dataset_of(out)[1]
    (out / "case_00001_x.npy").unlink()
    with pytest.raises(nifti.DataError, match="case_00001_x.npy: missing"):
        dataset_of(out)


def test_remaining_goes_on_where_each_rank_stopped():
    rows = range(41)
    for world in (1, 2, 3):
        order = sampling.epoch_order(rows, 3, 0)
        shares = [list(sampling.epoch_sampler(rows, 3, rank, world)) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1, "all ranks take equally many steps"
        assert set().union(*shares) == set(rows), "no rank's tail is left out"
        done = [i for share in shares for i in share[:4]]
        for rank in range(world):
            assert sampling.remaining(order, done, rank, world) == shares[rank][4:]


def test_sampler_orders_are_given_by_seed_and_epoch():
    rows = list(range(50))
    orders = {tuple(sampling.epoch_order(rows, seed, epoch))
              for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9 and all(sorted(order) == rows for order in orders)


@pytest.mark.parametrize("delivered, words", [
    ([0, 1, 2, 3], None), ([3, 1, 0, 2], None), ([0, 1, 2], "3 samples delivered, 4"),
    ([0, 1, 2, 2], r"repeated \[2\]"), ([0, 1, 2, 9], r"never asked for \[9\]"),
    ([0, 1, 2, 3, 3], "5 samples")])
def test_delivery_check(delivered, words):
    if words is None:
        sampling.check_delivery(range(4), delivered, 2, False, 1)
    else:
        with pytest.raises(sampling.DeliveryError, match=words):
            sampling.check_delivery(range(4), delivered, 2, False, 1)


def test_delivery_check_with_padded_last_round():
    sampling.check_delivery([0, 1, 2, 0], [0, 2, 0, 1], 2, False, 1)
    with pytest.raises(sampling.DeliveryError, match=r"missing \[0\]"):
        sampling.check_delivery([0, 1, 2, 0], [0, 2, 1], 1, False, 1)
    with pytest.raises(sampling.DeliveryError, match=r"repeated \[0\]"):
        sampling.check_delivery([0, 1, 2, 0], [0, 0, 0, 1], 2, False, 1)


def test_expert_samples_are_the_same(data_folder):
    """Mapped files and remembered boxes change no byte, in the first epoch and later."""
    plain = dataset_of(data_folder)
    expert = data.ExpertVolumes(plain)
    for epoch in (0, 1):
        plain.set_epoch(epoch)
        for index in range(len(plain)):
            for ours, theirs in zip(expert[index], plain[index]):
                np.testing.assert_array_equal(ours, theirs)
    assert expert._known and all(known.get("boxes") for known in expert._known.values())


def test_usage_of_all_ranks_is_summed():
    ranks = [[{"t": 0.5, "cpu": 0.25, "busy": 0.75, "memory_mb": 10.0, "gpu": 50.0},
              {"t": 1.0, "cpu": 0.4, "busy": None, "memory_mb": None, "gpu": None}],
             [{"t": 0.51, "cpu": 0.25, "busy": 0.7, "memory_mb": 20.0, "gpu": 70.0},
              {"t": 1.01, "cpu": 0.1, "busy": 0.2, "memory_mb": None, "gpu": None},
              {"t": 1.5, "cpu": 0.1, "busy": 0.2, "memory_mb": None, "gpu": None}]]
    assert usage.usage_of_all(ranks) == [
        {"t": 0.5, "cpu": 0.5, "memory_mb": 30.0, "gpu": 60.0, "others": 0.25},
        {"t": 1.0, "cpu": 0.5, "memory_mb": None, "gpu": None, "others": None}]


def test_delivery_check_with_drop_last():
    sampling.check_delivery(range(5), [0, 1, 2, 4], 2, True, 1)
    with pytest.raises(sampling.DeliveryError):
        sampling.check_delivery(range(5), [0, 1], 2, True, 1)


def test_hash_ignores_order_and_sees_repeats_and_bytes():
    image = torch.arange(24, dtype=torch.float32).reshape(3, 1, 2, 2, 2)
    label = torch.ones(3, 1, 2, 2, 2, dtype=torch.uint8)

    def hashed(rows, picture=image):
        made = meters.DeliveryHash(True)
        for row in rows:
            made.add(picture[row:row + 1], label[row:row + 1], [row])
        return made.state()

    whole = meters.DeliveryHash(True)
    whole.add(image, label, [0, 1, 2])
    assert hashed([0, 1, 2]) == hashed([2, 0, 1]) == whole.state()
    assert hashed([0, 1, 1, 1])["indices"] != hashed([0, 1])["indices"]
    changed = image.clone()
    changed[1, 0, 1, 1, 1] += 1
    assert hashed([0, 1, 2], changed)["indices"] == whole.state()["indices"]
    assert hashed([0, 1, 2], changed)["content"] != whole.state()["content"]
    resumed = meters.DeliveryHash(True, hashed([0, 1]))
    resumed.add(image[2:], label[2:], [2])
    assert resumed.state() == whole.state()


def test_wait_summary_keeps_the_start_up_apart():
    summary = meters.wait_summary([[5.0, 1.0, 3.0], [7.0, 2.0, 2.0]])
    assert summary["startup_s"] == 7.0 and summary["wait_s"] == 10.0
    assert summary["wait_mean_s"] == 2.0 and summary["wait_max_s"] == 3.0


def _stat(*ticks):
    """/proc/stat of cores with (user, nice, system, idle, wait, irq, soft, steal) ticks."""
    return "\n".join(["cpu  1 1 1 1 1 1 1 1 0 0", *(
        f"cpu{number} {' '.join(map(str, row))} 0 0" for number, row in enumerate(ticks)),
        "intr 1 2 3"]) + "\n"


def test_busy_time_is_that_of_usable_cores(tmp_path, monkeypatch):
    """Idle time and waiting for storage are not busy, and core 1 may not be used."""
    tick = 1 / usage.os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(usage, "PROC", tmp_path)
    monkeypatch.setattr(usage.os, "sched_getaffinity", lambda pid: {0, 2})
    assert usage.usable_cpu_seconds() is None
    (tmp_path / "stat").write_text(_stat((1, 2, 3, 90, 80, 4, 5, 6), [50] * 8,
                                         (10, 0, 0, 9, 9, 0, 0, 0)))
    assert usage.usable_cpu_seconds() == pytest.approx(31 * tick)


def test_other_programs_share_excludes_own_cpu(monkeypatch):
    """Of two cores in ten seconds: 12 s of CPU time, 3 of them our own or of waited children."""
    clocks = {"busy": [100.0, 112.0], "own": [(1.0, 1.0, 1.0, 1.0, 0), (2.0, 1.0, 3.0, 1.0, 0)],
              "now": [50.0, 60.0]}
    monkeypatch.setattr(usage, "usable_cpu_seconds", lambda: clocks["busy"].pop(0))
    monkeypatch.setattr(usage.os, "times", lambda: clocks["own"].pop(0))
    monkeypatch.setattr(usage.time, "perf_counter", lambda: clocks["now"].pop(0))
    monkeypatch.setattr(usage, "available_cores", lambda: 2)
    assert usage.Others().share() == pytest.approx(0.45)
    clocks.update(busy=[None, None], own=[(0.0,) * 5] * 2, now=[0.0, 1.0])
    assert usage.Others().share() is None


def test_remark_is_made_of_busy_machines_only():
    assert usage.busy_remark(None) == usage.busy_remark(usage.CROWDED) == ""
    assert usage.busy_remark(0.37) == "; other programs had 37% of the usable cores"


def test_children_that_ended_between_samples_count(monkeypatch):
    """A worker spends 3 s after its last sample, exits, and its parent waits for it."""
    trees = [{1: (0, 5.0, 1.0), 2: (7, 2.0, 0.0)}, {1: (0, 6.0, 6.0)}]
    monkeypatch.setattr(usage, "process_tree", lambda: trees.pop(0))
    monkeypatch.setattr(usage, "tree_memory", lambda pids: None)
    sampler = usage.UsageSampler(interval_s=60)
    sampler.start()
    assert sampler.stop()["cpu_seconds"] == pytest.approx(1.0 + 3.0)


def test_usage_counts_this_process():
    sampler = usage.UsageSampler(interval_s=60)
    sampler.start()
    began = np.sum([row[1] for row in usage.process_tree().values()])
    while np.sum([row[1] for row in usage.process_tree().values()]) < began + 0.1:
        sum(range(10000))
    summary = sampler.stop()
    assert summary["cpu_seconds"] >= 0.09 and 0 < summary["cpu"] <= 1.5


def test_usage_thread_ends_with_an_error():
    with pytest.raises(KeyError), usage.UsageSampler(interval_s=60) as sampler:
        raise KeyError
    assert not sampler._thread.is_alive()


def test_short_last_usage_interval_is_merged():
    sampler = usage.UsageSampler(interval_s=1.0)

    def joined(*rows):
        sampler.samples = [{"t": t, "cpu": cpu, "busy": None, "memory_mb": mb, "gpu": None}
                           for t, cpu, mb in rows]
        sampler._join_short()
        return [(s["t"], s["cpu"], s["memory_mb"]) for s in sampler.samples]

    whole = [(1.0, 0.5, 7.0), (2.0, 0.5, None), (2.6, 0.25, 5.0)]
    assert joined(*whole) == whole
    assert joined(*whole[:2], (2.25, 3.0, 5.0)) == [whole[0], (2.25, 1.0, 5.0)]
    assert joined(whole[0], (1.25, 3.0, 5.0)) == [(1.25, 1.0, 7.0)]
    assert joined((0.1, 2.0, 5.0)) == [(0.1, 2.0, 5.0)]


def test_evict_drops_a_file_from_the_page_cache(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    if pagecache.cached_share(path) != 1.0:
        pytest.skip("this file system does not tell what is cached")
    assert pagecache.evict([path]) < 0.5
    assert path.read_bytes() == b"x" * (1 << 20)
    assert pagecache.cached_share(path) == 1.0


def factor_of(dataset, index, **known):
    """The hint over what the case's bytes cost."""
    return dataset.cost_hint(index, **known) / dataset.case(index).nbytes


def test_seeded_dataset_hint_knows_the_first_draw(data_folder):
    dataset = dataset_of(data_folder, repeat=8)
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        for index in range(len(dataset)):
            number = data.mix(7, epoch, index)
            foreground = random.Random(number).random() < spec.FOREGROUND_PROBABILITY
            wanted = transforms.FOREGROUND_COST if foreground else 1.0
            assert factor_of(dataset, index) == factor_of(dataset, index, epoch=epoch) == wanted


def test_unseeded_dataset_hint_knows_the_loaders_draw(data_folder):
    minato = pytest.importorskip("minato")
    dataset = dataset_of(data_folder, seed=None)
    assert dataset.cost_hint(0) is None
    assert minato.check_determinism(dataset, 8)
    loader = minato.DataLoader(dataset, 5, num_workers=1)
    list(loader)
    assert loader.stats()["cost"]["hinted"] == len(dataset)


def test_hint_of_other_transforms_is_the_size_alone(data_folder):
    for steps in ([], [transforms.RandFlip(), transforms.RandBalancedCrop(PATCH)]):
        dataset = data.VolumeDataset(data.list_cases(data_folder), transforms.Compose(steps), 7)
        assert {factor_of(dataset, i) for i in range(5)} == {1.0}
