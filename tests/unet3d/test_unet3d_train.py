"""Whole runs: command line, resume, count check, distributed, comparison."""
from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from unet3d import data, evaluate, loaders, nifti, preprocess, settings, spec, train
from unet3d.bench import compare, meters, pagecache, plot

ROOT = Path(train.__file__).resolve().parents[1]
TINY = ["--patch", "16", "16", "16", "--filters", "2", "4", "--repeat", "4",
        "--workers", "1", "--threads", "1", "--hash-content", "--device", "cpu"]


def run(folder, out, *more, loader="pytorch", epochs=2):
    return train.main(["--data", str(folder), "--out", str(out), "--loader", loader,
                       "--epochs", str(epochs), *TINY, *more])


def lines(out, event):
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def losses(out):
    return [(row["epoch"], row["step"], row["loss"]) for row in lines(out, "step")]


def epochs(out):
    return json.loads((out / "result.json").read_text())["epochs"]


def hashes(out):
    with open(out / "epochs.csv", newline="") as stream:
        return [(row["epoch"], row["index_hash"], row["content_hash"])
                for row in csv.DictReader(stream)]


@pytest.fixture(scope="module")
def whole(data_folder, tmp_path_factory):
    """An uninterrupted run with accumulation over 3 of its 8 batches an epoch."""
    out = tmp_path_factory.mktemp("whole")
    assert run(data_folder, out, "--no-bounds", "--no-eval", "--accumulate", "3") == 0
    return out


def test_checkpoint_of_another_run_is_refused(data_folder, whole, tmp_path, capsys):
    arguments = ["--no-bounds", "--no-eval", "--accumulate", "3"]
    checkpoint = ["--resume", str(whole / "checkpoint.pt")]
    assert run(data_folder, tmp_path, *arguments, *checkpoint, "--seed", "1") == 1
    assert "seed was 0, is 1" in capsys.readouterr().err
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"nonsense")
    assert run(data_folder, tmp_path, *arguments, "--resume", str(broken)) == 1
    assert "broken.pt: cannot be read" in capsys.readouterr().err
    assert run(data_folder, tmp_path, *arguments, "--resume") == 1
    assert "no such checkpoint" in capsys.readouterr().err


def test_periodic_checkpoint_serves_after_a_crash(data_folder, whole, tmp_path, monkeypatch):
    """A crash between checkpoints: what followed the last one is done again."""
    arguments = ["--no-bounds", "--no-eval", "--accumulate", "3", "--checkpoint-every", "3"]
    real = train.dice_ce_loss
    calls = []

    def crash(*both):
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("as if killed")
        return real(*both)

    monkeypatch.setattr(train, "dice_ce_loss", crash)
    with pytest.raises(MemoryError):
        run(data_folder, tmp_path, *arguments)
    monkeypatch.setattr(train, "dice_ce_loss", real)
    assert run(data_folder, tmp_path, *arguments, "--resume") == 0
    assert hashes(tmp_path) == hashes(whole)
    assert [row for row in losses(tmp_path) if row[:2] != (1, 4)] == \
        [row for row in losses(whole) if row[:2] != (1, 4)]


def _losing(dataset, options):
    return list(loaders.LOADERS["pytorch"](dataset, options))[:-1]


def _repeating(dataset, options):
    batches = list(loaders.LOADERS["pytorch"](dataset, options))
    return batches[:-1] + batches[:1]


@pytest.mark.parametrize("broken, words", [
    (_losing, "14 samples delivered, 16 expected"), (_repeating, "repeated")])
def test_a_wrong_count_fails_the_run(data_folder, tmp_path, monkeypatch, capsys, broken, words):
    monkeypatch.setitem(loaders.LOADERS, "broken", broken)
    assert run(data_folder, tmp_path, "--no-bounds", "--no-eval", loader="broken") == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


