"""Interrupted and resumed runs against uninterrupted ones, bit for bit; equal loaders."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unet3d import evaluate, loaders, mlperf, resume, settings, train

ROOT = Path(train.__file__).resolve().parents[1]
# 4 cases, 16 samples, 8 batches an epoch, and a step for 3 of them.
TINY = ["--patch", "16", "16", "16", "--filters", "2", "4", "--repeat", "4", "--threads", "1",
        "--accumulate", "3", "--hash-content", "--device", "cpu", "--no-bounds", "--epochs", "2"]


def run(folder, out, loader, *more):
    """Exit status of a run; skips where the loader is not available."""
    if reason := loaders.unavailable(loader):
        pytest.skip(reason)
    arguments = [] if "--eval-every" in more else ["--no-eval"]
    return train.main(["--data", str(folder), "--out", str(out), "--loader", loader, *TINY,
                       *arguments, *more])


def lines(out, event="step"):
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def losses(out):
    return [(row["epoch"], row["step"], row["loss"], row["samples"]) for row in lines(out)]


def hashes(out, kind="content_hash"):
    return [row[kind] for row in lines(out, "epoch")]


@pytest.fixture
def ways(monkeypatch):
    """The ways in which runs were resumed."""
    found = []
    plan = resume.plan

    def noted(*arguments):
        made = plan(*arguments)
        found.append(made.way if made else None)
        return made

    monkeypatch.setattr(resume, "plan", noted)
    return found


@pytest.mark.parametrize("loader, seeding, workers, stop, way", [
    ("minato", "sample", "1 2", "4", "state"), ("minato", "loader", "2 1", "11", "state"),
    ("minato", "loader", "0 0", "4", "skip"), ("minato-static", "loader", "2 2", "11", "state"),
    ("minato-static", "sample", "1 2", "4", "rest"),
    ("minato-native", "sample", "2 2", "4", "state"),
    ("minato-native", "loader", "1 2", "11", "state"),
    ("pytorch", "loader", "2 2", "11", "skip"), ("pytorch", "sample", "2 1", "11", "rest"),
    ("pytorch-native", "loader", "1 1", "4", "skip"),
    ("pytorch-native", "loader", "0 0", "11", "skip"),
    ("minato-native", "loader", "0 0", "11", "skip")])
def test_the_losses_are_those_of_an_uninterrupted_run(data_folder, tmp_path, ways, loader,
                                                      seeding, workers, stop, way):
    before, after = workers.split()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    mode = ["--seeding", seeding]
    assert run(data_folder, whole, loader, *mode, "--workers", before) == 0
    assert run(data_folder, parts, loader, *mode, "--workers", before,
               "--stop-after", stop) == train.STOPPED
    assert len(losses(parts)) == {"4": 6, "11": 11}[stop]  # at the end of a step
    assert run(data_folder, parts, loader, *mode, "--workers", after, "--resume") == 0
    assert ways == [way]
    assert len(losses(parts)) == 16 and losses(parts) == losses(whole)
    assert hashes(parts) == hashes(whole) and len(set(hashes(whole))) == 2
    ends = [torch.load(out / "checkpoint.pt", weights_only=True) for out in (whole, parts)]
    for name, value in ends[0]["model"].items():
        assert torch.equal(value, ends[1]["model"][name]), name


@pytest.mark.parametrize("loader, seeding", [("minato-ready", "loader"),
                                             ("minato-ready", "sample"),
                                             ("pytorch-ooo", "loader")])
def test_batches_in_any_order_are_resumed_exactly_once(data_folder, tmp_path, ways, loader,
                                                       seeding):
    mode = ["--seeding", seeding, "--workers", "2"]
    assert run(data_folder, tmp_path, loader, *mode, "--stop-after", "5") == train.STOPPED
    assert run(data_folder, tmp_path, loader, *mode, "--resume") == 0
    assert ways == ["state" if loader == "minato-ready" else "rest"]
    for epoch in (1, 2):
        seen = [i for row in lines(tmp_path) if row["epoch"] == epoch for i in row["samples"]]
        assert sorted(seen) == list(range(16))


def test_three_legs_with_other_loaders_each_time(data_folder, tmp_path, ways):
    """The second leg ran no whole epoch, so the third must not skip in one."""
    mode = ["--seeding", "loader", "--workers", "1"]
    for loader, more, status in (
            ("minato", ["--stop-after", "2"], train.STOPPED),
            ("pytorch", ["--stop-after", "3", "--resume"], train.STOPPED),
            ("pytorch", ["--resume"], 0)):
        assert run(data_folder, tmp_path, loader, *mode, *more) == status
    assert ways == ["rest", "rest"]
    seen = [i for row in lines(tmp_path) if row["epoch"] == 1 for i in row["samples"]]
    assert len(seen) == 16 and sorted(seen) == list(range(16))


def test_static_minato_and_torch_train_alike(data_folder, tmp_path):
    """Same batches, same bytes, same losses, also where workers' streams give the draws."""
    for seeding in ("loader", "sample"):
        found = {}
        for loader in ("pytorch", "minato-static"):
            out = tmp_path / seeding / loader
            assert run(data_folder, out, loader, "--workers", "2", "--seeding", seeding) == 0
            found[loader] = losses(out), hashes(out)
        assert found["pytorch"] == found["minato-static"]
    bytes_of = [hashes(tmp_path / s / "pytorch")[0] for s in ("loader", "sample")]
    assert bytes_of[0] != bytes_of[1]


