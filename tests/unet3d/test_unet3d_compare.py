"""The comparison's tables: time to quality, scaling, busy machines, sweeps."""
from __future__ import annotations

import json

import pytest

from unet3d import settings
from unet3d.bench import compare, plot, quality

TINY = ["--patch", "16", "16", "16", "--filters", "2", "4", "--repeat", "2",
        "--workers", "1", "--threads", "1", "--device", "cpu"]


def cells(text, name):
    """The words of the line of a table that begins with `name`."""
    return next(line for line in text.splitlines() if line.split()[:1] == [name]).split()


def ended(seconds, dice, target=0.3, process_s=0.0, diverged=False):
    """A run's result with one evaluation of 1 s for each Dice."""
    rows = [{"epoch": number + 1, "mean_dice": value, "eval_s": 1.0}
            for number, value in enumerate(dice)]
    return {"epochs": rows, "seconds": seconds, "process_s": process_s or seconds + 5,
            "diverged": diverged, "reached_target": dice[-1] >= target}


def test_quality_table_counts_reached_runs_only():
    text = quality.quality_table(0.3, {
        "minato": [ended(20.0, [0.1, 0.3]), ended(30.0, [0.1, 0.2, 0.4])],
        "pytorch": [ended(40.0, [0.1, 0.3]), ended(90.0, [0.1, 0.2, 0.3])],
        "pytorch-ooo": [ended(70.0, [0.1, 0.2]), ended(50.0, [0.1, 0.31])],
        "dali": [ended(9.0, [0.0], diverged=True), ended(80.0, [0.1, 0.25])]})
    assert cells(text, "minato") == ["minato", "2", "of", "2", "2.5", "25.0", "20.0-30.0", "2.5",
                                     "30.0", "2.50", "2.00-3.00"]
    assert cells(text, "pytorch")[9:] == ["1.00", "1.00-1.00"]
    assert cells(text, "pytorch-ooo")[4:] == ["2", "50.0", "50.0-50.0", "2.0", "55.0", "1.80",
                                              "1.80-1.80"]
    assert cells(text, "dali") == ["dali", "0", "of", "2", "not", "reached", *["-"] * 6]
    assert ("pytorch-ooo: 1 of 2 runs did not reach the target in 2 epochs and 70.0 s; best mean "
            "Dice 0.2000") in text
    assert "dali: 2 of 2 runs did not reach the target in 2 epochs and 80.0 s" in text
    assert "best mean Dice 0.2500; 1 diverged" in text


def test_quality_table_without_torch_has_no_ratio():
    text = quality.quality_table(0.3, {"minato": [ended(20.0, [0.3])]})
    assert cells(text, "minato")[-2:] == ["-", "-"]


def test_evaluation_options_are_removed_in_any_spelling():
    kept = ["--epochs", "3", "--workers", "1", "--dali-batches=4"]
    assert quality.without_target([
        "--target-dice", "0.3", *kept[:2], "--eval-every=2", *kept[2:4], "--target", "0.4",
        "--eval-start", "1", kept[4]]) == kept


def test_target_evaluates_every_epoch_unless_told():
    common = ["--data", "d", "--out", "o", "--loader", "pytorch", "--target-dice", "0.3"]
    for more, every in (([], 1), (["--eval-every", "3"], 3), (["--eval-every", "0"], 0)):
        assert settings.parse("", [*common, *more]).evaluations(48)[1] == every
    assert settings.parse("", [*common, "--preset", "mlperf"]).evaluations(168)[1] == 20


def test_target_takes_the_presets_epochs(capsys):
    given = ["--data", "d", "--out", "o", "--loaders"]
    parsed = compare.parse([*given, "pytorch,synthetic", "--", "--target-dice", "0.3"])
    assert parsed.target == 0.3 and parsed.epochs == 8 and parsed.loaders == ["pytorch"]
    assert "left out: synthetic" in capsys.readouterr().err
    assert compare.parse([*given, "pytorch", "--epochs", "3", "--", "--target-dice",
                          "0.3"]).epochs == 3
    plain = compare.parse([*given, "pytorch"])
    assert plain.target is None and plain.epochs == 2
    with pytest.raises(SystemExit):
        compare.parse([*given, "synthetic", "--", "--target-dice", "0.3"])


def test_compare_reports_time_to_target(data_folder, tmp_path, capsys):
    status = compare.main(["--data", str(data_folder), "--out", str(tmp_path), "--loaders",
                           "pytorch", "--repeats", "1", "--epochs", "2", "--", *TINY,
                           "--target-dice", "0"])
    found = capsys.readouterr()
    assert status == 0, found.err
    assert "warm cache, time to a mean Dice of 0," in found.out
    assert cells(found.out, "pytorch")[:5] == ["pytorch", "1", "of", "1", "1"]
    assert "time to a mean Dice" in (tmp_path / "compare.txt").read_text()
    facts = json.loads((tmp_path / plot.JSON_NAME).read_text())
    assert facts["target_dice"] == 0
    [one] = facts["runs"]["warm"]["pytorch"]
    [row] = one["epochs"]
    assert one["process_s"] > one["seconds"] >= row["seconds"] > row["eval_s"] > 0
    bounds = json.loads((tmp_path / "warm-pytorch-bounds/result.json").read_text())["epochs"]
    assert "mean_dice" not in bounds[0]