def test_command_line_end_to_end(data_folder, tmp_path, capsys):
    """Bounds, evaluation, all files; then evaluate.py on the checkpoint."""
    assert run(data_folder, tmp_path, "--amp", "bf16", "--eval-every", "1") == 0
    printed = capsys.readouterr().out
    assert "16 samples" in printed and "bounds: work" in printed and "Dice: kidney" in printed
    rows = epochs(tmp_path)
    assert [row["epoch"] for row in rows] == [1, 2]
    for row in rows:
        assert row["samples"] == 16 and row["steps"] == 8
        assert row["epoch_s"] >= row["wait_s"] > 0
        assert row["bound_s"] == max(row[k] for k in row if k.endswith("bound_s"))
        assert row["samples_s"] == pytest.approx(16 / row["epoch_s"])
        assert row["mb_s"] == pytest.approx(16 * 16 ** 3 * 5 / row["epoch_s"] / 1e6)
        assert 0 <= row["mean_dice"] <= 1 and row["volumes"] == 1
    assert rows[0]["index_hash"] == rows[1]["index_hash"]
    assert rows[0]["content_hash"] != rows[1]["content_hash"]
    assert len(lines(tmp_path, "step")) == 16 and lines(tmp_path, "usage")
    keys = [json.loads(line.removeprefix(":::MLLOG "))["key"]
            for line in (tmp_path / "mlperf.log").read_text().splitlines()]
    assert keys.count("eval_accuracy") == 2 and keys[-1] == "run_stop"
    assert evaluate.main(["--data", str(data_folder), "--device", "cpu", "--amp", "bf16",
                          "--checkpoint", str(tmp_path / "checkpoint.pt")]) == 0
    printed = capsys.readouterr().out.splitlines()
    again = json.loads(printed[-1])
    assert again["mean_dice"] == pytest.approx(rows[-1]["mean_dice"], abs=1e-4)
    assert printed[2].split() == ["mean", *(f"{again[name]:.4f}" for name in (
        "kidney", "tumour", "mean_dice"))]
    with open(tmp_path / "evaluation.csv", newline="") as stream:
        (case,) = csv.DictReader(stream)
    assert case["case"] == printed[1].split()[0] and case["case"] not in lines(
        tmp_path, "start")[0]["config"]["train_cases"]
    assert float(case["tumour"]) == pytest.approx(again["tumour"], abs=1e-6)


def test_evaluation_takes_the_split_of_the_run(tmp_path, capsys):
    """Cases that it was trained on only where they were asked for, and with a warning."""
    folder, out = tmp_path / "data", tmp_path / "out"
    folder.mkdir()
    image, label = (np.zeros((1, 16, 16, 16), kind) for kind in (np.float32, np.uint8))
    manifest = {"settings": preprocess.Settings().as_json(), "cases": {}}
    for number in range(6):  # of these the reference evaluates 0, 3 and 5
        name = f"case_{number:05d}"
        files = preprocess.save_case(name, folder, image, label)
        manifest["cases"][name] = {"source": [], "files": files}
    preprocess.write_manifest(folder, manifest)
    assert run(folder, out, "--no-bounds", "--step-ms", "0", "--split", "kits19", epochs=1) == 0
    capsys.readouterr()
    common = ["--data", str(folder), "--checkpoint", str(out / "checkpoint.pt"), "--device", "cpu"]
    trained = "case_00001, case_00002, case_00004"
    for more, volumes, warned in (([], 3, False), (["--split", "kits19"], 3, False),
                                  (["--split", "all"], 6, True)):
        assert evaluate.main([*common, *more]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out.splitlines()[-1])["volumes"] == volumes
        assert (f"warning: {out / 'checkpoint.pt'}: was trained on {trained}"
                in printed.err) == warned
    # The same run, as if it had been trained on other parts of another folder.
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    state["config"]["train_cases"] = ["case_00000", "case_00005"]
    torch.save(state, out / "checkpoint.pt")
    assert evaluate.main(common) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert f"error: {out / 'checkpoint.pt'}: was trained on case_00000, case_00005" in printed.err


def test_ended_run_names_the_next_commands(data_folder, tmp_path, capsys):
    assert run(data_folder, tmp_path, "--no-bounds", "--no-eval", epochs=1) == 0
    said = capsys.readouterr().out
    assert (f"python -m unet3d.evaluate --data {data_folder} --checkpoint "
            f"{tmp_path / 'checkpoint.pt'}\n") in said and "no tumour" not in said
    args = argparse.Namespace(out=tmp_path, source="nifti", data=None, no_checkpoint=False)
    text = train.next_commands(args, 4, {"tumour": 0.004})
    assert "evaluate --source nifti" in text and text.endswith("--resume --epochs 8")
    assert "no tumour" not in train.next_commands(args, 4, {"tumour": 0.01})
    args.no_checkpoint = True
    assert "checkpoint" not in train.next_commands(args, 4, {"tumour": 0.0})


def test_training_learns(data_folder, tmp_path):
    assert run(data_folder, tmp_path, "--no-bounds", "--no-eval", "--filters", "4", "8",
               "--repeat", "16", epochs=3) == 0
    rows = epochs(tmp_path)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.05


def test_short_last_group_is_weighted_by_size(data_folder, tmp_path):
    """8 batches in groups of at most 8 or of at most 100 are the same one step."""
    ends = []
    for group in ("8", "100"):
        out = tmp_path / group
        assert run(data_folder, out, "--no-bounds", "--no-eval", "--accumulate", group,
                   epochs=1) == 0
        ends.append(torch.load(out / "checkpoint.pt", weights_only=True)["model"])
    torch.manual_seed(0)
    start = train.UNet3D((2, 4)).state_dict()
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name
    assert any(not torch.equal(value, start[name]) for name, value in ends[0].items())