def torchrun(folder, out, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", "-m", "unet3d.train", "--data", str(folder),
               "--loader", "minato", *TINY, "--workers", "1", "--batch-size", "1", "--split",
               "seeded", "--eval-every", "1", "--out", str(out), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, text=True, capture_output=True,
                          timeout=300)


def test_two_ranks_resume_and_evaluate_as_one(data_folder, tmp_path, capsys):
    """Stopped in the second epoch: the losses continue bit for bit, and the mean Dice of two
    ranks equals that of one process over the same checkpoint."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = torchrun(data_folder, whole)
    assert done.returncode == 0, done.stderr
    assert torchrun(data_folder, parts, "--stop-after", "11").returncode != 0
    state = torch.load(parts / "checkpoint.pt", weights_only=True)
    assert [len(rank["delivered"]) for rank in state["ranks"]] == [3, 3]
    done = torchrun(data_folder, parts, "--resume")
    assert done.returncode == 0, done.stderr
    assert losses(parts) == losses(whole) and len(losses(whole)) == 16  # rank 0's
    assert hashes(parts) == hashes(whole)
    dice = [[row["mean_dice"] for row in lines(out, "epoch")] for out in (whole, parts)]
    assert dice[0] == dice[1]
    assert evaluate.main(["--data", str(data_folder), "--device", "cpu", "--split", "seeded",
                          "--checkpoint", str(whole / "checkpoint.pt")]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert alone["mean_dice"] == pytest.approx(dice[0][-1], abs=1e-6)


def test_half_precision_trains_with_scaled_losses(data_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "check_amp", lambda *_given: None)  # it refuses fp16 on a CPU
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(data_folder, whole, "pytorch", "--amp", "fp16", "--workers", "0") == 0
    state = torch.load(whole / "checkpoint.pt", weights_only=True)
    assert state["scaler"]["scale"] > 1 and state["scaler"]["_growth_tracker"] > 0
    assert all(row["loss"] == row["loss"] for row in lines(whole))
    more = ["--amp", "fp16", "--workers", "0"]
    assert run(data_folder, parts, "pytorch", *more, "--stop-after", "9") == train.STOPPED
    assert run(data_folder, parts, "pytorch", *more, "--resume") == 0
    assert losses(parts) == losses(whole)


def test_mlperf_lines_open_once_and_pair_up(data_folder, tmp_path):
    """Also across a resume, which appends to the same log."""
    arguments = ["--workers", "0", "--eval-every", "1"]
    assert run(data_folder, tmp_path, "pytorch", *arguments, "--stop-after",
               "8") == train.STOPPED
    assert run(data_folder, tmp_path, "pytorch", *arguments, "--resume") == 0
    rows = [json.loads(line.removeprefix(":::MLLOG "))
            for line in (tmp_path / "mlperf.log").read_text().splitlines()]
    assert all(set(row) == {"namespace", "time_ms", "event_type", "key", "value", "metadata"}
               for row in rows)
    keys = [row["key"] for row in rows]
    for key in ("init_start", "init_stop", "run_start", "run_stop", "seed", "opt_momentum",
                "global_batch_size", "cache_clear", "eval_samples", *mlperf.SUBMISSION):
        assert keys.count(key) == 1, key
    order = ["init_start", "init_stop", "run_start", "block_start", "epoch_start",
             "epoch_stop", "eval_start", "eval_accuracy", "eval_stop", "block_stop"]
    assert [key for key in keys if key in order][:len(order)] == order
    assert keys.count("block_start") == keys.count("block_stop") == 2
    assert [row["time_ms"] for row in rows] == sorted(row["time_ms"] for row in rows)
    assert rows[-1]["key"] == "run_stop" and rows[-1]["metadata"] == {"status": "aborted"}
    value = next(row for row in rows if row["key"] == "eval_accuracy")
    assert 0 <= value["value"] <= 1 and value["metadata"] == {"epoch_num": 1}