def test_warm_up_is_linear_by_epochs(data_folder, tmp_path):
    assert run(data_folder, tmp_path, "--no-bounds", "--no-eval", "--learning-rate", "0.401",
               "--repeat", "1", "--warmup-epochs", "4", "--initial-rate", "0.001", epochs=5) == 0
    rates = [row["learning_rate"] for row in epochs(tmp_path)]
    assert rates == pytest.approx([0.101, 0.201, 0.301, 0.401, 0.401])


def logged(out):
    """Values by key of mlperf.log."""
    rows = [json.loads(line.removeprefix(":::MLLOG "))
            for line in (out / "mlperf.log").read_text().splitlines()]
    return {row["key"]: row["value"] for row in rows}


def test_options_of_the_reference_reach_the_run(data_folder, tmp_path, monkeypatch):
    """Momentum, oversampling and overlap; without them, the presets have the reference's."""
    made, asked, run_whole = [], [], train.Trainer.run

    def note(trainer, *args):
        made.append(trainer)
        return run_whole(trainer, *args)

    def ask(model, cases, patch, device, overlap, *rest, **more):
        asked.append(overlap)
        return {"kidney": 0.5, "tumour": 0.5, "mean_dice": 0.5, "volumes": 1}

    monkeypatch.setattr(train.Trainer, "run", note)
    monkeypatch.setattr(train, "evaluate", ask)
    assert run(data_folder, tmp_path, "--no-bounds", "--momentum", "0", "--oversampling", "1",
               "--overlap", "0.75", loader="minato-native", epochs=1) == 0
    assert asked == [0.75]
    group = made[0].optimizer.param_groups[0]
    assert group["momentum"] == 0 and not group["nesterov"]
    assert made[0].reference.transform.steps[0].oversampling == 1
    assert made[0].dataset.pipeline.operators[1].foreground == 1
    values = logged(tmp_path)
    assert (values["opt_momentum"], values["oversampling"], values["validation_overlap"]) == (
        0, 1, 0.75)
    for preset in spec.PRESETS.values():
        assert (preset.momentum, preset.oversampling) == (0.9, 0.4)
    mlperf = spec.PRESETS["mlperf"]
    assert (mlperf.overlap, mlperf.initial_rate, mlperf.warmup_epochs) == (0.5, 1e-4, 200)


def test_older_checkpoint_had_the_references_settings(data_folder, whole, tmp_path, capsys):
    state = torch.load(whole / "checkpoint.pt", weights_only=True)
    del state["config"]["momentum"], state["config"]["oversampling"]
    older = tmp_path / "older.pt"
    torch.save(state, older)
    common = ["--no-bounds", "--no-eval", "--accumulate", "3", "--resume", str(older)]
    assert run(data_folder, tmp_path, *common, "--momentum", "0.5") == 1
    assert "momentum was 0.9, is 0.5" in capsys.readouterr().err
    assert run(data_folder, tmp_path, *common) == 0


def test_tensorboard_if_installed(data_folder, tmp_path, monkeypatch):
    written = {}

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, name, value, epoch):
            written[name, epoch] = value

        def flush(self):
            written["flushed"] = True

        def close(self):
            written["closed"] = True

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert run(data_folder, tmp_path, "--no-bounds", "--no-eval", epochs=1) == 0
    assert written["loss", 1] == epochs(tmp_path)[0]["loss"]
    assert written["flushed"] and written["closed"]


def test_pauses_stand_in_for_steps(data_folder, tmp_path, capsys):
    """The same samples; the epoch lasts at least its pauses; nothing is trained."""
    real, pauses = tmp_path / "real", tmp_path / "pauses"
    assert run(data_folder, real, "--no-bounds", "--no-eval", epochs=1) == 0
    assert run(data_folder, pauses, "--step-ms", "20", epochs=1) == 0
    assert "pauses of 20 ms as steps, nothing trained" in capsys.readouterr().out
    assert hashes(pauses) == hashes(real)
    row, = epochs(pauses)
    assert row["epoch_s"] - row["wait_s"] >= 8 * 0.02
    assert row["synthetic_bound_s"] == pytest.approx(8 * 0.02)
    assert "core_bound_s" not in row and "mean_dice" not in row
    state = torch.load(pauses / "checkpoint.pt", weights_only=True)
    torch.manual_seed(0)
    for name, value in train.UNet3D((2, 4)).state_dict().items():
        assert torch.equal(value, state["model"][name]), name
    assert run(data_folder, pauses, "--no-eval", "--resume") == 1
    assert "step_ms was 20.0, is None" in capsys.readouterr().err


def test_python_in_steps_runs_in_training_thread(data_folder, tmp_path):
    """The same samples; each step has a given amount of it, and the time denied is reported."""
    assert run(data_folder, tmp_path, "--step-ms", "0", "--python-ms", "5", "--no-checkpoint",
               epochs=1) == 0
    assert not (tmp_path / "checkpoint.pt").exists()
    row, = epochs(tmp_path)
    assert row["samples"] == 16 and row["epoch_s"] - row["wait_s"] >= 8 * 0.005
    assert 0 <= row["gil_denied"] < 1
    assert row["copy_mb_s"] is None  # nothing goes anywhere on a CPU


@pytest.mark.parametrize("batches", [4, 8])
def test_a_run_that_stops_has_a_checkpoint(data_folder, tmp_path, batches):
    """Also at the end of an epoch, where --no-checkpoint writes none to resume from."""
    arguments = ["--step-ms", "0", "--no-checkpoint", "--no-bounds"]
    assert run(data_folder, tmp_path, *arguments, "--stop-after",
               str(batches)) == train.STOPPED
    assert (tmp_path / "checkpoint.pt").exists()
    assert run(data_folder, tmp_path, *arguments, "--resume") == 0
    assert len(lines(tmp_path, "step")) == 16


def test_a_full_batch_on_each_rank_is_enough(data_folder, tmp_path, monkeypatch):
    """Shares are equal, filled up: each of three ranks has two of four samples."""
    monkeypatch.setattr(train, "DistributedDataParallel", lambda model: model)
    ranks = types.SimpleNamespace(rank=1, world=3, device=torch.device("cpu"))
    for batch, enough in (("2", True), ("3", False)):
        given = settings.parse("", ["--data", str(data_folder), "--out", str(tmp_path),
                                    "--loader", "pytorch", *TINY, "--repeat", "1",
                                    "--drop-last", "--batch-size", batch])
        if enough:
            assert train.Trainer(given, ranks).samples_per_epoch == 2 * 3
        else:
            with pytest.raises(nifti.DataError, match="4 samples an epoch make no full batch"):
                train.Trainer(given, ranks)


def test_a_gil_that_another_thread_holds_is_noticed(monkeypatch):
    work = meters.PythonWork(0.2)
    assert work.denied is None
    ended = threading.Event()

    def compute():
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        work.step()
    finally:
        ended.set()
        thread.join()
    assert work.denied > 0.02
    monkeypatch.setattr(meters, "SCHEDULED", Path("/not/here"))
    assert meters.without_core() == 0.0
    idle = meters.PythonWork(0.0)
    idle.step()
    assert idle.denied is None


def test_layout_of_memory_changes_nothing_else(data_folder, whole, tmp_path):
    assert run(data_folder, tmp_path, "--no-bounds", "--no-eval", "--accumulate", "3",
               "--channels-last", "--cudnn-benchmark", loader="minato-device") == 0
    assert hashes(tmp_path) == hashes(whole)
    for (*place, loss), (*other, expected) in zip(losses(tmp_path), losses(whole)):
        assert place == other and loss == pytest.approx(expected, rel=1e-3)


class _Event:
    """Of CUDA: a second between any two."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, _end):
        return 1000.0


def test_copy_figures_come_from_thread_or_loader(monkeypatch):
    more = {}

    class Loader:
        def stats(self):
            return {"device": {"bandwidth": 3e6, "overlap": 0.5, **more,
                               "through": {"locked": 7e6, "pinned": 0}}}

    class Plain:
        def stats(self):
            return {"device": None}

    monkeypatch.setattr(torch.cuda, "Event", _Event)
    there, host = torch.zeros(1000, device="meta"), torch.zeros(1000)
    copies = meters.DeviceCopies(torch.device("meta"))
    assert copies.move(there)[0] is there
    assert copies.summary(Loader()) == {"copy_mb_s": 3.0, "copy_overlap": 0.5,
                                        "copy_notes": "7 MB locked; operators on the host"}
    more["operators"] = ["flip", "noise"]
    assert copies.summary(Loader())["copy_notes"].endswith("on the device: flip, noise")
    for loader in (Plain(), object()):
        assert set(copies.summary(loader).values()) == {None}
    for _ in range(3):
        assert [part.device.type for part in copies.move(host, there)] == ["meta", "meta"]
    assert copies.summary(object()) == {"copy_mb_s": pytest.approx(0.004), "copy_overlap": 0.0,
                                        "copy_notes": None}


def test_ranks_sharing_a_gpu_avoid_nccl(monkeypatch):
    from unet3d import ranks

    used = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ranks.distributed, "init_process_group", used.append)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1"),
                        ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for device, backend, number in (("cuda", "nccl", 1), ("cuda:0", "gloo", 0)):
        assert ranks.Ranks(device).device == torch.device("cuda", number)
        assert used.pop() == backend


def test_one_gpu_without_a_number_is_the_first(monkeypatch):
    """set_device refuses torch.device("cuda")."""
    from torch.cuda._utils import _get_device_index

    from unet3d.ranks import Ranks

    asked = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: asked.append(_get_device_index(d)))
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for given, number in (("cuda", 0), ("cuda:3", 3)):
        assert Ranks(given).device == torch.device("cuda", number)
        assert asked.pop() == number


def test_missing_devices_are_refused(data_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, words in (("cuda", "finds no GPU here"), ("banana", "not a device of torch"),
                          ("meta", "cpu, cuda or cuda:N")):
        with pytest.raises(SystemExit):
            run(data_folder, tmp_path, "--device", device)
        assert words in capsys.readouterr().err


def test_half_precision_on_a_cpu_is_refused(data_folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(data_folder, tmp_path, "--amp", "fp16")
    assert "--amp fp16 is for GPUs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate.main(["--data", str(data_folder), "--checkpoint", "none.pt", "--device", "cpu",
                       "--amp", "fp16"])
    assert "--amp fp16 is for GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("name, plain", [
    ("minato-device", "minato"), ("minato-native-device-cached", "minato-native-cached"),
    ("minato-native-device-resident", "minato-native-cached")])
def test_device_loader_on_a_cpu_says_so(data_folder, tmp_path, capsys, name, plain):
    """Where the data are is checked later than the device."""
    assert run(tmp_path, tmp_path / "out", loader=name) == 1
    assert f"warning: {name}: the device is the CPU" in (said := capsys.readouterr().err)
    assert f"runs as {plain} does" in said
    assert loaders.without_device(name, torch.device("cuda")) is None
    assert loaders.without_device(plain, torch.device("cpu")) is None


def test_checkpoints_that_evaluate_cannot_use(data_folder, tmp_path, capsys):
    broken, other = tmp_path / "broken.pt", tmp_path / "other.pt"
    broken.write_bytes(b"junk")
    torch.save({"model": {}}, other)
    for path, words in ((broken, "cannot be read"), (other, "not a checkpoint of this program"),
                        (tmp_path / "none.pt", "no such checkpoint")):
        assert evaluate.main(["--data", str(data_folder), "--checkpoint", str(path)]) == 1
        assert f"error: {path}: " in (said := capsys.readouterr().err) and words in said


def test_wrong_options_and_missing_data(data_folder, tmp_path, capsys):
    for wrong in (["--patch", "15", "16", "16"], ["--epochs", "0"], ["--workers", "-1"],
                  ["--no-eval", "--eval-every", "1"], ["--step-ms", "-1"],
                  ["--step-ms", "nan"], ["--python-ms", "-1"], ["--dali-depth", "4"],
                  ["--step-ms", "1", "--eval-every", "1"], ["--momentum", "1"],
                  ["--target-dice", "1.1"], ["--target-dice", "nan"], ["--overlap", "nan"], ["--oversampling", "1.1"], ["--warmup-epochs", "-1"],
                  ["--initial-rate", "-1"], ["--learning-rate", "inf"]):
        with pytest.raises(SystemExit):
            run(data_folder, tmp_path, *wrong)
    assert run(tmp_path, tmp_path / "out") == 1
    assert "holds no preprocessed cases" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run(data_folder, tmp_path / "file", "--no-bounds", "--no-eval") == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize("samples, start, every", [
    (168, 1000, 20), (160, 1050, 21), (16800, 10, 1), (100, 1680, 34)])
def test_evaluations_follow_the_samples_of_an_epoch(samples, start, every):
    """CEILING(1000 x 168 / samples_per_epoch), and every CEILING(20 x 168 / ...) epochs."""
    common = ["--data", "d", "--out", "o", "--loader", "pytorch"]
    mlperf = settings.parse("", [*common, "--preset", "mlperf"])
    assert mlperf.evaluations(samples) == (start, every)
    own = settings.parse("", [*common, "--preset", "mlperf", "--eval-every", "3"])
    assert own.evaluations(samples) == (start, 3)
    quick = settings.parse("", [*common, "--eval-start", "2", "--eval-every", "5"])
    assert quick.evaluations(samples) == (2, 5)


def test_first_evaluation_starts_at_given_epoch(data_folder, tmp_path):
    assert run(data_folder, tmp_path, "--no-bounds", "--epochs", "6", "--eval-start", "2",
               "--eval-every", "3", loader="minato") == 0
    rows = [json.loads(line[9:]) for line in (tmp_path / "mlperf.log").read_text().splitlines()]
    evaluated = [r["metadata"]["epoch_num"] for r in rows if r["key"] == "eval_accuracy"]
    assert evaluated == [2, 5, 6]
    with pytest.raises(SystemExit):
        settings.parse("", ["--data", "d", "--out", "o", "--loader", "pytorch",
                            "--eval-start", "2"])


def mlperf_events(out):
    rows = [json.loads(line[9:]) for line in (out / "mlperf.log").read_text().splitlines()]
    return {row["key"]: row for row in rows}


def result_of(out):
    return json.loads((out / "result.json").read_text())


def test_training_ends_at_the_target_and_stays_ended(data_folder, tmp_path, capsys):
    """Unless the target is set higher."""
    arguments = ["--no-bounds", "--eval-every", "1", "--target-dice"]
    assert run(data_folder, tmp_path, *arguments, "0", loader="minato") == 0
    result = result_of(tmp_path)
    assert result["reached_target"] and not result["diverged"] and len(result["epochs"]) == 1
    assert result["seconds"] >= result["epochs"][0]["epoch_s"]
    assert "mean Dice 0 reached after" in capsys.readouterr().out
    events = mlperf_events(tmp_path)
    assert events["run_stop"]["metadata"]["status"] == "success"
    assert events["samples_per_epoch"]["value"] == 16
    with open(tmp_path / "usage.csv", newline="") as stream:
        assert {row["epoch"] for row in csv.DictReader(stream)} == {"1"}
    assert run(data_folder, tmp_path, *arguments, "0", "--resume", loader="minato") == 0
    after = result_of(tmp_path)
    assert after["reached_target"] and after["epochs"] == result["epochs"]
    assert len(lines(tmp_path, "epoch")) == 1
    assert run(data_folder, tmp_path, *arguments, "1", "--resume", loader="minato") == 0
    after = result_of(tmp_path)
    assert not after["reached_target"] and [row["epoch"] for row in after["epochs"]] == [1, 2]


def test_training_that_diverged_ends(data_folder, tmp_path, capsys, monkeypatch):
    """A mean Dice of nothing where the preset has a bound."""
    strict = dataclasses.replace(spec.PRESETS["quick"], diverged_dice=1e-6)
    monkeypatch.setitem(settings.PRESETS, "quick", strict)
    nothing = {"kidney": 0.0, "tumour": 0.0, "mean_dice": 0.0, "volumes": 1}
    monkeypatch.setattr(train, "evaluate", lambda *args, **named: nothing)
    assert run(data_folder, tmp_path, "--no-bounds", "--eval-every", "1") == 4
    assert "training has diverged in epoch 1" in capsys.readouterr().err
    result = result_of(tmp_path)
    assert result["diverged"] and len(result["epochs"]) == 1
    assert mlperf_events(tmp_path)["run_stop"]["metadata"]["status"] == "aborted"


def test_resumed_run_keeps_all_epoch_rows(data_folder, tmp_path):
    """Stopped within the second epoch and at its end, and evaluated in both."""
    arguments = ["--no-bounds", "--eval-every", "1"]
    assert run(data_folder, tmp_path, *arguments, "--stop-after", "9",
               epochs=3) == train.STOPPED
    for more in (["--stop-after", "7"], []):
        status = run(data_folder, tmp_path, *arguments, "--resume", *more, epochs=3)
        assert status == (train.STOPPED if more else 0)
    rows = epochs(tmp_path)
    assert [(row["epoch"], row["resumed_at"]) for row in rows] == [(1, 0), (2, 2), (3, 0)]
    assert all("mean_dice" in row for row in rows)
    assert [(str(row["epoch"]), row["index_hash"], row["content_hash"])
            for row in rows] == hashes(tmp_path)


def test_a_run_that_has_diverged_stays_diverged(data_folder, tmp_path, capsys, monkeypatch):
    """By a loss that is no number; also with epochs left: there is nothing to resume from."""
    with monkeypatch.context() as patched:
        patched.setattr(train.Trainer, "_step", lambda *args: float("nan"))
        assert run(data_folder, tmp_path, "--no-bounds", "--no-eval",
                   epochs=1) == train.DIVERGED
    capsys.readouterr()
    for number in (1, 2):
        assert run(data_folder, tmp_path, "--no-bounds", "--no-eval", "--resume",
                   epochs=number) == train.DIVERGED
        assert "training has diverged in epoch 1: loss nan" in capsys.readouterr().err
        assert result_of(tmp_path)["diverged"] and len(epochs(tmp_path)) == 1


@pytest.mark.parametrize("name", ["minato", "minato-native", "pytorch", "synthetic"])
def test_evaluation_volumes_come_by_the_loader(data_folder, name):
    """Of unequal shapes, in order, the files' own bytes."""
    if reason := loaders.unavailable(name):
        pytest.skip(reason)
    volumes = data.WholeVolumes(data.list_cases(data_folder))
    assert len({volumes[i][0].shape for i in range(len(volumes))}) > 1
    found = list(loaders.evaluation_loader(name, volumes, workers=2))
    assert len(found) == len(volumes)
    for batch, expected in zip(found, volumes):
        for part, array in zip(batch, expected):
            assert torch.equal(part[0], torch.from_numpy(array))


@pytest.mark.parametrize("loader", ["minato-native", "pytorch-expert"])
def test_cold_epochs_are_cold_where_files_are_mapped(data_folder, tmp_path, loader):
    """What workers map cannot be evicted before they are gone."""
    if reason := loaders.unavailable(loader):
        pytest.skip(reason)
    folder = tmp_path / "data"
    shutil.copytree(data_folder, folder)
    if pagecache.evict(folder.glob("*.npy")) != 0.0:
        pytest.skip("this file system does not let go of what it has cached")
    out = tmp_path / "out"
    assert run(folder, out, "--no-bounds", "--no-eval", "--page-cache", "cold", loader=loader) == 0
    assert [row["still_cached"] for row in epochs(out)] == [0.0, 0.0]


def test_an_epoch_that_was_not_cold_is_marked():
    assert compare.is_not_cold("cold", {"still_cached": 0.5})
    assert compare.is_not_cold("cold", {"still_cached": None})
    assert not compare.is_not_cold("cold", {"still_cached": 0.0})
    assert not compare.is_not_cold("warm", {"still_cached": None})


def test_compare_with_two_processes_a_run(data_folder, tmp_path, capsys, monkeypatch):
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    status = compare.main(["--data", str(data_folder), "--out", str(tmp_path), "--loaders",
                           "synthetic", "--repeats", "1", "--epochs", "1", "--processes", "2",
                           "--", *[a for a in TINY if a != "--hash-content"], "--step-ms", "5"])
    assert status == 0, capsys.readouterr().err
    [row] = json.loads((tmp_path / "warm-synthetic-1/result.json").read_text())["epochs"]
    assert row["samples"] == 16 and row["steps"] == 4, "each of two ranks took half"
    assert json.loads((tmp_path / "compare.json").read_text())["processes"] == [2]
    assert [*temporary.glob("torchelastic_*")] == []


def test_distributed_ranks_share_the_epoch(data_folder, tmp_path):
    """Two ranks together deliver what one delivers alone: the same hashes. One rank then
    resumes from the checkpoint of two."""
    arguments = ["--data", str(data_folder), "--loader", "pytorch", "--epochs", "1", *TINY,
                 "--workers", "0", "--batch-size", "1", "--no-bounds", "--no-eval"]
    alone, out = tmp_path / "alone", tmp_path / "two"
    assert train.main([*arguments, "--out", str(alone)]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", "-m", "unet3d.train", *arguments, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    stopped = subprocess.run([*command, "--stop-after", "3"], env=environment, text=True,
                             capture_output=True, timeout=300)
    assert stopped.returncode != 0, stopped.stdout  # torchrun's way to pass on a stop
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    assert [len(rank["delivered"]) for rank in state["ranks"]] == [3, 3]
    assert train.main([*arguments, "--out", str(out), "--resume"]) == 0
    assert hashes(out) == hashes(alone)


def test_compare_runs_each_loader_and_draws(data_folder, tmp_path, capsys):
    status = compare.main(["--data", str(data_folder), "--out", str(tmp_path), "--loaders",
                           "pytorch,synthetic", "--repeats", "1", "--epochs", "1", "--",
                           *[a for a in TINY if a != "--hash-content"], "--step-ms", "5"])
    assert status == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    [head, *lines] = [line.split() for line in printed.out.splitlines() if line[:6] in (
        "loader", "pytorc", "synthe")]
    assert head[:3] == ["loader", "epoch,", "s"] and [line[0] for line in lines] == [
        "pytorch", "synthetic"]
    assert "bounds of an epoch" in printed.out
    assert "steps are pauses of 5 ms, a stand-in for an accelerator" in printed.out
    assert "of the data in the page cache: " in printed.out
    # bytes are compared in a separate run, with nothing timed
    assert "comparing bytes: pytorch" in printed.err
    for run, hashed in (("check-pytorch", True), ("warm-pytorch-1", False)):
        [row] = json.loads((tmp_path / run / "result.json").read_text())["epochs"]
        assert (row["content_hash"] is not None) == hashed, run
    assert "wait ms mean/p50/p99/max" in (tmp_path / "compare.txt").read_text()
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "compare.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["loader"] for row in rows] == ["pytorch", "synthetic"]
    assert float(rows[1]["relative"]) == 1.0
    assert rows[0]["work_bound_s"] == rows[1]["work_bound_s"]
    assert float(rows[1]["bound_s"]) <= float(rows[0]["bound_s"])  # it has no work to wait for
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "again.png")]) == 0


def test_cold_cache_is_reported(tmp_path, capsys, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 16))
    compare.warm_up([path])
    for share, told in ((None, "an unknown share"), (1.0, "100%"), (0.25, "25%")):
        monkeypatch.setattr(compare.pagecache, "mean_share", lambda paths, share=share: share)
        assert compare.cached([path], "before") == f"{told} before"
        assert ("warning: 25% of the data is cached before" in capsys.readouterr().err) == (
            share == 0.25)


def test_each_kind_of_work_has_its_bounds():
    bounds = {"reference": {"work_bound_s": 4.0, "synthetic_bound_s": 1.0},
              "native": {"work_bound_s": 0.5, "synthetic_bound_s": 1.0}, "dali": {},
              "pytorch-expert": {"work_bound_s": 0.3, "synthetic_bound_s": 0.2}}
    largest = {name: compare.own_bounds(name, bounds).get("bound_s") for name in (
        "minato", "pytorch", "minato-native", "pytorch-native", "pytorch-expert", "dali",
        "synthetic")}
    assert largest == {"minato": 4.0, "pytorch": 4.0, "minato-native": 1.0,
                       "pytorch-native": 1.0, "pytorch-expert": 0.3, "dali": None,
                       "synthetic": 1.0}


def _result(content, indices="aa", seeding="sample"):
    return {"config": {"seeding": seeding},
            "epochs": [{"epoch": 1, "index_hash": indices, "content_hash": content}]}


def test_compare_refuses_different_work():
    compare.check_same_work({"pytorch": [_result("1")], "minato": [_result("1")],
                             "synthetic": [_result("2")]})
    compare.check_same_work({"pytorch": [_result(None)], "minato": [_result("3")]})
    compare.check_same_work({"pytorch": [_result("1", seeding="loader")],
                             "minato": [_result("3", seeding="loader")]})
    for other in (_result("3"), _result("1", indices="bb")):
        with pytest.raises(compare.ComparisonError, match="by minato"):
            compare.check_same_work({"pytorch": [_result("1")], "minato": [other]})


def test_options_of_dali_go_to_its_loaders(data_folder, capsys):
    rest = ["--dali-no-mmap", "--workers", "1"]
    assert compare.arguments_for("dali-cached", rest) == rest
    assert compare.arguments_for("minato", rest) == rest[1:]
    compare._open_unet3d(["--data", str(data_folder), *rest])  # which is no loader's
    given = ["--data", "x", "--out", "y", "--loaders"]
    parsed = compare.parse([*given, "dali,minato", "--", *rest])
    assert parsed.rest == rest
    for loaders_, option, words in (
            ("minato,pytorch", "--dali-no-mmap", "no loader of DALI is compared"),
            ("dali,minato", "--dali-cache-objects", "is the loader dali-cached")):
        with pytest.raises(SystemExit):
            compare.parse([*given, loaders_, "--", option])
        assert words in capsys.readouterr().err


def test_hanging_program_is_killed_with_descendants(tmp_path):
    note = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        compare.run_program(["sh", "-c", f"setsid sleep 600 & echo $! > {note}; wait"], 2)
    deadline = time.monotonic() + 90
    while Path(f"/proc/{note.read_text().strip()}/cwd").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_compare_reports_a_failing_run(tmp_path, capsys):
    status = compare.main(["--data", str(tmp_path), "--out", str(tmp_path / "out"),
                           "--loaders", "pytorch", "--repeats", "1"])
    assert status == 1
    assert "holds no preprocessed cases" in capsys.readouterr().err


@pytest.mark.parametrize("loader, plain", [("minato", "minato"), ("minato-native", "minato-native"),
                                           ("minato-shared", "minato-native-cached")])
def test_a_cache_changes_neither_losses_nor_samples(data_folder, tmp_path, loader, plain):
    if reason := loaders.unavailable(loader):
        pytest.skip(reason)
    folder = tmp_path / "data"
    shutil.copytree(data_folder, folder)
    quiet = ("--no-bounds", "--no-eval", "--no-checkpoint")
    assert run(folder, tmp_path / "plain", *quiet, loader=plain) == 0
    size = ("--cache", "64MiB")
    assert run(folder, tmp_path / "cached", *quiet, *size, loader=loader) == 0
    assert losses(tmp_path / "cached") == losses(tmp_path / "plain")
    assert hashes(tmp_path / "cached") == hashes(tmp_path / "plain")


def test_a_cache_is_refused_for_other_loaders(data_folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(data_folder, tmp_path / "out", "--cache", "64MiB", loader="pytorch")
    assert "--cache is of minato's loaders" in capsys.readouterr().err
